"""Selection of the largest elements, on processors and by torch's operations alone, against a stable sort."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from soap.errors import SoapError
from soap.plan.compression.seam import PROBES
from soap.runtime.compression import device_selection
from soap.runtime.compression.selection import BLOCK, CHUNK, Surveyed, exact, reused, search, trimmed
from tests.extent import every

SIZES = (1, 2, BLOCK - 1, BLOCK + 1, 1000, CHUNK, CHUNK + 1, 3 * CHUNK + BLOCK + 5)
KINDS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "laplace": lambda n, g: torch.randn(n, generator=g).sign() * -torch.rand(n, generator=g).clamp_min(1e-7).log(),
    "uniform": lambda n, g: torch.rand(n, generator=g),
    "ties": lambda n, g: torch.randint(-3, 4, (n,), generator=g).float(),
    "zeros": lambda n, g: torch.zeros(n),
    "few": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.0005),
    "equal": lambda n, g: torch.full((n,), -0.25),
    "outlier": lambda n, g: torch.randn(n, generator=g).index_fill_(0, torch.tensor([n // 2]), 1e30),
    "positive": lambda n, g: torch.rand(n, generator=g) + 1,
    "denormal": lambda n, g: torch.randint(-5, 6, (n,), generator=g).to(torch.int32).abs().view(torch.float32),
}
TYPES = (torch.float32, torch.float64)
SIGNS = (0, 1, -1)
CASES = every(5, list(product(KINDS, SIGNS, TYPES)))  # with every kind, sign and type


def drawn(kind: str, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return KINDS[kind](size, torch.Generator().manual_seed(seed)).to(dtype)


def keys(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    return tensor.abs() if sign == 0 else (tensor * sign).clamp_min(0)


def expected(tensor: torch.Tensor, count: int, sign: int) -> list[int]:
    """The largest keys, of equal ones the first; with a sign no zeros."""
    own = keys(tensor, sign)
    first = torch.sort(own, descending=True, stable=True).indices[:count]
    return (first if sign == 0 else first[own[first] > 0]).sort().values.tolist()


@pytest.fixture(params=[0, device_selection.LEAST_IN_BLOCKS], ids=["blocks", "whole"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_selection, "LEAST_IN_BLOCKS", request.param)


def counts(size: int) -> list[int]:
    return sorted({1, max(1, size // 1000), max(1, size // 100), max(1, size // 3), size, size + 3})


def real(found: device_selection.Found) -> list[int]:
    positions, count = found
    assert (positions[count:] == device_selection.FILL).all()
    return positions[: int(count)].tolist()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("kind", "sign", "dtype"), CASES)
def test_exact_and_trimmed_select_the_largest_and_of_ties_the_first(kind: str, sign: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        tensor = drawn(kind, size, dtype)
        surveyed = Surveyed.of(tensor, sign)
        for count in counts(size):
            right = expected(tensor, count, sign)
            assert exact(surveyed, count).tolist() == right, (size, count)
            assert trimmed(surveyed, count).tolist() == right, (size, count)
            assert real(device_selection.exact(tensor, min(count, size), sign)) == right, (size, count)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("kind", "sign", "dtype"), CASES)
def test_search_finds_k_to_2k_above_a_threshold_or_the_exact_ones(kind: str, sign: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        tensor = drawn(kind, size, dtype)
        own, surveyed = keys(tensor, sign), Surveyed.of(tensor, sign)
        for count in counts(size):
            positions, threshold = search(surveyed, count)
            by_torch, found = device_selection.search(tensor, min(count, size), sign)
            for selected, limit in ((positions.tolist(), threshold), (real(by_torch), None if found.isinf() else float(found))):
                if limit is None:
                    assert selected == expected(tensor, count, sign)
                else:
                    assert count <= len(selected) <= 2 * count
                    assert selected == torch.nonzero(own > limit)[:, 0].tolist()


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform"])
def test_on_smooth_data_the_search_converges(kind: str) -> None:
    """The rule as printed ended with fewer than k elements in 97 of 200 such trials."""
    for seed in range(50):
        tensor = drawn(kind, 100_000, torch.float32, seed)
        positions, threshold = search(Surveyed.of(tensor), 100)
        assert threshold is not None
        assert 100 <= len(positions) <= 200
        (found, count), limit = device_selection.search(tensor, 100)
        assert limit.isfinite()
        assert 100 <= count <= 200
        assert found.shape == (200,)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "ties"])
def test_a_device_finds_the_threshold_of_a_plain_binary_search(kind: str, dtype: torch.dtype) -> None:
    """Which counts everything, bit for bit; and none where that finds none."""
    for seed, count in product(range(3), (1, 7, 30, 400)):
        tensor = drawn(kind, 3000, dtype, seed)
        own = tensor.abs()
        mean, largest = own.mean(dtype=torch.float64), own.amax().double()
        low, high, expected_one = 0.0, 1.0, torch.tensor(torch.inf, dtype=dtype)
        for _ in range(PROBES):
            middle = (low + high) / 2
            threshold = (mean + middle * (largest - mean)).to(dtype)
            found = int((own > threshold).sum())
            if count <= found <= 2 * count:
                expected_one = threshold
                break
            low, high = (low, middle) if found < count else (middle, high)
        assert device_selection.search(tensor, count)[1].equal(expected_one), (kind, seed, count)


def test_what_a_block_says_is_what_counting_would() -> None:
    """The first threshold of a plain binary search, which counts everything, is the one that is found."""
    for seed in range(20):
        tensor = drawn("uniform", 30_000, torch.float32, seed)
        surveyed = Surveyed.of(tensor)
        low, high = 0.0, 1.0
        while True:
            middle = (low + high) / 2
            above = int((tensor.abs() > float(surveyed.threshold(middle))).sum())
            if 30 <= above <= 60:
                break
            low, high = (low, middle) if above < 30 else (middle, high)
        assert search(surveyed, 30)[1] == surveyed.threshold(middle)


def test_a_mean_and_a_maximum() -> None:
    for size in SIZES:
        tensor = drawn("normal", size, torch.float64)
        for sign in SIGNS:
            surveyed, own = Surveyed.of(tensor, sign), keys(tensor, sign)
            assert surveyed.largest == own.max()
            assert surveyed.mean == pytest.approx(float(own.mean()), rel=1e-12)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = drawn("normal", 800 * CHUNK + 77, torch.float32)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        surveyed = Surveyed.of(tensor)
        found.append((surveyed.mean, search(surveyed, 2000)[1], exact(surveyed, 2000).tolist(), trimmed(surveyed, 2000).tolist()))
    assert found[0] == found[1] == found[2]
    assert found[0][2] == expected(tensor, 2000, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -float("nan")])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_not_finite_is_refused_in_one_line(bad: float, dtype: torch.dtype) -> None:
    for size, place in ((1, 0), (1000, 999), (CHUNK, 5), (3 * CHUNK, CHUNK)):
        tensor = drawn("normal", size, dtype)
        tensor[place] = bad
        with pytest.raises(SoapError, match=r"an element that is (nan|inf); expected finite numbers") as raised:
            Surveyed.of(tensor)
        assert "\n" not in str(raised.value)


def test_a_reused_threshold_is_given_up_when_it_has_become_bad() -> None:
    tensor = drawn("normal", 100_000, torch.float32)
    positions, threshold = search(Surveyed.of(tensor), 100)
    assert threshold is not None
    again = reused(Surveyed.of(tensor), threshold, 50, 200)
    assert again is not None
    assert again.tolist() == positions.tolist()
    assert reused(Surveyed.of(10 * tensor), threshold, 50, 200) is None
    assert reused(Surveyed.of(tensor / 10), threshold, 50, 200) is None
    limit = torch.tensor(threshold)
    assert real(device_selection.above(tensor, limit, 200)) == positions.tolist()
    capped = torch.nonzero((10 * tensor).abs() > threshold)[:200, 0]
    assert real(device_selection.above(10 * tensor, limit, 200)) == capped.tolist()


def test_a_device_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value goes from the device to the host: shapes are all that Python may look at."""

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    tensor, limit = drawn("normal", 20_000, torch.float32), torch.tensor(3.0)
    for name in ("item", "__bool__", "__int__", "__float__", "tolist", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for sign in SIGNS:
        assert len(device_selection.exact(tensor, 20, sign)[0]) == 20
        assert len(device_selection.search(tensor, 20, sign)[0][0]) == 40
        assert len(device_selection.above(tensor, limit, 40, sign)[0]) == 40


def test_positions_are_whole_numbers_that_index() -> None:
    assert exact(Surveyed.of(drawn("normal", 100, torch.float32)), 3).dtype == np.int64
