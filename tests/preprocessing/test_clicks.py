"""Clicks of made-up data follow the model that is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from soap.preprocessing.generate import NUMBERS, draw_rows, effects, generate

ROWS = 40_000


def test_effects_are_even_and_always_the_same() -> None:
    found = effects(3, np.arange(10**5))
    assert np.array_equal(found[17:18], effects(3, np.array([17]))) and not np.array_equal(found, effects(4, np.arange(10**5)))
    counts, _ = np.histogram(found, 20, (-np.sqrt(3), np.sqrt(3)))
    assert counts.sum() == 10**5 and abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert abs(np.corrcoef(found, effects(4, np.arange(10**5)))[0, 1]) < 0.02


def test_clicks_come_as_often_as_is_said() -> None:
    """In each tenth of the rows by their probability, within five standard deviations; and about every fourth row, as in Criteo's data."""
    made = draw_rows(5, 0, ROWS)
    assert 0.22 < made.clicks.mean() < 0.28 and made.probabilities.std() > 0.15
    for tenth in np.array_split(np.argsort(made.probabilities), 10):
        own = made.probabilities[tenth]
        assert abs(made.clicks[tenth].sum() - own.sum()) < 5 * np.sqrt((own * (1 - own)).sum())


def test_what_is_written_is_what_was_drawn(tmp_path: Path) -> None:
    generate(tmp_path / "raw", 300, seed=5, categories=50, wrote=lambda count: None)
    made = draw_rows(5, 0, 300, categories=50)
    for row, line in enumerate((tmp_path / "raw" / "day_0.tsv").read_text().splitlines()):
        click, *fields = line.split("\t")
        numbers = ["" if no else str(n) for n, no in zip(made.numbers[row], made.no_number[row], strict=True)]
        ids = ["" if no else f"{n:08x}" for n, no in zip(made.ids[row], made.no_id[row], strict=True)]
        assert (click, fields[:NUMBERS], fields[NUMBERS:]) == (str(int(made.clicks[row])), numbers, ids)
