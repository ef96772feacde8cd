"""What a search leaves behind: the result, its history, and the recorder that keeps both while the search runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from soap.search.metropolis import Proposal
from soap.search.starts import BASELINE, Start
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    import pandas as pd

    from soap.search.to_fit import Budgeted


MOST_FINALISTS = 8
"""Number of strategies that are kept beside the best."""


class Row(NamedTuple):
    """One evaluated proposal. ``phase``: descent, chain or polish (polishing has rows only for what was taken, beyond the budget).
    ``chain``: name of the start. ``operator``: the first operator that was changed; ``operators``: how many were. ``fits``: None if the
    proposal is too slow for it to matter; of what a compiled chain has accepted and was not its best, perhaps by an estimate.
    ``cost_ns``: None if it is only known to be too slow. ``best_ns``: best cost so far that fits, None if nothing has fitted yet."""

    proposal: int
    phase: str
    chain: str
    move: str
    operator: str
    operators: int
    cost_ns: int | None
    fits: bool | None
    accepted: bool
    best_ns: int | None


class Improvement(NamedTuple):
    """A new best cost that fits. ``proposal``: how many proposals were evaluated before it became known, 0 of a start. ``seconds``: since
    the search began; a chain in compiled code tells of its own best at the end of a round."""

    proposal: int
    seconds: float
    cost_ns: int


class MoveCount(NamedTuple):
    """How often a move was evaluated and accepted."""

    proposed: int
    accepted: int


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search. Costs are what strategies were compared by: their times under several draws as one (``draws.Risk``), in ns;
    plain times only of a search by the most likely costs alone. ``SearchOutcome`` has times.

    ``strategy`` is the best one seen, and fits into memory. ``cost_ns``, ``data_parallel_ns``: its cost and data parallelism's.
    ``finalists``: the best few that fit, of different costs, the best one first. ``evaluations``: number of simulations, starts included.
    ``interrupted``: whether the user stopped it before the budget was spent. ``locally_optimal``: whether it was shown that no other
    structured configuration of any one operator is better; ``polished``: comparisons made for that and at cuts (``soap.search.cuts``),
    which are not in ``evaluations``. ``saving_bytes``: bytes that data parallelism lacks, if parameters could therefore be
    synchronized in ways that save memory, without the user's asking; else 0.
    ``budgeted``: of starts that recompute as few runs as it takes to fit, how near they are to the best choice of runs; by name.
    ``improvements``: each new best cost, with when it was found, which is no part of equal searches' equality."""

    strategy: Strategy
    cost_ns: int
    data_parallel_ns: int
    starts: tuple[Start, ...]
    finalists: tuple[Start, ...]
    rows: Sequence[Row]
    evaluations: int
    seed: int
    budget: int
    beta: float
    interrupted: bool
    locally_optimal: bool = False
    polished: int = 0
    saving_bytes: int = 0
    budgeted: Mapping[str, Budgeted] = field(default_factory=dict)
    improvements: tuple[Improvement, ...] = field(default=(), compare=False)

    @property
    def speedup(self) -> float:
        """Data parallelism's cost over the best strategy's. Data parallelism counts even if it does not fit into memory."""
        return self.data_parallel_ns / self.cost_ns

    @property
    def start_costs(self) -> Mapping[str, tuple[int, bool]]:
        """Name of each start -> (cost in ns, whether it fits)."""
        return {start.name: (start.cost_ns, start.fits) for start in self.starts}

    @cached_property
    def history(self) -> pd.DataFrame:
        """One line per evaluated proposal, with the columns of ``Row``; ``best_ns`` is a nullable integer, ``fits`` a nullable boolean."""
        import pandas as pd

        frame = pd.DataFrame(list(self.rows), columns=list(Row._fields))
        whole = dict.fromkeys(("proposal", "operators"), "int64")
        return frame.astype({**whole, "cost_ns": "Int64", "best_ns": "Int64", "fits": "boolean", "accepted": "bool"})

    @property
    def best_costs(self) -> list[tuple[int, int]]:
        """(number of the proposal, best cost in ns so far), from the best start that fits, if any does, at 0."""
        first = min((start.cost_ns for start in self.starts if start.fits), default=None)
        best = [] if first is None else [(0, first)]
        return best + [(row.proposal, row.best_ns) for row in self.rows if row.best_ns is not None]

    @cached_property
    def acceptance(self) -> Mapping[str, MoveCount]:
        """Move -> how often it was evaluated and accepted. Descent's moves have names of their own."""
        counts: dict[str, MoveCount] = {}
        for row in self.rows:
            proposed, accepted = counts.get(row.move, MoveCount(0, 0))
            counts[row.move] = MoveCount(proposed + 1, accepted + row.accepted)
        return dict(sorted(counts.items()))


