"""Uneven shares: in what proportion a factor is divided among devices of different speed (``OpConfig.shares``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Annotated

from soap.errors import StrategyError
from soap.model.json_text import Schema

MOST_WEIGHT = 2**20
"""Upper limit of a weight: above any number of samples of a device."""

Shares = tuple[tuple[Annotated[int, Schema(minimum=1, maximum=MOST_WEIGHT)], ...], ...]
"""For each factor that is split, the weights of its parts; () for equal parts."""


def lowest_terms(degrees: Sequence[int], shares: Shares) -> Shares:
    """The same shares in lowest terms; () for equal parts. StrategyError if they do not suit the degrees."""
    split = [degree for degree in degrees if degree > 1]
    if len(shares) != len(split) or any(own and len(own) != degree for own, degree in zip(shares, split, strict=True)):
        raise StrategyError(f"shares {list(map(list, shares))} for degrees {list(degrees)}: expected {_wanted(split)}")
    if any(not 1 <= weight <= MOST_WEIGHT for own in shares for weight in own):
        raise StrategyError(f"shares {list(map(list, shares))}: expected whole numbers from 1 to {MOST_WEIGHT}")
    reduced = tuple([() if len(set(own)) == 1 else tuple([weight // gcd(*own) for weight in own]) for own in shares])
    return reduced if any(reduced) else ()


def weights_of(degrees: Sequence[int], shares: Shares) -> Shares:
    """For each factor the numbers in whose proportion its parts are, one for each part."""
    own = iter(shares)
    return tuple([((next(own, ()) or (1,) * degree) if degree > 1 else (1,)) for degree in degrees])


def shares_of(degrees: Sequence[int], weights: Sequence[Sequence[int]]) -> Shares:
    """The reverse of ``weights_of``, in lowest terms."""
    found = tuple([tuple(own) for own, degree in zip(weights, degrees, strict=True) if degree > 1])
    return lowest_terms(degrees, found) if found else ()


def _wanted(split: Sequence[int]) -> str:
    lists = ", ".join(f"{degree} numbers" for degree in split)
    return f"a list for each factor that is split, of {lists}, or none for equal parts" if split else "none, as no factor is split"


def said_shares(value: Iterable[Sequence[int]]) -> str:
    """For people: ``2:1``; ``equal`` for a factor in equal parts beside others."""
    return " and ".join(":".join(map(str, own)) or "equal" for own in value)
