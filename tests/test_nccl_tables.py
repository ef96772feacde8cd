"""Published all-reduces beside predictions: the data file, and that the page is as predicted now."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks import nccl
from benchmarks.nccl import Table, page, predict, read, topology_of

PAGE = Path(__file__).parent.parent / "docs" / "results" / "nccl.md"


def test_tables_are_whole_and_name_their_sources() -> None:
    tables = read()
    assert len(tables) >= 6 and len({table.id for table in tables}) == len(tables)
    assert {table.cluster for table in tables} >= {"v100-8", "a100-40gb-8", "h100-8", "mi300x-8", "rtx4090-2", "a100-40gb-2x8", "h200-2x8"}
    for table in tables:
        sizes = [size for size, _ in table.rows]
        assert len(table.source) > 20 and len(table.quote) > 40 and sizes == sorted(set(sizes)) and len(sizes) >= 3
        assert topology_of(table).device_count == table.devices
        for size, published_us in table.rows:  # no faster than three times what a sheet promises anywhere, and no slower than seconds
            assert 5 < published_us < 3e6 and table.bus_bandwidth(size, published_us / 1e6) < 1000


@pytest.mark.parametrize("table", read(), ids=lambda table: table.id)
def test_predictions_are_priced_as_sums_are(table: Table) -> None:
    rows = predict(table)
    assert [(row.size_bytes, row.published * 1e6) for row in rows] == [(size, pytest.approx(us)) for size, us in table.rows]
    assert [row.predicted for row in rows] == sorted(row.predicted for row in rows)


def test_large_sums_are_near_what_was_published() -> None:
    """Of the largest size of each table half are within a tenth; none was fitted."""
    assert median(abs(predict(table)[-1].error) for table in read()) < 0.1


def test_the_page_is_as_predicted_now() -> None:
    assert PAGE.read_text("utf-8") == page(read()), "python -m benchmarks.nccl --write docs/results/nccl.md"


def test_the_page_can_be_written(tmp_path: Path) -> None:
    nccl.main(["--write", str(tmp_path / "nccl.md")])
    assert (tmp_path / "nccl.md").read_text("utf-8").startswith("# All-reduces, predicted and published")
