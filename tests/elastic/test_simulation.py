"""The steady state of servers and workers: by hand, by closed forms, and byte by byte as real messages have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bipartite import needs_of_batch
from benchmarks.sparse_designs import PublishedTraffic
from soap.cluster.topology import Host
from soap.elastic.cut import Cut
from soap.elastic.faults import ElasticError
from soap.elastic.layout import ElasticPlan
from soap.elastic.simulation.design import Design, Lane, Traffic, bipartite, design_of, fully_connected, naive, needs_of_graph
from soap.elastic.simulation.steady import Delays, Period, Steady, rate_bound, rate_of, required, simulate, unroll
from soap.elastic.simulation.work import EstimatedWork, Work
from soap.elastic.worker import Worker
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.runtime.system import clock
from soap.runtime.system.clock import Clock
from soap.simulator.communication.prices import Communication
from soap.simulator.reference import play
from soap.simulator.task_list import TaskList
from soap.simulator.tasks import TaskKind
from soap.strategy.consistency import parse
from soap.tracing.load import load_model
from tests.elastic.drawn import most_missing
from tests.elastic.stars import Fixed, star
from tests.elastic.test_owners import SECRET, SOURCE, layout_of, samples, serving
from tests.extent import FEW
from tests.strategies import GPU

ASYNC, SYNC = parse("async"), parse("sync")
TABLES = 2
OWNED_NS = TABLES * (300 + 400 + 500) + 100 + 500
"""What one server of everything computes for a lease: sums, gradients, updates; the dense variables' copy and update."""


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return load_model("zoo:full_sparse:tiny", plan_only=True).graph


