"""Predictions of large runs stay within 1% of those that were written: a change of prices shows here, row by row.

A change that is meant to move them writes them anew: ``python -m benchmarks.frontier_gate --write tests/golden/frontier.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.frontier_gate import outcomes

FIXTURE = Path(__file__).parent / "golden" / "frontier.json"
NEAR = 0.01


KNOWN = json.loads(FIXTURE.read_text(encoding="utf-8"))
MODELS = sorted({row["model"]["name"] for row in KNOWN["rows"]})


def test_there_are_forty_rows() -> None:
    assert len(KNOWN["rows"]) == len(KNOWN["outcomes"]) == 40


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_predictions_of_large_runs_are_those_that_were_written(tmp_path: Path, model: str) -> None:
    pytest.importorskip("transformers")
    found, moved = outcomes([row for row in KNOWN["rows"] if row["model"]["name"] == model], tmp_path), []
    for name, now in found.items():
        before = KNOWN["outcomes"][name]
        if before.keys() != now.keys() or any(isinstance(own, str) for own in now.values()):
            moved += [f"{name}: {before}, now {now}"] * (before != now)
            continue
        moved += [f"{name}: {field} {before[field]:,}, now {now[field]:,}" for field in now if abs(now[field] / before[field] - 1) > NEAR]
    assert found and not moved, "\n".join(moved)
