"""Samples and tokens per second, utilisation and cost: values by hand."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

import soap
from soap import api
from soap.cluster.presets import preset
from soap.cluster.price import Price
from soap.simulator import simulate
from soap.simulator.throughput import Throughput, arithmetic_of, model_flops, throughput
from tests.graph_builder import GraphBuilder, transformer


def test_figures_of_a_step() -> None:
    found = Throughput(250_000_000, 32, 32 * 256, model_flops=10**12, arithmetic="bfloat16", peak_flops_per_second=1e13)
    assert (found.samples_per_second, found.tokens_per_second) == (128, 32768)
    assert found.mfu == pytest.approx(0.4)  # 4e12 of 1e13 per second
    assert found.cost_per_step is found.cost_per_million_samples is found.cost_per_million_tokens is None


def test_cost_follows_from_price_and_time() -> None:
    found = Throughput(36_000_000, 10, 1000, 10**9, "float32", 1e12, Price(100.0, "EUR"))
    assert found.cost_per_step == pytest.approx(0.001)  # a hundred thousandth of an hour
    assert found.cost_per_million_samples == pytest.approx(100.0)
    assert found.cost_per_million_tokens == pytest.approx(1.0)
    assert replace(found, price=Price(0.0)).cost_per_million_samples == 0
    assert replace(found, samples=None, tokens=None).cost_per_million_samples is None


def test_model_flops_count_what_is_trained_three_times() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 8), 16, bias=False)
    graph = g.build(g.mean(g.linear(x, 2, bias=False)))
    forward = 2 * 4 * 8 * 16 + 2 * 4 * 16 * 2
    assert model_flops(graph) == 3 * (forward + 8)  # and the mean's additions
    g = GraphBuilder()
    frozen = g.parameter("frozen", 16, 8, frozen=True)
    x = g.linear(g.input("x", 4, 8), 16, bias=False, weight=frozen)
    graph = g.build(g.mean(g.linear(x, 2, bias=False)))
    assert model_flops(graph) == 2 * 4 * 8 * 16 + 3 * (2 * 4 * 16 * 2 + 8)  # no gradient goes back to the first layer


def test_the_type_of_most_arithmetic_decides() -> None:
    assert arithmetic_of(transformer()) == "float32"
    g = GraphBuilder(dtype="bfloat16")
    assert arithmetic_of(g.build(g.mean(g.linear(g.input("x", 4, 8), 3)))) == "bfloat16"
    assert arithmetic_of(soap.load("zoo:gpt:tiny", plan_only=True, dtype="bfloat16").graph) == "bfloat16"


def test_the_peak_is_of_all_devices_in_that_type() -> None:
    found = throughput(transformer(batch=8, length=6), preset("h200-8"), 10**6, batches=3)
    assert (found.samples, found.tokens, found.peak_flops_per_second) == (24, 144, 8 * 67e12)
    assert found.model_flops == 3 * model_flops(transformer(batch=8, length=6))
    half = transformer(batch=8, length=6)
    tensors = {name: replace(t, dtype="bfloat16", itemsize=2) if t.dtype == "float32" else t for name, t in half.tensors.items()}
    assert throughput(replace(half, tensors=tensors), preset("h200-8"), 10**6).peak_flops_per_second == 8 * 989.5e12


def test_what_soap_returns_has_them() -> None:
    model, cluster = soap.load("zoo:gpt:tiny", plan_only=True), preset("p100-4x4")
    simulation = soap.simulate(model, cluster, "data_parallel")
    seconds = simulation.makespan_ns / 1e9
    assert simulation.throughput.samples_per_second == pytest.approx(8 / seconds)
    assert simulation.throughput.tokens_per_second == pytest.approx(96 / seconds)
    assert simulation.throughput.mfu == pytest.approx(model_flops(model.graph) / seconds / (16 * 10.6e12))
    found = soap.find(model, cluster, soap.SearchOptions(budget=5, starts=["data_parallel"]))
    assert found.throughput.step_ns == found.time_ns
    assert found.throughput == found.simulation.throughput


def test_of_a_folded_simulation_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    simulator = api.simulator_for("zoo:gpt:tiny", preset("p100-4x4"))
    strategy = api.classical("data_parallel", simulator.graph, simulator.topology)
    folded = simulator.predict(strategy)
    assert type(folded).__name__ == "FoldedSimulation"
    assert folded.throughput == simulator.run(strategy).throughput


def test_a_price_changes_no_prediction_and_no_hash() -> None:
    cluster = preset("p100-4x4")
    priced = replace(cluster, price=Price(24.5, "EUR"))
    assert priced.hash == cluster.hash == pickle.loads(pickle.dumps(priced)).hash
    assert pickle.loads(pickle.dumps(priced)).price == Price(24.5, "EUR")
    plain, other = (soap.simulate("zoo:gpt:tiny", one, "megatron") for one in (cluster, priced))
    assert (plain.makespan_ns, plain.peak_bytes, plain.busy_ns) == (other.makespan_ns, other.peak_bytes, other.busy_ns)
    assert api.simulator_for("zoo:gpt:tiny", cluster).costs_hash == api.simulator_for("zoo:gpt:tiny", priced).costs_hash
    assert plain.throughput.cost_per_million_samples is None
    expected = 24.5 / 3600 * other.makespan_ns / 1e9 / 8 * 1e6
    assert other.throughput.cost_per_million_samples == pytest.approx(expected)
