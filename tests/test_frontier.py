"""Large runs: what rows say, and how predictions of them are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontier import Outcome, decided, errors, page, predicted, refused
from benchmarks.frontier_plans import said

ROW: dict[str, Any] = {
    "id": "one", "family": "small", "tier": "A", "gpu": "H100-SXM5-80GB", "gpus": 16, "gpus_per_host": 8, "precision": "bf16",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256, "seq": 32, "gated_mlp": True},
    "kernels": "flash_attention2 + RMS kernel", "global_batch": 32, "micro_batch": 2, "microbatches_per_pipeline": None, "tp": 2, "pp": 2,
    "dp": 4, "cp": 1, "schedule": "1F1B", "virtual_stages": None, "sharding": "ZeRO-1", "recompute": "none, sequence parallelism",
    "step_ms": 10.0,
}  # fmt: skip


def row(**changed: Any) -> dict[str, Any]:
    return {**ROW, **changed}


def test_what_a_row_says() -> None:
    own = said(ROW)
    assert (own.lacking, own.precision, own.schedule, own.sharding, own.recompute) == ((), "bfloat16", "1f1b", "zero1", "none")
    assert own.microbatches == 4  # 32 samples, 4 copies, 2 at a time
    assert said(row(schedule="interleaved 1F1B", virtual_stages=3)).schedule == "interleaved:3"
    assert said(row(sharding="FSDP2 full shard", recompute="full (every layer)")).sharding == "fsdp"


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"precision": "fp8 (TE hybrid)"}, "float8"),
        ({"gpu": "GB200 NVL72"}, "cluster of GB200 NVL72"),
        ({"cp": 2}, "context parallelism"),
        ({"schedule": "ZB-2p"}, "ZB-2p"),
    ],
)
def test_what_cannot_be_said_is_named_and_not_predicted(changed: dict[str, Any], lacking: str, tmp_path: Path) -> None:
    outcome = predicted(row(**changed), tmp_path)
    assert outcome == Outcome("one", lacking) and not any(tmp_path.iterdir())


SHARDED = {"pp": 1, "dp": 8, "sharding": "FSDP2 full shard", "recompute": "full", "kernels": "eager, no flash"}


MIXTURE = {"model": {**ROW["model"], "experts": 4, "top_k": 2, "expert_ffn": 128}, "ep": 4, "etp": 1}


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, *(pytest.param(own, marks=pytest.mark.long) for own in (SHARDED, MIXTURE))])
def test_a_row_from_end_to_end(changed: dict[str, Any], tmp_path: Path) -> None:
    outcome = predicted(row(**changed), tmp_path)
    assert not outcome.lacking and outcome.fits and outcome.step_ms > 0
    assert predicted(row(**changed), tmp_path).step_ms == outcome.step_ms  # of the file that was kept


def outcome(id: str, step_ms: float, *, fits: bool = True) -> Outcome:
    return Outcome(id, "", step_ms, 1 if fits else 3, 2, 1.0)


def test_a_workload_is_won_by_a_plan_that_is_nearly_the_fastest() -> None:
    rows = {name: row(id=name, step_ms=ms) for name, ms in (("a", 100.0), ("b", 104.0), ("c", 150.0))} | {"d": row(id="d", step_ms=None)}
    group = {
        "model": "m", "gpus": 16, "gpu": "g", "global_batch": 32, "seq": 32, "extra": "", "ranking": [{"id": name} for name in "abc"],
        "oom_ids": ["d"],
    }  # fmt: skip
    found = {"a": outcome("a", 11), "b": outcome("b", 10), "c": outcome("c", 12), "d": outcome("d", 9, fits=False)}
    decision = decided(group, rows, found)
    assert (decision.chosen, decision.right, decision.pairs, decision.is_won) == ("b", 2, 3, True) and decision.over == pytest.approx(0.04)
    lost = decided(group, rows, {**found, "d": outcome("d", 9)})
    assert (lost.chosen, lost.over, lost.is_won) == ("d", None, False)
    refused_ones = decided(group, rows, {name: outcome(name, own.step_ms, fits=name == "c") for name, own in found.items()})
    assert refused_ones.chosen == "c" and not refused_ones.is_won
    unsaid = decided(group, rows, {**found, "a": Outcome("a", "float8")})
    assert (unsaid.said, unsaid.plans, unsaid.pairs) == (2, 3, 1)
    assert errors(rows.values(), found) == pytest.approx([-0.89, 10 / 104 - 1, -0.92])
    assert refused(rows.values(), found, ran=False) == (1, 1) and refused(rows.values(), found, ran=True) == (0, 3)
    text = page(list(rows.values()), [group], found, "command")
    assert "Winners: 1 of 1. Pairs in order: 2 of 3." in text and "| small | 4 | 4 | -90% | 90% | 1 of 1 | 0 of 3 | 1.0 |" in text
