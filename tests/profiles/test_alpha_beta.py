from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ProfileError
from soap.measure.link_probes import fit

SIZES = [2**k for k in range(8, 24, 2)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    found = fit(SIZES, [alpha + beta * size for size in SIZES])
    assert found.seconds(10**6) == pytest.approx(alpha + beta * 1e6, rel=1e-6)
    assert found.alpha_seconds == pytest.approx(alpha, rel=1e-3, abs=1e-9 * beta * SIZES[-1])
    assert found.deviation == pytest.approx(0.0, abs=1e-9)


def test_what_is_far_off_counts_little() -> None:
    seconds = [1e-4 + 1e-8 * size for size in SIZES]
    seconds[2] *= 30
    found = fit(SIZES, seconds)
    assert (found.alpha_seconds, found.beta_seconds_per_byte) == (pytest.approx(1e-4), pytest.approx(1e-8))


def test_neither_figure_is_negative() -> None:
    assert fit([0, 100, 200], [3e-4, 2e-4, 1e-4]).beta_seconds_per_byte == 0.0
    convex = fit([100, 1000, 10_000], [1e-8, 1e-6, 1e-4])
    assert convex.alpha_seconds >= 0.0 and convex.beta_seconds_per_byte > 0.0


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e-6, 1.0)), min_size=2, max_size=6))
def test_no_line_of_a_grid_is_much_better(points: list[tuple[int, float]]) -> None:
    sizes, seconds = [p[0] for p in points], [p[1] for p in points]
    if len(set(sizes)) < 2:
        with pytest.raises(ProfileError, match="two different sizes"):
            fit(sizes, seconds)
        return
    found = fit(sizes, seconds)

    def error(alpha: float, beta: float) -> float:
        return float(sum(abs(np.log(max(alpha + beta * size, 1e-300) / time)) for size, time in points))

    alphas, betas = [0.0, *np.geomspace(1e-7, 1, 20)], [0.0, *np.geomspace(1e-13, 1e-2, 20)]
    assert error(found.alpha_seconds, found.beta_seconds_per_byte) <= 1.5 * min(error(a, b) for a in alphas for b in betas) + 1e-9


def test_messages_that_pass_before_a_limit_applies_do_not_hide_it() -> None:
    """Exchanges as they were measured on a link with a token bucket of 50 MB/s, which lets the first 128 KiB pass at full speed."""
    sizes = [1024, 16 * 1024, 128 * 1024, 512 * 1024, 2 * 2**20]
    found = fit(sizes, [118e-6, 102e-6, 3649e-6, 19789e-6, 42025e-6])
    assert 524288 / 19789e-6 < 1 / found.beta_seconds_per_byte < 50e6  # 512 KiB took nearly twice as long as at that rate
    assert 50e-6 < found.alpha_seconds < 118e-6
