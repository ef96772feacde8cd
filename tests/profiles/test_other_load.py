"""Whether others' work on a machine is noticed while it is measured, by counts that are made up."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from soap.errors import SoapWarning
from soap.measure import this_machine
from soap.measure.this_machine import Count, noticing_others, others_cores


def counts(*known: Count | None) -> Callable[[], Count | None]:
    left = iter(known)
    return lambda: next(left)


BEFORE = Count(1000.0, 50.0, 10.0, 2)


@pytest.mark.parametrize(
    ("after", "cores"),
    [
        (Count(1008.0, 54.0, 14.0, 2), 1.0),  # two cores for four seconds, half of which was ours
        (Count(1004.0, 54.0, 14.0, 2), 0.0),
        (Count(1003.9, 54.0, 14.0, 2), 0.0),  # the cores' counts are coarser than ours
        (Count(1000.2, 50.0, 10.1, 2), None),  # too short to tell
        (None, None),
    ],
)
def test_others_work_is_what_is_not_ours(after: Count | None, cores: float | None) -> None:
    assert others_cores(BEFORE, after) == (None if cores is None else pytest.approx(cores))
    assert others_cores(None, after) is None


def test_much_of_it_is_told_in_one_line() -> None:
    with (
        pytest.warns(SoapWarning, match=r"^other work kept 1.0 of 2 cores busy while links were measured: predictions may be off; on an"),
        noticing_others("links were", "again", counts(BEFORE, Count(1008.0, 54.0, 14.0, 2))),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for after in (Count(1004.7, 54.0, 14.0, 2), None):
            with noticing_others("links", "again", counts(BEFORE, after)):
                pass


def test_this_machine_tells_and_our_own_work_is_not_anothers() -> None:
    first = this_machine.count()
    assert first is not None and first.cores >= 1
    while (now := this_machine.count()) is not None and now.own_s < first.own_s + 0.05:
        pass
    assert now is not None and now.busy_s >= first.busy_s
