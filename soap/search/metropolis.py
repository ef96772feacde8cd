"""One step of the Metropolis-Hastings chain over strategies: pure, with explicit randomness.

The chain's stationary distribution over the strategies that fit into memory is

    pi(S)  proportional to  weight(S) * exp(-beta * cost(S) / cost_start)

where ``weight`` is the space's reference measure (1 for every strategy that is built of structured configurations, so among those the
distribution is the plain Boltzmann one). A proposed strategy S* is compared with the current one S and accepted with probability
min(1, exp(log_ratio + beta * (cost(S) - cost(S*)) / cost_start)); ``log_ratio`` is the proposal's Hastings correction. Since
beta is relative to the cost at the chain's start, it has no unit: at beta = 1000 a proposal that adds 0.1% of the
start's cost is accepted with probability 1/e.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log
from typing import Protocol

from soap.search.proposals import Proposal
from soap.strategy.config import Strategy

DEFAULT_BETA = 1000.0
"""FlexFlow's published simulator uses 5 per millisecond, which is this for an iteration of 200 ms."""


class Evaluator(Protocol):
    """What the search asks of a simulator. Must be deterministic."""

    def makespan_ns(self, strategy: Strategy) -> int:
        """Time of one iteration. StrategyError if the strategy does not fit the graph or the cluster."""

    def overflow_bytes(self, strategy: Strategy) -> int:
        """Bytes of memory that the devices lack; 0 if the strategy fits. Not called for strategies that are too slow anyway."""


@dataclass(frozen=True, slots=True)
class ChainState:
    """The chain's state: the current strategy, its cost, and the cost to which beta is relative."""

    strategy: Strategy
    cost_ns: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Facts about a step, for the record. ``proposal`` is None if the move had no effect; then nothing was evaluated.
    ``overflow_bytes`` is None if memory was not checked."""

    proposal: Proposal | None
    cost_ns: int = 0
    overflow_bytes: int | None = None
    log_acceptance: float = -inf
    accepted: bool = False


def step(
    rng: random.Random,
    state: ChainState,
    propose: Callable[[random.Random, Strategy], Proposal | None],
    evaluator: Evaluator,
    beta: float,
) -> tuple[ChainState, StepInfo]:
    """One step from ``state``. A strategy that does not fit into memory has probability zero, so it is rejected. A move without effect
    (proposal None) leaves the chain where it is; that counts as a step."""
    proposal = propose(rng, state.strategy)
    if proposal is None:
        return state, StepInfo(None)
    cost_ns = evaluator.makespan_ns(proposal.strategy)
    log_acceptance = proposal.log_ratio + beta * (state.cost_ns - cost_ns) / state.start_ns
    # 1 - random() lies in (0, 1], so that the logarithm exists.
    accepted = log(1.0 - rng.random()) < log_acceptance or log_acceptance >= 0.0
    overflow_bytes = evaluator.overflow_bytes(proposal.strategy) if accepted or cost_ns < state.cost_ns else None
    if overflow_bytes:
        log_acceptance, accepted = -inf, False
    info = StepInfo(proposal, cost_ns, overflow_bytes, log_acceptance, accepted)
    if not accepted:
        return state, info
    return ChainState(proposal.strategy, cost_ns, state.start_ns), info
