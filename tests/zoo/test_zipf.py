"""Ids that are drawn as unevenly as it takes to have a given number of different ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.zoo.zipf import Zipf, repeating, zipf
from tests.extent import FEW


@FEW
@given(rows=st.integers(1, 6000), exponent=st.floats(0, 4), draws=st.integers(1, 5000))
def test_different_ids_are_those_of_the_probabilities(rows: int, exponent: float, draws: int) -> None:
    law = Zipf(rows, exponent)
    probabilities = law.probability(torch.arange(rows, dtype=torch.float64))
    assert float(probabilities.sum()) == pytest.approx(1)
    assert bool((probabilities.diff() <= 1e-12).all())
    expected = float((1 - (1 - probabilities) ** draws).sum())
    assert law.different(draws) == pytest.approx(expected, rel=2e-3)


@FEW
@given(rows=st.integers(2, 10**8), draws=st.integers(2, 10**5), part=st.floats(0.05, 0.95))
def test_exponent_is_solved_for_the_share(rows: int, draws: int, part: float) -> None:
    wanted = max(1.5, part * Zipf(rows, 0.0).different(draws))  # one in any case
    law = zipf(rows, draws, wanted / rows)
    assert law == zipf(rows, draws, wanted / rows)
    assert law.different(draws) == pytest.approx(wanted, rel=1e-3, abs=0.6)


def test_as_many_as_cannot_be_are_equally_likely() -> None:
    assert zipf(100, 10, 0.5).exponent == 0.0
    assert repeating(3, 128, 0.6).exponent == 0.0
    assert repeating(10**6, 128, 0.6).different(128) == pytest.approx(0.6 * 128, rel=1e-3)


@pytest.mark.parametrize(("rows", "draws", "alpha"), [(24_000, 1600, 0.02), (500, 4000, 0.3), (10**7, 2048, 1e-4), (40, 100, 0.99)])
def test_draws_have_that_many_different_ids(rows: int, draws: int, alpha: float) -> None:
    torch.manual_seed(5)
    law = zipf(rows, draws, alpha)
    drawn = [law.draw(draws) for _ in range(20)]
    assert all(0 <= int(ids.min()) <= int(ids.max()) < rows for ids in drawn)
    found = sum(len(ids.unique()) for ids in drawn) / 20
    assert found == pytest.approx(law.different(draws), rel=0.05)


@given(rows=st.one_of(st.integers(1, 3000), st.sampled_from([793_470, 10**7])))
def test_ids_are_the_ranks_in_another_order(rows: int) -> None:
    law, ranks = Zipf(rows, 1.0), torch.arange(min(rows, 3000))
    ids = law.ids(ranks)
    assert torch.equal(law.ranks(ids), ranks)
    assert len(ids.unique()) == len(ranks)


def test_parts_of_a_table_are_asked_for_equally() -> None:
    torch.manual_seed(5)
    ids = Zipf(24_000, 1.0).draw_different(2048)
    parts = torch.bincount(ids * 8 // 24_000, minlength=8).tolist()
    assert all(abs(part - 256) < 50 for part in parts)


def test_different_draws_are_as_if_repeated_ones_were_put_back() -> None:
    torch.manual_seed(5)
    law = Zipf(200, 1.0)
    counts = torch.zeros(200)
    for _ in range(2000):
        ids = law.draw_different(40)
        assert len(ids.unique()) == 40
        counts[law.ranks(ids)] += 1 / 2000
    tries = law.draws_for(40)
    assert law.different(tries) == pytest.approx(40)
    expected = 1 - (1 - law.probability(torch.arange(200, dtype=torch.float64))) ** tries
    assert float((counts - expected).abs().max()) < 0.06  # the number of tries varies, which this leaves out


def test_shapes_without_values() -> None:
    with torch.device("meta"):
        assert Zipf(1000, 1.2).draw(3, 4).shape == (3, 4)
        assert Zipf(1000, 1.0).draw_different(7).is_meta
        assert zipf(5000, 30, 0.001).exponent > 0
