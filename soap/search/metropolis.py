"""The distribution that Metropolis-Hastings chains over strategies follow, and what they ask of a simulator.

A chain's stationary distribution over the strategies that fit into memory is

    pi(S)  proportional to  weight(S) * exp(-beta * cost(S) / cost_start)

where ``weight`` is the space's reference measure (1 for every strategy that is built of structured configurations, so among those the
distribution is the plain Boltzmann one). A proposed strategy S* is compared with the current one S and accepted with probability
min(1, exp(log_ratio + beta * (cost(S) - cost(S*)) / cost_start)); ``log_ratio`` is the proposal's Hastings correction. Since
beta is relative to the cost at the chain's start, it has no unit: at beta = 1000 a proposal that adds 0.1% of the
start's cost is accepted with probability 1/e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from soap.strategy.config import OpConfig, Strategy


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed strategy; ``operators`` names what was changed (operators, or parameters if their synchronization changes; for the
    prefetch the first gathered parameter stands)."""

    strategy: Strategy
    move: str
    operators: tuple[str, ...]


def changed(strategy: Strategy, placements: Mapping[str, OpConfig]) -> dict[str, OpConfig]:
    """The operators that ``placements`` splits or places anew, as changed. Every move ends here: it chooses how operators are split and
    where they run, and the rest of a configuration stays."""
    old = strategy.operators
    new = {name: old[name].placed_like(config) for name, config in placements.items()}
    return {name: config for name, config in new.items() if config is not old[name]}


DEFAULT_BETA = 1000.0
"""FlexFlow's published simulator uses 5 per millisecond, which is this for an iteration of 200 ms."""


class Evaluator(Protocol):
    """What the search asks of a simulator. Must be deterministic."""

    def makespan_ns(self, strategy: Strategy) -> int:
        """Time of one iteration. StrategyError if the strategy does not fit the graph or the cluster."""

    def overflow_bytes(self, strategy: Strategy) -> int:
        """Bytes of memory that the devices lack; 0 if the strategy fits. Not called for strategies that are too slow anyway."""
