"""The page of ``benchmarks.selection``, of a small tensor's times and of made-up ones."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import selection


def test_methods_are_timed_and_select_what_topk_does() -> None:
    tensor = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    ways = selection.on_processor(tensor, 66)
    expected = sorted(torch.topk(tensor.abs(), 66).indices.tolist())
    assert list(ways["exact"]()) == list(ways["trimmed"]()) == expected  # type: ignore[call-overload]
    found = selection.best_ms(ways, "cpu", 1)
    assert found.keys() == {*ways, "sampled"} and all(own > 0 for own in found.values())
    assert found["sampled"] == (found["search"] + 4 * found["reuse"]) / 5


def test_the_page_says_how_many_times_as_fast() -> None:
    times = {"torch.topk": 100.0, "sum": 2.0, "exact": 10.0, "trimmed": 8.0, "search": 20.0, "reuse": 5.0, "sampled": 8.0}
    text = selection.page({("normal", 1): times, ("normal", 64): {**times, "trimmed": 5.0}}, "cpu", 0.25)
    assert "| normal | 1 M | 100.00 ms | 2.00 ms (50.0x) | 10.00 ms (10.0x) | 8.00 ms (12.5x) | 20.00 ms (5.0x) |" in text
    assert "- normal, 64 M elements: exact 10.0, trimmed 20.0, search 5.0, sampled 12.5 times as fast." in text
    assert "other programs used 25% of the cores" in " ".join(text.split())
    assert "other programs" not in selection.page({("normal", 1): times}, "cpu", None)


def test_the_command_writes_its_page(tmp_path: Path) -> None:
    assert selection.main(["--sizes", "1", "--rounds", "1", "--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text().count("\n| uniform | 1 M |") == 1
