"""The outcome of a search: the plan to use, and the fastest and the safe one by predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soap import outputs
from soap.api.deciding import decision, decision_by_costs, decision_record, draws_for, timed
from soap.api.predictions import costs_record, explain, explain_synchronization, explain_unkept, predicted_range, resources_record
from soap.api.strategies import save_strategy
from soap.files import write_bytes_atomically
from soap.measure.paired import Gain
from soap.model import sparse_shares
from soap.search.constraints import Pairs, parse
from soap.search.deciding import DECIDING_DRAWS, LEAST_CHANCE, Decision
from soap.search.explanation import Line, Synchronized, Unkept
from soap.search.plot import plot
from soap.search.record import SearchResult
from soap.search.starts import BASELINE
from soap.simulator.analysis.rich_display import milliseconds
from soap.simulator.draws import Draws
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.simulator.throughput import Throughput, throughput
from soap.strategy.config import Strategy
from soap.strategy.rich_display import bars, strategy_html, table

if TYPE_CHECKING:
    import pandas as pd

    from soap.search.oracles.bounds import LowerBound

MOST_SHOWN = 8
"""Starts in a notebook's table."""


@dataclass(frozen=True)
class Run:
    """A strategy that was run for real. ``measured_ns``: time per iteration, median of its turns. ``allowed``: whether it obeys the
    search's constraints. ``gain``: over data parallelism, measured in further turns of these two alone; only for the fastest strategy."""

    name: str
    strategy: Strategy
    predicted_ns: int
    measured_ns: int
    allowed: bool
    gain: Gain | None = None

LEAST_MEASURED = 1.02
"""A measured gain must exceed this factor: a machine's speed varies by as much from one hour to the next."""


