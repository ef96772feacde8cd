"""Large runs: what rows say, and how predictions of them are scored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.frontier import Outcome, decided, errors, flowing_ns, page, predicted, refused
from benchmarks.frontier_plans import said, topology_of
from benchmarks.layers import layer_chunks

ROW: dict[str, Any] = {
    "id": "one", "family": "small", "tier": "A", "gpu": "H100-SXM5-80GB", "gpus": 16, "gpus_per_host": 8,
    "interconnect": "NVLink4 in host", "precision": "bf16",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256, "seq": 32, "gated_mlp": True},
    "kernels": "flash_attention2 + RMS kernel", "global_batch": 32, "micro_batch": 2, "microbatches_per_pipeline": None, "tp": 2, "pp": 2,
    "dp": 4, "cp": 1, "schedule": "1F1B", "virtual_stages": None, "sharding": "ZeRO-1", "recompute": "none, sequence parallelism",
    "step_ms": 10.0, "source": "aleph",
}  # fmt: skip


def row(**changed: Any) -> dict[str, Any]:
    return {**ROW, **changed}


def test_what_a_row_says() -> None:
    own = said(ROW)
    assert (own.lacking, own.precision, own.schedule, own.sharding, own.recompute) == ((), "bfloat16", "1f1b", "zero1", "none")
    assert own.microbatches == 4  # 32 samples, 4 copies, 2 at a time
    assert said(row(schedule="interleaved 1F1B", virtual_stages=3)).schedule == "interleaved:3"
    zero_bubble = said(row(schedule="ZB-2p"))
    assert (zero_bubble.schedule, zero_bubble.flows, own.flows) == ("zb-2p", True, False)
    each_layer = row(source="zb", schedule="interleaved 1F1B", pp=16, model={**ROW["model"], "layers": 46})
    assert said(each_layer).schedule == "interleaved:3"
    assert said(row(sharding="FSDP2 full shard", recompute="full (every layer)")).sharding == "fsdp"
    assert said(row(sharding="Megatron-FSDP over 4")).sharding == "fsdp"
    assert said(row(sharding="Megatron-FSDP over 2")).lacking == ("sharding Megatron-FSDP over 2",)


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"precision": "NVFP4"}, "NVFP4"),
        ({"gpu": "GB300 NVL72"}, "cluster of GB300 NVL72"),
    ],
)
def test_what_cannot_be_said_is_named_and_not_predicted(changed: dict[str, Any], lacking: str, tmp_path: Path) -> None:
    outcome = predicted(row(**changed), tmp_path)
    assert outcome == Outcome("one", lacking) and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpu", "interconnect", "each", "name", "inside", "between"),
    [
        ("A100-SXM4-80GB", "Selene: 8x 200 Gb/s HDR", 8, "a100-80gb-16x8", 300e9, 25e9),
        ("A100-SXM4-80GB", "Jean Zay: 4 Omni-Path links", 8, "a100-80gb-16x8 on 4 x 100 Gbit/s", 300e9, 12.5e9),
        ("A100-SXM4-80GB", "2 Tb/s RoCE per host", 8, "a100-80gb-16x8 on 8 x 250 Gbit/s", 300e9, 31.25e9),
        ("H100 96GB HBM2e (2.4 TB/s), 500 W limit", "Grand Teton", 8, "h100-96gb-500w-16x8", 450e9, 50e9),
        ("GB200 NVL72", "NVLink5 domain of 72", 4, "gb200-2x64", 900e9, 50e9),
    ],
)
def test_a_rows_cluster(gpu: str, interconnect: str, each: int, name: str, inside: float, between: float) -> None:
    made = topology_of(row(gpu=gpu, interconnect=interconnect, gpus=128, gpus_per_host=each))
    assert (made.name, made.device_count) == (name, 128)
    bandwidths = [[made.links[i].bandwidth_bytes_per_second for i in made.route(*pair)] for pair in ((0, 1), (0, 64))]
    assert [min(own) for own in bandwidths] == [inside, between]


@pytest.mark.parametrize(
    ("precision", "scaling"),
    [
        ("bf16", ""), ("fp16 mixed", ""), ("fp8 (TE hybrid)", "delayed"), ("MXFP8", "mx"), ("FP8-MX", "mx"), ("FP8-CS", "tensorwise"),
        ("float8 tensorwise + bf16", "tensorwise"),
    ],
)  # fmt: skip
def test_a_rows_float8(precision: str, scaling: str) -> None:
    own = said(row(precision=precision))
    assert (own.lacking, own.float8, own.precision) == ((), scaling, "float16" if precision.startswith("fp16") else "bfloat16")


def test_what_is_open_is_assumed() -> None:
    open_one = row(kernels="torch.compile", recompute="full", source="titan")
    assert said(open_one).assumed == ("sequence parallelism with tensor parallelism",) and not said({**open_one, "tp": 1, "dp": 8}).assumed
    assert said(row(interconnect="not stated (Meta cluster)")).assumed == ("network between hosts: that of the GPU's preset",)
    assert said(row(gpu="GB200 NVL72", gpus_per_host=4)).assumed == ("64 GPUs of each NVLink domain",)


def test_what_is_before_and_behind_all_layers_counts_as_layers_where_that_is_even() -> None:
    names = ["embedding", *(f"blocks.{layer}.{part}" for layer in range(6) for part in ("attention", "mlp")), "norm", "head"]
    graph: Any = SimpleNamespace(operators=[SimpleNamespace(name=name) for name in names])
    assert layer_chunks(graph, 3) == [0] * 5 + [1] * 4 + [2] * 6
    assert layer_chunks(graph, 4) == [0] * 3 + [1] * 4 + [2] * 4 + [3] * 4
    assert layer_chunks(graph, 8) == [0, *(1 + layer for layer in range(6) for _ in range(2)), 7, 7]


def test_a_step_of_devices_that_do_not_wait_between_steps() -> None:
    """The second device is busy for longest, from 5 to 22; the link for less."""
    tasks = [SimpleNamespace(resources=own) for own in ((0,), (0,), (0, 2), (1,), (1,))]
    schedule = SimpleNamespace(start_ns=torch.tensor([0, 8, 12, 5, 14]), end_ns=torch.tensor([8, 10, 15, 10, 22]))
    found: Any = SimpleNamespace(tasks=SimpleNamespace(tasks=tasks), schedule=schedule)
    assert flowing_ns(found) == 17


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
