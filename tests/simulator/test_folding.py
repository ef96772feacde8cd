"""A folded simulation beside the whole one: every task of both copies that are left, and what the other copies do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from soap import api
from soap.cluster.overheads import CollectiveLatencyFactor
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.copies import LEFT, find_copies
from soap.plan.delivery import box_bytes
from soap.profiles.roofline import RooflineCosts
from soap.schedules.named import parse
from soap.simulator.drawn_times import reference_times_ns
from soap.simulator.draws import Draws, links_between_hosts
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folding import CopiesBuilders, Folding, fold
from soap.simulator.lowering import PlanBuilder, lower
from soap.simulator.memory.sweep import with_allowance
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import Task, TaskGraph, TaskKind
from soap.strategy.classical import data_parallel, hybrid, megatron
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.megatron import staged
from soap.strategy.named import named
from soap.strategy.stages import stages_of
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, parameter_server
from tests.extent import MANY, USUAL, every, rows_often
from tests.graph_builder import GraphBuilder, counting, mlp, transformer
from tests.simulator.copied import Case, copied
from tests.simulator.examples import ExampleSpreads, LaunchedCosts
from tests.simulator.two_step import registered
from tests.strategies import CPU, GPU, cluster, with_rails


def place(task: Task) -> tuple[int, ...]:
    """What of a task's id is the same in all copies: not the numbers of tiles and devices."""
    return task.id[:1] if task.kind is TaskKind.UPDATE else task.id[:3]


def needing(tasks: TaskGraph, task: Task) -> tuple[int]:
    """The device whose tile needs something: of a task that holds nothing."""
    plan = tasks.plan
    return (plan.tiles[plan.first_tile[len(plan.graph.operators) - 1 - task.id[1]] + task.id[3]].device,)


def check(graph: OperatorGraph, topology: Topology, strategy: Strategy, folding: Folding, training: PlannedTraining = PLAIN) -> None:
    """Everything about two copies is the same as in the whole simulation, and the other copies do as copy 1."""
    costs = LaunchedCosts(topology)
    whole = lower(PlanBuilder(graph, topology, training).build(strategy), topology, costs)
    small = lower(folding.plan, folding.topology, costs, folding.communication)
    times, small_times = simulate(whole), simulate(small)
    assert small_times.makespan_ns == times.makespan_ns
    images, count = folding.copies.images, topology.device_count
    copy_of = {device: min(j, LEFT) for j, own in enumerate(images.tolist()) for device in own}
    links = {link: min(j, LEFT) for j, own in enumerate(folding.local.tolist()) for link in own}
    rank = {device: i for i, device in enumerate(folding.copies.devices)}
    expected, others, first = Counter(), Counter(), Counter()
    for task, start, end in zip(whole.tasks, times.start_ns.tolist(), times.end_ns.tolist(), strict=True):
        kinds = {copy_of[r] if r < count else links.get(r - count, -1) for r in task.resources or needing(whole, task)}
        told = (place(task), task.kind, start, end, task.bytes)
        if kinds == {LEFT}:
            others[told] += 1
            continue
        if kinds == {1}:
            first[told] += 1
        held = {rank.get(r, -1) if r < count else folding.alike[r - count] for r in task.resources}
        shift = 0 if not task.resources or task.resources[0] < count else folding.topology.device_count
        held = {r + shift for r in held if r >= 0}
        expected[told, frozenset(held)] += 1
    folded = FoldedSimulation(folding, small, small_times, 0)
    found = Counter(
        ((place(task), task.kind, start, end, moved), frozenset(task.resources))
        for task, start, end, moved in zip(
            small.tasks, small_times.start_ns.tolist(), small_times.end_ns.tolist(), folded.task_bytes, strict=True
        )
    )
    assert found == expected
    assert others == Counter({told: number * (len(images) - LEFT) for told, number in first.items()})


