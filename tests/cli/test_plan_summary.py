"""What a report says besides its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap import api
from soap.cli import plan_summary
from soap.cluster.presets import preset
from soap.simulator import simulate

MODEL = "zoo:gpt:tiny"


@pytest.mark.parametrize(
    ("found", "line"),
    [("single_device", "the strategy is single_device: splitting does not pay here"), ("megatron", "the strategy is megatron")],
)
def test_a_classical_strategy_is_called_by_its_name(found: str, line: str) -> None:
    simulator = api.simulator_for(MODEL, preset("p100-4x4"))
    strategy = api.classical(found, simulator.graph, simulator.topology)
    summary = plan_summary.document(simulator, strategy, simulator.run(strategy))
    lines = plan_summary.text(summary, plan_summary.FOUND).splitlines()
    assert summary["same_as"] == found and line in lines
    assert ("unlike data parallelism" in "\n".join(lines)) == (found != "single_device")
    assert f"s.json is {found}" in plan_summary.text(summary, "s.json").splitlines()
    assert line not in plan_summary.text(summary, found)


def test_what_was_simulated_whole_although_it_can_be_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    simulator = api.simulator_for(MODEL, preset("p100-4x4"))
    strategy = api.classical("data_parallel", simulator.graph, simulator.topology)
    summary = plan_summary.document(simulator, strategy, simulator.run(strategy))
    assert summary["folded"] is None
    assert summary == {**plan_summary.document(simulator, strategy, simulator.predict(strategy)), "folded": None}
    assert plan_summary.dump(summary)


@pytest.mark.slow
def test_what_servers_keep_on_hosts_is_said_and_if_it_was_not_checked() -> None:
    known = preset("p100-4x4")
    unknown = replace(known, hosts=tuple(replace(host, memory_bytes=None) for host in known.hosts))
    checked, not_checked = "KiB on node0 of 238 GiB", "KiB on node0, whose memory is not known: whether that fits was not checked"
    for topology, words in ((known, checked), (unknown, not_checked)):
        simulator = api.simulator_for(MODEL, topology)
        strategy = api.classical("parameter_server", simulator.graph, topology)
        simulation = simulator.run(strategy)
        summary = plan_summary.document(simulator, strategy, simulation)
        assert [host["held_bytes"] for host in summary["host_memory"]] == list(simulation.host_memory)
        assert words in plan_summary.text(summary, "parameter_server") and summary["fits"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "idle", "why"),
    [("data_parallel", 8, 0, ""), ("data_parallel", 7, 1, ": 7 samples are too few for all"), ("single_device", 7, 7, "")],
)
def test_idle_devices_are_said(name: str, samples: int, idle: int, why: str) -> None:
    simulator = api.simulator_for(f"{MODEL}@{samples}", preset("h100-8"))
    strategy = api.classical(name, simulator.graph, simulator.topology)
    summary = plan_summary.document(simulator, strategy, simulator.run(strategy))
    assert summary["idle_devices"] == [f"host/gpu{number}" for number in range(8 - idle, 8)]
    notes = [own for own in plan_summary.text(summary, "plan").splitlines() if own.startswith("note: idle")]
    assert [note.partition("others compute: ")[2] for note in notes] == [
        f"{idle} of 8 devices ({'host/gpu7' if idle == 1 else 'host/gpu1, host/gpu2, …'}){why}"
    ] * bool(idle)


def test_shared_cores() -> None:
    topology = preset("local:4")
    if topology.devices[0].type.kind != "cpu":
        pytest.skip("this machine's devices are GPUs")
    crowd = replace(topology, hosts=(replace(topology.hosts[0], cpu_cores=2),))
    assert plan_summary.shared_cores(crowd) == 2
    assert plan_summary.shared_cores(replace(topology, hosts=(replace(topology.hosts[0], cpu_cores=4),))) is None
    assert plan_summary.shared_cores(replace(crowd, name="basement")) is None
    assert plan_summary.crowded(4, 2) == "note: 4 processes share 2 cores of this machine"
