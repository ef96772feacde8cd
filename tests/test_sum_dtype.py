"""In which type partial results are summed: what graphs say of it, and how that travels from searches to runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import soap
from soap import api
from soap.cli import run, search, simulate
from soap.cli.options import reading
from soap.cluster.presets import local_topology
from soap.errors import ModelError, StrategyError
from soap.model.graph import OperatorGraph
from soap.search.options import SearchOptions
from soap.strategy.json_file import dumps, load_header, loads
from soap.strategy.named import named
from tests.graph_builder import GraphBuilder
from tests.strategies import GPU, cluster

SPLIT, ROWS = "megatron", 4096


def narrow(dtype: str = "bfloat16") -> OperatorGraph:
    g = GraphBuilder("narrow", dtype)
    return g.build(g.mean(g.elementwise(g.linear(g.linear(g.input("x", 8, 64), 64, name="first"), 64, name="second")), name="loss"))


class Columns(nn.Module):
    """Two products in bfloat16, and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False).bfloat16(), nn.Linear(256, 64, bias=False).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))).float().square().mean()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("columns") / "m.pt2")
    soap.export(Columns(), (torch.zeros(ROWS, 64, dtype=torch.bfloat16),), path=path, verify=False)
    return path


def test_a_graphs_sums() -> None:
    graph = narrow()
    own = graph.summed_in("own")
    assert (graph.sum_dtype, own.sum_dtype, own.summed_in("float32").sum_dtype) == ("float32", "own", "float32")
    assert [own.tensors[name].partial_itemsize for name in ("first", "second", "loss")] == [2, 2, 4]  # a single number stays as it was
    assert all(graph.tensors[op.outputs[0].tensor].partial_itemsize == 4 for op in graph.operators)
    assert own.summed_in("float32") == graph and own.hash != graph.hash == own.summed_in("float32").hash
    wide = narrow("float32")
    assert wide.sum_dtype is None and wide.summed_in("own") == wide and wide.summed_in("own").hash == wide.hash


def test_the_kind_of_devices_decides_by_default(path: str) -> None:
    kinds = {kind: soap.load(path, plan_only=True, autocast_device=kind).graph for kind in ("cpu", "cuda")}
    assert {kind: graph.sum_dtype for kind, graph in kinds.items()} == {"cpu": "float32", "cuda": "own"}
    assert soap.load(path, plan_only=True, autocast_device="cuda", sum_dtype="float32").graph.sum_dtype == "float32"
    assert soap.load(path, plan_only=True, sum_dtype="own", dtype="float32").graph.sum_dtype is None
    with pytest.raises(ModelError, match=r"^sum_dtype 'bfloat16': expected one of float32, own$"):
        soap.load(path, plan_only=True, sum_dtype="bfloat16")


def test_half_of_the_bytes(path: str) -> None:
    """Of what is summed there; gradients go back in bfloat16 in any case, and losses in float32."""
    found = {sums: soap.simulate(path, cluster([2], GPU), SPLIT, costs="estimate", sum_dtype=sums) for sums in ("float32", "own", None)}
    moved = {sums: own.bytes_moved for sums, own in found.items()}
    assert moved["float32"] - moved["own"] == ROWS * 64 * (4 - 2)  # each device gets the other's part of one half
    assert moved[None] == moved["own"] and found["own"].makespan_ns < found["float32"].makespan_ns
    assert max(found["own"].peak_bytes) < max(found["float32"].peak_bytes)


def test_a_model_is_loaded_with_what_is_asked_for(path: str) -> None:
    model = soap.load(path, plan_only=True)
    said = r"^model 'm' was loaded with sum_dtype 'float32'; expected 'own' there, too$"
    with pytest.raises(ModelError, match=said):
        soap.simulate(model, cluster([2], GPU), SPLIT, sum_dtype="own")
    with pytest.raises(ModelError, match=said):
        soap.find(model, cluster([2], GPU), SearchOptions(budget=1, sum_dtype="own"))
    assert soap.simulate(model, cluster([2], GPU), SPLIT, sum_dtype="float32", costs="estimate").makespan_ns > 0


def test_strategy_files_remember_it() -> None:
    graph, topology = narrow(), cluster([2])
    own = graph.summed_in("own")
    strategy = named(SPLIT, graph, topology)
    texts = {sums: dumps(strategy, graph.summed_in(sums), topology) for sums in ("float32", "own")}
    assert {sums: load_header(text).sum_dtype for sums, text in texts.items()} == {"float32": "float32", "own": "own"}
    assert loads(texts["own"], own, topology)[0] == loads(texts["float32"], graph, topology)[0] == strategy
    other = r"partial results are summed in own there and in float32 here: read the model with sum_dtype own"
    with pytest.raises(StrategyError, match=other):
        loads(texts["own"], graph, topology)
    old = json.loads(texts["float32"])
    del old["model"]["sum_dtype"]
    assert loads(json.dumps(old), graph, topology)[0] == strategy and load_header(json.dumps(old)).sum_dtype is None
    with pytest.raises(StrategyError, match="summed in float32 there and in own here"):
        loads(json.dumps(old), own, topology)
    old["model"]["sum_dtype"] = "float16"
    with pytest.raises(StrategyError, match=r"malformed at model/sum_dtype: 'float16'"):
        loads(json.dumps(old), graph, topology)
    wide = narrow("float32")
    assert "sum_dtype" not in dumps(named(SPLIT, wide, topology), wide, topology)


def given(path: str, *words: str) -> argparse.Namespace:
    return run.make_parser().parse_args([words[0], "--model", path, *words[1:]])


def test_runs_sum_as_was_planned(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, two = str(tmp_path / "s.json"), local_topology(2)
    options = [path, "--cluster", "local:2", "--costs", "estimate", "--sum-dtype", "own"]
    assert search.main([*options, "--budget", "10", "-o", file]) == 0
    assert "partial results: made, sent and added up in the activations' own type" in capsys.readouterr().out
    assert api.load_strategy_header(file).sum_dtype == "own"
    assert reading(given(path, file), two)["sum_dtype"] == "own"
    assert reading(given(path, file, "--sum-dtype", "float32"), two)["sum_dtype"] == "float32"
    document = json.loads(Path(file).read_text())
    del document["model"]["sum_dtype"]
    (older := tmp_path / "older.json").write_text(json.dumps(document))
    assert reading(given(path, str(older)), cluster([2], GPU))["sum_dtype"] == "float32"
    assert simulate.main([path, "--cluster", "local:2", "--costs", "estimate", "--builtin", SPLIT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sum_dtype"] == "float32"
    assert simulate.main([path, "--cluster", "local:2", "--strategy", file, "--sum-dtype", "float32"]) == 5
    assert "read the model with --sum-dtype own" in capsys.readouterr().err
