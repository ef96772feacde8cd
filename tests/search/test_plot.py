from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from soap.errors import SoapError
from soap.search import plot as module
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.search.plot import check_plot, plot
from tests.graph_builder import mlp
from tests.search.toys import simulated
from tests.strategies import cluster

RESULT = search(mlp(), cluster([2, 2]), simulated(mlp(), cluster([2, 2])), SearchOptions(budget=80))


def test_lines_and_bars_are_the_result_s() -> None:
    costs, moves = Figure().subplots(1, 2)
    module._draw_costs(costs, RESULT)
    module._draw_moves(moves, RESULT)
    labels = costs.get_legend_handles_labels()[1]
    for start in RESULT.starts:
        assert f"{start.name}: {start.cost_ns / 1e6:.3f} ms" in labels
    (best,) = [line for line in costs.lines if str(line.get_label()).startswith("best")]
    assert list(best.get_ydata())[1:] == [row.best_ns / 1e6 for row in RESULT.rows if row.best_ns is not None]
    assert list(best.get_ydata())[-1] == RESULT.cost_ns / 1e6
    widths = [bar.get_width() for bar in moves.patches]  # type: ignore[attr-defined]
    assert widths == [count.accepted / count.proposed for count in RESULT.acceptance.values()][::-1]
    assert [label.get_text() for label in moves.get_yticklabels()] == list(RESULT.acceptance)[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG\r\n"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_formats_and_equal_bytes(name: str, start: bytes) -> None:
    data = plot(RESULT, name)
    assert data.startswith(start)
    assert plot(RESULT, name) == data


def test_a_search_without_proposals_can_be_drawn() -> None:
    from dataclasses import replace

    assert plot(replace(RESULT, rows=()), "a.png").startswith(b"\x89PNG")


def test_bad_names_and_missing_matplotlib_are_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SoapError, match=r"^picture 'a.jpg': expected a name that ends in one of .png, .svg, .pdf$"):
        check_plot("a.jpg")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(SoapError, match=r"matplotlib, which is not installed; install it, or soap-search\[plots\]"):
        check_plot(Path("a.png"))


def test_nobody_loads_matplotlib_without_need() -> None:
    import subprocess

    program = "import sys, soap.api, soap.cli.search; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_png_is_a_picture_of_that_size() -> None:
    from matplotlib.image import imread

    assert imread(io.BytesIO(plot(RESULT, "a.png"))).shape[:2] == (600, 1440)


def test_costs_are_not_shown_as_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what plans are compared by, over draws."""
    drawn: list[Figure] = []
    monkeypatch.setattr(module, "picture", lambda figure, path: drawn.append(figure) or b"")
    plot(RESULT, "a.png")
    assert drawn[0].get_suptitle() == f"data parallelism costs {RESULT.speedup:.2f}x the best after {len(RESULT.rows)} proposals (seed 0)"
    assert drawn[0].axes[0].get_ylabel().startswith("cost: ")
