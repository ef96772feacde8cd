"""Where to cut a model whose last layers run on servers (``soap.strategy.ralp``): the start ``ralp``.

Every cut is simulated whose tail keeps up: for all samples the busiest of the tail's devices computes no longer than the busiest worker
does for its own. As a cut moves forward the tail takes longer and the front less long, so all cuts before the first one that does not keep
up are left out, too. The fastest that fits into memory is taken, and of equally fast ones the one that leaves most to the workers.

A model is *unfriendly* if that gains too little over plain parameter servers: it then stays with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.metropolis import Evaluator
from soap.simulator.costs import CostModel
from soap.simulator.cut_operators import CutOperators
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.ralp import cut_at, tails

LEAST_GAIN = 0.1
"""By default: what a cut must save at least of the time of a step with plain servers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The operators from ``position`` on run on the devices ``tail``. ``cost_ns``: of a step. ``front_ns``, ``tail_ns``: what the busiest
    worker and the busiest device of the tail compute in it."""

    position: int
    tail: tuple[int, ...]
    strategy: Strategy
    cost_ns: int
    front_ns: int
    tail_ns: int


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """``best``: the best cut; None if none keeps up and fits. ``plain``, ``plain_ns``: parameter servers without cut."""

    best: Cut | None
    plain: Strategy
    plain_ns: int
    least_gain: float

    @property
    def gain(self) -> float:
        """The share of a step that the best cut saves; 0 without one."""
        return 0.0 if self.best is None else 1 - self.best.cost_ns / self.plain_ns

    @property
    def friendly(self) -> bool:
        """Whether that is enough."""
        return self.best is not None and self.gain >= self.least_gain

    @property
    def strategy(self) -> Strategy:
        """The best cut if the model is friendly, else plain servers."""
        return self.best.strategy if self.best is not None and self.friendly else self.plain


def layer_placement(
    graph: OperatorGraph,
    topology: Topology,
    evaluator: Evaluator,
    costs: CostModel,
    *,
    count: int | None = None,
    least_gain: float = LEAST_GAIN,
) -> LayerPlacement:
    """The best cut by the evaluator's time of a step. ``count``: of the tail's devices; by default any. StrategyError in one line if the
    cluster has no servers, or not so many devices of servers."""
    groups, busy = tails(topology, count), _Busy(graph, topology, costs)
    plain = cut_at(graph, topology, len(graph.operators), groups[0])
    best: Cut | None = None
    for tail in groups:
        for cut in _keeping_up(graph, topology, busy, tail, evaluator):
            if (best is None or cut.cost_ns < best.cost_ns) and evaluator.overflow_bytes(cut.strategy) == 0:
                best = cut
    return LayerPlacement(best, plain, evaluator.makespan_ns(plain), least_gain)


def _keeping_up(graph: OperatorGraph, topology: Topology, busy: _Busy, tail: Sequence[int], evaluator: Evaluator) -> Iterator[Cut]:
    """The cuts whose tail keeps up, the last one first."""
    for position in range(len(graph.operators) - 1, 0, -1):
        strategy = cut_at(graph, topology, position, tail)
        front_ns, tail_ns = busy.front_and_tail_ns(strategy, position)
        if tail_ns > front_ns:
            return
        yield Cut(position, tuple(tail), strategy, evaluator.makespan_ns(strategy), front_ns, tail_ns)


class _Busy:
    """What devices compute, forward and backward."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel) -> None:
        self._graph, self._topology = graph, topology
        self._cuts = CutOperators(graph, topology, costs)
        self._known: dict[tuple[int, OpConfig], tuple[int, ...]] = {}

    def front_and_tail_ns(self, strategy: Strategy, cut: int) -> tuple[int, int]:
        """Of the busiest device for the operators before the cut, and of the busiest one for those behind it."""
        own = [self._of(position, strategy.operators[op.name]) for position, op in enumerate(self._graph.operators)]
        return _busiest(own[:cut]), _busiest(own[cut:])

    def _of(self, position: int, config: OpConfig) -> tuple[int, ...]:
        """Of an operator, by device."""
        key = (self._cuts.class_of(position), config)
        if key not in self._known:
            both = self._cuts.durations(position, config.degrees, config.shares).sum(axis=1)
            found = [0] * self._topology.device_count
            for place, device in enumerate(config.devices):
                found[device] += int(both[self._cuts.type_of[device], place % both.shape[1]])
            self._known[key] = tuple(found)
        return self._known[key]


def _busiest(operators: Sequence[Sequence[int]]) -> int:
    return max((sum(own) for own in zip(*operators, strict=True)), default=0)
