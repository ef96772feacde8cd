"""``soap.fits``: whether a plan fits, and the fastest ways that do."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from math import inf
from typing import Any

import pytest

import soap
from soap.api import fitting
from soap.api.fitting import Fit, fits, smaller_zoo
from soap.cli.simulate_report import fit_document
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.recomputing import recompute_to_fit
from soap.simulator.incremental import IncrementalSimulator
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.time_limit import TimeIsUp
from tests.graph_builder import GraphBuilder, mlp
from tests.search.test_recomputing import wide
from tests.strategies import GPU, cluster

WIDE = (64, 256, 256, 64)
"""Layers whose weights are most of what devices hold."""


ARGUMENTS = Namespace(
    model="model.pt2", cluster="c", memory_budget=None, batch_dim=(), batch_norm="global", autocast=None, matmul_precision=None, imports=(),
    sum_dtype=None,
    batches="whole",
)


def tight(graph: OperatorGraph, share: float, name: str = "data_parallel", topology: Topology | None = None) -> Topology:
    """A cluster whose devices have this share of what a strategy needs."""
    topology = topology or cluster([4], GPU)
    peak = max(soap.simulate(graph, topology, name, costs="estimate").peak_bytes)
    devices = tuple(replace(d, type=replace(d.type, memory_bytes=int(share * peak))) for d in topology.devices)
    return replace(topology, devices=devices)


def asked(graph: OperatorGraph, topology: Topology, **options) -> Fit:  # type: ignore[no-untyped-def]
    return fits(graph, topology, costs="estimate", **{"seconds": inf, **options})


def test_what_fits_needs_no_other_way() -> None:
    graph = mlp(widths=WIDE)
    topology = tight(graph, 1.01)
    found, simulation = asked(graph, topology), soap.simulate(graph, topology, "data_parallel", costs="estimate")
    assert found.fits and found.ways == found.tried == found.untried == () and found.closest is None
    way = found.asked
    assert (way.name, way.time_ns, way.peak_bytes) == ("data_parallel", simulation.makespan_ns, max(simulation.peak_bytes))
    assert sum(way.by_kind.values()) == way.peak_bytes <= way.available_bytes == topology.memory_limits[0]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_the_fastest_of_all_ways_that_fit(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp(widths=WIDE)
    topology = tight(graph, 0.7)
    if not compiled:
        monkeypatch.setattr(IncrementalSimulator, "begins_at_once", staticmethod(lambda: False))
    found = asked(graph, topology)
    assert not found.fits and found.asked.lacking_bytes > 0 and found.untried == ()
    played = {name: soap.simulate(graph, topology, name, costs="estimate") for name in found.tried}
    assert "zero1" in played and "megatron+zero1" in played
    fitting = sorted((own.makespan_ns, name) for name, own in played.items() if own.fits)
    assert len(fitting) >= 3 and [way.time_ns for way in found.ways] == [time_ns for time_ns, _ in fitting[:3]]
    for way in found.ways:
        own = played[way.name]
        assert way.fits and way.peak_bytes == max(own.peak_bytes) == sum(way.by_kind.values())
        assert way.strategy == named(way.name, graph, topology) and way.micro_batches == 1


@pytest.mark.slow
def test_if_nothing_fits_it_says_what_lacks_least() -> None:
    graph = mlp(widths=WIDE)
    topology = tight(graph, 0.05)
    found = asked(graph, topology)
    assert not found.fits and found.ways == () and found.closest is not None
    peaks = {name: soap.simulate(graph, topology, name, costs="estimate").peak_bytes for name in found.tried}
    lacking = {name: sum(peak - limit for peak, limit in zip(own, topology.memory_limits, strict=True)) for name, own in peaks.items()}
    assert found.closest.lacking_bytes <= found.asked.lacking_bytes and found.closest.lacking_bytes == lacking[found.closest.name]
    assert found.closest.peak_bytes == max(peaks[found.closest.name])  # the bound for any order may be many times as much


def test_a_budget_and_a_strategy_of_the_user_s() -> None:
    graph, topology = mlp(widths=WIDE), cluster([4], GPU)
    whole = max(soap.simulate(graph, topology, "data_parallel", costs="estimate").peak_bytes)
    found = asked(graph, topology, strategy=named("data_parallel", graph, topology), memory_budget=f"{whole - 1} B")
    assert found.asked.name == fitting.THIS and not found.fits and found.asked.available_bytes == whole - 1
    assert "data_parallel" not in found.tried


def test_without_time_what_saves_most_is_tried_all_the_same_and_all_else_is_said() -> None:
    found = asked(wide(), tight(wide(), 0.7), seconds=0)
    assert [way.name for way in found.ways] == ["fsdp+recompute"] == [*found.tried] and {"zero1", "megatron"} < {*found.untried}
    lacking = asked(wide(), tight(wide(), 0.05), seconds=0)
    assert lacking.tried == ("fsdp+recompute", "fsdp+recompute+microbatches:8") and not lacking.ways
    assert lacking.closest is not None and lacking.closest.lacking_bytes > 0


def test_at_the_end_of_the_commands_time_the_ways_so_far_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, real, played = mlp(widths=WIDE), fitting._Ways._played, list[str]()

    def late(self: Any, name: str, *more: Any) -> Any:
        played.append(name)
        if len(played) > 1:
            raise TimeIsUp
        return real(self, name, *more)

    monkeypatch.setattr(fitting._Ways, "_played", late)
    found = asked(graph, tight(graph, 0.7))
    assert list(found.tried) == played[:1] and {way.name for way in found.ways} <= {*found.tried} and played[1] in found.untried
    assert found.ways or found.closest is not None


def test_only_the_first_way_is_begun_though_it_would_not_be_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp(widths=WIDE)
    monkeypatch.setattr(fitting, "TILE_SECONDS", 1e6)
    found = asked(graph, tight(graph, 0.7), seconds=1000)
    assert len(found.tried) == 1 and {way.name for way in found.ways} <= {*found.tried} and "zero1" in found.untried


def test_where_half_of_the_time_is_over_few_ways_are_played_what_saves_most_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model took more than that to be looked at as it was asked for, and nothing was tried."""
    graph, seconds = wide(), iter([0, *[6] * 1000])
    topology = tight(graph, 0.7)
    monkeypatch.setattr(fitting.time, "process_time", lambda: next(seconds))
    found = asked(graph, topology, seconds=9)
    assert found.tried == ("fsdp+recompute", "zero1+recompute", "recompute") and {"zero1", "megatron"} < set(found.untried)