def check_outcome(
    graph: OperatorGraph, topology: Topology, strategy: Strategy, folding: Folding, training: PlannedTraining = PLAIN
) -> None:
    """What reports say of all devices and links."""
    costs = RooflineCosts(topology)
    whole = Simulator(graph, topology, costs, training=training).run(strategy)
    small = lower(folding.plan, folding.topology, costs, folding.communication)
    folded = FoldedSimulation(folding, small, simulate(small), whole.optimizer_states)
    assert folded.topology is whole.topology
    assert folded.task_count == len(whole.tasks.tasks)
    assert folded.peak_bytes == whole.peak_bytes
    assert folded.overflow_bytes == whole.overflow_bytes
    assert folded.bytes_moved == whole.bytes_moved
    assert folded.messages == whole.messages
    draws = Draws(ExampleSpreads(), 2)
    assert reference_times_ns(folded, draws) == reference_times_ns(whole, draws)
    assert folded.busy_ns == whole.busy_ns
    assert folded.link_bytes == whole.link_bytes
    assert folded.critical_path_ns == whole.critical_path_ns


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(copied(), st.sampled_from((PLAIN, PlannedTraining(clips=True))), st.booleans())
def test_folded_is_whole(case: Case, training: PlannedTraining, own_samples: bool) -> None:
    graph, topology, strategy = case
    graph, topology = counting(graph) if own_samples else graph, replace(topology, own_samples=own_samples)
    folding = fold(graph, topology, strategy, training)
    if isinstance(folding, str):
        event(f"not folded: {folding.split(' ')[0:6]}")
        return
    event(f"folded over {folding.count}")
    check(graph, topology, strategy, folding, training)
    check_outcome(graph, topology, strategy, folding, training)


def test_strategies_that_divide_operators_alike_share_a_builder_and_get_the_same_plans() -> None:
    graph, topology = transformer(16), api.load_cluster("p100-4x4")
    builders = CopiesBuilders(graph, topology)
    names = ("data_parallel", "recompute", "data_parallel+selective", "zero1", "fsdp+recompute")
    for name in names:
        strategy = named(name, graph, topology)
        own, shared = fold(graph, topology, strategy), fold(graph, topology, strategy, builders=builders)
        assert isinstance(own, Folding) and isinstance(shared, Folding)
        assert shared.plan == own.plan and shared.plan.strategy == own.plan.strategy and shared.topology == own.topology
    again = fold(graph, topology, replace(strategy, prefetch=2), builders=builders)
    assert isinstance(again, Folding) and again.communication is shared.communication  # nothing that decides about copies has changed
    assert len({id(builders.builder(find_copies(graph, named(name, graph, topology), 16), own.builder.topology)) for name in names}) == 1


def test_a_link_that_stands_for_those_between_hosts_is_one() -> None:
    """Two copies on one host: none of their links leads to another, but the sum that they take part in does."""
    graph, topology = mlp(), api.load_cluster("p100-4x4")
    strategy = data_parallel(graph, topology)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding) and len(folding.topology.hosts) == 1
    options = [list(option.links) for common in folding.communication.common.values() for option in common.small]
    assert options and all(folding.between_hosts[links].any() for links in options)
    assert not all(links_between_hosts(folding.topology)[links].any() for links in options)
    check_outcome(graph, topology, strategy, folding)


def test_copies_of_which_only_some_devices_have_a_host_for_themselves_are_not_folded() -> None:
    """Where nobody else is on its host, all links of a device lead to other hosts."""
    graph, spread = transformer(batch=6), (0, 2, 4, 6, 8, 9)
    whole = hybrid(graph, cluster([1] * 6), tensor=2, pipeline=1)
    moved = {
        name: config.placed(config.degrees, tuple(spread[device] for device in config.devices), config.replicas)
        for name, config in whole.operators.items()
    }
    assert isinstance(fold(graph, cluster([2] * 6), Strategy(moved).with_changes(operators=_on(moved, 9, 10))), Folding)
    assert _reason(graph, cluster([2, 2, 2, 2, 1, 1]), Strategy(moved)) == "3 copies have links of which some lead between hosts"


def _on(configs: Mapping[str, OpConfig], before: int, after: int) -> dict[str, OpConfig]:
    """The same with another device in place of one."""
    return {
        name: config.placed(config.degrees, tuple(after if one == before else one for one in config.devices), config.replicas)
        for name, config in configs.items()
    }


SHARED = [SHARDED_STATE, SHARDED]
IN_HOSTS = [replace(sync, within="host") for sync in SHARED]


def shared(strategy: Strategy, graph: OperatorGraph, sync: SyncConfig) -> Strategy:
    """All parameters so."""
    return strategy.with_changes(parameters={tensor.name: sync for tensor in graph.parameters})


