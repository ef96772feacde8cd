"""Prices that are taken away from predictions of large runs, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontier import Outcome, predicted
from benchmarks.frontier_ablations import (
    ALLOWANCE,
    AS_IS,
    FLASH,
    FLOAT8,
    FLOWING,
    FUSED,
    HOPPER,
    LAUNCHES,
    OVERLAPPED,
    PROCESS,
    SHARES,
    SUMS,
    alike,
    given,
    no_flash_tables,
    page,
    small,
    taken_bytes,
    without_each,
)
from soap.profiles import efficiency
from tests.test_frontier import ROW, outcome, row

MODEL = {**ROW["model"], "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384, "seq": 2048}
TITAN = {"kernels": "torch.compile, SDPA flash attention, async TP", "source": "titan", "pp": 1, "dp": 8, "schedule": "none"}


@pytest.mark.slow
def test_without_a_price_a_row_is_as_if_it_had_none(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one = row(model=MODEL, precision="FP8-CS", **TITAN)
    found = without_each(one, tmp_path)
    assert list(found) == [AS_IS, SHARES, LAUNCHES, FUSED, FLASH, HOPPER, OVERLAPPED, SUMS, FLOAT8, PROCESS, ALLOWANCE]
    usual = found[AS_IS]
    assert alike(predicted(one, tmp_path), usual)
    slower = {name for name, own in found.items() if own.step_ms > 1.001 * usual.step_ms}
    faster = {name for name, own in found.items() if own.step_ms < 0.999 * usual.step_ms}
    assert slower == {FUSED, OVERLAPPED, SUMS, FLOAT8} and faster == {FLASH, HOPPER, SHARES, LAUNCHES}
    assert found[PROCESS].available_bytes == usual.available_bytes + taken_bytes() > usual.available_bytes + 2**30
    assert 0.95 < found[ALLOWANCE].peak_bytes / usual.peak_bytes < 0.96
    plain = predicted(row(model=MODEL, precision="bf16", **TITAN), tmp_path)
    assert found[FLOAT8].step_ms == plain.step_ms
    known = {**found, SUMS: outcome("one", 1.0)}
    again = without_each(one, tmp_path, {**known, PROCESS: outcome("one", 2.0)})
    assert again == {**found, SUMS: known[SUMS]}  # of what is known nothing is played again


@pytest.mark.long
def test_without_flowing_a_step_takes_until_its_last_device_ends(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    stages = {"schedule": "ZB-2p", "gpus": 8, "pp": 8, "dp": 1, "tp": 1, "model": {**MODEL, "layers": 8}}
    flowing = row(kernels="Megatron fused kernels", sharding="none", **stages)
    found = without_each(flowing, tmp_path)
    assert list(found) == [AS_IS, SHARES, LAUNCHES, FUSED, FLOWING, PROCESS, ALLOWANCE]
    assert found[FLOWING].step_ms > found[AS_IS].step_ms and found[FLOWING].peak_bytes == found[AS_IS].peak_bytes


def test_tables_of_attention_come_back() -> None:
    before = efficiency.figures(flash2=True)
    with given(no_flash_tables()):
        assert efficiency.figures(flash2=True) != before
    assert efficiency.figures(flash2=True) == before


def group(count: int, gpus: int) -> dict[str, Any]:
    names = [{"id": f"{gpus}-{number}"} for number in range(count - 1)]
    return {"model": "m", "gpu": "g", "gpus": gpus, "global_batch": 1, "seq": 1, "extra": "", "ranking": names, "oom_ids": [f"{gpus}-oom"]}


def test_small_workloads_are_chosen_without_their_errors() -> None:
    groups = [group(16, 64), group(17, 63), group(4, 128), group(2, 256)]
    rows = {id: row(id=id) for own in groups for id in [*(one["id"] for one in own["ranking"]), *own["oom_ids"]]}
    assert [own["gpus"] for own in small(groups, rows)] == [64, 128]
    rows["128-0"] = row(id="128-0", model={**ROW["model"], "experts": 8})
    rows["64-0"] = row(id="64-0", precision="NVFP4")
    assert small(groups, rows) == []


def test_a_price_is_scored_on_rows_that_it_changes_and_on_all() -> None:
    own = group(3, 8)
    rows = [row(id="8-0", step_ms=10.0), row(id="8-1", step_ms=20.0), row(id="8-oom", step_ms=None)]
    usual = {"8-0": outcome("8-0", 11.0), "8-1": outcome("8-1", 20.0), "8-oom": outcome("8-oom", 30.0, fits=False)}
    found: dict[str, dict[str, Outcome]] = {id: {AS_IS: one} for id, one in usual.items()}
    found["8-0"][SUMS] = outcome("8-0", 25.0)
    found["8-oom"][ALLOWANCE] = outcome("8-oom", 5.0)
    lines = page(rows, [own], found, "command").splitlines()
    by_price = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    assert by_price[AS_IS].endswith("| - | - | - | - | - | +5.0% | 5.0% | 1 of 1 | 1 of 1 | 1 of 1 | 0 of 2 |")
    assert by_price[SUMS].endswith("| 1 | +10.0% | 10.0% | +150.0% | 150.0% | +75.0% | 75.0% | 0 of 1 | 0 of 1 | 1 of 1 | 0 of 2 |")
    assert by_price[ALLOWANCE].endswith("| 1 | - | - | - | - | +5.0% | 5.0% | 1 of 1 | 0 of 1 | 0 of 1 | 0 of 2 |")