def least_measured(run: Run, usual: Run) -> float:
    """The factor that a run's gain over data parallelism must exceed with confidence to replace it. A plan that is predicted to be slower
    by some factor must win by that factor: otherwise the measured gain may come from other work on the machine."""
    return max(LEAST_MEASURED, run.predicted_ns / max(1, usual.predicted_ns))


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found, together with its model and cluster, so that it can be saved and inspected.

    ``strategy``: the answer. If strategies were run for real (``runs``), the one that is kept by the measurements (``kept``). Otherwise
    ``fastest``, or, if a ``confidence`` is asked for, ``safe``, which is faster than data parallelism in at least that share of so many
    ``draws`` of the costs (``soap.search.deciding``). ``pins``, ``forbidden``: the search's constraints.
    ``compared_by``: draws by which the search compared strategies; None: by the most likely costs alone. ``decided``: the decision, if it
    is known. ``brief``: no time is left to simulate anything: an unknown decision is by the search's costs, and the record leaves out
    memory, bytes and what times rest on.
    """

    simulator: Simulator
    result: SearchResult
    runs: tuple[Run, ...] = ()
    pins: Pairs = ()
    forbidden: Pairs = ()
    confidence: float = 0.0
    draws: int = DECIDING_DRAWS
    compared_by: Draws | None = None
    decided: Decision | None = None
    brief: bool = False

    def with_runs(self, runs: Sequence[Run]) -> SearchOutcome:
        """The same outcome with measured runs."""
        return replace(self, runs=tuple(runs))

    @property
    def kept(self) -> Run | None:
        """The run that is kept; None if nothing was run.

        That is the fastest one if further turns have confirmed that it beats data parallelism (``least_measured``); else data parallelism,
        which users know. If data parallelism was not run or is not allowed, it is the fastest allowed run.
        """
        allowed = [run for run in self.runs if run.allowed]
        usual = next((run for run in allowed if run.name == BASELINE), None)
        if usual is None:
            return min(allowed, key=lambda run: run.measured_ns, default=None)
        compared = next((run for run in allowed if run.gain is not None), usual)
        return compared if compared.gain is not None and compared.gain.at_least > least_measured(compared, usual) else usual

    @cached_property
    def usual(self) -> Strategy | None:
        """Data parallelism, if it obeys the search's constraints and fits into memory."""
        usual = self.simulator.data_parallel
        return next((start.strategy for start in self.result.starts if start.fits and start.strategy == usual), None)

    @cached_property
    def decision(self) -> Decision:
        """The fastest and the safe plan by predictions, and which of them is kept."""
        if self.decided is not None:
            return self.decided
        usual, possible = self.simulator.data_parallel, self.usual is not None
        if self.brief:
            return decision_by_costs(self.result, usual, possible=possible, confidence=self.confidence)
        return decision(self.simulator, self.result, usual, possible=possible, confidence=self.confidence, draws=self.draws)

    def shortened(self) -> SearchOutcome:
        """This outcome with nothing left to simulate; a decision that was made stays."""
        return replace(self, brief=True, decided=self.decision if "decision" in self.__dict__ else self.decided)

    def may_win(self, strategy: Strategy) -> bool:
        """Whether it is worth running a plan: it beats data parallelism in more than a few of the draws (``LEAST_CHANCE``), or is what is
        kept if nothing is run."""
        if self.usual is None or strategy in (self.usual, self.fastest, self.safe):
            return True
        plan, usual = timed(self.simulator, {"plan": strategy, BASELINE: self.usual}, self.usual)
        return plan.wins(usual) > LEAST_CHANCE

    @property
    def fastest(self) -> Strategy:
        """The plan that is predicted to be the fastest on average over the draws."""
        return self.decision.fastest.strategy

    @property
    def safe(self) -> Strategy:
        """The plan that is surely faster than data parallelism by predictions; data parallelism, or the best start, if none is."""
        return self.decision.safe.strategy

    @cached_property
    def other(self) -> SearchOutcome | None:
        """The outcome with the other one of ``fastest`` and ``safe`` as its answer; None if they are the same plan, or plans were run."""
        if self.kept is not None or self.fastest == self.safe:
            return None
        return replace(self, decided=replace(self.decision, answer=self.decision.other_answer))

    @property
    def strategy(self) -> Strategy:
        """The strategy that is kept, see the class."""
        if self.kept is not None:
            return self.kept.strategy
        return self.decision.kept.strategy

    @cached_property
    def time_ns(self) -> int:
        """Predicted time per training iteration of ``strategy`` under the most likely costs, ns."""
        return self.kept.predicted_ns if self.kept is not None else self.decision.kept.usual_ns

    @cached_property
    def data_parallel_ns(self) -> int:
        """The same of data parallelism, even if it does not fit into memory or is not allowed."""
        if self.brief:
            return self.result.data_parallel_ns
        return self.simulator.predict(self.simulator.data_parallel).makespan_ns

    @cached_property
    def range(self) -> dict[str, Any]:
        """How sure the prediction is (``predicted_range``); found when it is first asked for."""
        return predicted_range(self.simulator, self.strategy, len(self.simulation.tasks.tasks))

    @property
    def speedup(self) -> float:
        """Data parallelism's predicted time, divided by that of ``strategy``."""
        return self.data_parallel_ns / max(1, self.time_ns)

    @cached_property
    def throughput(self) -> Throughput:
        """Predicted samples and tokens per second, utilisation and cost of ``strategy``."""
        return throughput(self.simulator.graph, self.simulator.topology, self.time_ns)

    @property
    def history(self) -> pd.DataFrame:
        """One row per proposal."""
        return self.result.history

    @cached_property
    def simulation(self) -> Simulation | FoldedSimulation:
        """The iteration of ``strategy``, task by task; of a large one with many equal copies, two of these (``Simulator.predict``)."""
        return self.simulator.predict(self.strategy)

    @cached_property
    def explanation(self) -> list[Line]:
        """Why each operator got its configuration. Simulates one strategy per operator that differs from data parallelism."""
        return explain(self.simulator, self.strategy, self.simulation if isinstance(self.simulation, Simulation) else None)

    @cached_property
    def synchronization(self) -> list[Synchronized]:
        """The cost of all-reducing parameters that are synchronized by another method."""
        return explain_synchronization(self.simulator, self.strategy)

    @cached_property
    def unkept(self) -> list[Unkept]:
        """What it would be to keep what ``strategy`` recomputes, or offloads."""
        return explain_unkept(self.simulator, self.strategy)

    @cached_property
    def bound(self) -> LowerBound | None:
        """A time that no allowed strategy of the space can be below; None if computing it would take too long."""
        from soap.search.oracles.bounds import is_quickly_bounded, lower_bound  # compiled code
        from soap.search.space import build_space

        simulator = self.simulator
        count = simulator.topology.device_count
        space = build_space(simulator.graph, count, allowed=parse(simulator.graph, count, self.pins, self.forbidden))
        return lower_bound(space, simulator.shared.cuts) if is_quickly_bounded(space) else None

    def _repr_html_(self) -> str:
        """What notebooks show: the time, beside what the search began with, and the strategy."""
        title = f"{milliseconds(self.time_ns)} an iteration, {self.speedup:.2f} times as fast as data parallelism (predicted)"
        began = sorted(self.result.starts, key=lambda own: own.cost_ns)[:MOST_SHOWN]  # costs are means over draws; shown is what is usual
        others = sorted((self.simulator.makespan_ns(own.strategy), own.name, own.fits) for own in began)
        plans = [("kept", self.time_ns, True), *((name, time_ns, fits) for time_ns, name, fits in others)]
        drawn = zip(plans, bars([time_ns for _, time_ns, _ in plans]), strict=True)
        rows = [[escape(name), bar, milliseconds(time_ns) + ("" if fits else ", does not fit")] for (name, time_ns, fits), bar in drawn]
        return f"<b>{escape(title)}</b>" + table(("plan", "", "predicted"), rows) + strategy_html(self.strategy, self.simulator.graph)

    @property
    def record(self) -> dict[str, Any]:
        """What a strategy file records of the search, as plain values. It does not say when or where the search ran, so equal searches
        write equal files, unless strategies were run for real."""
        result = self.result
        record: dict[str, Any] = {
            "predicted_ns": self.time_ns,
            "data_parallel_ns": self.data_parallel_ns,
            "starts": {start.name: {"cost_ns": start.cost_ns, "fits": start.fits} for start in result.starts},
            **({} if self.brief else self._simulated()),
            "search": {
                "seed": result.seed,
                "budget": result.budget,
                "beta": result.beta,
                "risk": None if self.compared_by is None else self.compared_by.risk.value,
                "draws": 0 if self.compared_by is None else self.compared_by.count,
                "spreads": draws_for(self.simulator, 1).spreads.hash,
                "evaluations": result.evaluations,
                "interrupted": result.interrupted,
                "locally_optimal": result.locally_optimal,
            },
        }
        if self.simulator.topology.limits:
            record["search"]["memory_limit_bytes"] = list(self.simulator.topology.limits)
        if self.simulator.graph.sparse:
            record["sparse"] = sparse_shares.document(self.simulator.graph)
        for name, pairs in (("pins", self.pins), ("forbidden", self.forbidden)):
            if pairs:
                record["search"][name] = [f"{pattern}={spec}" for pattern, spec in pairs]
        if self.kept is not None:
            runs = {run.name: {"predicted_ns": run.predicted_ns, "measured_ns": run.measured_ns} for run in self.runs}
            record["measured"] = {"kept": self.kept.name, "runs": runs}
        else:
            record["decision"] = decision_record(self.decision)
        return record

    def _simulated(self) -> dict[str, Any]:
        """The part of the record for which the strategy is simulated."""
        return {
            **resources_record(self.simulation),
            "costs": costs_record(self.simulator, self.simulation.tasks),
        }

    def plot(self, path: str | Path) -> None:
        """Draw the search to a ``.png``, ``.svg`` or ``.pdf`` file: best cost against proposals, starts, acceptance per move.

        SoapError if matplotlib is missing (``soap-search[plots]``) or the file cannot be written.
        """
        outputs.check(path, outputs.PICTURE)
        write_bytes_atomically(path, plot(self.result, path))

    def save(self, path: str | Path, beside: str = "") -> None:
        """Write the strategy with its record to ``path``. ``beside``: the name of the answer's file, if this is the other plan of a
        search. SoapError if that fails."""
        record = {**self.record, **({"beside": beside} if beside else {})}
        save_strategy(path, self.strategy, self.simulator.graph, self.simulator.topology, record)