class Told(Clock):
    """What a worker tells its device."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def catch_up(self) -> None:
        self.calls.append("catch_up")

    def resume(self) -> None:
        self.calls.append("resume")


def steady(plan: ElasticPlan | Design, graph: OperatorGraph, work: Work, **options: object) -> Steady:
    """Of a star with as many machines as the plan needs, whose links are quick unless ``bandwidth`` says how quick."""
    design = plan if isinstance(plan, Design) else design_of(plan, graph)
    machines = 1 + max(design.roles)
    topology = star(machines, float(options.pop("bandwidth", 1e15)))  # type: ignore[arg-type]
    return simulate(topology, traffic_of(graph, design), work, **options)  # type: ignore[arg-type]


def traffic_of(graph: OperatorGraph, design: Design) -> Traffic:
    return Traffic(design, needs_of_graph(graph, [*design.layout.tables], design.batch))


def one_server(graph: OperatorGraph, workers: int, word: str = "async") -> ElasticPlan:
    return bipartite(graph, range(1, workers + 1), [0], 8, parse(word))


def test_one_worker_and_one_server_by_hand(graph: OperatorGraph) -> None:
    """Messages take 1 ns each. 1000: the batch is read; 1001, 1301: sums begin; 1601 to 1701: the copy; 1702: all is there; 3702: the
    rest; then the server computes one gradient after the other, and updates in the order in which they become ready: 3703 + 400 + 400 +
    500 (dense) + 500 + 500 = 6003; 6004: the worker knows."""
    found = steady(one_server(graph, 1), graph, Fixed())
    assert found.period == Period(1, 6004)
    assert found.samples_per_second == pytest.approx(8e9 / 6004, rel=1e-12)
    assert found.idle == {0: pytest.approx(1 - OWNED_NS / 6004), 1: pytest.approx(1 - 3000 / 6004)}
    assert (found.stateful, found.waiting_ns, {*found.staleness}) == (1, (0,), {0})
    assert found.idle_by_role == {"server": found.idle[0], "worker": found.idle[1]}
    later = steady(one_server(graph, 1), graph, Fixed(control_ns=50))
    assert later.period == Period(1, 6104)


def test_in_step_an_update_waits_for_the_next_question(graph: OperatorGraph) -> None:
    """By hand again: 1001, 1002, 1003: the first questions begin an update of 600 each, one after the other; 3502: all is there; 5502: the
    rest; 5503: what is pushed is kept, 500 each, behind two gradients; 7804: the worker knows."""
    plan = one_server(graph, 1, "sync")
    assert steady(plan, graph, Fixed()).period == Period(1, 7804)
    for workers, word in ((1, "sync"), (3, "sync"), (3, "bounded:0")):
        design = design_of(one_server(graph, workers, word), graph)
        tasks = unroll(star(4), traffic_of(graph, design), Fixed(), 5).tasks
        updates = [task for task in tasks if task.name == "update"]
        assert len(updates) == (5 * (TABLES + 1) if word == "sync" else 0), "one of each partition for each step"
        pushes = [[position for position, task in enumerate(tasks) if task.name == "count" and task.id[1] == step] for step in range(5)]
        for task in updates if workers > 1 else ():
            step, number = task.id[1], task.id[4]
            waits = {position for position in task.predecessors if tasks[position].name == "count"}
            own = {position for position in pushes[step - 1] if tasks[position].id[4] == number} if step else set()
            assert waits == own and len(own) == (workers if step else 0)


@pytest.mark.parametrize("workers", [6, 9])
def test_owner_that_is_never_idle_is_the_limit(graph: OperatorGraph, workers: int) -> None:
    found = steady(one_server(graph, workers), graph, Fixed())
    assert found.period is not None
    assert found.period.duration_ns == found.period.leases * workers * OWNED_NS
    assert found.samples_per_second == pytest.approx(8e9 / OWNED_NS, rel=1e-12)
    assert found.idle[0] == 0


def test_narrowest_link_is_the_limit(graph: OperatorGraph) -> None:
    """Into the server go more bytes than out of it; each takes 100 ns. Eight workers come near it: now and then all wait for answers."""
    plan = one_server(graph, 8)
    traffic = traffic_of(graph, design_of(plan, graph))
    places = traffic.design.layout.places
    into = sum(traffic.asking(place) for place in places[:TABLES]) + traffic.pulling() + sum(map(traffic.push, places))
    out = sum(traffic.sums(place) for place in places[:TABLES]) + traffic.values(places[-1]) + len(places) * traffic.counted()
    found = steady(plan, graph, Fixed(), bandwidth=1e7)
    assert into > out
    bound = 8e9 / (100 * into)
    assert 0.9 * bound < found.samples_per_second <= bound
    assert found.link_busy[1] == pytest.approx(found.samples_per_second / bound, rel=1e-3)
    assert (found.link_bytes[0], found.link_bytes[1]) == (8 * out, 8 * into)
    assert found.link_bytes[2:4] == (into, out)


@pytest.mark.slow
def test_publications_bound_of_one_input_pipeline() -> None:
    """1008 entries of 20 bytes for each of 512 samples, at 150 MB/s: 14.5 batches a second leave one pipeline (with 1000: 14.6)."""
    graph = load_model("zoo:full_sparse", plan_only=True).graph
    design = naive(graph, [0], [1], [2], 512, ASYNC)
    traffic = PublishedTraffic(design, needs_of_graph(graph, [*design.layout.tables], 512))
    sent = sum(traffic.asking(place) for place in design.layout.places[:3])
    assert sent == pytest.approx(512 * 1008 * 20, rel=1e-4)
    found = simulate(star(3, 150e6), replace(traffic, design=replace(design, in_flight=3)), Fixed())
    assert 0.97 * 14.53 < found.samples_per_second / 512 <= 14.53


@pytest.mark.parametrize("bandwidth", [1e15, 1e7, 1e6])
@pytest.mark.parametrize("word", ["sync", "async"])
def test_nothing_is_quicker_than_its_bound(graph: OperatorGraph, bandwidth: float, word: str) -> None:
    """And one lane alone, whose messages and work nobody holds up, is as quick as it, if messages take hardly any time."""
    for plan in (one_server(graph, 1, word), one_server(graph, 4, word), bipartite(graph, [3, 4], range(3), 8, parse(word), axis=1)):
        design = design_of(plan, graph)
        topology, traffic = star(1 + max(design.roles), bandwidth), traffic_of(graph, design)
        found, bound = simulate(topology, traffic, Fixed()), rate_bound(topology, traffic, Fixed(), alike=True)
        assert found.samples_per_second <= bound
        if len(design.lanes) == 1 and bandwidth == 1e15:
            assert bound < 1.01 * found.samples_per_second


def test_streamed_messages_hold_each_link_by_itself() -> None:
    """800,000 bytes at 1 byte a ns, in 8 chunks over 2 links. Two messages of one sender and a third one to the second's target: whole
    messages take turns, so that the third one waits for both."""

    def ended_ns(pairs: Sequence[tuple[int, int]], *, streamed: bool) -> list[int]:
        tasks = TaskList(Communication(star(4, 1e9)))
        ends = list[tuple[int, ...]]()
        for number, (source, target) in enumerate(pairs):
            what = (0, number, 0, 0, 0, 0), "m", TaskKind.TRANSFER, source, target, 800_000, ()
            ends.append(tasks.streamed(*what, 100_000) if streamed else (tasks.message(*what),))
        assert len(tasks.tasks) == len(pairs) * (16 if streamed else 1)
        found = play(tasks.tasks, tasks.topology).end_ns
        return [int(max(found[list(own)])) for own in ends]

    assert ended_ns([(0, 1)], streamed=True) == ended_ns([(0, 1)], streamed=False) == [800_000]
    pairs = [(0, 1), (0, 2), (3, 2)]
    assert ended_ns(pairs, streamed=False) == [800_000, 1_600_000, 2_400_000]
    assert max(ended_ns(pairs, streamed=True)) == 1_600_000


def test_synchronous_workers_go_with_the_slowest(graph: OperatorGraph) -> None:
    slow = Fixed(slower={2: 10})
    alone = steady(bipartite(graph, [2], [0], 8, SYNC), graph, slow)
    both = steady(one_server(graph, 2, "sync"), graph, slow)
    assert alone.period == Period(1, 3004 + 10 * 3000 + (TABLES + 1) * 600)
    assert both.period == Period(1, 3004 + 10 * 3000), "the quick one has asked, and all is updated, before the slow one asks"
    assert both.waiting_ns[0] > 0 == both.waiting_ns[1]
    free = steady(one_server(graph, 2), graph, slow)
    assert free.samples_per_second > both.samples_per_second and free.waiting_ns == (0, 0)


@pytest.mark.slow
def test_looser_bounds_are_no_slower_and_staleness_keeps_to_them(graph: OperatorGraph) -> None:
    delays = Delays(0.8, seed=1)
    words = ("sync", "bounded:1", "bounded:4", "async")
    found = [steady(one_server(graph, 3, word), graph, Fixed(front=20_000), delays=delays, most_leases=64) for word in words]
    assert [a.samples_per_second < b.samples_per_second for a, b in pairwise(found)] == [True] * 3
    assert [sum(a.waiting_ns) > sum(b.waiting_ns) for a, b in pairwise(found)] == [True] * 3
    for word, own in zip(words[:3], found, strict=False):
        most = most_missing(parse(word).bound)
        assert most is not None and max(own.staleness) == most
    again = steady(one_server(graph, 3), graph, Fixed(front=20_000), delays=delays, most_leases=64)
    assert again == found[-1]


SURE = 4
"""Standard errors: what lies within so many of a value is not told apart from it."""


@FEW
@given(st.sampled_from(["sync", "bounded:1", "async"]), st.integers(1, 4), st.sampled_from([0.1, 0.4, 1.0]), st.integers(0, 2**20))
def test_random_delays_make_nothing_quicker(graph: OperatorGraph, word: str, workers: int, spread: float, seed: int) -> None:
    """Their mean is 1. Where lanes hardly meet, no worker is quicker by them, and one alone is as quick. Where they share owners and links,
    the bound of what a lease takes holds; below it workers in step may gain, as delays keep them from asking all at once."""
    plan, delays = one_server(graph, workers, word), Delays(spread, seed)
    apart = Fixed(front=200_000, rest=300_000, look_up=1, gradient=1, count=1, update=1, pull=1)
    plain = steady(plan, graph, apart).samples_per_second
    found = steady(plan, graph, apart, delays=delays)
    above = found.samples_per_second / plain - 1
    assert above < SURE * found.error + 1e-3
    assert workers > 1 or above > -SURE * found.error - 1e-3
    together = steady(plan, graph, Fixed(front=2000), delays=delays, bandwidth=1e9)
    design = design_of(plan, graph)
    bound = rate_bound(star(1 + workers, 1e9), traffic_of(graph, design), Fixed(front=2000), alike=True)
    assert together.samples_per_second < bound * (1 + SURE * together.error)


def test_rates_count_parts_of_leases_at_the_borders() -> None:
    """Of intervals with mean 1, windows of eight say so on average; the first and the last that end within would say 1.1."""
    draws = np.random.default_rng(0).lognormal(-log(2) / 2, sqrt(log(2)), (4000, 64))
    ends = np.cumsum(draws, 1)
    rates = [rate_of([own], 16, 24) for own in ends]
    assert np.mean(rates) == pytest.approx(1, abs=SURE * np.std(rates) / sqrt(len(rates)))
    whole = [own[(own >= 16) & (own <= 24)] for own in ends]
    assert np.mean([(len(own) - 1) / (own[-1] - own[0]) for own in whole if len(own) > 1]) > 1.05
    assert rate_of([np.array([10, 20, 30]), np.array([5, 25, 45])], 10, 30) * 20 == pytest.approx(2 + (1 + 5 / 20) - 5 / 20)


@pytest.mark.slow
def test_error_says_how_far_seeds_are_apart(graph: OperatorGraph) -> None:
    plan = one_server(graph, 3, "sync")
    found = [steady(plan, graph, Fixed(front=20_000), delays=Delays(0.5, seed), most_leases=64) for seed in range(10)]
    rates = [own.samples_per_second for own in found]
    between = np.std(rates, ddof=1) / np.mean(rates)
    assert between / 2 < np.mean([own.error for own in found]) < 2 * between
    assert not any(own.settled for own in found), "64 leases with a spread of a half do not tell 1%"
    calm = steady(plan, graph, Fixed(front=20_000), delays=Delays(0.02))
    assert calm.settled and 0 < calm.error < 0.01
    assert steady(plan, graph, Fixed()).error == 0


@pytest.mark.parametrize(("wave", "bound"), [(1, 2), (3, 0), (3, 1)])
def test_leases_begin_as_soon_as_clocks_let_them(graph: OperatorGraph, wave: int, bound: int) -> None:
    """``Clocks`` are told of all that happens, and refuse what may not begin; what their bound allows is reached."""
    design = replace(design_of(one_server(graph, 3, f"bounded:{bound}"), graph), in_flight=wave)
    found = steady(design, graph, Fixed(front=20_000), delays=Delays(1.0), most_leases=64)
    assert max(found.staleness) == most_missing(bound, wave)
    assert [required(design, lease) for lease in (0, (bound + 1) * wave - 1, (bound + 2) * wave - 1)] == [
        range(0), range(0), range(wave)
    ]  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
def test_bytes_are_those_of_a_real_lease(axis: int, tmp_path: Path) -> None:
    layout, data = layout_of(2, 3, axis), samples(8)
    design = Design((Lane(2, 2),), (0, 1), layout, 8, ASYNC)
    with serving(layout, tmp_path) as servers:
        worker = Worker(SOURCE, data, layout, servers.address, SECRET)
        device = Told()
        clock.install(device)
        try:
            report = worker.work(0, range(8))
        finally:
            clock.install(None)
        inputs = data.batch(range(8))
        needs = needs_of_batch(SOURCE.load(plan_only=True).graph, design, worker._cut(inputs).look_ups(inputs))
    found = simulate(star(3), Traffic(design, needs), Fixed())
    assert (found.link_bytes[4], found.link_bytes[5]) == (report.sent_bytes, report.received_bytes)
    assert sum(found.link_bytes[:4]) == report.sent_bytes + report.received_bytes
    assert device.calls == ["catch_up", "resume"] * 2  # read, push: an emulated device waits for what it has computed before


def test_needs_of_a_graph_are_those_of_its_batches() -> None:
    graph, layout = SOURCE.load(plan_only=True).graph, layout_of(1, 1, 0)
    design, data = Design((Lane(1, 1),), (0,), layout, 8, ASYNC), samples(8)
    exact = needs_of_batch(graph, design, Cut(SOURCE.load()).look_ups(data.batch(range(8))))
    found = needs_of_graph(graph, [*layout.tables], 8)
    assert {name: replace(own, shares=()) for name, own in exact.tables.items()} == dict(found.tables)
    assert found.input_bytes == 8 * 8
    half = needs_of_graph(graph, [*layout.tables], 4)
    assert [(own.bags, own.entries) for own in half.tables.values()] == [(4, 12)] * 2
    with pytest.raises(ElasticError, match="leases of 3 samples of a model for 8; expected a number that divides it"):
        needs_of_graph(graph, [*layout.tables], 3)


def test_servers_beside_gpus_compute_on_cores_of_their_host(graph: OperatorGraph) -> None:
    """With two cores two leases' sums are computed at once, but not of one partition."""
    topology = star([GPU, GPU, GPU])
    topology = replace(topology, hosts=tuple(Host(host.name, 2, None) for host in topology.hosts))
    found = simulate(topology, traffic_of(graph, design_of(one_server(graph, 2), graph)), Fixed(front=1, rest=1))
    alone = simulate(star(3), traffic_of(graph, design_of(one_server(graph, 2), graph)), Fixed(front=1, rest=1))
    assert alone.samples_per_second == pytest.approx(8e9 / OWNED_NS, rel=0.01)
    assert 1.2 * alone.samples_per_second < found.samples_per_second < 2 * alone.samples_per_second
    locks = {task.resources[-1] for task in unroll(topology, traffic_of(graph, found.design), Fixed(), 1).tasks if len(task.resources) > 1}
    assert len([lock for lock in locks if lock >= 3 + 6 + 6]) == TABLES + 1


