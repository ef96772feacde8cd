"""Parallel tempering: compiled chains at several temperatures, side by side, that change places.

The coldest chain has the search's beta. The hottest one's is calibrated while the search warms up, so that it accepts about
``HOT_ACCEPTANCE`` of its proposals. Those between are spaced evenly on a logarithmic scale. After every round neighbours on this ladder
exchange their temperatures with probability min(1, exp((beta_i - beta_j) (cost_i - cost_j) / cost_start)), which keeps the product of
their distributions (Geyer, *Markov chain Monte Carlo maximum likelihood*, 1991). The mix of moves adapts in the same warm-up, and then
stays. Chains that have been left behind begin anew from the best strategy of all, at ``RESTARTS`` of the budget; a sampling chain would
not do this, but a search that ends may.

Chains run in threads (compiled code needs no interpreter lock). Each has a generator of its own and they meet after whole rounds, so
the outcome depends on the seed and the budget alone, not on the number of cores.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import exp
from threading import Lock
from typing import NamedTuple

from soap.search.compiled.runner import DEFAULT_WEIGHTS, CompiledChain, CompiledSpace, Fits, Logged
from soap.search.record import MoveCount
from soap.simulator.engine import Engine
from soap.strategy.config import Strategy

ROUND = 100
"""Proposals of each chain between two exchanges."""
SLICE_S = 0.05
"""Chains ask about so often whether the search has ended, however long a proposal takes."""
LEAVE_S = 0.5
"""When it has ended, chains that take longer to notice are not waited for."""
WARM_UP = 0.2
"""Share of the budget in which the hottest beta and the mix of moves adapt. What is accepted then follows no fixed distribution."""
HOT_ACCEPTANCE = 0.3
MOST_HEAT = 100.0
"""Limit of how much smaller the hottest beta may be than the coldest."""
RESTARTS = (0.4, 0.7)
LEFT_BEHIND = 1.01
"""A chain begins anew if its best cost, relative to the best of all, is above this."""
FOCUS = 300.0
"""How strongly the coldest chain weighs candidates by rough costs, per cost at the start (``compiled.moves``). Other chains weigh them
in proportion to their beta: to a hot chain costs matter less, so rough costs must not hold it back."""


class Round(NamedTuple):
    """What one chain did in one round. ``best``: the chain's best strategy, if it is new."""

    chain: int
    log: Sequence[Logged]
    best: Strategy | None
    best_ns: int


