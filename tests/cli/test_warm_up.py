"""What the steps of a warm-up take: said by ``soap-search`` and ``soap-run``, as the same plan at their densities is predicted."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

import soap
from soap.cli import compressing
from soap.cli.run import document, make_parser, prepare, text
from soap.cli.search import main as search
from soap.runtime.compression.dgc import WarmUp
from soap.simulator.simulate import Simulator
from soap.strategy.compression import Bf16, Compression, Rgc
from soap.strategy.config import Strategy
from soap.strategy.sync import compressed

MODEL, CLUSTER = "zoo:alexnet:tiny", "emulated:2x1@1Mbit/s"


def planned(method: Compression) -> tuple[Simulator, Strategy]:
    """Data parallelism that compresses the largest parameters."""
    simulator = soap.api.simulator_for(MODEL, CLUSTER, costs="estimate")
    usual = soap.api.classical("data_parallel", simulator.graph, simulator.topology)
    largest = sorted(simulator.graph.parameters, key=lambda tensor: -prod(tensor.shape))[:2]
    return simulator, usual.with_changes(parameters={tensor.name: compressed(method) for tensor in largest})


def test_phases_of_a_warm_up() -> None:
    assert WarmUp().phases == () and WarmUp(7).phases == ((7, None),)
    densities = [0.25, 0.0625, 0.015625, 0.00390625, 0.0009765625]
    assert WarmUp(7, 3).phases == ((7, None), *((3, density) for density in densities))


def test_each_phase_is_the_same_plan_at_its_density() -> None:
    simulator, strategy = planned(Rgc(0.001))
    found = compressing.warm_up_document(simulator, strategy, (7, 3))
    assert [(own["steps"], own["density"]) for own in found] == [(7, None), (3, 0.25), (3, 0.0625), (3, 0.015625), (3, 0.00390625)]
    usual = soap.api.classical("data_parallel", simulator.graph, simulator.topology)
    assert found[0]["predicted_ns"] == simulator.run(usual).makespan_ns
    _, denser = planned(Rgc(0.0625))
    assert found[2]["predicted_ns"] == simulator.run(denser).makespan_ns
    times = [own["predicted_ns"] for own in found] + [simulator.run(strategy).makespan_ns]
    assert times[1:] == sorted(times[1:], reverse=True) and times[-1] < times[0]
    line = compressing.warm_up_text(found[:2], times[-1])
    assert line.startswith("the first 7 steps that send everything take ") and ", then 3 steps at a density of 0.25 take " in line
    assert line.count(" each") == 2 and ", and then " in line


def test_what_has_no_density_or_is_not_compressed_has_no_such_phase() -> None:
    simulator, strategy = planned(Bf16())
    assert [own["density"] for own in compressing.warm_up_document(simulator, strategy, (7, 3))] == [None]
    assert compressing.warm_up_document(simulator, strategy, (0, 0)) == []
    usual = soap.api.classical("data_parallel", simulator.graph, simulator.topology)
    assert compressing.warm_up_document(simulator, usual, (7, 3)) == []


@pytest.mark.slow
def test_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    arguments = [MODEL, "--cluster", CLUSTER, "--budget", "30", "--costs", "estimate", "--profile", "0", "--verify", "0", "-o", str(out)]
    arguments += ["--start", "data_parallel", "--pin", "*=sample:2", "--lossy", "bf16"]
    assert search([*arguments, "--warm-up", "5"]) == 0
    assert "\n\nwarm-up: the first 5 steps that send everything take " in capsys.readouterr().out
    assert search([*arguments, "--warm-up", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [phase] = found["warm_up"]
    assert phase["steps"] == 5 and phase["density"] is None and phase["predicted_ns"] > found["predicted_ns"]
    assert search([*arguments, "--json"]) == 0
    assert "warm_up" not in json.loads(capsys.readouterr().out)
    command = [str(out), "--model", MODEL, "--cluster", CLUSTER, "--costs", "estimate", "--steps", "3", "--accumulate", "2"]
    job, predicted, costs = prepare(make_parser().parse_args([*command, "--warm-up", "5"]))
    measured = SimpleNamespace(median_ns=1000, times_ns=(1000,), losses=(1.0, 0.5, 0.25), input_bytes=(64, 64))
    outcome = SimpleNamespace(measured={"strategy": measured}, backend="gloo", saved=None, peak_bytes=None, check=None, loss_scaling=None)
    report = document(job, predicted, outcome, costs)  # type: ignore[arg-type]
    assert report["warm_up"][0]["predicted_ns"] > report["strategies"]["strategy"]["predicted_ns"] and "warm_up" not in report["costs"]
    assert "the first 5 steps that send everything take " in text(report)
