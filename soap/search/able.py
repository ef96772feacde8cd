"""What searches ask of an evaluator that has a compiled simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from soap.plan.compression.training import PlannedTraining
from soap.simulator.costs import CostModel
from soap.simulator.draws import Draws
from soap.strategy.config import Strategy, SyncConfig

if TYPE_CHECKING:
    from soap.simulator.engine import Engine
    from soap.simulator.folding import Folding
    from soap.simulator.shared import Shared


class Able(Protocol):
    """An evaluator that also lets compiled chains simulate by themselves."""

    @property
    def engine_costs(self) -> CostModel:
        """The cost model for their engines."""

    @property
    def shared(self) -> Shared:
        """What these engines share with the evaluator's own."""

    @property
    def optimizer_states(self) -> int:
        """Tensors of a parameter's size that the optimizer keeps."""

    @property
    def training(self) -> PlannedTraining:
        """What training adds to compressed parameters."""

    @property
    def draws(self) -> Draws | None:
        """Draws of the costs, under which strategies are compared; None: only the most likely costs count."""

    def folding(self, strategy: Strategy, syncs: Iterable[SyncConfig]) -> Folding | None:
        """A large strategy as two of its copies, whose parameters may have those of ``syncs`` that ``Folding.syncs`` has; None if it is not
        large or cannot be folded."""

    def fits(self, strategy: Strategy, engine: Engine, folding: Folding | None = None) -> bool:
        """Whether a strategy that an engine holds or proposes fits into memory; with ``folding`` as two of its copies."""

    def peak_share(self, strategy: Strategy) -> float:
        """The peak by the limit, of the device that is filled most; infinite if a host lacks memory."""
