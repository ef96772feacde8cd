"""``soap-search`` as people call it: what it prints and writes, and what it says about bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import soap
from soap import api
from soap.api import strategies
from soap.cli.search import main
from soap.model.regions import whole
from soap.search import chains
from soap.simulator.lowering import build_plan
from soap.strategy.config import SyncConfig
from soap.strategy.sync import parameter_server
from tests.cli.refusals import assert_refused

MODEL = "zoo:gpt:tiny"
CLUSTER = "p100-4x4"


def search(*arguments: str) -> int:
    return main([MODEL, "--cluster", CLUSTER, "--budget", "20", "--confidence", "0", *arguments])


def test_finds_saves_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "s.json", tmp_path / "trace.json"
    assert search("-o", str(path), "--timeline", str(trace)) == 0
    out = capsys.readouterr().out
    for word in ("found", "data_parallel", "megatron", "speed-up", "memory per device", "moved per iteration"):
        assert word in out
    assert ("configured unlike data parallelism" in out) != ("the strategy is " in out)  # what it is, or how it differs
    assert out.endswith(f"wrote {path} and {trace}\n")
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event["name"].startswith("forward ") for event in events)
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    strategy = soap.load_strategy(path, model, cluster)
    predicted_ns = soap.simulate(model, cluster, strategy).makespan_ns
    record = json.loads(path.read_text())["record"]
    assert record["predicted_ns"] == predicted_ns <= record["data_parallel_ns"]
    assert record["data_parallel_ns"] == soap.simulate(model, cluster, "data_parallel").makespan_ns


@pytest.mark.slow
def test_keeps_whole_what_the_optimizer_needs_whole(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    assert search("-o", str(path), "--start", "megatron", "--optimizer", "torch.optim.Adafactor:lr=0.01") == 0
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    plan = build_plan(model.graph, soap.load_strategy(path, model, cluster), cluster)
    assert all(shard.box == whole(model.graph.tensors[shard.parameter].shape) for shard in plan.shards if shard.trainable)


def test_optimizers_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), "--optimizer"]
    assert_refused(capsys, main, [*command, "torch.optim.Lamb"], 2, "no 'torch.optim.Lamb'; expected one of sgd, adam, adamw")
    assert_refused(capsys, main, [*command, "torch.optim.LBFGS"], 8, "optimizer LBFGS computes the loss several times in a step")


@pytest.mark.long  # ``search/test_tempering``: equal seeds give equal files
def test_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        assert search("-o", str(path), "--seed", "3") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search("-o", str(tmp_path / "s.json"), "--json", "--start", "megatron") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted_ns"] <= min(report["baselines"][name]["predicted_ns"] for name in ("data_parallel", "megatron"))
    assert report["speedup"] == report["baselines"]["data_parallel"]["predicted_ns"] / report["predicted_ns"]
    fixed = {"seed": 0, "budget": 20, "risk": "tail", "draws": 8, "evaluations": 22, "interrupted": False}
    assert report["search"] == {**fixed, "beta": report["search"]["beta"], "spreads": report["search"]["spreads"]}
    assert len(report["expected_memory_bytes"]) == len(report["cluster"]["devices"]) == 16
    assert report["strategy"] == str(tmp_path / "s.json")
    assert 0 < report["bound_ns"] <= report["predicted_ns"]


@pytest.mark.slow
def test_it_says_how_good_the_plan_is_among_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "s.json")
    assert main([MODEL, "--cluster", "h200-2", "--budget", "20", "--start", "dynamic", "--confidence", "0", "-o", path]) == 0
    text = capsys.readouterr().out
    assert "no other configuration of any one operator is better (locally optimal)" in text
    assert re.search(r"at best [0-9.]+ ms, without any communication \(.*\): this plan is within [0-9]+% of it", text)
    record = json.loads((tmp_path / "s.json").read_text())["record"]
    assert record["search"]["locally_optimal"] is True
    assert set(record["starts"]) == {"data_parallel", "dynamic"}


@pytest.mark.slow
def test_explains_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    assert search("-o", str(out), "--explain", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    graph, cluster = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    strategy, usual = soap.load_strategy(out, graph, cluster), api.classical("data_parallel", graph, cluster)
    assert sorted(name for line in report["explanation"] for name in line["operators"]) == sorted(op.name for op in graph.operators)
    path_ns = 0
    for line in report["explanation"]:
        name = line["operators"][-1]
        assert line["devices"] == list(strategy.operators[name].devices)
        back = strategy.with_operator(name, usual.operators[name])
        assert line["set_back_alone_ns"][name] == soap.simulate(graph, cluster, back).makespan_ns
        assert line["set_back_saves_ns"] == report["predicted_ns"] - line["set_back_ns"]
        assert bool(line["critical_path"]) == any(part["ns"] for part in line["critical_path"])
        path_ns += sum(part["ns"] for part in line["critical_path"])
    assert path_ns == pytest.approx(report["predicted_ns"], abs=100)


@pytest.mark.slow
def test_draws_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "s.json", tmp_path / "s.png"
    assert search("-o", str(out), "--plot", str(picture)) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out} and {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [out, picture]
    assert_refused(capsys, main, [MODEL, "--cluster", CLUSTER, "-o", str(out), "--plot", str(tmp_path / "s.gif")], 1, "s.gif", ".png")
    assert_refused(capsys, main, [MODEL, "--cluster", CLUSTER, "-o", str(out), "--plot", str(out)], 2, "--plot", "--output")


@pytest.mark.long
def test_explains_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search("-o", str(tmp_path / "s.json"), "--explain") == 0
    out = capsys.readouterr().out
    for word in ("why each operator is configured as it is", "bound by", "computation on node", "ms of the iteration", "set back"):
        assert word in out


@pytest.mark.slow
def test_pinned_and_forbidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    constraints = ["--pin", "blocks.*.up=sample:4@0-3", "--pin", "*norm*=sample:2", "--forbid", "*=reduction", "--forbid", "*=@7"]
    assert search("-o", str(out), *constraints) == 0
    assert "as the search was told: --pin blocks.*.up=sample:4@0-3, --pin *norm*=sample:2, --forbid *=reduction" in capsys.readouterr().out
    told = json.loads(out.read_text())["record"]["search"]
    assert told["pins"] == ["blocks.*.up=sample:4@0-3", "*norm*=sample:2"] and told["forbidden"] == ["*=reduction", "*=@7"]
    strategy = soap.load_strategy(out, MODEL, CLUSTER)
    graph = soap.load(MODEL, plan_only=True).graph
    pinned = 0
    for op in graph.operators:
        config = strategy.operators[op.name]
        degrees = {f.kind.value: d for f, d in zip(op.factors, config.degrees, strict=True) if d > 1}
        assert 7 not in config.devices
        assert "reduction" not in degrees, op.name
        if op.name.endswith(".up"):
            assert degrees == {"sample": 4} and config.replicas == 1 and set(config.devices) <= {0, 1, 2, 3}
            pinned += 1
        elif "norm" in op.name:
            assert degrees == {"sample": 2}
            pinned += 1
    assert pinned > 2


@pytest.mark.long
def test_parameters_may_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of DLRM, if every device reads all of them, cost most of a step to all-reduce, and little to serve by rows."""
    model, out = "zoo:dlrm", tmp_path / "s.json"
    arguments = [model, "--cluster", CLUSTER, "--confidence", "0", "-o", str(out), "--json", "--pin", "embedding*=sample:16"]
    sparse = set(soap.load(model, plan_only=True).graph.sparse)
    assert main([*arguments, "--budget", "300", "--sync", "parameter_server:2"]) == 0
    found, strategy = json.loads(capsys.readouterr().out), soap.load_strategy(out, model, CLUSTER)
    assert strategy.parameters == {name: parameter_server(2, rows=name in sparse) for name in strategy.parameters}
    assert set(strategy.parameters.values()) == {parameter_server(2), parameter_server(2, rows=True)}
    assert soap.simulate(model, CLUSTER, strategy).makespan_ns == found["predicted_ns"]
    reduced = replace(strategy, parameters={})
    assert found["predicted_ns"] < soap.simulate(model, CLUSTER, reduced).makespan_ns
    assert main([*arguments, "--budget", "20"]) == 0
    unasked = soap.load_strategy(out, model, CLUSTER).parameters
    assert all(unasked[name].owner == "servers" and unasked[name].payload == "rows" for name in sparse)
    assert {unasked[name] for name in unasked.keys() - sparse} == {SyncConfig("parts")}  # of dense ones optimizer states in parts
    assert main([*arguments, "--budget", "20", "--sync", "allreduce"]) == 0
    assert dict(soap.load_strategy(out, model, CLUSTER).parameters) == {}


