"""What searches ask of an evaluator that has a compiled simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from soap.plan.compression.training import PlannedTraining
from soap.simulator.costs import CostModel
from soap.simulator.draws import Draws
from soap.strategy.config import Strategy

if TYPE_CHECKING:
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
        """Tensors of a parameter's size that the optimizer keeps, as in ``simulator.memory.peaks``."""

    @property
    def training(self) -> PlannedTraining:
        """What training adds to compressed parameters."""

    @property
    def draws(self) -> Draws | None:
        """Draws of the costs, under which strategies are compared; None: only the most likely costs count."""

    def always_fits(self) -> bool:
        """True if every strategy of the space fits into memory."""

    def least_overflow_bytes(self, strategy: Strategy) -> int:
        """A lower bound of the memory that the devices lack, in bytes."""

    def bounds_overflow_bytes(self, strategy: Strategy) -> int:
        """An upper bound of it, without playing the strategy."""

    def estimated_share(self, strategy: Strategy) -> float | None:
        """An estimate of the peak by the limit, of the device that is filled most; 0 or infinite where bounds decide. None unless this is
        the last strategy whose time was asked for."""

    def peak_share(self, strategy: Strategy) -> float:
        """The same exactly; infinite if a host lacks memory."""

    def probably_lacks(self, strategy: Strategy) -> bool:
        """Whether devices lack memory by an estimate that has learned from earlier answers."""