@pytest.mark.parametrize("sync", SHARED, ids=["zero", "fsdp"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_equal_parts_are_folded_exactly(sync: SyncConfig, tensor: int) -> None:
    """Each reader owns as many rows of everything, among six devices or, where matrices are cut in two, among three."""
    g, topology = GraphBuilder(), cluster([2, 2, 2], GPU)
    x = g.elementwise(g.linear(g.input("x", 12, 24), 48, name="first"), name="act")
    graph = g.build(g.mean(g.linear(g.linear(x, 24, name="second"), 12, name="third"), name="loss"))
    strategy = shared(hybrid(graph, topology, tensor=tensor, pipeline=1), graph, sync)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding) and folding.exact and folding.count == 6 // tensor
    readers = {(sync.readers, sync.cluster_readers) for sync in folding.plan.syncs}
    assert readers == ({((0, 1), 6)} if tensor == 1 else {((0, 2), 3), ((1, 3), 3), ((0, 1, 2, 3), 6)})
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)


@pytest.mark.parametrize("sync", [*IN_HOSTS, None], ids=["zero", "fsdp", "two_step"])
@pytest.mark.parametrize(("kind", "tensor"), [(GPU, 1), (GPU, 2), (CPU, 1)])
def test_what_stays_inside_hosts_is_folded_exactly(sync: SyncConfig | None, kind: DeviceType, tensor: int) -> None:
    """A copy is a host with all that its devices exchange; between hosts there are sums of what one of each has."""
    g, topology = GraphBuilder(), cluster([4, 4, 4], kind)
    x = g.elementwise(g.linear(g.input("x", 24, 24), 48, name="first"), name="act")
    graph = g.build(g.mean(g.linear(g.linear(x, 24, name="second"), 12, name="third"), name="loss"))
    with registered():
        strategy = shared(hybrid(graph, topology, tensor=tensor, pipeline=1), graph, sync or SyncConfig(payload="two steps", within="host"))
        folding = fold(graph, topology, strategy)
        assert isinstance(folding, Folding) and folding.exact and folding.count == 3
        assert all(own.aggregated and own.cluster_readers is None for own in folding.plan.syncs)
        check(graph, topology, strategy, folding)
        check_outcome(graph, topology, strategy, folding)


@settings(USUAL, suppress_health_check=list(HealthCheck))
@given(copied(), st.sampled_from(SHARED))
def test_unequal_parts_are_folded_to_no_less(case: Case, sync: SyncConfig) -> None:
    """Copy 1 owns a row more of each region than others at most, and nothing is below what the whole simulation says."""
    graph, topology, strategy = case
    strategy = shared(strategy, graph, sync)
    folding = fold(graph, topology, strategy)
    if isinstance(folding, str):
        return
    if folding.exact:
        check(graph, topology, strategy, folding)
        check_outcome(graph, topology, strategy, folding)
        return
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    assert simulator.run_folded(strategy) == "readers own unequal parts of parameters"
    whole, folded = simulator.run(strategy), simulator.run_folded(strategy, nearly=True)
    assert isinstance(folded, FoldedSimulation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("soap.simulator.simulate.MANY_TILES", 0)  # what is large is played so
        assert simulator.predict(strategy) is simulator.outcome(strategy) is folded
    plan = folding.plan
    regions = [(region.box, box_bytes(plan, region.parameter, region.box)) for sync in plan.syncs for region in sync.regions]
    rows = [size // (box[0][1] - box[0][0]) if box else size for box, size in regions]
    assert folded.task_count >= len(whole.tasks.tasks)  # an empty part has no task
    assert folded.makespan_ns >= whole.makespan_ns
    for mine, all_of_it in zip(folded.peak_bytes, whole.peak_bytes, strict=True):
        assert 0 <= mine - all_of_it <= with_allowance(16 * sum(rows))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline", "copies"), every(3, [(2, 2, 4), (1, 1, 16), (2, 1, 8), (1, 4, 4), (4, 1, 4)]))
def test_a_transformer_in_three_dimensions(tensor: int, pipeline: int, copies: int) -> None:
    graph, topology = api.load("zoo:gpt:tiny@16", plan_only=True).graph, api.load_cluster("p100-4x4")
    strategy = hybrid(graph, topology, tensor=tensor, pipeline=pipeline)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding)
    assert folding.copies.images.tolist() == [[j * 16 // copies + i for i in range(16 // copies)] for j in range(copies)]
    assert len(folding.plan.tiles) * copies == LEFT * sum(len(config.devices) for config in strategy.operators.values())
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "tensor", "count"),
    rows_often([("1f1b", 2, 2, 4), ("gpipe", 2, 1, 2), ("interleaved:2", 2, 2, 4)], {("1f1b", 2, 2, 4)}),
)
def test_a_pipeline_in_micro_batches(schedule: str, stages: int, tensor: int, count: int) -> None:
    """Copies inside each stage, a host of eight devices of which groups split matrices together, and each of which has a NIC."""
    graph, topology = api.load("zoo:gpt:tiny@16", plan_only=True).graph, api.load_cluster("h200-2x8")
    groups = [tuple(range(8 * stage, 8 * stage + 8)) for stage in range(stages)]
    each = parse(schedule).chunks
    chunks = [position * stages * each // len(graph.operators) for position in range(len(graph.operators))]
    made = staged(graph, topology, [chunk % stages for chunk in chunks], groups, tensor=tensor, microbatches=count)
    strategy = replace(made, microbatches=count, stages=stages_of(graph, chunks), schedule=schedule)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding) and folding.count == 8 // tensor
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)


