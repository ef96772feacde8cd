"""How much of the large suites is run: ``SOAP_TESTS`` is ``quick``, ``test`` (if it is not set) or ``all``, as `make` sets it.

``docs/testing.md`` has a table of what runs where. Numbers of hypothesis's examples stand here alone: a test without settings has
hypothesis's profile, one whose examples cost much has ``FEW``, one whose examples cost next to nothing has ``MANY``.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")

EXTENTS = ("quick", "test", "all")
CHOSEN = os.environ.get("SOAP_TESTS", "test")
if CHOSEN not in EXTENTS:
    raise ValueError(f"SOAP_TESTS={CHOSEN!r}; expected one of {', '.join(EXTENTS)}")
ALL = CHOSEN == "all"

EXAMPLES = {"quick": (1, 4, 20), "test": (2, 5, 25), "all": (40, 150, 1000)}
"""Of a property, if an example costs much, as most do, and next to nothing."""


def _examples(count: int) -> settings:
    """No deadline for one example: the first one compiles, and the machine may be busy."""
    return settings(max_examples=count, deadline=None)


FEW, USUAL, MANY = (_examples(count) for count in EXAMPLES[CHOSEN])


def load_profile() -> None:
    """``USUAL`` for what has no settings of its own. Before modules of tests are imported."""
    settings.register_profile(CHOSEN, USUAL)
    settings.load_profile(CHOSEN)


def so_many(usual: int, in_all: int) -> int:
    """How many of something there are."""
    return in_all if ALL else usual


def often(cases: Sequence[Case], which: Container[Case], *marks: pytest.MarkDecorator) -> list[Any]:
    """Cases of a test, of which the others are for `make test-all`. ``marks``: of those that run often."""
    return [pytest.param(case, marks=marks if case in which else pytest.mark.long) for case in cases]


def rows_often(cases: Sequence[tuple[Any, ...]], which: Container[tuple[Any, ...]]) -> list[Any]:
    """As ``often``, of cases that have several arguments each."""
    return [pytest.param(*case, marks=() if case in which else pytest.mark.long) for case in cases]


def every(step: int, cases: Sequence[Case]) -> Sequence[Case]:
    """The first of so many cases and so on, or all of them."""
    return cases if ALL else cases[::step]