@dataclass
class Recorder:
    """Keeps the best strategy and the history while a search runs. ``baseline_ns``: data parallelism's cost, if it is not among the
    starts because it breaks the user's constraints. ``improved``: called with each new best cost that fits."""

    starts: list[Start] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    best: Start | None = None
    baseline_ns: int | None = None
    improved: Callable[[int], None] = lambda cost_ns: None
    finalists: list[Start] = field(default_factory=list)
    locally_optimal: bool = False
    polished: int = 0
    budgeted: Mapping[str, Budgeted] = field(default_factory=dict)
    improvements: list[Improvement] = field(default_factory=list)
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def fits(self) -> bool:
        """Whether something that fits is known."""
        return self.best is not None and self.best.fits

    def start(self, start: Start) -> None:
        """Record an evaluated start."""
        self.starts.append(start)
        self._compare(start)

    def proposal(
        self, phase: str, chain: str, proposal: Proposal, cost_ns: int, overflow_bytes: int | None, accepted: bool
    ) -> bool:
        """Record an evaluated proposal. ``overflow_bytes``: None if it is too slow, or lacks too much, to be the best. Returns whether
        it is the best so far."""
        better = overflow_bytes is not None and self._compare(Start(chain, proposal.strategy, cost_ns, overflow_bytes))
        assert self.best is not None
        best_ns = self.best.cost_ns if self.best.fits else None
        names, number = proposal.operators, len(self.rows) + 1
        fits = None if overflow_bytes is None else overflow_bytes == 0
        row = Row(number, phase, chain, proposal.move, names[0], len(names), cost_ns, fits, accepted, best_ns)
        self.rows.append(row)
        return better

    def found(self, strategy: Start) -> None:
        """Record a strategy that fits and is better than the rest of its chain."""
        self._compare(strategy)

    def logged(self, chain: str, move: str, operator: str, operators: int, cost_ns: int | None, accepted: bool) -> None:
        """Record a proposal that a compiled chain evaluated. ``cost_ns``: None if it was refused before its cost was known."""
        assert self.best is not None
        fits = True if accepted else None
        self.rows.append(Row(len(self.rows) + 1, "chain", chain, move, operator, operators, cost_ns, fits, accepted, self.best.cost_ns))

    def _compare(self, candidate: Start) -> bool:
        if candidate.fits and all(candidate.cost_ns != other.cost_ns for other in self.finalists):
            self.finalists = sorted([*self.finalists, candidate], key=lambda start: start.cost_ns)[:MOST_FINALISTS]
        better = self.best is None or candidate.score < self.best.score
        if better:
            self.best = candidate
            if candidate.fits:
                self.improvements.append(Improvement(len(self.rows), time.monotonic() - self.begun_s, candidate.cost_ns))
                self.improved(candidate.cost_ns)
        return better

    @property
    def data_parallel_ns(self) -> int:
        """Data parallelism's cost."""
        if self.baseline_ns is not None:
            return self.baseline_ns
        return next(start.cost_ns for start in self.starts if start.name == BASELINE)

    def result(self, *, seed: int, budget: int, beta: float, interrupted: bool, saving_bytes: int) -> SearchResult:
        """The result so far. ``saving_bytes``: see ``SearchResult``."""
        assert self.best is not None
        evaluations = len(self.starts) + len(self.rows)
        return SearchResult(
            strategy=self.best.strategy,
            cost_ns=self.best.cost_ns,
            data_parallel_ns=self.data_parallel_ns,
            starts=tuple(self.starts),
            finalists=tuple(self.finalists),
            rows=tuple(self.rows),
            evaluations=evaluations,
            seed=seed,
            budget=budget,
            beta=beta,
            interrupted=interrupted,
            locally_optimal=self.locally_optimal,
            polished=self.polished,
            saving_bytes=saving_bytes,
            budgeted={start.name: self.budgeted[start.name] for start in self.starts if start.fits and start.name in self.budgeted},
            improvements=tuple(self.improvements),
        )
