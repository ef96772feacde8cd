"""The tuner of partitions on curves of which the best number is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parallax import tune
from soap.errors import SoapError
from soap.search.partition_tuning import MOST_SAMPLES, Curve, Sample, Tuning, choose, fit, next_partitions, settled_ns

curves = st.builds(Curve, st.floats(1e6, 1e9), st.floats(0, 1e10), st.floats(0, 1e7))
hosts = st.integers(1, 64)


def on(curve: Callable[[int], float], count: int, **options: int) -> Tuning:
    """Tuned on a curve: runs of four iterations, of which the first two take much longer."""
    return tune(lambda partitions: [9e12, 8e12, curve(partitions), curve(partitions)], count, **options)


@given(curves, hosts)
def test_the_best_of_the_range_is_found(curve: Curve, count: int) -> None:
    found = on(curve.time_ns, count)
    tried = [sample.partitions for sample in found.samples]
    assert len(tried) == len(set(tried)) <= MOST_SAMPLES
    assert min(tried) <= found.partitions <= max(tried)
    best = min(map(curve.time_ns, range(min(tried), max(tried) + 1)))
    assert curve.time_ns(found.partitions) <= best * (1 + 1e-6) or found.curve is None
    assert curve.time_ns(found.partitions) <= min(map(curve.time_ns, tried)) * (1 + 1e-6)


@given(curves, hosts)
def test_samples_double_until_the_time_rises_then_halve(curve: Curve, count: int) -> None:
    tried = [sample.partitions for sample in on(curve.time_ns, count).samples]
    expected, partitions = [count], count
    while len(expected) < MOST_SAMPLES and curve.time_ns(expected[-1]) <= curve.time_ns(expected[max(0, len(expected) - 2)]):
        partitions *= 2
        expected.append(partitions)
    partitions = count
    while len(expected) < MOST_SAMPLES and partitions > 1:
        before, partitions = partitions, partitions // 2
        expected.append(partitions)
        if curve.time_ns(partitions) > curve.time_ns(before):
            break
    assert tried == expected


@pytest.mark.parametrize(
    ("curve", "count", "tried", "best"),
    [
        # sqrt(theta1 / theta2) = 10
        (Curve(1e8, 1e8, 1e6), 4, [4, 8, 16, 2], 10),
        (Curve(1e8, 1e8, 1e6), 64, [64, 128, 32, 16, 8], 10),
        # more partitions are always better, or always worse
        (Curve(1e8, 1e9, 0.0), 8, [8, 16, 32, 64, 128], 128),
        (Curve(1e8, 0.0, 1e6), 8, [8, 16, 4, 2, 1], 1),
        # too few samples for a curve
        (Curve(1e8, 0.0, 1e6), 1, [1, 2], 1),
    ],
)
def test_by_hand(curve: Curve, count: int, tried: list[int], best: int) -> None:
    found = on(curve.time_ns, count)
    assert [sample.partitions for sample in found.samples] == tried
    assert found.partitions == best
    assert (found.curve is None) == (len(tried) < 3)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e6, 1e9)), min_size=3, max_size=5, unique_by=lambda point: point[0]))
def test_fit_has_the_least_squares_of_all_curves_without_negative_coefficients(points: list[tuple[int, float]]) -> None:
    """By the conditions for such an optimum: no coefficient can be changed, to either side that is allowed, to any avail."""
    curve = fit(points)
    thetas = [curve.theta0_ns, curve.theta1_ns, curve.theta2_ns]
    assert min(thetas) >= 0
    left = [time - curve.time_ns(partitions) for partitions, time in points]
    size = sum(time for _, time in points)
    for theta, column in zip(thetas, ([1.0] * len(points), [1 / p for p, _ in points], [float(p) for p, _ in points]), strict=True):
        slope = sum(a * b for a, b in zip(left, column, strict=True)) / (size * max(column))
        assert slope <= 1e-6
        assert theta == 0 or slope >= -1e-6


@given(curves, st.lists(st.integers(1, 512), min_size=3, max_size=5, unique=True))
def test_fit_of_points_on_a_curve_is_the_curve(curve: Curve, partitions: list[int]) -> None:
    found = fit([(number, curve.time_ns(number)) for number in partitions])
    for number in partitions:
        assert found.time_ns(number) == pytest.approx(curve.time_ns(number), rel=1e-6)


def test_noise_of_two_percent_costs_less_than_five() -> None:
    import random

    rng = random.Random(3)
    for _ in range(200):
        curve = Curve(1e8, rng.uniform(1e7, 2e9), rng.uniform(1e4, 1e6))
        found = on(lambda partitions, curve=curve: curve.time_ns(partitions) * rng.uniform(0.98, 1.02), 4)  # type: ignore[misc]
        tried = [sample.partitions for sample in found.samples]
        best = min(map(curve.time_ns, range(min(tried), max(tried) + 1)))
        assert curve.time_ns(found.partitions) <= 1.05 * best


def test_a_run_that_is_faster_than_the_curve_has_it_is_the_choice() -> None:
    found = choose([Sample(4, 81.0), Sample(8, 84.0), Sample(2, 79.0), Sample(1, 70.0)])
    assert found.curve is not None
    assert min(map(found.curve.time_ns, range(1, 9))) > 70.0
    assert found.partitions == 1
    assert found.deviation > 0.01
    even = choose([Sample(4, 80.0), Sample(8, 60.0), Sample(16, 80.0), Sample(2, 120.0)])
    assert (even.partitions, even.curve is not None) == (8, True)


def test_runs_that_fail_for_too_few_partitions_raise_the_minimum() -> None:
    curve = Curve(1e8, 1e8, 1e6)
    found = tune(lambda partitions: None if partitions < 8 else [curve.time_ns(partitions)], 2)
    assert [(sample.partitions, sample.time_ns is None) for sample in found.samples] == [(2, True), (4, True), (8, False), (16, False)]
    assert (found.partitions, found.curve) == (8, None)
    below = tune(lambda partitions: None if partitions < 4 else [Curve(1e8, 0.0, 1e6).time_ns(partitions)], 8)
    assert [sample.partitions for sample in below.samples] == [8, 16, 4, 2]
    assert below.partitions == 4


def test_runs_that_fail_for_too_many_partitions_end_the_doubling() -> None:
    found = tune(lambda partitions: None if partitions > 8 else [1e9 / partitions], 4)
    assert [sample.partitions for sample in found.samples] == [4, 8, 16, 2]
    assert found.partitions == 8


def test_most_partitions() -> None:
    assert [sample.partitions for sample in on(Curve(1e8, 1e9, 0.0).time_ns, 8, most=20).samples] == [8, 16, 4]
    assert next_partitions([], 8, 5) == 5


def test_all_runs_fail() -> None:
    with pytest.raises(SoapError, match=r"^no run succeeded, with partitions: 4, 8, 16, 32, 64; expected at least one that fits"):
        tune(lambda partitions: None, 4)


def test_first_half_of_the_iterations_is_dropped() -> None:
    assert settled_ns([100.0, 90.0, 10.0, 30.0, 20.0]) == 20.0
    assert settled_ns([5.0]) == 5.0
    assert choose([Sample(4, 3.0), Sample(8, 2.0)]).partitions == 8