METHODS = [
    ("gossip", "parameter_server"), ("parameter_server:0", "1 to"), ("allreduce:2", "PARTITIONS"), ("allgather+local", "PARTITIONS"),
    ("parameter_server:2+local:3", "+local"), ("allreduce:x", "parameter_server[:PARTITIONS]"),
    ("parameter_server:" + "9" * 5000, "PARTITIONS"), ("parameter_server+offload", "fsdp[+offload], hsdp[+offload]"),
    ("zero+offload+offload", "zero[+local][+offload]"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "said"), METHODS)
def test_other_synchronizations_are_refused(method: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), "--sync", method], 2, "--sync", said)


@pytest.mark.long
def test_the_bound_is_of_what_is_allowed() -> None:
    free, pinned = (soap.find(MODEL, CLUSTER, soap.SearchOptions(budget=5, pins=pins)) for pins in ({}, {"*": "@0"}))
    assert free.bound is not None and pinned.bound is not None
    assert free.bound.bound_ns <= free.time_ns and free.bound.bound_ns <= pinned.bound.bound_ns <= pinned.time_ns
    assert pinned.time_ns <= soap.simulate(MODEL, CLUSTER, "single_device").makespan_ns  # only parameters have a choice
    assert pinned.result.locally_optimal  # nothing else is allowed
    assert all(config.devices == (0,) for config in pinned.strategy.operators.values())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--pin", "fc"], 2, ["--pin", "'fc'", "GLOB=SPEC"]),
        (["--pin", "nothing*=sample:2"], 5, ["--pin nothing*=sample:2", "no operator", "--explain-graph"]),
        (["--pin", "*=chanel:2"], 5, ["no factor 'chanel'", "sample"]),
        (["--forbid", "*=@99"], 5, ["device 99", "0 to 15"]),
        (["--forbid", "*=@0-15"], 5, ["nothing is left", "device"]),
    ],
)
def test_constraints_that_cannot_be(
    arguments: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "s.json"
    assert_refused(capsys, main, [MODEL, "--cluster", CLUSTER, "-o", str(out), *arguments], code, *words)
    assert not out.exists()


def test_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    command = [str(tmp_path / "no.pt2"), "--cluster", CLUSTER, "-o", str(out)]
    assert_refused(capsys, main, command, 3, "no.pt2", "does not exist")
    assert not out.exists()


def test_corrupt_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "model.pt2"
    model.write_bytes(b"PK\x03\x04 not really an archive")
    assert_refused(capsys, main, [str(model), "--cluster", CLUSTER, "-o", str(tmp_path / "s.json")], 3, str(model), "torch.export.save")


def test_unknown_zoo_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_refused(capsys, main, ["zoo:gtp", "--cluster", CLUSTER, "-o", str(tmp_path / "s.json")], 3, "gtp", "gpt")


@pytest.mark.parametrize("cluster", ["p100-4x5", "local:0", "local:four"])
def test_unknown_cluster(cluster: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_refused(capsys, main, [MODEL, "--cluster", cluster, "-o", str(tmp_path / "s.json")], 4, cluster, "expected")


YAML = """
name: pair
hosts:
  - {name: box, devices: {type: TYPE, count: 2}, cpu_cores: 8, memory: 64 GiB, links: {intra: {bandwidth: BANDWIDTH, latency: 5 us}}}
"""


@pytest.mark.parametrize(
    ("device", "bandwidth", "words"),
    [
        ("p100", "20 Gb/s", ["'20 Gb/s'", "GB/s"]),
        ("p100", "20", ["20 has no unit", "add the unit"]),
        ("p1000", "20 GB/s", ["p1000", "expected one of"]),
    ],
)
def test_bad_cluster_file(device: str, bandwidth: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(YAML.replace("TYPE", device).replace("BANDWIDTH", bandwidth))
    assert_refused(capsys, main, [MODEL, "--cluster", str(cluster), "-o", str(tmp_path / "s.json")], 4, "cluster.yaml", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "0"], ["--budget", "'0'", "at least 1"]),
        (["--budget", "many"], ["--budget", "'many'"]),
        (["--seed", "-1"], ["--seed", "'-1'"]),
        (["--beta", "nan"], ["--beta", "'nan'", "above 0"]),
        (["--start", "clever"], ["--start", "clever", "megatron"]),
        (["--batch-dim", "tokens"], ["--batch-dim", "tokens=1"]),
    ],
)
def test_usage_errors(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_refused(capsys, main, [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), *arguments], 2, *words)


