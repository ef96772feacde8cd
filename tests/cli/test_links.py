"""``soap-profile links`` as people call it, and what planners make of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import soap
from soap import api
from soap.cli import link_measuring, links, simulate
from soap.cli.profile import main
from soap.cluster.topology import Topology
from soap.emulation.network import burst_bytes
from soap.emulation.quota import CpuGroups
from soap.measure.link_probes import IN_STEPS, LinkTiming, Operation, Probe, probes_for
from soap.profiles.link_places import link_place
from soap.profiles.store import Store, default_path
from tests.cli.own_store import use_own_store
from tests.cli.refusals import assert_refused
from tests.emulation.conftest import groups
from tests.profiles.test_link_figures import timed

__all__ = ["groups"]
MODEL, CLUSTER, EMULATED = "zoo:rnnlm:tiny", "local:2", "emulated:2x1@400Mbit/s"
ROOT = Path(__file__).resolve().parents[2]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test begins with an empty store; this machine's rates are measured once for all."""
    use_own_store(monkeypatch, tmp_path_factory)


def told(capsys: Capsys, command: Sequence[str]) -> dict[str, Any]:
    assert main(["links", *command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def keep(topology: Topology, *, emulated: bool = False, slower: float = 3.0) -> list[LinkTiming]:
    """Put timings into the store as if all probes had been measured, on links that are so many times slower than described."""
    links = (
        replace(x, bandwidth_bytes_per_second=x.bandwidth_bytes_per_second / slower, latency_seconds=x.latency_seconds * slower)
        for x in topology.links
    )
    timings = [replace(one, cpu_seconds=1e-5) for one in timed(replace(topology, links=tuple(links)))]
    Store().put_links(link_place(topology, "gloo", emulated=emulated), timings)
    return timings


def test_shows_what_is_known(capsys: Capsys) -> None:
    before = told(capsys, ["--cluster", CLUSTER, "--show"])
    assert (before["measured"], before["used"], before["fits"]) == (0, False, [])
    topology = soap.load_cluster(CLUSTER)
    timings = keep(topology)
    found = told(capsys, ["--cluster", CLUSTER, "--show"])
    assert (found["probes"], found["measured"], found["measured_now"], found["used"]) == (29, 29, 0, True)
    of_sizes = [operation.value for operation in Operation if operation not in IN_STEPS]
    assert [(line["operation"], line["devices"]) for line in found["fits"]] == [(operation, [0, 1]) for operation in of_sizes]
    for line in found["fits"]:
        assert line["by_links"] == pytest.approx(1.0, rel=1e-2) and line["deviation"] == pytest.approx(0.0, abs=1e-2)
        own = [one for one in timings if one.probe.operation.value == line["operation"]]
        assert line["processor_share"] == pytest.approx(1e-5 / sorted(one.seconds[0] for one in own)[2], rel=1e-3)
        assert line["processor_ns"] == pytest.approx(1e4) and line["processor_ns_per_mib"] == pytest.approx(0.0, abs=1e-3)
    assert found["fits"][1]["bytes_per_second"] == pytest.approx(topology.links[0].bandwidth_bytes_per_second / 3, rel=1e-2)
    assert main(["links", "--cluster", CLUSTER, "--show"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert " ".join(rows[3].split()) == "operation devices latency bandwidth processor and per MiB busy deviation measured / by links"
    assert rows[4].split()[:2] == ["message", "0,1"]
    in_steps = [(line["operation"], line["devices"]) for line in found["in_steps"]]
    of_two = [*(2 * [Operation.STEP_MESSAGE]), Operation.STEP_SUM, *(3 * [Operation.STEP_COLD_PENALTY]), *(3 * [Operation.STEP_WAIT])]
    assert in_steps == [(operation.value, [0, 1]) for operation in of_two]
    assert [row.split()[0] for row in rows[9:16]] == ["within", *(2 * ["step_message"]), "step_sum", *(3 * ["step_restart"])]
    assert "quicker than by links" in rows[21]
    elsewhere = told(capsys, ["--cluster", EMULATED, "--show"])
    assert elsewhere["measured"] == 0 and list(elsewhere["foreign"].values()) == [29]


def test_what_is_left_is_said(capsys: Capsys) -> None:
    place = link_place(soap.load_cluster(CLUSTER), "gloo", emulated=False)
    some = [LinkTiming(Probe(Operation.MESSAGE, (0, 1), size), (size / 1e9,), 0.0) for size in (1024, 16 * 1024)]
    Store().put_links(place, [*some, LinkTiming(Probe(Operation.EXCHANGE, (0, 1), 1024), (1e-4,), 0.0)])
    found = told(capsys, ["--cluster", CLUSTER, "--show"])
    assert (found["measured"], found["used"], len(found["fits"])) == (3, False, 1)  # no line through one size
    assert main(["links", "--cluster", CLUSTER, "--show"]) == 0
    assert "until all messages and exchanges are measured" in capsys.readouterr().out


@pytest.mark.slow
def test_planners_take_them_and_say_so(capsys: Capsys, tmp_path: Path) -> None:
    topology = soap.load_cluster(EMULATED)
    graph = soap.load(MODEL, plan_only=True).graph
    path = tmp_path / "s.json"
    soap.save_strategy(path, api.classical("data_parallel", graph, topology), graph, topology)
    command = [MODEL, "--cluster", EMULATED, "--strategy", str(path)]

    def priced(*options: str) -> dict[str, Any]:
        assert simulate.main([*command, *options, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    before = priced()
    assert before["costs"]["links"] is None
    keep(topology, emulated=True)
    after = priced()
    assert after["costs"]["links"].startswith("measured by soap-profile links") and "emulated hosts" in after["costs"]["links"]
    assert after["costs"]["hash"] != before["costs"]["hash"] and after["predicted_ns"] > before["predicted_ns"]
    assert after["cluster"]["hash"] == before["cluster"]["hash"]  # the strategy was accepted, too
    assert priced("--costs", "estimate") == before
    assert simulate.main(command) == 0
    assert f"\nlinks: {after['costs']['links']}\n" in capsys.readouterr().out
    assert after["predicted_ns"] == soap.simulate(graph, topology, "data_parallel").makespan_ns
    simulator = api.simulator_for(graph, topology)
    soap.save_strategy(path, api.classical("megatron", graph, simulator.topology), graph, simulator.topology)
    assert soap.load_strategy(path, graph, topology) == api.classical("megatron", graph, topology)


def test_a_scaled_emulation_counts_as_the_whole_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    topology = soap.load_cluster(EMULATED)
    place, store = link_place(topology, "gloo", emulated=True), Store(tmp_path / "s.sqlite")
    probes = probes_for(topology)[:2]

    def measured(todo: Any, count: int, kind: str, backend: str, seconds: float, on_probe: Any, when_open: Any, enough: Any) -> None:
        assert (list(todo), count, kind, backend, enough()) == (probes, 2, "cpu", "gloo", False)
        for probe in todo:
            on_probe(LinkTiming(probe, (4e-3, 8e-3), 1e-3))

    monkeypatch.setattr(link_measuring, "measure_links", measured)
    assert link_measuring.measure_and_keep(link_measuring.LinkJob(probes, 2, "cpu", place, store.path, 0.25)) == 2
    for timing in store.links(place):
        assert timing.seconds == pytest.approx((1e-3, 2e-3)) and timing.cpu_seconds == pytest.approx(2.5e-4) and timing.scale == 0.25
        assert timing.measured_at.startswith("20")


def test_what_was_measured_at_another_scale_is_measured_again(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = soap.load_cluster(EMULATED)
    asked: list[tuple[float, tuple[Probe, ...]]] = []
    timings = keep(topology, emulated=True)

    def measured(processes: int, entry: Any, args: tuple[link_measuring.LinkJob], **_: Any) -> dict[int, int]:
        asked.append((args[0].scale, tuple(args[0].probes)))
        return {0: len(args[0].probes)}

    monkeypatch.setattr("soap.runtime.comm.launch.launch", measured)
    monkeypatch.setattr(links.emulation, "check_possible", lambda args: None)
    monkeypatch.setattr(links.emulation, "cluster", lambda hosts: nullcontext(links.emulation.Placed()))
    common = ["--cluster", EMULATED, "--emulate"]
    assert told(capsys, common)["measured_now"] == 0 and asked == []
    assert told(capsys, [*common, "--emulate-scale", "0.25"])["measured_now"] == len(timings)
    assert asked == [(0.25, tuple(probes_for(topology)))]
    Store().put_links(link_place(topology, "gloo", emulated=True), [replace(one, scale=0.25) for one in timings])
    found = told(capsys, [*common, "--show"])
    assert found["scales"] == [0.25] and found["used"]
    assert main(["links", *common, "--show"]) == 0
    assert f"{len(timings)} of {len(timings)} probes measured at --emulate-scale 0.25\n" in capsys.readouterr().out
    told(capsys, [*common, "--emulate-scale", "0.25", "--within-steps", "--again"])
    assert asked[1:] == [(0.25, tuple(probe for probe in probes_for(topology) if probe.operation in IN_STEPS))]


@pytest.mark.long
def test_measures_between_real_ranks_once(capsys: Capsys, kept_ranks: None) -> None:
    brief = ["--cluster", CLUSTER, "--seconds", "0.001"]
    found = told(capsys, brief)
    assert (found["measured_now"], found["measured"], len(found["fits"])) == (29, 29, 4)
    timings = Store().links(link_place(soap.load_cluster(CLUSTER), "gloo", emulated=False))
    assert {timing.probe for timing in timings} == set(probes_for(soap.load_cluster(CLUSTER)))
    assert all(timing.measured_at and len(timing.seconds) >= 5 for timing in timings)
    assert told(capsys, brief)["measured_now"] == 0


@pytest.mark.long
def test_measures_on_emulated_hosts(groups: CpuGroups, capsys: Capsys) -> None:
    found = told(capsys, ["--cluster", EMULATED, "--emulate", "--seconds", "0.001"])
    assert found["measured_now"] == 29 and "emulated hosts" in found["place"]
    timings = {one.probe: one for one in Store().links(link_place(soap.load_cluster(EMULATED), "gloo", emulated=True))}
    size = 2 * 2**20
    for operation in (Operation.MESSAGE, Operation.EXCHANGE):  # but for what the buckets at both ends hold, nothing passes more quickly
        assert min(timings[Probe(operation, (0, 1), size)].seconds) > (size - 2 * burst_bytes(50e6)) / 50e6


@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured() -> None:
    place = link_place(soap.load_cluster(CLUSTER), "gloo", emulated=False)
    command = [sys.executable, "-m", "soap.cli.profile", "links", "--cluster", CLUSTER, "--seconds", "3"]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    stop = time.monotonic() + 120
    while not Store().links(place):
        assert process.poll() is None and time.monotonic() < stop
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "soap-profile links: interrupted: what was measured is kept, and the same command goes on from there\n"
    assert 0 < len(Store().links(place)) < 24


GPUS = """
name: gpus
hosts:
  - {name: box, devices: {type: p100, count: 2}, cpu_cores: 4, memory: 8 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 1 us}}}
"""


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["--cluster", "local:1"], 2, ["has one device; expected at least two"]),
        (["--cluster", "p100-4x4"], 2, ["has 4 hosts, but this machine is one host", "torchrun"]),
        (["--cluster", EMULATED], 2, ["add --emulate"]),
        (["--cluster", CLUSTER, "--emulate-scale", "0.5"], 2, ["add --emulate"]),
        (["--cluster", CLUSTER, "--seconds", "0"], 2, ["above 0"]),
        (["--cluster", "gpus.yaml"], 8, ["GPUs but this machine has none"]),
        (["--cluster", CLUSTER, "--backend", "nccl"], 8, ["'nccl' needs one GPU per rank"]),
    ],
)
def test_bad_input_is_one_line(
    command: list[str], code: int, words: list[str], capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpus.yaml").write_text(GPUS)
    assert_refused(capsys, main, ["links", *command], code, *words)


def test_gpus_are_not_emulated(groups: CpuGroups, capsys: Capsys) -> None:
    assert_refused(capsys, main, ["links", "--cluster", "p100-4x4", "--emulate"], 2, "expected a cluster of CPUs")


def test_a_damaged_store_is_one_line_here_and_a_warning_for_planners(capsys: Capsys) -> None:
    default_path().write_text("no database" * 1000)
    assert_refused(capsys, main, ["links", "--cluster", CLUSTER, "--show"], 6, "cannot be used", "move it away")
    topology = soap.load_cluster(CLUSTER)
    with pytest.warns(soap.errors.SoapWarning, match="going on with estimates"):
        assert api.with_links(topology) is topology
    assert api.with_links(topology, "estimate") is topology
    assert links.PROG == "soap-profile links"
