"""What a search has found, and which plan of it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soap.api.predictions import costs_record, explain, explain_synchronization
from soap.api.strategies import classical, save_strategy
from soap.files import write_bytes_atomically
from soap.measure.paired import Gain
from soap.model import sparse_shares
from soap.search.constraints import Pairs, parse
from soap.search.explanation import Line, Synchronized
from soap.search.plot import plot
from soap.search.record import SearchResult
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    import pandas as pd

    from soap.search.oracles.bounds import LowerBound


@dataclass(frozen=True)
class Run:
    """A strategy that was run for real. ``measured_ns``: median of its turns, per iteration. ``allowed``: whether it obeys the
    search's constraints. ``gain``: over data parallelism, in turns of their own, if it was the fastest in those before."""

    name: str
    strategy: Strategy
    predicted_ns: int
    measured_ns: int
    allowed: bool
    gain: Gain | None = None

LEAST_MEASURED = 1.02
"""What a measured gain must exceed: a machine differs by as much from one hour to the next."""


def least_measured(run: Run, usual: Run) -> float:
    """What a run's gain over data parallelism must exceed with confidence before it replaces it. A plan that is predicted to be slower
    has to win by as much as it is predicted to lose: then what was measured may be due to what else the machine did."""
    return max(LEAST_MEASURED, run.predicted_ns / max(1, usual.predicted_ns))


