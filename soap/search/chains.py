"""The search: it evaluates the starts, then runs a descent and a Metropolis-Hastings chain from each of the best few.

How the budget of proposals is spent (evaluations of starts do not count):

- Chains begin at the best distinct starts that fit into memory. The best start's chain gets half of the budget; the others share the rest.
  There is one chain for each ``TEMPERED_PROPOSALS`` (at most ``MAX_TEMPERED``).
- Each chain spends ``DESCENT_SHARE`` of its part on ``soap.search.descent`` (at most ``DESCENT_PROPOSALS``; nothing from a large start that
  fits, as each proposal takes a second there), and goes on from there. If the best is large and can be folded, only its chain runs, and
  keeps its copies alike (``soap.search.copies``). The chains are compiled, and run together (``soap.search.tempering``). Beta is relative
  to the cost at which the chain begins. The first chain's descent first tries reference strategies that were no starts, such as data
  parallelism on fewer devices.
- If data parallelism does not fit, parameters may be synchronized in the ways that save memory (``sync.SAVING_MEMORY``), unless the options
  say which ways are allowed; then mixtures that save memory are the first starts, and what certainly lacks memory is none. Tensor
  parallelism, stages and micro-batches together (``soap.search.grid``) follow, as far as rough costs find them promising.
- If no start fits, hosts may keep optimizer states (``soap.search.offloading``), and starts that do so are evaluated as well.
- If still no start fits, the best one descends until something fits, for the whole budget if need be.
- Where memory binds, that is if a start that does not fit is faster than those that do, operators may be recomputed
  (``soap.search.recomputing``), and starts that do so are evaluated as well.
- Where hosts are servers, the best cut of the model whose last layers run there is a start (``soap.search.layer_placement``).
- Where rough costs expect a pipeline to be faster than all starts, the best one is a start as well (``soap.search.pipelining``). If it is
  the best of all, half of the budget goes to it: a descent by moves that pipelines alone have (``soap.search.pipeline_moves``), a chain
  that moves operators inside their stages, and such a descent again.
- In the end ``soap.search.polish`` makes the result locally optimal if the space is small enough. This is beyond the budget.

A move that changes nothing is not evaluated and not counted. All randomness comes from generators seeded by (seed, chain), so equal seeds
and budgets give equal results, on any number of cores, unless the time is limited.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from soap import collector
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.search.all_starts import NO_STARTS, first_starts, inside, start_names, with_starts
from soap.search.allowance import Allowance, chain_budgets
from soap.search.allowed_space import allowed_space, allowed_syncs
from soap.search.constraints import out_of_stage
from soap.search.descent import adopt, propose_descent
from soap.search.infeasible import infeasible, nothing_fits_yet
from soap.search.metropolis import Proposal
from soap.search.options import SearchOptions
from soap.search.pipeline_moves import pipeline_moves
from soap.search.pipelining import is_cut, is_legal, keeps_stages, space_of
from soap.search.polish import MAX_POLISHED, polish_best
from soap.search.record import Recorder, SearchResult
from soap.search.space import Space
from soap.search.starts import (
    BASELINE,
    Start,
    evaluated,
    starts_of_chains,
)
from soap.simulator.simulate import is_large
from soap.strategy.config import Strategy
from soap.strategy.named import PIPELINE, named
from soap.time_limit import TimeIsUp, TimeLimit

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator

TEMPERED_PROPOSALS, MAX_TEMPERED = 4000, 4
DESCENT_SHARE, DESCENT_PROPOSALS = 0.5, 300
CLIMB_SHARE = 0.2
"""Share of a pipeline's part of the budget for each of the two descents by its moves."""
MAX_IDLE_MOVES = 1000
"""After so many moves without effect in a row a phase ends: nothing is left to propose."""