def test_copies_have_their_part_of_every_micro_batch() -> None:
    g = GraphBuilder()
    first = g.linear(g.input("x", 24, 4), 4, name="first")
    graph, topology = g.build(g.mean(g.linear(first, 4, name="second"), name="loss")), cluster([1] * 3)
    usual = data_parallel(graph, topology)
    strategy = replace(usual, microbatches=2)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding) and folding.count == 3
    check(graph, topology, strategy, folding)
    assert [tile.intervals[0] for tile in folding.plan.tiles if tile.operator == 0] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert _reason(graph, topology, replace(usual, microbatches=5)) == "5 micro-batches of different sizes"


def test_the_first_copy_may_do_more() -> None:
    """What follows a summed loss is done by one device."""
    g = GraphBuilder()
    loss = g.mean(g.linear(g.input("x", 6, 4), 3, name="first"), name="sum")
    graph = g.build(g.elementwise(loss, name="tail"))
    topology = cluster([2, 2, 2])
    spread = data_parallel(graph, topology)
    for devices in ((0,), tuple(range(6))):
        tail = spread.operators["tail"].placed(spread.operators["tail"].degrees, devices, len(devices))
        strategy = spread.with_operator("tail", tail)
        folding = fold(graph, topology, strategy)
        assert isinstance(folding, Folding) and folding.count == 6
        check(graph, topology, strategy, folding)
        check_outcome(graph, topology, strategy, folding)


def test_copies_that_share_a_cable_are_folded_in_pairs() -> None:
    """Two copies of two stages on the same two hosts send over the same card; together they have it for themselves."""
    g = GraphBuilder()
    first = g.linear(g.input("x", 12, 4), 4, name="first")
    graph = g.build(g.mean(g.linear(first, 4, name="second"), name="loss"))
    topology = cluster([2, 2, 2, 2, 2, 2])
    low, high = (0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)
    stages = {"first": low, "second": high, "loss": high}
    degrees = {op.name: (6, *[1] * (len(op.factors) - 1)) for op in graph.operators}
    strategy = Strategy({name: OpConfig(degrees[name], own) for name, own in stages.items()})
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding)
    assert folding.copies.images.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_copies_on_rails_are_folded(per_host: int) -> None:
    """Sums over all hosts are rings on all rails; each copy has its own NICs."""
    g = GraphBuilder()
    graph = g.build(g.mean(g.linear(g.linear(g.input("x", 12, 4), 4, name="first"), 4, name="second"), name="loss"))
    topology = with_rails(cluster([per_host] * 3))
    strategy = data_parallel(graph, topology)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding) and folding.count == 3 * per_host
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)


def test_copies_on_measured_links_are_folded_with_their_factor() -> None:
    graph, base = transformer(batch=6), cluster([2, 2, 2])
    topology = replace(base, described=base.links, latency_factor=CollectiveLatencyFactor(((2, 3.0), (6, 2.0)), ()))
    strategy = hybrid(graph, topology, tensor=2, pipeline=1)
    folding = fold(graph, topology, strategy)
    assert isinstance(folding, Folding) and folding.count == 3
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)


