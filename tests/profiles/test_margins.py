"""What predictions are known to err by: the constants are those of the tables in docs/, which are read here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy_report import USUAL, Plan, read
from soap.profiles.lookup import Source
from soap.profiles.margins import ERRORS, ESTIMATED_ERROR, MEASURED_ERROR, least_gain

DOCS = Path(__file__).parents[2] / "docs"


def gains_of_measured_costs() -> list[tuple[float, float]]:
    """(predicted, measured) gains over data parallelism of all plans of docs/accuracy.md."""
    groups: dict[tuple[str, str], dict[str, Plan]] = {}
    for plan in read((DOCS / "accuracy.md").read_text(encoding="utf-8")):
        groups.setdefault((plan.cluster, plan.model), {})[plan.strategy] = plan
    found = []
    for own in groups.values():
        usual = own.pop(USUAL)
        found += [(usual.predicted_ns / plan.predicted_ns, usual.measured_ns / plan.measured_ns) for plan in own.values()]
    return found


def gains_of_estimates() -> list[tuple[float, float]]:
    """The same of docs/benchmarks.md, *Predicted and measured, end to end*, which states gains."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    section = text.split("\n## Predicted and measured, end to end\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return [(float(row[6]), float(row[7])) for row in rows[2:] if row[1] != USUAL]


def test_the_error_of_measured_costs_is_that_of_the_table() -> None:
    gains = gains_of_measured_costs()
    worst = max(predicted / measured for predicted, measured in gains)
    assert len(gains) == 115 and worst == pytest.approx(1.151, abs=1e-3)
    assert worst < MEASURED_ERROR < 1.02 * worst
    assert not [gain for gain in gains if gain[0] > MEASURED_ERROR and gain[1] < 1]


def test_the_error_of_estimates_is_that_of_the_table() -> None:
    gains = gains_of_estimates()
    worst = max(predicted / measured for predicted, measured in gains if predicted <= 3)
    assert len(gains) == 30 and worst == pytest.approx(2.029, abs=1e-3)
    assert worst < ESTIMATED_ERROR < 1.02 * worst
    beyond = [gain for gain in gains if gain[0] > ESTIMATED_ERROR]
    assert len(beyond) == 6 and all(measured > 1 for _, measured in beyond)
    # Where the error is larger still, so is the gain.
    assert all(predicted > 2 * predicted / measured for predicted, measured in gains if predicted / measured > ESTIMATED_ERROR)


def test_every_source_has_an_error() -> None:
    assert set(ERRORS) == {source.value for source in Source}


def test_it_follows_the_shares_of_where_costs_come_from() -> None:
    assert least_gain({"measured": 1.0}, links_measured=True) == pytest.approx(MEASURED_ERROR)
    assert least_gain({"measured": 0.5, "interpolated": 0.5, "estimated": 0.0}, links_measured=True) == pytest.approx(MEASURED_ERROR)
    assert least_gain({"estimated": 1.0}, links_measured=True) == pytest.approx(ESTIMATED_ERROR)
    half = least_gain({"measured": 0.5, "calibrated": 0.25, "estimated": 0.25}, links_measured=True)
    assert half == pytest.approx((MEASURED_ERROR * ESTIMATED_ERROR) ** 0.5)
    assert least_gain({"measured": 0.98}, links_measured=True) == pytest.approx(MEASURED_ERROR)  # shares are rounded


def test_links_that_are_not_measured_are_estimates_whatever_is_known_of_computations() -> None:
    assert least_gain({"measured": 1.0}, links_measured=False) == ESTIMATED_ERROR
    assert least_gain(dict.fromkeys(ERRORS, 0.0), links_measured=True) == ESTIMATED_ERROR  # nothing is computed
