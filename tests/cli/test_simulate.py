"""``soap-simulate`` as people call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import soap
from soap import api
from soap.api import baselines
from soap.cli import simulate_report
from soap.cli.simulate import main
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.simulator import simulate
from soap.simulator.analysis.timeline import critical_path_ns, link_bytes
from soap.units import format_bytes
from tests.cli.refusals import assert_refused
from tests.extent import rows_often

COMMAND = ["zoo:gpt:tiny", "--cluster", "p100-4x4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel", "megatron"])
def test_prices_a_classical_strategy(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    assert main([*COMMAND, "--builtin", name, "--json", "--timeline", str(trace)]) == 0
    report = json.loads(capsys.readouterr().out)
    simulation = soap.simulate("zoo:gpt:tiny", "p100-4x4", name)
    assert report["predicted_ns"] == simulation.makespan_ns == report["baselines"][name]["predicted_ns"]
    assert report["bytes_moved"] == simulation.bytes_moved
    assert report["expected_memory_bytes"] == list(simulation.peak_bytes) and "memory_bytes" not in report
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} == {task.name for task in simulation.tasks.tasks if task.resources}
    assert (name == "data_parallel") == (report["unlike_data_parallel"] == [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel", "megatron"])
def test_says_what_decides_the_iteration(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--builtin", name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    told, simulation = report["iteration"], soap.simulate("zoo:gpt:tiny", "p100-4x4", name)
    assert told["iteration_ns"] == sum(told["critical_path_ns"].values()) == report["predicted_ns"]
    assert [device["name"] for device in told["devices"]] == report["cluster"]["devices"]
    assert [device["peak_bytes"] for device in told["devices"]] == list(simulation.peak_bytes)
    for device, kinds in zip(told["devices"], report["peak_memory_bytes"], strict=True):
        assert kinds["values"] < device["peak_bytes"] == sum(kinds.values())
        assert device["busy_ns"] == report["busy_ns"][device["name"]] <= told["iteration_ns"]
    assert {link["name"]: link["bytes"] for link in told["links"]} == link_bytes(simulation.tasks)
    assert sum(link["bytes"] for link in told["links"]) >= report["bytes_moved"] > 0


@pytest.mark.slow
def test_says_it_to_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--builtin", "megatron"]) == 0
    out = capsys.readouterr().out
    simulation = soap.simulate("zoo:gpt:tiny", "p100-4x4", "megatron")
    lines = [line.split() for line in out.splitlines()]
    for kind, duration in critical_path_ns(simulation.tasks, simulation.schedule).items():
        assert [kind.value, f"{duration / 1e6:.3f}", "ms", f"{duration / simulation.makespan_ns:.0%}"] in lines
    (row,) = [line for line in lines if line[:1] == ["node0/gpu0"] and len(line) > 4]
    assert " ".join(row[-2:]) == format_bytes(simulation.peak_bytes[0])
    busiest = max(link_bytes(simulation.tasks).items(), key=lambda entry: entry[1])
    assert any(line[-2:] == format_bytes(busiest[1]).split() and "ms" in line for line in lines)
    (links,) = [part.splitlines()[1:] for part in out.split("\n\n") if part.split()[:1] == ["link"]]
    named = [1 + int(more[1]) if (more := re.search(r" and (\d+) more ", line)) else 1 for line in links]
    assert sum(named) == sum(size > 0 for size in link_bytes(simulation.tasks).values()) > len(named)  # equal ones are one row


def test_rows_that_are_not_listed_are_counted() -> None:
    devices = [{"name": f"gpu{number}", "busy_ns": 0, "peak_bytes": number} for number in range(simulate_report.MOST_ROWS + 4)]
    told = simulate_report.iteration_text({"iteration_ns": 1, "critical_path_ns": {"compute": 1}, "devices": devices, "links": []})
    assert told.endswith("\n  and 4 further rows; --json has all") and "gpu15" in told and "gpu16" not in told


NO_COPIES = {"single_device", "model_parallel", "one_weird_trick", "hybrid", "parameter_server", "sparse_allgather"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "copies"), rows_often([("data_parallel", 8), ("megatron", 4)], [("megatron", 4)]))
def test_a_folded_report_is_the_whole_one(
    name: str, copies: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, arguments = tmp_path / "t.json", [*COMMAND, "--builtin", name]
    assert main([*arguments, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    assert main([*arguments, "--json", "--timeline", str(trace)]) == 0
    folded = json.loads(capsys.readouterr().out)
    devices = len({d for config in soap.api.classical(name, *_parts()).operators.values() for d in config.devices})
    assert folded.pop("folded") == {"copies": copies, "devices_per_copy": devices // copies}
    assert whole.pop("folded") is None
    two, all_of = folded.pop("baselines"), whole.pop("baselines")
    priced = {known: own["predicted_ns"] for known, own in two.items() if own["predicted_ns"] is not None}
    assert all(all_of[known]["predicted_ns"] <= priced[known] < 1.001 * all_of[known]["predicted_ns"] for known in priced)
    assert all_of.keys() - priced.keys() == {"pipeline", *NO_COPIES}
    assert folded == whole
    shown = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "thread_name"}
    assert len(shown & set(whole["cluster"]["devices"])) == 2 * devices // copies
    assert main(arguments) == 0
    assert f"{copies} copies of the model, on {devices // copies} devices each" in capsys.readouterr().out


@pytest.mark.slow
def test_says_why_it_was_not_folded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 20)
    assert main([*COMMAND, "--builtin", "model_parallel"]) == 0
    out = capsys.readouterr().out
    assert "note: every device was simulated: " in out
    assert "one_weird_trick" in out
    assert main([*COMMAND, "--builtin", "model_parallel", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folded"].keys() == {"reason"}
    assert {name for name, cost in told["baselines"].items() if cost["predicted_ns"] is None} == {"pipeline", *NO_COPIES}
    left_out = ", ".join(name for name, cost in told["baselines"].items() if cost["predicted_ns"] is None)
    asked = "soap-simulate --builtin NAME; what fits: --fits"
    assert f"  not simulated, as each takes seconds or more: {left_out} ({asked})\n" in out


def test_large_models_are_compared_with_equal_copies(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what is small; a pipeline and ways that fit are not looked for."""
    monkeypatch.setattr(simulate, "MANY_TILES", 30)
    monkeypatch.setattr(baselines, "best_pipeline", None)
    monkeypatch.setattr(baselines, "fastest_that_fits", None)
    assert main([*COMMAND, "--builtin", "fsdp", "--memory-budget", "64KiB", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["baselines"]
    unpriced = {name for name, cost in costs.items() if cost["predicted_ns"] is None}
    assert unpriced == {"pipeline", *NO_COPIES} - {"single_device", "model_parallel"} and costs["data_parallel"]["overflow_bytes"] > 0


def _parts() -> tuple[OperatorGraph, Topology]:
    return soap.load("zoo:gpt:tiny", plan_only=True).graph, soap.load_cluster("p100-4x4")


def test_one_device_has_no_links_to_tell_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo:gpt:tiny", "--cluster", "local:1", "--builtin", "single_device"]) == 0
    out = capsys.readouterr().out
    assert "peak memory" in out and "carries" not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--builtin", "fsdp"], "strategy 'fsdp' on cluster 'local:1': one device has nothing to divide, which is what 'fsdp' would do"),
        (["--builtin", "megatron+fsdp", "--fits"], "which is what 'megatron' and 'fsdp' would do"),
        (["--builtin", "recompute"], ""),
    ],
)
def test_a_name_that_divides_nothing_says_so(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo:gpt:tiny", "--cluster", "local:1", *options]) == 0
    errors = capsys.readouterr().err
    assert errors.count("\n") == bool(words) and words in errors and errors.startswith("soap-simulate: warning: " * bool(words))


def test_a_pipeline_on_one_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = "has no pipeline on 1 devices; expected several devices and samples"
    assert_refused(capsys, main, ["zoo:gpt:tiny", "--cluster", "local:1", "--builtin", "pipeline"], 5, words)


def test_data_parallelism_is_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--builtin", "data_parallel"]) == 0
    out = capsys.readouterr().out
    assert "zoo:gpt:tiny@8" in out
    assert "operators are configured as in data parallelism" in out


@pytest.mark.slow
def test_prices_a_strategy_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    model, cluster = soap.load("zoo:gpt:tiny", plan_only=True), soap.load_cluster("p100-4x4")
    soap.save_strategy(path, soap.api.classical("megatron", model.graph, cluster), model, cluster)
    assert main([*COMMAND, "--strategy", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted_ns"] == soap.simulate(model, cluster, "megatron").makespan_ns
    assert main([*COMMAND, "--strategy", str(path)]) == 0
    assert "  s.json " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "expected --strategy FILE or --builtin NAME"),
        (["--builtin", "magic"], 2, "magic"),
        (["--builtin", "megatron", "--strategy", "s.json"], 2, "not allowed with"),
        (["--strategy", "no.json"], 5, "no.json"),
        (["--builtin", "megatron", "--timeline", "no/t.json"], 1, "cannot write"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [*COMMAND, *arguments], code, word)


def test_explains_a_given_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--builtin", "data_parallel", "--explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for line in found["explanation"]:
        assert line["set_back_ns"] == found["predicted_ns"]
        assert line["busiest_ns"] == line["data_parallel_busiest_ns"]
    assert any(line["critical_path"] for line in found["explanation"])
    assert main([*COMMAND, "--builtin", "data_parallel", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "there is nothing to set back" in out and "as it is\n" not in out.split("why each operator")[1].split("\n", 1)[1]


def test_devices_and_links_with_equal_figures_are_one_row() -> None:
    peaks = [2**20, 2**20, 2**21, 2**20]
    devices = [{"name": f"gpu{i}", "busy_ns": 5, "peak_bytes": peak, "available_bytes": 2**30} for i, peak in enumerate(peaks)]
    links = [{"name": f"link{number}", "busy_ns": 7, "bytes": 2**10} for number in range(40)]
    told = simulate_report.iteration_text({"iteration_ns": 10, "critical_path_ns": {"forward": 10}, "devices": devices, "links": links})
    rows = [" ".join(line.split()) for line in told.splitlines()]
    assert [row for row in rows if row.startswith(("gpu", "link"))] == [
        "gpu0 and 2 more 0.000 ms 50% 1.00 MiB",
        "gpu2 0.000 ms 50% 2.00 MiB",
        "link held carries",
        "link0 and 39 more 0.000 ms 70% 1.00 KiB",
    ]  # fmt: skip


OTHER_CLUSTER = """
name: slower
hosts:
  - name: box
    count: 2
    devices: {type: k80, count: 8}
    cpu_cores: 8
    memory: 64 GiB
    links: {intra: {bandwidth: 2 GB/s, latency: 5 us}}
network: {bandwidth: 10 Gbit/s, latency: 30 us}
"""


@pytest.mark.slow
def test_what_if_prices_a_strategy_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, other = tmp_path / "s.json", tmp_path / "other.yaml"
    other.write_text(OTHER_CLUSTER)
    graph, home, away = soap.load(COMMAND[0], plan_only=True).graph, soap.load_cluster(COMMAND[2]), soap.load_cluster(other)
    strategy = api.classical("megatron", graph, home)
    soap.save_strategy(path, strategy, graph, home)
    command = [COMMAND[0], "--strategy", str(path), "--cluster", str(other)]
    assert_refused(capsys, main, command, 5, "another cluster", "'p100-4x4'", "'slower'", "--what-if")
    assert main([*command, "--what-if", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["what_if"] == {"made_for": "p100-4x4"}
    assert report["predicted_ns"] == soap.simulate(graph, away, strategy).makespan_ns != soap.simulate(graph, home, strategy).makespan_ns
    assert main([*command, "--what-if"]) == 0
    assert capsys.readouterr().out.startswith("what if: this strategy was made for cluster 'p100-4x4'; its devices are taken by number\n")
    assert main([COMMAND[0], "--strategy", str(path), "--cluster", COMMAND[2], "--what-if", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what_if"] is None  # at home there is nothing to say


@pytest.mark.slow
def test_what_if_needs_as_many_devices_and_the_same_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    graph, home = soap.load(COMMAND[0], plan_only=True).graph, soap.load_cluster(COMMAND[2])
    soap.save_strategy(path, api.classical("megatron", graph, home), graph, home)
    for flags in ([], ["--what-if"]):
        capsys.readouterr()
        command = [COMMAND[0], "--strategy", str(path), "--cluster", "h200-8", *flags]
        assert_refused(capsys, main, command, 5, "another cluster", "16 devices", "8 devices")
    assert_refused(capsys, main, ["zoo:rnnlm:tiny", "--strategy", str(path), "--cluster", COMMAND[2], "--what-if"], 5, "another model")
    assert_refused(capsys, main, [*COMMAND, "--builtin", "megatron", "--what-if"], 2, "--what-if", "--strategy")


def test_copies_that_were_not_simulated_are_not_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    assert_refused(capsys, main, [*COMMAND, "--builtin", "data_parallel", "--explain"], 5, "--explain", "equal copies")