class Tempering:
    """Chains from several strategies."""

    def __init__(
        self,
        space: CompiledSpace,
        starts: Sequence[Strategy],
        *,
        seed: int,
        budgets: Sequence[int],
        beta: float,
        fits: Fits | None = None,
        cores: int | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """``starts``: the best one first; beta is relative to its cost. ``budgets``: proposals of each chain. ``fits``: as in
        ``CompiledChain.run``. ``cores``: how many chains run at a time, by default as many as there are cores. ``ended``: once it returns
        True, chains end in the middle of a round; so they do on an interrupt."""
        self._asked, self._left = ended, False
        self._draw = random.Random(f"{seed} tempering")
        self._budgets, self._beta = list(budgets), beta
        self._fits = None if fits is None else _one_at_a_time(fits)
        self.chains: list[CompiledChain] = []
        for number, (start, budget) in enumerate(zip(starts, budgets, strict=True)):
            start_ns = self.chains[0].start_ns if self.chains else None
            own_seed = random.Random(f"{seed} chain {number}").getrandbits(62)
            chain = CompiledChain(space, start, seed=own_seed, proposals=budget, start_ns=start_ns)
            self.chains.append(chain)
        self.betas = [beta] * len(self.chains)
        self._ladder = list(range(len(self.chains)))
        self._heat = 2.0 ** (len(self.chains) - 1)
        self._cores = cores or len(os.sched_getaffinity(0))
        self._rounds = 0
        self._spread()

    def rounds(self) -> Iterator[list[Round]]:
        """Run round after round, until the budgets are spent or no chain has anything left to do. When it is interrupted, it gives what the
        chains have found by then, and raises the interrupt afterwards."""
        pool = ThreadPoolExecutor(max(1, min(self._cores, len(self.chains))))
        try:
            while True:
                done = [chain.proposals for chain in self.chains]
                futures = [pool.submit(self._advance, number) for number in range(len(self.chains))]
                try:
                    found = [future.result() for future in futures]
                except KeyboardInterrupt:
                    yield self._left_behind(futures)
                    raise
                if done == [chain.proposals for chain in self.chains]:
                    return
                yield found
                self._rounds += 1
                if sum(done) < WARM_UP * sum(self._budgets):
                    self._adapt(done)
                self._exchange()
                self._restart(sum(done))
        finally:
            self._left = True
            pool.shutdown(wait=False, cancel_futures=True)

    def _left_behind(self, futures: Sequence[Future[Round]]) -> list[Round]:
        """The work, in an interrupted round, of the chains that end soon."""
        self._left = True
        ended, _ = wait(futures, timeout=LEAVE_S)
        return [future.result() for future in futures if future in ended and not future.cancelled() and future.exception() is None]

    def _advance(self, number: int) -> Round:
        chain = self.chains[number]
        first, before = chain.proposals, chain.best_ns
        beta = self.betas[number]
        focus, last = FOCUS * beta / self._beta, min(first + ROUND, self._budgets[number])
        while not (self._left or self._asked()) and chain.proposals < last:
            began_s, wanted = time.monotonic(), min(last, chain.proposals + chain.slice)
            if chain.run(wanted, beta=beta, focus=focus, fits=self._fits) < wanted:  # no move has an effect any more
                break
            fitting = int(chain.slice * SLICE_S / max(1e-6, time.monotonic() - began_s))
            chain.slice = max(1, min(ROUND, 10 * chain.slice, fitting))
        best = chain.best if chain.best_ns < before else None
        return Round(number, list(chain.log(first)), best, chain.best_ns)

    def _adapt(self, done: Sequence[int]) -> None:
        """Calibrate the hottest chain's temperature, and adapt the mix of moves."""
        if len(self.chains) > 1:
            hottest = self.chains[self._ladder[-1]]
            log = list(hottest.log(done[self._ladder[-1]]))
            share = sum(entry.accepted for entry in log) / max(1, len(log))
            self._heat *= 1.5 if share < HOT_ACCEPTANCE else 1 / 1.5
            self._heat = min(MOST_HEAT, max(1.0, self._heat))
            self._spread()
        weights = _adapted([chain.moves for chain in self.chains])
        for chain in self.chains:
            chain.weights = weights

    def _restart(self, before: int) -> None:
        """Bring chains that have been left behind to the best strategy, at the shares ``RESTARTS`` of the budget. ``before``: proposals
        before the last round."""
        budget, after = sum(self._budgets), sum(chain.proposals for chain in self.chains)
        if any(before < share * budget <= after for share in RESTARTS):
            best = min(self.chains, key=lambda chain: chain.best_ns)
            strategy = best.best
            for chain in self.chains:
                if chain.best_ns > LEFT_BEHIND * best.best_ns:
                    chain.move_to(strategy)

    def _spread(self) -> None:
        """Give every place on the ladder its beta."""
        for place, number in enumerate(self._ladder):
            self.betas[number] = self._beta / self._heat ** (place / max(1, len(self._ladder) - 1))

    def _exchange(self) -> None:
        for place in range(self._rounds % 2, len(self._ladder) - 1, 2):
            a, b = self._ladder[place], self._ladder[place + 1]
            gain = (self.betas[a] - self.betas[b]) * (self.chains[a].cost_ns - self.chains[b].cost_ns) / self.chains[0].start_ns
            if gain >= 0 or self._draw.random() < exp(gain):
                self._ladder[place], self._ladder[place + 1] = b, a
        self._spread()


def _adapted(moves: Sequence[Mapping[str, MoveCount]]) -> dict[str, float]:
    """Draw moves that are accepted more often more often, within limits."""
    shares = {}
    for move in DEFAULT_WEIGHTS:
        proposed, accepted = (sum(own[move][column] for own in moves) for column in range(2))
        shares[move] = (accepted + 1) / (proposed + 20)
    mean = sum(shares.values()) / len(shares)
    return {move: weight * min(3.0, max(1 / 3, shares[move] / mean)) for move, weight in DEFAULT_WEIGHTS.items()}


def _one_at_a_time(fits: Fits) -> Fits:
    lock = Lock()

    def locked(strategy: Strategy, engine: Engine) -> bool:
        with lock:
            return fits(strategy, engine)

    return locked
