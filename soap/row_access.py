"""Sparse parameters: tables of which a step reads, and gives a gradient to, some rows only, and how many these are.

A parameter is sparse if all its uses are look-ups of rows by indices that come with the batch. How many different rows a part of a batch
touches decides what synchronizing it costs (alpha in Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks",
EuroSys 2019; there for one worker's share of the batch). It grows more slowly than the part does, since parts share rows; so it is kept
for halves, quarters, … of a batch, which tells how much several workers' rows overlap, too. Whole numbers throughout: the compiled
simulator must give the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from soap.errors import ModelError

HALVINGS = 20
"""At most so many times is a batch halved: more than any number of devices."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One use of a sparse parameter: by operand ``parameter`` of the operator at ``operator`` (positions in the graph).

    ``inputs``: the operator's inputs from which the indices come; they are inputs of the model or constants. ``indices``: how many rows
    the whole operator looks up, repeated ones counted. A tile of which the operator's other factors (those that no dimension of the
    parameter follows) are a part looks up that part of them.
    """

    operator: int
    parameter: int
    inputs: tuple[int, ...]
    indices: int


@dataclass(frozen=True, slots=True)
class RowAccess:
    """How steps touch a parameter's ``rows`` (dimension 0).

    ``touched[k]``: how many different rows 1/2^k of a batch touches on average, rounded up; at least as many as half of the entry before.
    ``measured``: from batches, rather than assumed (``uniform``).
    """

    rows: int
    lookups: tuple[Lookup, ...]
    touched: tuple[int, ...]
    measured: bool = False

    def __post_init__(self) -> None:
        steps = zip((self.rows, *self.touched), self.touched, strict=False)
        if not self.touched or any(not 1 <= fewer <= more for more, fewer in steps) or self.touched[0] > self.indices:
            raise ModelError(
                f"rows touched by a batch, its half, … {list(self.touched)}: expected whole numbers of at least 1 that do not grow, "
                f"at most {min(self.rows, self.indices)}"
            )

    @property
    def indices(self) -> int:
        """How many rows one batch looks up, repeated ones counted."""
        return sum(lookup.indices for lookup in self.lookups)

    @property
    def alpha(self) -> float:
        """Share of the rows that one batch touches."""
        return self.touched[0] / self.rows

    def touched_by(self, indices: int) -> int:
        """How many different rows so many of a batch's look-ups touch: ``touched``, linearly between its entries, rounded up.

        Beyond the last entry rows do not repeat any more: every look-up touches the part of a row that it does there.
        """
        total = self.indices
        if indices >= total:
            return self.touched[0]
        level = 0
        while level + 1 < len(self.touched) and indices << (level + 1) <= total:
            level += 1
        # indices lie between total / 2^(level + 1) and total / 2^level
        upper = self.touched[level]
        if level + 1 == len(self.touched):
            return min(indices, -(-upper * (indices << level) // total))
        lower = self.touched[level + 1]
        return min(indices, lower + -(-(upper - lower) * ((indices << (level + 1)) - total) // total))


def uniform(rows: int, lookups: Sequence[Lookup]) -> RowAccess:
    """What is assumed where nothing was measured: all rows are equally likely. Real data repeat popular rows, so this counts too many.

    Different rows among n look-ups: rows * (1 - (1 - 1 / rows)^n).
    """
    indices = sum(lookup.indices for lookup in lookups)
    counts = [indices / 2**k for k in range(HALVINGS + 1) if indices >> k or k == 0]
    return RowAccess(rows, tuple(lookups), tuple(min(rows, ceil(count), ceil(rows * (1 - (1 - 1 / rows) ** count))) for count in counts))


def scaled(access: RowAccess, alpha: float) -> RowAccess:
    """The same with another share of rows that a batch touches; ModelError if that cannot be.

    How much parts of a batch overlap is kept: all entries change in one proportion, up to what can be touched at most.
    """
    limit = min(access.rows, access.indices)
    wanted = ceil(alpha * access.rows)
    if not 0 < alpha <= 1 or wanted > limit:
        limits = f"{limit / access.rows:g}, since a batch looks up {access.indices} rows"
        raise ModelError(f"alpha {alpha:g}: expected more than 0 and at most {limits}")
    touched: list[int] = []
    for k, before in enumerate(access.touched):
        most = touched[-1] if touched else limit
        touched.append(min(most, max(1, access.indices >> k), -(-before * wanted // max(1, access.touched[0]))))
    return RowAccess(access.rows, access.lookups, tuple(touched), access.measured)