def search(
    graph: OperatorGraph,
    topology: Topology,
    evaluator: IncrementalSimulator,
    options: SearchOptions,
    *,
    progress: bool = False,
    polish_up_to: int = MAX_POLISHED,
    improved: Callable[[int], None] = lambda cost_ns: None,
    stopped: Callable[[], bool] = lambda: False,
    further_starts: Mapping[str, Callable[[], Strategy]] = NO_STARTS,
    limit: TimeLimit | None = None,
    share: float = 1.0,
) -> SearchResult:
    """Search for the strategy with the shortest iteration. The result fits into memory and is never worse than the best start.

    ``options``: what to search, and how; the evaluator brings the costs, so the options about costs are ignored here. Data parallelism is
    always among the starts. Starts that violate the constraints are changed. ``progress``: show a bar on stderr if that is a terminal.
    ``polish_up_to``: make the result locally optimal if all operators together have at most so many structured configurations; 0: never.
    ``improved``: called with each new best cost in ns. ``stopped``: asked after every start, proposal or round; once it returns True, the
    search ends as by Ctrl-C (Python loses one that arrives while a library calls back into it). ``further_starts``: name -> function that
    makes a strategy, called after the other starts are evaluated, if ``options.starts`` has the name or not. ``limit``: by default of
    ``options.seconds``. ``share``: part of it after which the search ends if something fits.

    Ctrl-C and the end of the limit return the best so far; KeyboardInterrupt if nothing was evaluated yet. InfeasibleError if nothing fits
    into memory, StrategyError if the options do not fit model and cluster.
    """
    whole = limit or TimeLimit(options.seconds)
    until, within, recorder = whole.part(share), ExitStack(), Recorder(improved=improved)

    def ended() -> bool:
        return stopped() or (until if recorder.fits else whole).over

    names = start_names(options, further_starts)
    space, usual = _space_and_usual(graph, topology, evaluator, options, ended)
    baseline, early, interrupted = usual.strategy, False, False
    if keeps_stages(space, baseline) and inside(space, options, baseline) is baseline:
        recorder.start(usual)

    def evaluate(name: str, strategy: Strategy) -> None:
        fitted = recorder.fits
        bar.set_description(f"start {len(recorder.starts) + 1}: {name}")
        recorder.start(evaluated(evaluator, name, strategy))
        if recorder.fits and not fitted:
            within.enter_context(until)
        _heed(ended)

    bar: tqdm[Any] = tqdm(total=options.budget, unit="proposal", disable=None if progress else True)
    with bar, collector.seldom():
        try:
            with whole, within:
                if recorder.fits:
                    within.enter_context(until)
                _heed(ended)
                if not recorder.starts:
                    recorder.baseline_ns = evaluator.makespan_ns(baseline)
                first = first_starts(space, topology, options, names, usual)
                space = with_starts(space, topology, evaluator, recorder, options, first, further_starts, evaluate)
                if not recorder.starts:
                    raise StrategyError(out_of_stage(space, baseline) or "no start")
                _Run(space, topology, evaluator, recorder, options, bar, ended).everything()
                if (around := space_of(space, recorder.best)) is not None:
                    polish_best(recorder, around, evaluator, polish_up_to, lambda: _heed(ended))
        except (KeyboardInterrupt, Exception) as error:
            if not (isinstance(error, KeyboardInterrupt) or ended()):  # libraries may turn an interrupt into an error of their own
                raise
            if not recorder.starts:
                raise type(error) if isinstance(error, TimeIsUp) else KeyboardInterrupt from error
            early, interrupted = True, stopped() or not (isinstance(error, TimeIsUp) or whole.over or until.over)  # perhaps the caller's
    return _result(space, topology, evaluator, recorder, options, usual, early=early, interrupted=interrupted)


