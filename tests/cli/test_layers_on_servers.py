"""``soap-simulate --builtin ralp`` as people call it: what it says, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.cli.run import main as run
from soap.cli.simulate import main
from soap.cli.simulate_report import layers_text
from tests.cli.refusals import assert_refused

CLUSTER = """
name: workers and a server
hosts:
  - {name: worker, count: 2, devices: {type: titanxp, count: 1}, cpu_cores: 8}
  - {name: server, devices: {type: titanxp, count: 1}, cpu_cores: 8, server: true}
network: {bandwidth: 1 Gbit/s, latency: 30 us}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.mark.slow
def test_the_cut_is_said_and_written(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["zoo:alexnet:tiny", "--cluster", str(cluster), "--costs", "estimate", "--builtin", "ralp", "--least-gain", "0"]
    assert main([*command, "--json", "-o", str(tmp_path / "ralp.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["layers_on_servers"]
    assert found["friendly"] and found["best"]["devices"] == ["server/gpu0"]
    assert found["best"]["predicted_ns"] == report["predicted_ns"] <= found["plain_servers_ns"]
    strategy = soap.load_strategy(tmp_path / "ralp.json", soap.load("zoo:alexnet:tiny", plan_only=True), soap.load_cluster(cluster))
    assert strategy.operators[found["best"]["first"]].devices == (2,)
    assert main(command) == 0
    assert f"layers on servers: {found['best']['operators']} operators from {found['best']['first']} on" in capsys.readouterr().out


CPUS = """
name: workers and servers
device_types: {core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}
hosts:
  - {name: worker, count: 2, devices: {type: core, count: 1}, cpu_cores: 1, memory: 8 GiB}
  - {name: server, count: SERVERS, devices: {type: core, count: 1}, cpu_cores: 1, memory: 8 GiB, server: true}
network: {bandwidth: 1 Gbit/s, latency: 30 us}
"""


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_planned_trains_like_one_process(
    servers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_ranks: None
) -> None:
    """``--check``, with one and with two devices of servers that compute the tail."""
    (tmp_path / "cluster.yaml").write_text(CPUS.replace("SERVERS", str(servers)))
    model, plan = "zoo:alexnet:tiny", str(tmp_path / "ralp.json")
    common = ["--cluster", str(tmp_path / "cluster.yaml"), "--costs", "estimate", "--json"]
    assert main([model, *common, "--builtin", f"ralp:{servers}", "--least-gain", "0", "-o", plan]) == 0
    found = json.loads(capsys.readouterr().out)["layers_on_servers"]
    assert found["best"]["devices"] == [f"server{k}/cpu0" for k in range(servers)] and found["friendly"]
    assert run([plan, "--model", model, *common, "--steps", "1", "--check"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["check"]["passed"], report["check"]


def test_what_stays_on_plain_servers_says_why() -> None:
    best = {"first": "fc", "operators": 3, "devices": ["server/gpu0"], "predicted_ns": 98 * 10**6, "front_ns": 10**6, "tail_ns": 5 * 10**5}
    found = {"friendly": False, "gain": 0.02, "least_gain": 0.1, "plain_servers_ns": 10**8, "best": best}
    assert layers_text(found) == (
        "layers on servers: 3 operators from fc on, on server/gpu0: 98.000 ms instead of 100.0 ms with plain servers, a gain of 2%, "
        "less than 10%: unfriendly, so parameters stay on plain servers\n"
        "a step computes 1.000 ms on the busiest worker, 0.500 ms on the busiest of these"
    )
    assert "none, as no tail keeps up" in layers_text({**found, "best": None})


@pytest.mark.slow
def test_bad_input_is_one_line(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["zoo:alexnet:tiny", "--cluster", str(cluster), "--costs", "estimate", "--builtin"]
    assert_refused(capsys, main, [*command, "data_parallel", "--least-gain", "0.2"], 2, "--least-gain without --builtin ralp")
    assert_refused(capsys, main, [*command, "ralp:2"], 5, "whose servers have 1 devices; expected a number from 1 to 1")
