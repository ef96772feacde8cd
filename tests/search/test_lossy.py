"""Compression in searches: never unless a method is named; where links are slow it is chosen, where they are fast it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.planning import PlanBuilder
from soap.plan.syncs.clipping import refusal
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.lossy import lossy_starts, lossy_syncs, lossy_ways, may_be_ragged, peer_counts, with_lossy
from soap.search.options import SearchOptions
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.compression import Bf16, Int8, PowerSgd, Rgc, RgcAsq
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE, compressed, sync_choices
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU, cluster


def layers() -> OperatorGraph:
    """A large hidden layer, a small one, a table, and an output layer."""
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 8, 3, dtype="int64"), 4096, 256, weight=g.parameter("table", 4096, 256))
    x = g.linear(g.linear(x, 1024, name="large"), 16, name="small")
    return g.build(g.mean(g.linear(x, 8192, name="output")))


GRAPH = layers()


def linked(bytes_per_second: float) -> Topology:
    found = cluster([1, 1, 1, 1], CPU)
    return replace(found, links=tuple(replace(link, bandwidth_bytes_per_second=bytes_per_second) for link in found.links))


SLOW, FAST = linked(1e6), linked(1e12)


def pins_of(topology: Topology) -> dict[str, str]:
    """All operators stay data-parallel."""
    usual = data_parallel(GRAPH, topology)
    pins = {op.name: ",".join(f"{f.name}:{d}" for f, d in zip(op.factors, usual.operators[op.name].degrees, strict=True) if d > 1)
            + f"@{','.join(map(str, usual.operators[op.name].devices))}" for op in GRAPH.operators}
    return {name: spec if not spec.startswith("@") else f"replicas:{usual.operators[name].replicas}{spec}" for name, spec in pins.items()}


def found(topology: Topology, *lossy: str) -> Strategy:
    """What is searched is how parameters are synchronized."""
    costs, pins = RooflineCosts(topology), pins_of(topology)
    options = SearchOptions(budget=200, cores=1, starts=["data_parallel"], syncs=[ALL_REDUCE], lossy=lossy, pins=pins)
    result = search(GRAPH, topology, IncrementalSimulator(Simulator(GRAPH, topology, costs)), options)
    return result.strategy


def test_nothing_is_lossy_unless_it_is_named() -> None:
    assert all(sync.contract.exact for sync in found(SLOW).parameters.values())
    assert all(sync.contract.exact for ways in sync_choices(GRAPH, SLOW).values() for sync in ways)
    assert SearchOptions().lossy == ()


def test_choices_follow_the_policy() -> None:
    """Vectors and small layers are left alone by sparse methods; averages do not reach the output layer; sparse tables have rows."""
    ways = lossy_syncs(GRAPH, (RgcAsq(0.01), PowerSgd(2), Bf16()))
    assert ways["large.weight"] == tuple(map(compressed, (RgcAsq(0.01, "search"), PowerSgd(2), Bf16())))
    assert ways["output.weight"] == tuple(map(compressed, (Rgc(0.01, "sampled"), PowerSgd(2), Bf16())))
    assert ways["small.weight"] == ways["large.bias"] == (compressed(Bf16()),)
    assert "table" not in ways
    choices = with_lossy(GRAPH, sync_choices(GRAPH, SLOW), [Bf16()])
    assert all(own[0] == ALL_REDUCE for own in choices.values())
    assert choices["table"] == sync_choices(GRAPH, SLOW)["table"] and choices["large.bias"] == (ALL_REDUCE, compressed(Bf16()))


def test_starts_have_names() -> None:
    starts = lossy_starts(GRAPH, data_parallel(GRAPH, SLOW), [Rgc(0.01), Int8()])
    assert list(starts) == ["data_parallel, rgc:0.01", "data_parallel, int8"]
    assert starts["data_parallel, rgc:0.01"].parameters.keys() == {"large.weight", "output.weight"}


def test_slow_links_are_worth_it_and_fast_ones_are_not() -> None:
    slow = found(SLOW, "rgc:0.001")
    assert {name for name, sync in slow.parameters.items() if sync.compression} == {"large.weight", "output.weight"}
    assert all(sync == SyncConfig() for sync in found(FAST, "rgc:0.001", "int8").parameters.values())


def test_of_several_methods_each_parameter_gets_one() -> None:
    mixed = found(SLOW, "rgc:0.001", "bf16", "int8")
    own = {name: sync.compression.name for name, sync in mixed.parameters.items() if sync.compression}
    assert own["large.weight"] == own["output.weight"] == "rgc"
    assert own.get("large.bias") in (None, "bf16", "int8")


def pairs_of_hosts(inside: float, outside: float) -> Topology:
    """Two hosts of two devices; bytes per second inside hosts and between them."""
    found = cluster([2, 2], CPU)
    rates = [outside if "network" in (link.source, link.target) else inside for link in found.links]
    return replace(
        found, links=tuple(replace(link, bandwidth_bytes_per_second=rate) for link, rate in zip(found.links, rates, strict=True))
    )


def test_hosts_compress_together_where_that_pays() -> None:
    """A choice where several hosts have several devices. It takes dense sums inside hosts, which slow links there do not carry."""
    assert lossy_ways(pairs_of_hosts(1e10, 1e5)) == ("none", "host") and lossy_ways(SLOW) == lossy_ways(cluster([4], CPU)) == ("none",)
    assert peer_counts(pairs_of_hosts(1e10, 1e5)) == (4, 2) and peer_counts(SLOW) == (4,)
    for inside, within in ((1e10, "host"), (1e5, "none")):
        own = found(pairs_of_hosts(inside, 1e5), "rgc:0.001").parameters["output.weight"]
        assert own.compression is not None and own.compression.padded == Rgc(0.001, "sampled") and own.within == within
    assert list(lossy_starts(GRAPH, data_parallel(GRAPH, SLOW), [Rgc(0.01)], ["none", "host"])) == [
        "data_parallel, rgc:0.01",
        "data_parallel, rgc:0.01 by host",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("training", [PLAIN, PlannedTraining(clips=True), PlannedTraining(kept=1, densest=0.25, dense=True)])
def test_what_is_priced_is_what_is_trained(training: PlannedTraining) -> None:
    """By the search, to the nanosecond; with clipping a step takes longer, as sums and selections wait."""
    costs, options = RooflineCosts(SLOW), SearchOptions(budget=60, cores=1, starts=["data_parallel"], lossy=["rgc:0.01"])
    simulator = Simulator(GRAPH, SLOW, costs, training=training)
    result = search(GRAPH, SLOW, IncrementalSimulator(simulator), options)
    exact = Simulator(GRAPH, SLOW, costs, training=training).run(result.strategy)
    assert result.cost_ns == exact.makespan_ns
    lossy = lossy_starts(GRAPH, data_parallel(GRAPH, SLOW), [Rgc(0.01)])["data_parallel, rgc:0.01"]
    times = [Simulator(GRAPH, SLOW, costs, training=own).run(lossy).makespan_ns for own in (PLAIN, training)]
    assert (times[0] < times[1]) == training.clips
    assert IncrementalSimulator(simulator).makespan_ns(lossy) == times[1]


def test_a_search_that_clips_finds_what_trains() -> None:
    """The best plan of all sends rows of the table, and compresses the rest: ranks that clip refuse it. Another one is found instead."""
    costs, clips = RooflineCosts(SLOW), PlannedTraining(clips=True)
    options = SearchOptions(budget=200, cores=1, starts=["data_parallel"], lossy=["rgc:0.01"], pins=pins_of(SLOW))
    results = {}
    for training in (PLAIN, clips):
        simulator = Simulator(GRAPH, SLOW, costs, training=training)
        found = search(GRAPH, SLOW, IncrementalSimulator(simulator), options)
        results[training] = found.strategy, found.cost_ns, simulator
    free, free_ns, _ = results[PLAIN]
    bound, bound_ns, simulator = results[clips]
    builder = PlanBuilder(GRAPH, SLOW, clips)
    assert refusal(builder.build(free)) and not refusal(builder.build(bound))
    assert simulator.is_refused(free) and not simulator.is_refused(bound)
    usual_ns = Simulator(GRAPH, SLOW, costs, training=clips).run(data_parallel(GRAPH, SLOW)).makespan_ns
    assert any(sync.compression for sync in free.parameters.values()) and free_ns < bound_ns < usual_ns


def test_a_warm_up_that_does_not_fit_is_not_chosen() -> None:
    """What a dense step sends needs more memory than the steps behind it."""
    costs, warm = RooflineCosts(SLOW), PlannedTraining(dense=True)
    lossy = lossy_starts(GRAPH, data_parallel(GRAPH, SLOW), [Rgc(0.001)])["data_parallel, rgc:0.001"]
    limit = max(Simulator(GRAPH, SLOW, costs).run(lossy).peak_bytes)
    assert limit < max(Simulator(GRAPH, SLOW, costs, training=warm).run(lossy).peak_bytes)
    tight = replace(SLOW, devices=tuple(replace(d, type=replace(d.type, memory_bytes=limit)) for d in SLOW.devices))
    for training, fits in ((PLAIN, True), (warm, False)):
        evaluator = IncrementalSimulator(Simulator(GRAPH, tight, costs, training=training))
        evaluator.makespan_ns(lossy)
        assert (evaluator.overflow_bytes(lossy) == 0) == fits


def test_real_lengths_are_sent_where_bytes_count_more_than_messages() -> None:
    """On processors: a GPU would have to tell how long its messages are in the middle of a step."""
    assert may_be_ragged(SLOW) and not may_be_ragged(cluster([2, 2]))
    ways = lossy_syncs(GRAPH, [Rgc(0.01), Bf16(), Rgc(0.01, "exact")], ragged=True)["large.weight"]
    assert ways == tuple(map(compressed, (Rgc(0.01, "sampled"), Rgc(0.01, "sampled", ragged=True), Bf16(), Rgc(0.01, "exact"))))
    for latency, ragged in ((1e-6, True), (1e-2, False)):
        topology = replace(SLOW, links=tuple(replace(link, latency_seconds=latency) for link in SLOW.links))
        own = found(topology, "rgc:0.001").parameters["output.weight"].compression
        assert own == Rgc(0.001, "sampled", ragged=ragged)


def test_wrong_methods_are_refused_in_one_line() -> None:
    with pytest.raises(StrategyError, match=r"^compression 'zip' is unknown; expected one of rgc, "):
        SearchOptions(lossy=["zip"])
