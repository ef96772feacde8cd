"""Predictions beside published figures: the data file, the page's numbers, and a row from end to end."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import soap
from benchmarks import published
from benchmarks.published import Row, problems, published_seconds, read, rows_of, selected, strategy_of, table_wise, topology_of
from benchmarks.published_models import graph_of
from benchmarks.published_table import page
from benchmarks.told import kernels_told
from soap.cluster.presets import device_types
from soap.model.graph import OperatorGraph
from soap.profiles.efficiency import memory_share
from soap.profiles.roofline import RooflineCosts
from soap.profiles.work import ATTENTION
from soap.strategy.recomputation import LIGHT, RECOMPUTED

PAGE = Path(__file__).parent.parent / "docs" / "results" / "published.md"

TINY = {
    "builder": "gpt",
    "sequence": 8,
    "vocabulary": 64,
    "width": 16,
    "layers": 2,
    "heads": 4,
    "dropout": 0.1,
    "attention": "plain",
    "tied": True,
}
def made(**changed: Any) -> Row:
    """A row of the data file with other fields."""
    row = {**published.OPTIONAL, **next(row for row in read()["rows"] if row["id"] == "libai-megatron-gpt2-dp4"), **changed}
    return Row(**row)


PLAIN = {"source": "hf-nvlink", "precision": "float32", "optimizer": "AdamW", "optimizer_states": 2}
"""Of a row that runs as SOAP does by default."""


def with_tiny() -> dict[str, Any]:
    """The data file with one small model more."""
    data = read()
    data["models"]["tiny"] = TINY
    return data


@pytest.fixture(scope="module")
def tiny() -> OperatorGraph:
    """Its graph for 8 samples."""
    return graph_of(TINY, 8)


def test_every_row_has_its_figure_from_a_quoted_source() -> None:
    data = read()
    assert problems(data) == []
    rows = rows_of(data)
    assert sum(not row.needs for row in rows) >= 82
    for row in rows:
        assert data["sources"][row.source]["url"].startswith("https://")
        assert len(row.quote) > 10


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"quote": ""}, "no quote"),
        ({"source": "hearsay"}, "source 'hearsay'"),
        ({"unit": "furlongs"}, "unit 'furlongs'"),
        ({"strategy": "gossip"}, "strategy 'gossip'"),
        ({"precision": "float8"}, "precision 'float8'"),
        ({"cluster": "nowhere"}, "unknown cluster 'nowhere'"),
        ({"figure": -1}, "figure -1"),
        ({"wind": 3}, "unknown field wind"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(change: dict[str, Any], problem: str) -> None:
    data = read()
    data["rows"][0].update(change)
    found = problems(data)
    assert len(found) == 1
    assert found[0].startswith(f"row {data['rows'][0]['id']}: ")
    assert problem in found[0]
    with pytest.raises(ValueError, match="row "):
        rows_of(data)


def test_a_waiting_row_may_have_what_is_not_simulated_yet() -> None:
    data = read()
    data["rows"][0].update(strategy="pipeline", precision="float8", needs=["pipeline", "float8"])
    assert problems(data) == []


def test_causes_are_of_families_that_rows_have() -> None:
    data = read()
    data["causes"]["alchemy"] = "lead"
    assert problems(data) == ["causes: no row is of family 'alchemy'"]


def test_a_row_twice_and_a_source_without_address() -> None:
    data = read()
    data["rows"].append(copy.deepcopy(data["rows"][0]))
    data["sources"]["libai"]["url"] = "see there"
    assert problems(data) == ["source libai: 'see there' is no address", f"row {data['rows'][0]['id']}: occurs twice"]


def test_published_figures_as_seconds_of_a_step() -> None:
    data = read()
    seconds = {
        unit: published_seconds(made(figure=2.0, unit=unit, batch=8, accumulate=3, hosts=2, devices=4), data) for unit in published.UNITS
    }
    assert seconds == {"samples/s": 12.0, "tokens/s": 12.0 * 1024, "tokens/s/device": 12.0 * 1024 / 8, "ms": 0.002}


def test_clusters_have_the_rows_hosts_and_the_sheets_devices() -> None:
    data = read()
    topology = topology_of(made(cluster="dlperf-v100", hosts=2, devices=4), data)
    assert (len(topology.hosts), topology.device_count) == (2, 8)
    assert topology.devices[0].type == device_types()["v100-16gb"]
    one, several = (topology_of(made(cluster="a100-80gb", hosts=hosts, devices=4), data) for hosts in (1, 2))
    assert (one.name, several.name) == ("a100-80gb-4", "a100-80gb-2x4")
    assert several.devices[0].type == device_types()["a100-80gb"]
    assert topology_of(made(cluster="titanxp-8x6", hosts=8, devices=6), data) == soap.load_cluster("titanxp-8x6")


def test_only_types_that_no_preset_has_are_described() -> None:
    data = read()
    assert not set(data["device_types"]) & set(device_types())
    text = json.dumps(data["clusters"])
    assert all(f'"type": "{name}"' in text for name in data["device_types"])


@pytest.mark.long
def test_a_rows_precision_is_the_graphs() -> None:
    """As a user's own: by the options of ``soap.load``, of GPUs' lists of casts."""
    made_in = {
        name: {op.kind: op for op in graph_of(TINY, 8, **published.PRECISIONS[name]).operators}
        for name in ("float32", "tf32", "float16 autocast", "float16")
    }
    assert [kinds["linear"].arithmetic for kinds in made_in.values()] == ["float32", "tf32", "float16", "float16"]
    assert made_in["float16 autocast"]["softmax"].calls[-1].endswith(":float16")  # on GPUs alone softmax makes float32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_one_row_from_end_to_end(tiny: OperatorGraph) -> None:
    """What the program predicts is what ``soap.simulate`` says of the same model, cluster and strategy."""
    data = with_tiny()
    row = made(model="tiny", batch=8, devices=2, cluster="dlperf-v100", figure=4.0, unit="ms", **PLAIN)
    outcome = published.predict(row, data)
    graph, topology = tiny, topology_of(row, data)
    alone = soap.simulate(graph, topology, "data_parallel", costs="estimate")
    assert outcome.seconds == alone.makespan_ns / 1e9
    assert outcome.peak_bytes == max(alone.peak_bytes)
    assert outcome.fits
    text = page([row], data, {row.id: outcome}, {row.id: published_seconds(row, data)}, "2026-01-02")
    error = outcome.seconds / 0.004 - 1
    assert f"| {row.id} | 2 | data | float32 | 4 ms | 4.0 ms | {outcome.seconds * 1e3:.1f} ms | {error:+.0%} |" in text


@pytest.mark.slow
def test_steps_of_several_iterations_update_once(tiny: OperatorGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "graph_of", lambda *_, **__: tiny)
    data = with_tiny()
    row = made(model="tiny", batch=8, devices=2, accumulate=3, **PLAIN)
    simulation = soap.simulate(tiny, topology_of(row, data), "data_parallel", costs="estimate")
    assert published.predict(row, data).seconds == simulation.step_ns(3) / 1e9
    assert simulation.makespan_ns < simulation.step_ns(3) < 3 * simulation.makespan_ns


def test_kernels_optimizers_and_sums_are_as_sources_say(tiny: OperatorGraph) -> None:
    """By hand: what the counted passes move, and one sum of all gradients that begins behind the last of them."""
    data = with_tiny()
    rows = [made(model="tiny", batch=8, devices=2, **own) for own in (PLAIN, {**PLAIN, "source": "libai"})]
    topology = topology_of(rows[0], data)
    plain, megatron = (published.simulator_of(row, data, tiny, topology) for row in rows)
    assert isinstance(plain.costs, RooflineCosts) and isinstance(megatron.costs, RooflineCosts)
    assert (plain.costs.kernels, megatron.costs.kernels) == ("eager", "fused")
    step = megatron.run(strategy_of(rows[0], tiny, topology))
    kinds = {kind: [i for i, task in enumerate(step.tasks.tasks) if task.kind.value == kind] for kind in ("backward", "sync")}
    (sync,) = kinds["sync"]
    assert step.schedule.start_ns[sync] >= max(step.schedule.end_ns[i] for i in kinds["backward"])
    counted = published.simulator_of(replace(rows[0], optimizer="BertAdam"), data, tiny, topology)
    device, passes = topology.devices[0].type, data["optimizers"]["BertAdam"]
    assert counted.costs.hash != plain.costs.hash
    times = [counted.costs.update_ns(size, device) for size in (10**9, 0)]
    moved = passes["passes"] * 10**9 / (device.memory_bandwidth_bytes_per_second * memory_share(device))
    assert times[0] - times[1] == pytest.approx(moved * 1e9, abs=2) and times[1] == pytest.approx(17 * 5000 + 2500, abs=1)


@pytest.mark.parametrize(
    ("told", "kernels"),
    [
        ("not stated", "eager"),
        ("TensorFlow 1.6, call by call", "eager"),
        ("flash attention (triton/cuda), low-precision layer norm, no torch.compile", "eager+flash2"),
        ("torch.compile, SDPA flash attention, async TP", "compiled+overlap+flash2"),
        ("Megatron fused kernels; no flash attention", "fused"),
        ("fused kernels of its own, cuDNN flash attention", "fused"),
        ("Transformer Engine, cuDNN flash attention, TP overlap", "fused+overlap"),
        ("JIT-scripted bias with GELU, Apex layer norm; attention call by call", "eager"),
    ],
)
def test_kernels_by_what_a_source_says(told: str, kernels: str) -> None:
    assert kernels_told(told) == kernels


def test_tensor_and_table_wise_strategies(tiny: OperatorGraph) -> None:
    data = with_tiny()
    row = made(model="tiny", strategy="tensor", tensor=2, devices=4, batch=8)
    topology = topology_of(row, data)
    up = strategy_of(row, tiny, topology).operators["blocks.0.up"]
    assert (up.degrees, up.devices) == ((2, 1, 1, 2), (0, 1, 2, 3))
    dlrm = graph_of({"builder": "dlrm", "rows": [50, 40, 30, 20], "bottom": [13, 8, 4], "top": [8, 1]}, 8)
    tables = {name: config.devices for name, config in table_wise(dlrm, topology).operators.items() if name.startswith("embeddings")}
    assert list(tables.values()) == [(0,), (1,), (2,), (3,)]


def test_the_page_in_the_documentation_has_every_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    simulated, _, waiting = text.partition("## Waiting")
    for row in rows_of(read()):
        assert f"| {row.id} |" in (waiting if row.needs else simulated)


def test_unknown_ids_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        published.main(["--only", "no-such-row"])
    assert left.value.code == 2
    assert "no row no-such-row" in capsys.readouterr().err


@pytest.mark.long
def test_selective_recomputation_keeps_attention_and_every_other_product() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    model = {
        "builder": "transformers", "class": "LlamaForCausalLM", "inputs": "language_model", "sequence": 8,
        "config": {**sizes, "num_hidden_layers": 2}, "attention": "sdpa",
    }  # fmt: skip
    graph = graph_of(model, 4)
    levels = selected(graph)
    names = {name for name, level in levels.items() if level == RECOMPUTED}
    layers = [op for op in graph.operators if "layers." in op.name]
    products = [op.name for op in layers if op.kind == "linear"]
    assert [name.rsplit(".", 1)[-1] for name in products if name in names] == ["k_proj", "o_proj", "up_proj"] * 2
    assert {op.kind for op in layers if levels.get(op.name) == LIGHT} == {"linear", ATTENTION}
    assert [op.kind for op in layers if op.name not in levels] == ["add"] * 2  # what the next layer reads
    row = made(strategy="fsdp+selective_op", hosts=1, devices=4)
    strategy = strategy_of(row, graph, topology_of(row, read()))
    assert {name: config.recompute for name, config in strategy.operators.items() if config.recompute} == levels
    assert {sync.residence for sync in strategy.parameters.values()} == {"gathered"}
