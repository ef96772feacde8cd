from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from soap.api.exported_plans import ExportedPlan, export_plan
from soap.cli.export_plan import main
from soap.cli.simulate import main as simulate
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from tests.cli.refusals import assert_refused

GPT = ["zoo:gpt:tiny", "--cluster", "h100-2x4"]


def test_says_what_it_gives_up_and_what_that_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    assert main([*GPT, "--builtin", "megatron:2+zero1", "--to", "fsdp2", "-o", plan, "--nearest"]) == 0
    out = capsys.readouterr().out
    words = "zero1, values gathered before the forward pass, prefetch 1"
    assert out.startswith(f"wrote {plan}: PyTorch's fully_shard torch 2.13, 8 devices: 8 data, {words}\npredicted: ")
    assert " ms by the plan (megatron:2+zero1), " in out
    assert "of 27 operators are configured differently:" in out and "blocks.*.up (2 layers)" in out
    assert '"""PyTorch\'s fully_shard torch 2.13: near a plan of SOAP for zoo:gpt:tiny@8 on h100-2x4' in Path(plan).read_text()


@pytest.mark.slow
def test_a_strategy_file_that_is_told_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy, plan = str(tmp_path / "strategy.json"), str(tmp_path / "plan.sh")
    assert simulate([*GPT, "--builtin", "megatron:2+zero1", "-o", strategy]) == 0
    capsys.readouterr()
    assert main([*GPT, "--strategy", strategy, "--to", "megatron", "-o", plan, "--nearest"]) == 0
    assert capsys.readouterr().out.endswith("it says all of the plan\n")
    assert main([*GPT, "--strategy", strategy, "--to", "megatron", "-o", plan, "--nearest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tensor"], found["data"], found["sharing"], found["operators"], found["notes"]) == (2, 4, "zero1", [], [])
    assert found["compared"] == [{"sharing": "zero1", "prefetch": 1, "ns": found["exported_ns"], "fits": True, "peak_bytes": ANY}]


@pytest.mark.slow
def test_says_what_it_compared_and_writes_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*GPT, "--builtin", "fsdp", "--to", "fsdp2", "-o", str(tmp_path / "plan.py")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"\ncompared, the nearest first +predicted +memory per device\nfsdp, prefetch 1 .*\nfsdp, prefetch 2 ", out)
    assert re.search(r"\nall parameters on each .* written\n", out) and out.count(" written\n") == 1
    assert re.search(r"\nhsdp, prefetch 4 .*\nzero1, values gathered before the forward pass, prefetch 1 ", out)
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sharing"] == "none" and found["exported_ns"] == min(own["ns"] for own in found["compared"])


@pytest.mark.slow
def test_mixed_precision_is_the_model_s(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    for _ in range(2):  # a file of its own may be written over
        assert main([*GPT, "--builtin", "data_parallel", "--autocast", "bfloat16", "--to", "deepspeed", "-o", str(plan)]) == 0
    document = json.loads(plan.read_text())
    assert document["bf16"]["enabled"] and not document["fp16"]["enabled"] and document["communication_data_type"] == "fp32"


@pytest.mark.slow
def test_memory_is_what_the_options_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Topology]()

    def find(strategy: Strategy, graph: OperatorGraph, topology: Topology, target: str, **options: Any) -> ExportedPlan:
        seen.append(topology)
        return export_plan(strategy, graph, topology, target, **options)

    monkeypatch.setattr("soap.cli.export_plan.export_plan", find)
    command = [*GPT, "--builtin", "data_parallel", "--to", "fsdp2", "-o", str(tmp_path / "plan")]
    assert main(command) == 0
    assert main([*command, "--batches", "parts", "--memory-budget", "50%"]) == 0
    assert [one.own_samples for one in seen] == [False, True]
    assert list(seen[1].memory_limits) == pytest.approx([limit / 2 for limit in seen[0].memory_limits])


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["--builtin", "zero1", "--to", "horovod"], 2, "invalid choice: 'horovod'"),
        (["--to", "fsdp2"], 2, "one of the arguments --strategy --builtin is required"),
        (["--builtin", "bipartite+async", "--to", "fsdp2"], 5, "stale"),
        (["--strategy", "absent.json", "--to", "fsdp2"], 5, "absent.json"),
    ],
)
def test_what_is_wrong(command: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [*GPT, *command, "-o", str(tmp_path / "plan")], code, words)
    assert not (tmp_path / "plan").exists()


@pytest.mark.slow
def test_samples_that_do_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["zoo:gpt:tiny@6", "--cluster", "h100-4", "--builtin", "data_parallel", "--to", "fsdp2", "-o", str(tmp_path / "plan")]
    assert_refused(capsys, main, command, 5, "6 samples on 4 devices: PyTorch's fully_shard gives each device equally many")