def test_ways_are_looked_at_by_what_they_save_and_what_cannot_fit_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, looked = wide(), list[str]()
    monkeypatch.setattr(fitting, "certainly_lacks", lambda graph, topology, own: not any(one.recompute for one in own.operators.values()))
    real = fitting._Ways._looked_at

    def noting(self: Any, name: str, strategy: Strategy) -> Any:
        looked.append(name)
        return real(self, name, strategy)

    monkeypatch.setattr(fitting._Ways, "_looked_at", noting)
    found = asked(graph, tight(graph, 0.3))
    assert looked[:3] == ["fsdp+recompute", "zero1+recompute", "recompute"]
    assert {"fsdp", "zero1", "megatron"} <= {*found.tried}.difference(looked)


@pytest.mark.slow
def test_as_little_as_fits_is_recomputed_and_how_near_that_is_to_the_best() -> None:
    graph = wide()
    topology = tight(graph, 0.8)
    found = asked(graph, topology)
    (way,) = [own for own in found.ways if own.budgeted is not None]
    simulator = soap.api.simulator_for(graph, topology, costs="estimate")
    made = recompute_to_fit(graph, topology, named(way.base, graph, topology), simulator.costs, simulator.peak_share)
    assert way.budgeted == made and way.strategy == made.strategy and way.name == f"{way.base}, recomputed to fit"
    assert way.fits and 0 < made.runs <= made.of_runs
    (told,) = [own for own in fit_document(found, ARGUMENTS, graph, topology)["ways"] if own["budgeted"]]
    assert told["budgeted"]["gap"] is None or told["budgeted"]["gap"] == made.gap >= 0
    assert told["commands"] == [f"soap-search model.pt2 --cluster c --start {way.base} --recompute yes --budget 1 -o strategy.json"]


