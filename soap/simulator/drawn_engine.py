"""The compiled simulator under draws of the costs: the cost of a strategy is what its times under all of them come to (``draws.Risk``)."""

from __future__ import annotations

from collections.abc import Mapping

from soap.simulator.compiled.draws import Drawing, draw_tables, make_drawing, play_draws
from soap.simulator.compiled.events import NO_BOUND
from soap.simulator.compiled.graph_arrays import Longs
from soap.simulator.compiled.handles import handle
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.config import NOTHING, OpConfig, SyncConfig


class DrawnEngine(Engine):
    """An engine whose costs are uncertain. ``makespan_ns``, ``simulate`` and proposals are the cost under all draws; ``usual_ns`` is the
    makespan under the most likely costs."""

    _drawing: Drawing

    def __init__(self, shared: Shared, draws: Draws) -> None:
        self.draws = draws
        self._usual_ns = self._proposed_usual_ns = 0
        super().__init__(shared, draws)

    def simulate(self) -> int:
        """Cost in ns of the loaded strategy under all draws, from full simulations."""
        self._usual_ns = super().simulate()
        self.makespan_ns = self._play_draws()
        return self.makespan_ns

    @property
    def usual_ns(self) -> int:
        """Makespan of the held strategy under the most likely costs."""
        return self._usual_ns

    def propose_changes(
        self,
        operators: Mapping[str, OpConfig],
        parameters: Mapping[str, SyncConfig] = NOTHING,
        *,
        prefetch: int | None = None,
        at_most_ns: int = NO_BOUND,
    ) -> int | None:
        """Cost in ns with other configurations; None if it exceeds ``at_most_ns``."""
        usual_ns = super().propose_changes(operators, parameters, prefetch=prefetch)
        assert usual_ns is not None  # there is no bound
        found = self._play_draws()
        self._proposed_usual_ns, self._proposed_ns = usual_ns, None if found > at_most_ns else found
        return self._proposed_ns

    def accept(self) -> None:
        """Hold the proposed strategy."""
        super().accept()
        self._usual_ns = self._proposed_usual_ns

    def times_ns(self) -> Longs:
        """[draw]: makespan of the strategy that was simulated last, proposed ones included."""
        return self._drawing.tables.makespan.copy()

    def _play_draws(self) -> int:
        return self.consult(lambda: int(play_draws(self.world, self.drawing)))

    def _make_state(self) -> None:
        super()._make_state()
        tables = draw_tables(self.draws, self.topology, self.shared.between_hosts, len(self.state.duration))
        self._drawing = make_drawing(tables, self.state, self._resources, self.topology.device_count)
        self.drawing = handle(self._drawing)


def make_engine(shared: Shared, draws: Draws | None) -> Engine:
    """An engine, with draws if there are any."""
    return Engine(shared) if draws is None else DrawnEngine(shared, draws)