def test_three_designs_of_the_same_machines(graph: OperatorGraph) -> None:
    costs = RooflineCosts(star(4))
    designs = {
        "bipartite": design_of(bipartite(graph, [2, 3], [0, 1], 8, ASYNC), graph),
        "fully connected": design_of(fully_connected(graph, range(4), 8, ASYNC), graph),
        "naive": naive(graph, [2], [0, 1], [3], 8, ASYNC),
    }
    found = {}
    for name, design in designs.items():
        traffic = traffic_of(graph, design)
        found[name] = simulate(star(4, 1e9), traffic, EstimatedWork(graph, star(4), costs, traffic))
    assert {name: own.stateful for name, own in found.items()} == {"bipartite": 2, "fully connected": 4, "naive": 3}
    assert {*found["naive"].idle_by_role} == {"input", "server", "rest"}
    assert {*found["fully connected"].idle_by_role} == {"worker and server"}
    assert found["naive"].samples_per_second < min(found[name].samples_per_second for name in ("bipartite", "fully connected"))


def test_estimates_shrink_with_partitions_and_leases(graph: OperatorGraph) -> None:
    def work(partitions: int, batch: int, axis: int = 0) -> tuple[EstimatedWork, Design]:
        design = design_of(bipartite(graph, [1], [0], batch, ASYNC, partitions=partitions, axis=axis), graph)
        return EstimatedWork(graph, star(2), RooflineCosts(star(2)), traffic_of(graph, design)), design

    whole, design = work(1, 8)
    place, lane = design.layout.places[0], design.lanes[0]
    for other, cut in (work(2, 8), work(2, 8, 1), work(1, 4)):
        own = cut.layout.places[0]
        assert other.look_up_ns(own) <= whole.look_up_ns(place)
        assert other.gradient_ns(own) < whole.gradient_ns(place)
        assert other.count_ns(own) < whole.count_ns(place)
    assert work(1, 4)[0].rest_ns(lane) < whole.rest_ns(lane)
    assert work(1, 4)[0].front_ns(lane) < whole.front_ns(lane)