@pytest.mark.parametrize("option", ["-o", "--timeline"])
def test_unwritable_output_is_found_before_the_work(option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = [] if option == "-o" else ["-o", str(tmp_path / "s.json")]
    # The model does not exist either: that this is not what is said shows that outputs are looked at first.
    command = [str(tmp_path / "no.pt2"), "--cluster", CLUSTER, *other, option, str(tmp_path / "no" / "s.json")]
    assert_refused(capsys, main, command, 1, "cannot write", "create the folder")


@pytest.mark.slow
def test_model_that_fits_nowhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "s.json"
    types = (
        "device_types: {chip: {kind: cuda, flops: {float32: 1 TFLOP/s}, memory_bandwidth: 1 GB/s, memory: 16 KiB, kernel_overhead: 1 us}}"
    )
    cluster.write_text(types + YAML.replace("TYPE", "chip").replace("BANDWIDTH", "1 GB/s"))
    command = [MODEL, "--cluster", str(cluster), "-o", str(out), "--budget", "5"]
    assert_refused(capsys, main, command, 7, "does not fit", "16.0 KiB", "smaller batch")
    assert not out.exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.slow
def test_interrupt_saves_the_best_so_far(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    # A line on standard error after a few proposals, so that the signal comes neither too early nor after a guessed time.
    program = """
import sys
from soap.cli import search
from soap.search.record import Recorder
real = Recorder.proposal
def proposal(self, *args):
    better = real(self, *args)
    if len(self.rows) == 5:
        print("searching", file=sys.stderr, flush=True)
    return better
Recorder.proposal = proposal
sys.exit(search.main(sys.argv[1:]))
"""
    arguments = [MODEL, "--cluster", CLUSTER, "--budget", "1000000", "-o", str(out), "--json"]
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "searching\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1].startswith("soap-search: interrupted after ")
    assert stderr.endswith(f"the best strategy so far is in {out}\n")
    assert json.loads(stdout)["search"]["interrupted"] is True
    strategy = soap.load_strategy(out, soap.load(MODEL, plan_only=True), CLUSTER)
    assert strategy.operators
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.slow
def test_terminated_while_searching_and_again_while_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.json"
    real, write, calls = chains._Run._show, strategies.write_text_atomically, list[int]()

    def show(run: Any, done: int = 0) -> None:
        calls.append(done)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        real(run, done)

    def slow(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(*args, **options)

    monkeypatch.setattr(chains._Run, "_show", show)
    monkeypatch.setattr(strategies, "write_text_atomically", slow)
    assert main([MODEL, "--cluster", CLUSTER, "--budget", "1000", "-o", str(out)]) == 143
    assert capsys.readouterr().err.endswith(f"the best strategy so far is in {out}\n")
    monkeypatch.undo()
    assert soap.load_strategy(out, MODEL, CLUSTER).operators


def test_output_may_not_overwrite_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "m.pt2"
    model.write_bytes(b"precious")
    assert_refused(capsys, main, [str(model), "--cluster", CLUSTER, "-o", str(model)], 2, "--output", "same file as MODEL")
    both = str(tmp_path / "o.json")
    assert_refused(capsys, main, [str(model), "--cluster", CLUSTER, "-o", both, "--timeline", both], 2, "same file as --output")
    assert model.read_bytes() == b"precious"


@pytest.mark.parametrize("inside", [True, False])
def test_folders_are_called_folders(
    inside: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "things").mkdir()
    name = "things" if inside else str(tmp_path / "things")
    assert_refused(capsys, main, [name, "--cluster", CLUSTER, "-o", "s.json"], 3, name, "folder")
    assert_refused(capsys, main, [MODEL, "--cluster", name, "-o", "s.json"], 4, name, "folder")


def test_empty_cluster_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("# later\n")
    assert_refused(capsys, main, [MODEL, "--cluster", str(cluster), "-o", str(tmp_path / "s.json")], 4, "cluster.yaml", "is empty")