def _result(
    space: Space,
    topology: Topology,
    evaluator: IncrementalSimulator,
    recorder: Recorder,
    options: SearchOptions,
    usual: Start,
    *,
    early: bool,
    interrupted: bool,
) -> SearchResult:
    """The search's result. InfeasibleError if nothing fits into memory. ``early``: whether the search was ended before it was done; to say
    then what is lacking must not take long."""
    assert recorder.best is not None
    if not recorder.best.fits and early:
        raise nothing_fits_yet(space.graph, topology, recorder)
    if not recorder.best.fits:
        raise infeasible(space.graph, topology, evaluator, recorder, saving=not options.syncs)
    lacking = 0 if options.syncs else usual.overflow_bytes
    return recorder.result(seed=options.seed, budget=options.budget, beta=options.beta, interrupted=interrupted, saving_bytes=lacking)


def _space_and_usual(
    graph: OperatorGraph, topology: Topology, evaluator: IncrementalSimulator, options: SearchOptions, stopped: Callable[[], bool]
) -> tuple[Space, Start]:
    """The space of allowed strategies, and data parallelism, evaluated; if that does not fit, the space has what saves memory."""
    space = allowed_space(graph, topology, options)
    usual = _usual(graph, topology, evaluator, stopped)
    return space if usual.fits else replace(space, syncs=allowed_syncs(graph, topology, options, saving=True)), usual


def _usual(graph: OperatorGraph, topology: Topology, evaluator: IncrementalSimulator, stopped: Callable[[], bool]) -> Start:
    """Data parallelism, evaluated. KeyboardInterrupt if the user has ended the search."""
    try:
        return evaluated(evaluator, BASELINE, named(BASELINE, graph, topology))
    except Exception as error:
        if not stopped():  # see ``search``
            raise
        raise KeyboardInterrupt from error


