"""How much of the large suites is run: a part of each, or all with ``SOAP_ALL_CASES=1``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

ALL = os.environ.get("SOAP_ALL_CASES") == "1"


def so_many(usual: int, in_all: int) -> int:
    """How many of something there are."""
    return in_all if ALL else usual


def every(step: int, cases: Sequence[Case]) -> Sequence[Case]:
    """The first of so many cases and so on, or all of them."""
    return cases if ALL else cases[::step]
