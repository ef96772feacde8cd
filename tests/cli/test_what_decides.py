"""``soap-profile --what-decides``, ``--kind`` and ``--for`` as people call them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import soap
from soap import api
from soap.api.informing import COMPRESSING, Matter, Thing
from soap.cli import links as links_command
from soap.cli import measuring, profile, run
from soap.cli.profile import Subject, command, main
from soap.cli.wanted import wanted
from soap.cluster.presets import device_types, preset
from soap.profiles.entries import Entry, Timing
from soap.profiles.keys import Environment, environments, torch_version
from soap.profiles.lookup import foreign, read_profiles
from soap.profiles.store import Store
from tests.cli.own_store import use_own_store
from tests.cli.refusals import assert_refused

MODEL, LOCAL, AWAY = "zoo:rnnlm:tiny", "local:2", "h200-2x4"
Capsys = pytest.CaptureFixture[str]
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    use_own_store(monkeypatch, tmp_path_factory)


def saved(folder: Path, cluster: str, name: str = "model_parallel") -> str:
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(cluster)
    path = folder / "plan.json"
    soap.save_strategy(path, api.classical(name, graph, topology), graph, topology)
    return str(path)


def told(capsys: Capsys, *command: str) -> dict[str, Any]:
    assert main([*command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


CLUSTERS = [AWAY, *(pytest.param(one, marks=SLOW) for one in (LOCAL, "p100-4x4", "emulated:2x1"))]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_command_that_it_prints_is_one(cluster: str, tmp_path: Path, capsys: Capsys) -> None:
    plan = saved(tmp_path, cluster)
    found = told(capsys, MODEL, "--cluster", cluster, "--what-decides", plan)
    assert found["decides"] and {"links", "plans", "rate", "tiles", "updates"} <= {one["thing"] for one in found["decides"]}
    for one in found["decides"]:
        words = shlex.split(one["command"])
        if words[0] == "torchrun":
            assert one["thing"] == "links" or one["measured"]
            args = get_args_parser().parse_args(words[1:])
            assert (args.nnodes, args.nproc_per_node, args.no_python) == ("2" if cluster == AWAY else "4", "4", True)
            assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "HOST:29500")  # else each host starts a world of its own
            words = [args.training_script, *args.training_script_args]
        assert cluster in words
        if words[:2] == ["soap-profile", "links"]:
            assert one["thing"] == "links" and links_command.make_parser().parse_args(words[2:])
        elif words[0] == "soap-profile":
            args = profile.make_parser().parse_args(words[1:])
            assert (args.model, args.strategy) == (MODEL, plan) and args.kind == ([one["kind"]] if one["kind"] else args.kind)
            assert (args.cluster, args.planned) == ((cluster, None) if found["at_hand"] else ("local:1", cluster))
        else:
            assert (one["measured"] or one["thing"] == "plans") and run.make_parser().parse_args(words[1:]).compare_data_parallel


@SLOW
def test_what_compressing_takes_is_measured_by_the_plans_methods() -> None:
    topology = preset("local:2")
    thing = Thing(COMPRESSING, topology.devices[0].type.name)
    subject = Subject(("model.pt2",), "local:2", "plan.json", ("rgc:0.001", "int8"))
    words = command(Matter(thing, 0.5, 1.0, False, ()), topology, subject)
    assert words is not None and words[-6:] == ["--lossy", "rgc:0.001", "--lossy", "int8", "--kind", "compression"]


def test_the_text_has_what_the_document_has(tmp_path: Path, capsys: Capsys) -> None:
    plan = saved(tmp_path, AWAY)
    command = [MODEL, "--cluster", AWAY, "--what-decides", plan]
    found = told(capsys, *command)
    assert main(command) == 0
    text = capsys.readouterr().out
    assert f"data_parallel in {found['wins'] * 512:.0f} of 512 draws" in text
    first = found["decides"][0]
    assert f"{first['what']}  " in text and first["command"] in text and f"{first['share']:.0%}" in text
    assert "soap-profile import measured.json here" in text
    assert "HOST:29500" in text and "; HOST is the name or address of one of them" in text
    assert sum(one["share"] for one in found["decides"]) + found["unexplained"] == pytest.approx(1, abs=0.02)


@SLOW
def test_how_the_model_is_read_is_part_of_the_commands(tmp_path: Path, capsys: Capsys) -> None:
    reading = ["--batch-norm", "local", "--matmul-precision", "high"]
    found = told(capsys, MODEL, *reading, "--cluster", AWAY, "--what-decides", saved(tmp_path, AWAY))
    profiling = [one["command"] for one in found["decides"] if one["thing"] == "tiles" and not one["measured"]]
    assert profiling and all(f"soap-profile {MODEL} {' '.join(reading)} " in one for one in profiling)


@SLOW
def test_processors_elsewhere_cannot_be_measured(tmp_path: Path, capsys: Capsys) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "name: two\ndevice_types:\n"
        "  c: {kind: cpu, flops: {float32: 100 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 8 GiB, kernel_overhead: 5 us}\n"
        "hosts:\n  - {count: 2, cpu_cores: 4, memory: 16 GiB, devices: {type: c, count: 1}}\n"
        "network: {bandwidth: 1 Gbit/s, latency: 50 us}\n"
    )
    found = told(capsys, MODEL, "--cluster", str(cluster), "--what-decides", saved(tmp_path, str(cluster)))
    by_thing = {one["thing"]: one["command"] for one in found["decides"]}
    assert by_thing["tiles"] is None and by_thing["rate"] is None and str(cluster) in by_thing["links"]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--what-decides", "PLAN", "--budget", "5"], 2, ["--what-decides with --budget", "measures nothing"]),
        (["--what-decides", "PLAN", "--kind", "linear"], 2, ["--what-decides with --kind"]),
        (["--what-decides", "PLAN", "--for", AWAY], 2, ["--what-decides with --for"]),
        (["--what-decides", "nowhere.json"], 5, ["nowhere.json"]),
        (["--what-decides", "USUAL"], 5, ["is data_parallel", "expected a strategy that differs"]),
        (["--cluster", "p100-4x4", "--what-decides", "PLAN"], 5, []),
        (["--kind", "lineal"], 2, ["--kind 'lineal'", "linear, lstm"]),
        (["--for", AWAY], 6, ["--for 'h200-2x4'", "h200", "on a machine that has them"]),
    ],
)
def test_what_cannot_be_asked_for(options: list[str], code: int, words: list[str], tmp_path: Path, capsys: Capsys) -> None:
    plan, usual = saved(tmp_path, LOCAL), ""
    if "USUAL" in options:
        usual = saved(tmp_path, LOCAL, "data_parallel")
    given = [{"PLAN": plan, "USUAL": usual}.get(one, one) for one in options]
    assert_refused(capsys, main, [MODEL, "--cluster", LOCAL, *given], code, *words)


def test_one_kind_alone_is_measured(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    monkeypatch.setattr(measuring, "measure", lambda *args: kinds.extend(one.kind for one in args[4]) or len(args[4]))
    found = told(capsys, MODEL, "--cluster", LOCAL, "--kind", "lstm", "--kind", "update")
    assert set(kinds) == {"lstm", "update"} and found["measured_now"] == len(kinds)


def test_for_another_cluster_its_tiles_are_measured_here_and_used_there(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the name of this machine's device made up: the times are."""
    gpu = replace(device_types()["h200"], name="NVIDIA H200")
    here = api.load_cluster("local:1")
    fake = replace(here, devices=tuple(replace(one, type=gpu) for one in here.devices))
    real = api.load_cluster
    monkeypatch.setattr(api, "load_cluster", lambda spec: fake if spec == "local:1" else real(spec))
    plan, graph, away = saved(tmp_path, AWAY), soap.load(MODEL, plan_only=True).graph, real(AWAY)

    def measure(model: str, reading: Any, topology: Any, place: Environment, todo: Any, store: Store, *_: Any) -> int:
        assert topology is fake and place.device == "NVIDIA H200"
        store.put(place, [Entry(one.kind, one.key, Timing(1e5, 1.0), Timing(1e5, 1.0), 9, launch_ns=(5.0, 5.0)) for one in todo])
        return len(todo)

    monkeypatch.setattr(measuring, "measure", measure)
    found = told(capsys, MODEL, "--cluster", "local:1", "--for", AWAY, "--strategy", plan, "--kind", "lstm")
    needed = [one for one in wanted(graph, away, {}) if one.kind == "lstm"]
    assert found["measured_now"] >= len(needed) > 0 and found["cluster"] == AWAY and found["foreign"] == {}
    entries = read_profiles(away, Store())["h200"]
    assert {one.kind for one in entries} == {"lstm"} and all(one.launch_ns is None for one in entries)
    sources = api.simulator_for(graph, away).costs.description
    assert "soap-profile, and NVIDIA H200" in sources
    after = told(capsys, MODEL, "--cluster", AWAY, "--what-decides", plan)
    assert {one["kind"]: one["measured"] for one in after["decides"]}["lstm"] is True


def test_only_such_a_gpu_with_this_torch_counts(tmp_path: Path) -> None:
    topology, store = soap.load_cluster("h200-8"), Store(tmp_path / "s.sqlite")
    (own,) = environments(topology).values()
    graph = soap.load(MODEL, plan_only=True).graph
    entries = [Entry(one.kind, one.key, Timing(1e5, 1.0), None, 9) for one in wanted(graph, topology, {})[-2:]]
    for place in (replace(own, device="NVIDIA H100 80GB HBM3"), replace(own, device="NVIDIA H200", torch="1.0")):
        store.put(place, entries)
    assert read_profiles(topology, store) == {} and len(foreign(topology, store)) == 2
    store.put(replace(own, device="NVIDIA H200"), entries)
    assert own.torch == torch_version() and len(read_profiles(topology, store)["h200"]) == 2
    assert len(foreign(topology, store)) == 2
    changed = replace(topology, devices=tuple(replace(one, type=replace(one.type, kernel_seconds=1e-9)) for one in topology.devices))
    assert read_profiles(changed, store) == {}  # another device of this name
