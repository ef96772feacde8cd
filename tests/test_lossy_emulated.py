"""What ``benchmarks.lossy_emulated`` keeps and says, of made-up cells."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import kept, lossy_emulated
from benchmarks.lossy_emulated import FOUND, Cell
from benchmarks.lossy_race import PEERS
from soap.errors import SoapError
from soap.search.starts import BASELINE

TIMES = {BASELINE: [400, 420, 410], FOUND: [200, 190, 205], **{name: [300 + 100 * place] for place, name in enumerate(PEERS)}}
CELL = Cell("lstm", "50Mbit/s", {"rgc:0.001": 3}, {BASELINE: 300 * 10**6, FOUND: 180 * 10**6},
            {name: [ms * 10**6 for ms in own] for name, own in TIMES.items()}, "a box")  # fmt: skip


def test_a_line_has_medians_and_ratios_over_all_others() -> None:
    cells = [cell.strip() for cell in lossy_emulated.line(CELL).strip("|").split("|")]
    assert cells == ["50Mbit/s", "lstm", "3 rgc:0.001", "180.0", "200.0", "-10%", "2.05", "1.50", "2.00", "2.50"]
    assert len(cells) == len(lossy_emulated.HEAD)


@pytest.mark.parametrize(("share", "said"), [(None, "200.0"), (0.05, "200.0"), (0.35, "200.0 (others used 35%)")])
def test_a_race_beside_other_programs_says_so(share: float | None, said: str) -> None:
    assert lossy_emulated.line(replace(CELL, others_share=share)).split(" | ")[4] == said


def test_cells_are_kept_and_anything_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    assert lossy_emulated.read(None) == lossy_emulated.read(path) == []
    kept.write(path, [asdict(CELL)], lossy_emulated.VERSION)
    assert lossy_emulated.read(path) == [CELL]
    kept.write(path, [{name: own for name, own in asdict(CELL).items() if name != "others_share"}], lossy_emulated.VERSION)
    assert lossy_emulated.read(path) == [CELL]  # as files were before
    kept.write(path, [{**asdict(CELL), "times_ns": {FOUND: [1]}}], lossy_emulated.VERSION)
    with pytest.raises(SoapError, match=r"cells/0/times_ns: 'data_parallel' is a required property; expected a file of benchmarks"):
        lossy_emulated.read(path)