def _reason(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> str:
    found = fold(graph, topology, strategy)
    assert isinstance(found, str)
    return found


def test_reasons_why_not() -> None:
    graph, topology = transformer(batch=4), cluster([1, 1, 1, 1])
    spread = data_parallel(graph, topology)
    name, parameter = graph.operators[0].name, graph.parameters[0].name
    assert isinstance(fold(graph, topology, spread), Folding)
    assert _reason(graph, topology, spread.with_parameter(parameter, parameter_server(1))) == (
        "synchronization by parameter_server moves more than sums between copies"
    )
    assert _reason(graph, cluster([2]), data_parallel(graph, cluster([2]))) == "at most 2 devices in use"
    alone = fold(graph, topology, spread.with_parameter(parameter, SHARDED_IN_HOSTS))  # there is nobody to share with
    assert isinstance(alone, Folding) and alone.plan.syncs == fold(graph, topology, spread).plan.syncs  # type: ignore[union-attr]
    processors = cluster([1, 1, 1, 1], CPU)
    own = spread.with_parameter(parameter, SHARDED)
    assert _reason(graph, processors, own) == (
        "4 copies of which devices send each other what they synchronize"
    )
    turned = spread.with_operator(name, replace(spread.operators[name], devices=(1, 0, 2, 3)))
    assert _reason(graph, topology, turned) == "4 copies share devices"
    whole = spread.with_operator(name, spread.operators[name].placed((1,) * len(spread.operators[name].degrees), (0,)))
    assert _reason(graph, topology, whole) == "device 1 works outside of 4 equal copies"
    mixed = tuple(replace(device, type=CPU if device.index == 3 else GPU) for device in topology.devices)
    assert _reason(graph, replace(topology, devices=mixed), spread) == "4 copies on devices of different types"
    uneven = cluster([1, 1, 1, 2])
    assert isinstance(fold(graph, uneven, spread), Folding)  # nothing is inside of a copy, and the spare device is idle
    wide = cluster([2, 2, 2, 2])
    tensor = megatron(graph, wide)
    assert isinstance(fold(graph, wide, tensor), Folding)
    links = [replace(link, latency_seconds=1.0) if link.source == "host1/device0" else link for link in wide.links]
    assert _reason(graph, replace(wide, links=tuple(links)), tensor) == "4 copies have links of different bandwidth or latency"


def mesh(*joined: tuple[str, str, float]) -> Topology:
    """Six GPUs of one host; pairs of them, or of them and a switch, are joined both ways at a bandwidth."""
    devices = tuple(Device(i, f"d{i}", 0, GPU) for i in range(6))
    ways = [(a, b, rate) for one, other, rate in joined for a, b in ((one, other), (other, one))]
    links = tuple(Link(i, f"{a}->{b}", a, b, rate, 1e-6) for i, (a, b, rate) in enumerate(ways))
    return Topology("mesh", devices, (Host("h", 4, 2**34),), links)


def test_sums_that_hold_other_links_in_some_copies_are_not_folded() -> None:
    """There is one ring through all devices. It uses the links of the first two copies, and not that of the third."""
    graph, pairs = transformer(batch=6), ("01", "14", "42", "23", "35", "50", "45")
    topology = mesh(*((f"d{one}", f"d{other}", 1e9) for one, other in pairs))
    strategy = hybrid(graph, topology, tensor=2, pipeline=1)
    assert _reason(graph, topology, strategy) == "sums over 3 copies do not hold corresponding links in all of them"


def test_copies_whose_messages_avoid_their_own_link_are_not_folded() -> None:
    """A message is faster over the switch than over the narrow link that a sum of two devices takes."""
    narrow = [(f"d{i}", f"d{i + 1}", 1e6) for i in (0, 2, 4)]
    graph, topology = transformer(batch=6), mesh(*narrow, *((f"d{i}", "switch", 1e9) for i in range(6)))
    strategy = hybrid(graph, topology, tensor=2, pipeline=1)
    assert _reason(graph, topology, strategy) == "3 copies in which sums and messages take different links"