def test_update_of_a_step_is_less_than_those_of_its_leases(graph: OperatorGraph) -> None:
    """Rows that several leases touch are updated once. In step a push is kept alone."""
    found = {}
    for word in ("sync", "async"):
        design = design_of(bipartite(graph, [1, 2, 3, 4], [0], 2, parse(word)), graph)
        work = EstimatedWork(graph, star(5), RooflineCosts(star(5)), traffic_of(graph, design))
        found[word] = [(work.count_ns(place), work.update_ns(place)) for place in design.layout.places]
    for (kept, together), (applied, _) in zip(found["sync"], found["async"], strict=True):
        assert kept < applied
        assert applied - kept < together < 4 * (applied - kept)


def test_plans_that_cannot_be(graph: OperatorGraph) -> None:
    with pytest.raises(ElasticError, match="0 workers, 1 servers"):
        steady(bipartite(graph, [], [0], 8, ASYNC), graph, Fixed())
    plan = one_server(graph, 1)
    with pytest.raises(ElasticError, match="has no server; expected one at least for the dense variables"):
        design_of(replace(plan, dense=()), graph)
    with pytest.raises(ElasticError, match="is on server 1; expected 0 to 0"):
        design_of(replace(plan, dense=(1,)), graph)
    with pytest.raises(ElasticError, match="'elsewhere' is no table"):
        design_of(replace(plan, tables={"elsewhere": plan.tables["layers.0.weight"]}), graph)
    with pytest.raises(ElasticError, match="delays of spread -1"):
        Delays(-1)