def _heed(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise KeyboardInterrupt


@dataclass
class _Run:
    """The state of one search."""

    space: Space
    topology: Topology
    evaluator: IncrementalSimulator
    recorder: Recorder
    options: SearchOptions
    bar: tqdm[Any]
    stopped: Callable[[], bool]

    def everything(self) -> None:
        """Run all descents and chains, until the budget is spent."""
        self.bar.set_description("proposals")
        self._show()
        first, budget = self.recorder.best, self.options.budget
        assert first is not None
        if is_cut(first.strategy) and self.evaluator.steady(first.strategy) is None:  # of which each proposal would take seconds
            self._pipelines(first, budget // 2)
            budget -= budget // 2
        self._chains([start for start in self.recorder.starts if not is_cut(start.strategy)], budget)

    def _pipelines(self, current: Start, budget: int) -> None:
        """Improve a strategy with micro-batches: as a pipeline, operator by operator inside its stages, and as a pipeline again."""
        climbs = max(1, int(budget * CLIMB_SHARE))
        current = self._climb(current, climbs)
        around = space_of(self.space, current)
        if around is not None:
            replace(self, space=around)._chains([current], max(1, budget - 2 * climbs))
        best = self.recorder.best
        assert best is not None
        if best.strategy != current.strategy and is_cut(best.strategy):
            self._climb(best, climbs)

    def _climb(self, current: Start, budget: int) -> Start:
        """Take moves of pipelines that are better until none is."""
        allowance = Allowance(budget, None)
        pending = pipeline_moves(self.space.graph, current.strategy)
        while not allowance.spent and (proposal := next(pending, None)) is not None:
            if not is_legal(self.space, self.topology, proposal.strategy):
                continue
            better = self._tried(PIPELINE, current, proposal, allowance)
            if better is not current:
                current, pending = better, pipeline_moves(self.space.graph, better.strategy)
        return current

    def _chains(self, starts: Sequence[Start], budget: int) -> None:
        """Descents and chains from the best of these starts."""
        count = min(MAX_TEMPERED, max(1, budget // TEMPERED_PROPOSALS))
        chosen = starts_of_chains(starts, count, sum(self.topology.memory_limits))
        if not chosen:
            return
        evaluated = [start.strategy for start in self.recorder.starts]
        openings = [reference for reference in self.space.references if reference not in evaluated]
        lows: list[tuple[Start, int]] = []
        for start, part in zip(chosen, chain_budgets(budget, len(chosen)), strict=True):
            rng = random.Random(f"{self.options.seed} {start.name}")
            allowance = Allowance(part, self.options.patience)
            share = min(int(part * DESCENT_SHARE), 0 if is_large(start.strategy) else DESCENT_PROPOSALS)
            low = self._descend(rng, start, openings, share, allowance)
            openings = []
            if low.fits:
                lows.append((low, part - allowance.used))
        if lows:
            self._temper(sorted(lows, key=lambda found: found[0].cost_ns))

    def _temper(self, lows: Sequence[tuple[Start, int]]) -> None:
        """Run compiled chains from the strategies at which the descents have ended, best first."""
        from soap.search.compiled.runner import CompiledSpace, Fits  # compiled code
        from soap.search.copies import copies_of
        from soap.search.tempering import Tempering

        budgets = sorted((budget for _, budget in lows), reverse=True)
        copies = copies_of(self.space, self.evaluator, lows[0][0].strategy)
        fits: Fits = self.evaluator.fits if copies is None else copies.fits
        if copies is None:
            space = CompiledSpace(self.space, self.evaluator.shared, self.evaluator.optimizer_states, self.evaluator.draws)
            begin = [low.strategy for low, _ in lows]
        else:  # others, which are slower, are no copies of the same devices
            budgets, space, begin = [sum(budgets)], copies.compiled, [copies.start]
        chains = Tempering(
            space, begin, seed=self.options.seed, budgets=budgets, beta=self.options.beta, fits=fits, cores=self.options.cores,
            ended=self.stopped,
        )  # fmt: skip
        allowance = Allowance(sum(budgets), self.options.patience)
        for rounds in chains.rounds():
            for own in rounds:
                before = self.recorder.best
                name = lows[own.chain][0].name
                if own.best is not None:
                    best = own.best if copies is None else copies.unfolded(own.best)
                    self.recorder.found(Start(name, best, own.best_ns, 0))
                graph = self.space.graph
                for entry in own.log:
                    changed = graph.operators[entry.operator] if entry.operator >= 0 else graph.parameters[-1 - entry.operator]
                    self.recorder.logged(name, entry.move, changed.name, *entry[2:])
                allowance.use(improved=self.recorder.best is not before, count=len(own.log))
                self._show(len(own.log))
            if allowance.spent:
                break

    def _descend(
        self, rng: random.Random, current: Start, openings: Sequence[Strategy], share: int, allowance: Allowance
    ) -> Start:
        """Accept only improvements. Ends after ``share`` proposals once something fits, or when the allowance is spent."""
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
            current = self._tried("descent", current, proposal, allowance)
        return current

    def _tried(self, phase: str, current: Start, proposal: Proposal, allowance: Allowance) -> Start:
        """The proposal if it is better, else the current strategy itself."""
        cost_ns, overflow_bytes = self.evaluator.makespan_ns(proposal.strategy), None
        better = False
        if cost_ns < current.cost_ns or not current.fits:  # computing the memory takes longer, so do it only if needed
            overflow_bytes = self.evaluator.overflow_bytes(proposal.strategy)
            better = (overflow_bytes, cost_ns) < current.score
        self.recorder.proposal(phase, current.name, proposal, cost_ns, overflow_bytes, better)
        allowance.use(improved=better)
        self._show(1)
        if better and overflow_bytes is not None:
            return Start(current.name, proposal.strategy, cost_ns, overflow_bytes)
        return current

    def _show(self, done: int = 0) -> None:
        """Update the progress bar. Raises KeyboardInterrupt if the search is to stop."""
        _heed(self.stopped)
        if self.bar.disable:
            return
        best = self.recorder.best
        if best is not None and best.fits:
            costs_ms = best.cost_ns / 1e6, self.recorder.data_parallel_ns / 1e6
            self.bar.set_postfix_str("best cost {:.3f} ms, data parallel {:.3f} ms".format(*costs_ms), refresh=False)
        self.bar.update(done)
