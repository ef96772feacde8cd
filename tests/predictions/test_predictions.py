"""Predictions are what they were: a change by more than 1% has to be accepted (``python -m tests.predictions.write``)."""

from __future__ import annotations

import pytest

from tests.predictions.rows import MOST_CHANGE, ROWS, SOURCES, Row, predicted_ms, stored

OFTEN = {("h200-8", "single_device"), ("h100-8", "data_parallel")}


def marks(row: Row) -> list[pytest.MarkDecorator]:
    """Full-size models: the others are for `make test-all`."""
    often = (row.cluster, row.plan) in OFTEN and row.model != "zoo:resnet50" and row.precision != "tf32"
    return [pytest.mark.slow if often else pytest.mark.long]


def test_all_have_figures() -> None:
    assert list(stored()) == ROWS and len(ROWS) >= 40
    assert {row.costs for row in ROWS} == set(SOURCES)


@pytest.mark.parametrize("row", [pytest.param(row, id="-".join(row), marks=marks(row)) for row in ROWS])
def test_predictions_are_as_stored(row: Row) -> None:
    assert predicted_ms(row) == pytest.approx(stored()[row], rel=MOST_CHANGE), "if that is meant: python -m tests.predictions.write"
