"""The search: evaluates the starts, and spends the budget on a descent and a Metropolis-Hastings chain from each of the best few.

How the budget is spent, in proposals (the starts are evaluated on top of it):

- One chain per ``PROPOSALS_PER_CHAIN`` proposals, at most ``MAX_CHAINS``, from the best different starts that fit. The best start's chain
  gets half of the budget, the others share the rest; a single chain gets all.
- Each chain spends ``DESCENT_SHARE`` of its part on ``soap.search.descent`` and goes on from there with ``soap.search.metropolis``;
  beta is relative to the cost at which the latter begins. The first chain's descent opens with data parallelism on fewer devices.
- If no start fits, the best one descends until something fits, if need be for the whole budget.
- In the end ``soap.search.polish`` makes the result locally optimal, where the space is small enough; this is beyond the budget.

A move that changes nothing is not evaluated and not counted. All randomness comes from generators seeded by (seed, chain), so equal
seeds and budgets give equal results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from soap.errors import InfeasibleError, StrategyError
from soap.graph import OperatorGraph
from soap.search.descent import adopt, propose_descent
from soap.search.metropolis import DEFAULT_BETA, ChainState, Evaluator, step
from soap.search.polish import MAX_POLISHED, polish_best
from soap.search.proposals import Kernel
from soap.search.record import Recorder, SearchResult
from soap.search.space import Space, build_space
from soap.search.starts import Start, best_starts, reference_strategies, starting_strategies
from soap.strategy import Strategy
from soap.topology import Topology
from soap.units import format_bytes

PROPOSALS_PER_CHAIN = 500
MAX_CHAINS = 3
DESCENT_SHARE = 0.5
MAX_IDLE_MOVES = 1000
"""Moves without effect in a row after which a phase ends: the space has nothing else to offer."""


def search(
    graph: OperatorGraph,
    topology: Topology,
    evaluator: Evaluator,
    *,
    budget: int,
    seed: int = 0,
    beta: float = DEFAULT_BETA,
    starts: Sequence[str] | None = None,
    initial: Strategy | None = None,
    patience: float | None = None,
    progress: bool = False,
    polish_up_to: int = MAX_POLISHED,
    further_starts: Mapping[str, Callable[[], Strategy]] | None = None,
) -> SearchResult:
    """Search for the strategy with the shortest iteration. The result fits into memory and is never worse than the best start.

    ``budget``: proposals to evaluate. ``beta``: see ``soap.search.metropolis``. ``starts``: names of classical strategies (or
    "random"), all classical ones by default; data parallelism is always among them. ``patience``: a chain ends early once this share of
    its budget has brought it no improvement. ``progress``: a bar on stderr, if that is a terminal. Ctrl-C returns the best so far.
    ``polish_up_to``: structured configurations of all operators together up to which the result is made locally optimal; 0: never.
    ``further_starts``: name -> what makes the strategy, such as that of ``soap.search.dynamic``; made once the others are evaluated.
    """
    _check_arguments(budget, beta, patience)
    strategies = starting_strategies(graph, topology, starts, initial, seed)
    recorder = Recorder()
    interrupted = False
    bar: tqdm[Any] = tqdm(total=budget, unit="proposal", disable=None if progress else True)
    with bar:
        try:
            for name, strategy in strategies.items():
                recorder.start(Start(name, strategy, evaluator.makespan_ns(strategy), evaluator.overflow_bytes(strategy)))
            for name, make in (further_starts or {}).items():
                strategy = strategies[name] = make()
                recorder.start(Start(name, strategy, evaluator.makespan_ns(strategy), evaluator.overflow_bytes(strategy)))
            references = reference_strategies(graph, topology, strategies.values())
            space = build_space(graph, topology.device_count, references=references)
            _Run(space, evaluator, recorder, budget, seed, beta, patience, bar).all_chains()
            polish_best(recorder, space, evaluator, polish_up_to)
        except KeyboardInterrupt:
            interrupted = True
            if not recorder.starts:
                raise
    assert recorder.best is not None
    if not recorder.best.fits:
        raise _infeasible(graph, topology, evaluator, recorder.best, len(recorder.rows))
    return recorder.result(seed=seed, budget=budget, beta=beta, interrupted=interrupted)


def _check_arguments(budget: int, beta: float, patience: float | None) -> None:
    if budget < 1:
        raise StrategyError(f"--budget {budget}: expected at least 1 proposal; a few hundred are a good beginning")
    if not 0 < beta < float("inf"):
        raise StrategyError(f"--beta {beta}: expected a positive number; the default is {DEFAULT_BETA:g}")
    if patience is not None and not 0 < patience <= 1:
        raise StrategyError(f"patience {patience}: expected a share of the budget above 0 and up to 1, such as 0.5")


def chain_budgets(budget: int, chains: int) -> list[int]:
    """Proposals of each chain: the first gets half, the others share the rest."""
    if chains == 1:
        return [budget]
    rest = budget // 2
    others = [rest // (chains - 1) + (i < rest % (chains - 1)) for i in range(chains - 1)]
    return [budget - rest, *others]


@dataclass
class _Run:
    """One search on its way."""

    space: Space
    evaluator: Evaluator
    recorder: Recorder
    budget: int
    seed: int
    beta: float
    patience: float | None
    bar: tqdm[Any]

    def all_chains(self) -> None:
        """Spend the budget."""
        wanted = min(MAX_CHAINS, max(1, self.budget // PROPOSALS_PER_CHAIN))
        self._show()
        first = self.recorder.best
        assert first is not None
        chosen = best_starts(self.recorder.starts, wanted if first.fits else 1)
        evaluated = [start.strategy for start in self.recorder.starts]
        openings = [reference for reference in self.space.references if reference not in evaluated]
        for start, budget in zip(chosen, chain_budgets(self.budget, len(chosen)), strict=True):
            self._chain(start, budget, openings)
            openings = []

    def _chain(self, start: Start, budget: int, openings: Sequence[Strategy]) -> None:
        """Descent and Metropolis-Hastings from one start."""
        rng = random.Random(f"{self.seed} {start.name}")
        allowance = _Allowance(budget, self.patience)
        low = self._descend(rng, start, openings, int(budget * DESCENT_SHARE), allowance)
        if low.fits:
            self._metropolis(rng, low, allowance)

    def _descend(
        self, rng: random.Random, current: Start, openings: Sequence[Strategy], share: int, allowance: _Allowance
    ) -> Start:
        """Take what is better; for at most ``share`` proposals once something fits."""
        idle, pending = 0, list(openings)
        while not allowance.spent and (allowance.used < share or not current.fits) and idle < MAX_IDLE_MOVES:
            if pending:
                proposal = adopt(self.space, current.strategy, pending.pop(0))
            else:
                proposal = propose_descent(rng, self.space, current.strategy)
            idle += 1
            if proposal is None:
                continue
            idle = 0
            cost_ns, overflow_bytes = self.evaluator.makespan_ns(proposal.strategy), None
            better = False
            if cost_ns < current.cost_ns or not current.fits:  # it is slower to find out what memory is needed
                overflow_bytes = self.evaluator.overflow_bytes(proposal.strategy)
                better = (overflow_bytes, cost_ns) < current.score
            self.recorder.proposal("descent", current.name, proposal, cost_ns, overflow_bytes, better)
            allowance.use(improved=better)
            self._show(1)
            if better and overflow_bytes is not None:
                current = Start(current.name, proposal.strategy, cost_ns, overflow_bytes)
        return current

    def _metropolis(self, rng: random.Random, start: Start, allowance: _Allowance) -> None:
        """Run the chain for what is left of the allowance."""
        kernel = Kernel(self.space)
        state = ChainState(start.strategy, start.cost_ns, max(1, start.cost_ns))
        best_ns, idle = start.cost_ns, 0
        while not allowance.spent and idle < MAX_IDLE_MOVES:
            state, info = step(rng, state, kernel, self.evaluator, self.beta)
            idle += 1
            if info.proposal is None:
                continue
            idle = 0
            self.recorder.proposal("chain", start.name, info.proposal, info.cost_ns, info.overflow_bytes, info.accepted)
            improved = info.overflow_bytes == 0 and info.cost_ns < best_ns
            best_ns = info.cost_ns if improved else best_ns
            allowance.use(improved=improved)
            self._show(1)

    def _show(self, done: int = 0) -> None:
        """Bring the bar up to date."""
        if self.bar.disable:
            return
        best = self.recorder.best
        if best is not None and best.fits:
            speedup = self.recorder.data_parallel_ns / best.cost_ns
            self.bar.set_postfix_str(f"best {best.cost_ns / 1e6:.3f} ms, {speedup:.2f}x data parallel", refresh=False)
        self.bar.update(done)


@dataclass
class _Allowance:
    """What one chain may still spend."""

    budget: int
    patience: float | None
    used: int = 0
    last_improvement: int = 0

    def use(self, *, improved: bool) -> None:
        """Count one proposal."""
        self.used += 1
        if improved:
            self.last_improvement = self.used

    @property
    def spent(self) -> bool:
        """Whether the budget or the patience is at its end."""
        idle = self.used - self.last_improvement
        return self.used >= self.budget or (self.patience is not None and idle >= self.patience * self.budget)


def _infeasible(graph: OperatorGraph, topology: Topology, evaluator: Evaluator, best: Start, proposals: int) -> InfeasibleError:
    """The error of a search that found nothing that fits."""
    return InfeasibleError(
        f"model {graph.name!r} does not fit into the memory of cluster {topology.name!r}: {_need(topology, evaluator, best)}, in the "
        f"closest of {proposals} proposals and all starts; ways out: (1) more devices or devices with more memory, "
        "(2) a smaller batch, (3) an optimizer that keeps fewer states, (4) a larger --budget"
    )


def _need(topology: Topology, evaluator: Evaluator, best: Start) -> str:
    """What is needed and available: on the device that lacks most if the evaluator can simulate in full, else over all devices."""
    run = getattr(evaluator, "run", None)
    if run is not None:
        uses = zip(run(best.strategy).memory, topology.devices, strict=True)
        lacks = [(use.total - device.type.memory_bytes, use.total, device) for use, device in uses]
        _, needed_bytes, device = max(lacks, key=lambda lack: lack[0])
        return f"{device.name} needs {format_bytes(needed_bytes)}, available {format_bytes(device.type.memory_bytes)}"
    available_bytes = sum(device.type.memory_bytes for device in topology.devices)
    lacking = format_bytes(best.overflow_bytes)
    return f"{lacking} more needed than the {format_bytes(available_bytes)} available on {topology.device_count} devices"