@pytest.mark.slow
def test_samples_may_go_through_in_micro_batches() -> None:
    """Activations are most of what these devices hold."""
    graph = mlp(4096, (4, 64, 64))
    topology = tight(graph, 0.4)
    found = asked(graph, topology)
    way = next(own for own in found.ways if own.name.startswith("data_parallel+microbatches"))
    counts = [int(name.rpartition(":")[2]) for name in found.tried if name.startswith("data_parallel+microbatches")]
    assert counts[0] == 2 and way.name == f"data_parallel+microbatches:{counts[-1]}"  # half of the samples, or less
    simulation = soap.simulate(graph, topology, way.name, costs="estimate")
    assert (way.time_ns, way.peak_bytes, way.micro_batches) == (simulation.makespan_ns, max(simulation.peak_bytes), 1)
    assert way.fits and way.strategy.microbatches == counts[-1]
    assert not any(soap.simulate(graph, topology, f"data_parallel+microbatches:{n}", costs="estimate").fits for n in counts[:-1])


def test_micro_batches_smaller_than_the_devices_are_left_out() -> None:
    graph = mlp(8, WIDE)
    found = asked(graph, tight(graph, 0.05))
    tried = {name for name in found.tried if "microbatches" in name}
    assert tried == {f"{base}+microbatches:2" for base in ("data_parallel", "zero1", "fsdp")}  # the last is what saves most, too


@pytest.mark.slow
def test_what_couples_samples_is_made_for_fewer_of_them() -> None:
    """Batch norm needs all samples at once, so that micro-batches save nothing."""

    def of(batch: int) -> OperatorGraph:
        g = GraphBuilder("normalized")
        x = g.elementwise(g.linear(g.input("x", batch, 4), 64, name="fc0"), name="act0")
        x = g.elementwise(x, g.batch_mean(x), name="norm")
        return g.build(g.cross_entropy(g.linear(x, 4, name="head"), g.input("y", batch, dtype="int64")))

    graph = of(4096)
    topology = tight(graph, 0.4)
    made: list[int] = []

    def smaller(samples: int) -> OperatorGraph:
        made.append(samples)
        return of(samples)

    found = asked(graph, topology, smaller=smaller)
    assert made == [2048, 1024]  # half of the samples is still too much
    (way,) = [own for own in found.ways if own.micro_batches > 1]
    quarter = soap.simulate(of(1024), topology, "data_parallel", costs="estimate")
    assert (way.micro_batches, way.time_ns) == (4, quarter.step_ns(4))
    inputs = 1024 * (4 * 4 + 8)  # of the three other batches
    assert way.peak_bytes == max(quarter.peak_bytes) + 3 * inputs == sum(way.by_kind.values()) <= way.available_bytes
    assert {"data_parallel in 2 batches", "data_parallel in 4 batches"} <= {*found.tried}
    assert not any("microbatches" in name for name in found.tried)


@pytest.mark.slow
def test_models_of_the_zoo_are_made_for_fewer_samples() -> None:
    graph = soap.load("zoo:rnntc:tiny@8", plan_only=True).graph
    made = smaller_zoo(graph)
    assert made is not None and made(4).hash == soap.load("zoo:rnntc:tiny@4", plan_only=True).graph.hash
    assert smaller_zoo(mlp()) is None