@dataclass(frozen=True)
class Guard:
    """Whether what was found may replace data parallelism by its prediction alone. ``gain``: how many times as fast it is predicted to
    be. ``margin``: what it must exceed for that. ``shares``: parts of the predicted compute time by where they come from; ``links``: how
    links were measured, None if they were not."""

    gain: float
    margin: float
    found_ns: int
    shares: Mapping[str, float]
    links: str | None

    @property
    def keeps_data_parallelism(self) -> bool:
        """Because the gain is within the errors of predictions."""
        return self.gain <= self.margin


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found, with what it was found for, so that it can be saved and looked at.

    ``strategy`` is the one that ``runs``, what of it was run for real, have shown to be the fastest; if nothing was run, the one predicted
    to be fastest (``result.strategy``), or data parallelism if that gains no more than ``margin`` over it (``guard``). ``margin``: 1 takes
    whatever is predicted to be faster, None what such predictions are known to err by (``soap.profiles.margins``).
    ``pins``, ``forbidden``: what the search had to obey.
    """

    simulator: Simulator
    result: SearchResult
    runs: tuple[Run, ...] = ()
    pins: Pairs = ()
    forbidden: Pairs = ()
    margin: float | None = 1.0

    def with_runs(self, runs: Sequence[Run]) -> SearchOutcome:
        """The same search, with what was measured."""
        return replace(self, runs=tuple(runs))

    @property
    def kept(self) -> Run | None:
        """The run that counts: what was the fastest, if it was confirmed to be faster than data parallelism in turns of their own
        (``least_measured``); else data parallelism, as users know what they have with it; the fastest of all if that was not run or is not
        allowed. None if nothing was run."""
        allowed = [run for run in self.runs if run.allowed]
        usual = next((run for run in allowed if run.name == BASELINE), None)
        if usual is None:
            return min(allowed, key=lambda run: run.measured_ns, default=None)
        compared = next((run for run in allowed if run.gain is not None), usual)
        return compared if compared.gain is not None and compared.gain.at_least > least_measured(compared, usual) else usual

    @cached_property
    def usual(self) -> Strategy | None:
        """Data parallelism, if it obeys the search's constraints and fits into memory."""
        strategy = classical(BASELINE, self.simulator.graph, self.simulator.topology)
        return next((start.strategy for start in self.result.starts if start.fits and start.strategy == strategy), None)

    @cached_property
    def guard(self) -> Guard | None:
        """Whether what was found may replace data parallelism; None if nothing was held against it: ``margin`` is 1, it is data
        parallelism, or that is not possible."""
        found = self.result.strategy
        if self.margin == 1 or self.usual is None or found == self.usual:
            return None
        margin = self.known_error if self.margin is None else self.margin
        record = costs_record(self.simulator, self.simulator.predict(found).tasks)
        gain = self.result.data_parallel_ns / max(1, self.result.cost_ns)
        return Guard(gain, margin, self.result.cost_ns, record["shares"], record["links"])

    @cached_property
    def known_error(self) -> float:
        """By what factor predictions of gains over data parallelism are known to err, with the costs of these predictions."""
        from soap.profiles.margins import least_gain

        strategies = [self.result.strategy] if self.usual in (None, self.result.strategy) else [self.result.strategy, self.usual]
        records = [costs_record(self.simulator, self.simulator.predict(own).tasks) for own in strategies if own is not None]
        return max(least_gain(record["shares"], links_measured=record["links"] is not None) for record in records)

    @property
    def strategy(self) -> Strategy:
        """The best strategy."""
        if self.kept is not None:
            return self.kept.strategy
        return self.usual if self.usual is not None and self._is_held_back else self.result.strategy

    @property
    def time_ns(self) -> int:
        """Its predicted time per training iteration."""
        if self.kept is not None:
            return self.kept.predicted_ns
        return self.result.data_parallel_ns if self._is_held_back else self.result.cost_ns

    @property
    def _is_held_back(self) -> bool:
        return self.guard is not None and self.guard.keeps_data_parallelism

    @property
    def speedup(self) -> float:
        """Data parallelism's predicted time over it."""
        return self.result.data_parallel_ns / self.time_ns

    @property
    def history(self) -> pd.DataFrame:
        """One row per proposal."""
        return self.result.history

    @cached_property
    def simulation(self) -> Simulation:
        """The best strategy's iteration, task by task."""
        return self.simulator.run(self.strategy)

    @cached_property
    def explanation(self) -> list[Line]:
        """Why each operator got its configuration; simulates one strategy per operator that is unlike data parallelism."""
        return explain(self.simulator, self.strategy, self.simulation)

    @cached_property
    def synchronization(self) -> list[Synchronized]:
        """What it would cost to all-reduce the parameters that are synchronized otherwise."""
        return explain_synchronization(self.simulator, self.strategy)

    @cached_property
    def bound(self) -> LowerBound | None:
        """What no strategy of the space, as far as it is allowed, can be below; None if working it out would take too long."""
        from soap.search.oracles.bounds import is_quickly_bounded, lower_bound  # imports numba
        from soap.search.space import build_space

        simulator = self.simulator
        count = simulator.topology.device_count
        space = build_space(simulator.graph, count, allowed=parse(simulator.graph, count, self.pins, self.forbidden))
        return lower_bound(space, simulator.topology, simulator.costs) if is_quickly_bounded(space) else None

    @property
    def record(self) -> dict[str, Any]:
        """What a strategy file remembers of the search. Nothing of when or where it ran: equal searches write equal files, unless the
        strategies were run for real."""
        result = self.result
        record: dict[str, Any] = {
            "predicted_ns": self.time_ns,
            "data_parallel_ns": result.data_parallel_ns,
            "starts": {start.name: {"predicted_ns": start.cost_ns, "fits": start.fits} for start in result.starts},
            "memory_bytes": [use.total for use in self.simulation.memory],
            "bytes_moved": self.simulation.bytes_moved,
            "costs": costs_record(self.simulator, self.simulation.tasks),
            "search": {
                "seed": result.seed,
                "budget": result.budget,
                "beta": result.beta,
                "evaluations": result.evaluations,
                "interrupted": result.interrupted,
                "locally_optimal": result.locally_optimal,
            },
        }
        if self.simulator.graph.sparse:
            record["sparse"] = sparse_shares.document(self.simulator.graph)
        for name, pairs in (("pins", self.pins), ("forbidden", self.forbidden)):
            if pairs:
                record["search"][name] = [f"{pattern}={spec}" for pattern, spec in pairs]
        if self.kept is not None:
            runs = {run.name: {"predicted_ns": run.predicted_ns, "measured_ns": run.measured_ns} for run in self.runs}
            record["measured"] = {"kept": self.kept.name, "runs": runs}
        elif self.guard is not None:
            record["guard"] = guard_record(self.guard)
        return record

    def plot(self, path: str | Path) -> None:
        """Draw the search to a ``.png``, ``.svg`` or ``.pdf``: best cost against proposals, starts, acceptance per move.

        SoapError without matplotlib (``soap-search[plots]``).
        """
        write_bytes_atomically(path, plot(self.result, path))

    def save(self, path: str | Path) -> None:
        """Write the strategy with its record to ``path``."""
        save_strategy(path, self.strategy, self.simulator.graph, self.simulator.topology, self.record)


def guard_record(guard: Guard) -> dict[str, Any]:
    """What was kept, and why, as plain values. ``found_ns``: the predicted time of the fastest plan found."""
    kept = BASELINE if guard.keeps_data_parallelism else "found"
    return {"kept": kept, "found_ns": guard.found_ns, "gain": round(guard.gain, 4), "margin": round(guard.margin, 4)}
