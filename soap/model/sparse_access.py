"""Sparse parameters: tables of which a step reads, and gives a gradient to, some rows only, and how many rows these are.

A parameter is sparse if all its uses look rows up by indices that come with the batch. How many different rows a part of a batch
touches decides what synchronizing the parameter costs (alpha in Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep
Neural Networks", EuroSys 2019; there for one worker's share of the batch). This count grows more slowly than the part does, since parts
share rows. So it is kept for halves, quarters, … of a batch, which also tells how much the rows of several workers overlap. All numbers
are whole: the compiled simulator must give the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, expm1, log1p

from soap.errors import ModelError

HALVINGS = 20
"""A batch is halved at most so many times: more often than any number of devices needs."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One use of a sparse parameter: by operand ``parameter`` of the operator at ``operator`` (positions in the graph).

    ``inputs``: the operator's inputs from which the indices come; they are inputs of the model, and perhaps constants. ``indices``: how
    many rows the whole operator looks up, counting repeated ones. A tile looks up a share of them: its share of the factors that no
    dimension of the parameter follows.

    ``weight``: how much the indices count beside the parameter's other lookups: at least ``indices``, in proportion to the different
    rows that they touch; 0 if that is not known, so that all indices count alike. Example: the candidates of a sampled softmax all
    differ; they touch more rows than as many targets, which repeat.
    """

    operator: int
    parameter: int
    inputs: tuple[int, ...]
    indices: int
    weight: int = 0

    @property
    def weighed(self) -> int:
        """``weight``, or ``indices`` where it is not known."""
        return self.weight or self.indices


@dataclass(frozen=True, slots=True)
class RowAccess:
    """How steps touch a parameter's ``rows`` (dimension 0).

    ``touched[k]``: how many different rows 1/2^k of a batch touches on average, rounded up; at least half of the entry before, since
    two halves touch no more rows together than apart. ``measured``: counted on batches instead of assumed (``uniform``). ``given``: the
    user said how many rows a whole batch touches (``scaled``).
    """

    rows: int
    lookups: tuple[Lookup, ...]
    touched: tuple[int, ...]
    measured: bool = False
    given: bool = False

    def __post_init__(self) -> None:
        limit = min(self.rows, self.indices)
        steps = zip(self.touched, self.touched[1:], strict=False)
        if not self.touched or not min(1, limit) <= self.touched[0] <= limit or any(not more / 2 <= fewer <= more for more, fewer in steps):
            raise ModelError(
                f"rows touched by a batch, its half, … {list(self.touched)}: expected whole numbers, at most {limit}, "
                "each at least half of the one before and not above it"
            )

    @property
    def indices(self) -> int:
        """How many rows one batch looks up, counting repeated ones."""
        return sum(lookup.indices for lookup in self.lookups)

    @property
    def weighed(self) -> int:
        """The same with each lookup's weight."""
        return sum(lookup.weighed for lookup in self.lookups)

    @property
    def alpha(self) -> float:
        """Share of the rows that one batch touches."""
        return self.touched[0] / self.rows

    @property
    def source(self) -> str:
        """Where ``touched`` comes from: given, measured or assumed."""
        return "given" if self.given else "measured" if self.measured else "assumed"

    def touched_by(self, indices: int) -> int:
        """How many different rows so many of a batch's weighed lookups touch: ``touched``, linear between its entries, rounded up.

        Beyond the last entry rows are taken not to repeat any more: each lookup touches the same share of a row as there.
        """
        total = self.weighed
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
    """What is assumed where nothing was measured: all rows are equally likely. Real data repeat popular rows, so this is too many.

    Different rows among n lookups: rows * (1 - (1 - 1 / rows)^n).
    """
    indices = sum(lookup.indices for lookup in lookups)
    missed = log1p(-1 / rows) if rows > 1 else float("-inf")  # of a row, by one look-up
    counts = [indices / 2**k for k in halvings(indices)]
    touched = [min(rows, ceil(count), ceil(-rows * expm1(count * missed))) if count else 0 for count in counts]
    return RowAccess(rows, tuple(lookups), tuple(touched))


def halvings(indices: int) -> range:
    """How often so many lookups are halved: until one is left, or further halving helps for no number of devices."""
    return range(min(HALVINGS, max(0, indices.bit_length() - 1)) + 1)


def scaled(access: RowAccess, alpha: float) -> RowAccess:
    """The same with another share of rows that a batch touches; ModelError if that share is impossible.

    How much parts of a batch overlap is kept: all entries change in proportion, up to the most that can be touched.
    """
    limit = min(access.rows, access.indices)
    wanted = max(1, round(alpha * access.rows)) if 0 < alpha <= 1 else 0
    if not 0 < wanted <= limit:
        limits = f"{limit / access.rows:g}, since a batch looks up {access.indices} rows of {access.rows}"
        raise ModelError(f"alpha {alpha:g}: expected more than 0 and at most {limits}")
    most = [min(limit, -(-access.indices // 2**k)) for k in range(len(access.touched))]
    touched = [min(limit_k, -(-before * wanted // access.touched[0])) for limit_k, before in zip(most, access.touched, strict=True)]
    return RowAccess(access.rows, access.lookups, tuple(touched), access.measured, given=True)
