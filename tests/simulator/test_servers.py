"""Parameter servers and gathered rows: which tasks there are, where they run, what they move, and how long they take."""

from __future__ import annotations

import pytest
from hypothesis import given

from soap.cluster.topology import DeviceType, Topology
from soap.errors import StrategyError
from soap.model.graph import WHOLE, DimMap, Factor, OperatorGraph
from soap.model.sparse_access import Lookup
from soap.plan.plan import ASK_NAME, serve_name, sync_name, update_name
from soap.plan.row_counts import DeviceLookups, row_bytes, sparse_lookup_operators, touched_rows
from soap.plan.syncs.amounts import INDEX_BYTES
from soap.plan.syncs.bucketing import shard_bytes
from soap.plan.tiling import Tile
from soap.simulator.analysis.timeline import busy_time_ns, chrome_trace, link_bytes, resource_names
from soap.simulator.communication.servers import HOST_CORE, core_names, first_cores, server_resources, server_type
from soap.simulator.communication.synchronizing import device_updates
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.tasks import TaskGraph, TaskKind
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from tests.extent import MANY
from tests.graph_builder import REDUCTION, SAMPLE, GraphBuilder
from tests.simulator.examples import (
    UNIT_NS,
    PointCosts,
    batch_split,
    by_name,
    chain,
    finish,
    on,
    pairwise_cluster,
    predecessors,
    strategy,
    units,
)
from tests.simulator.reference_memory.any_order import memory_use
from tests.strategies import CPU, GPU, cases, cluster

TWO = pairwise_cluster(1, 1)
SERVER, ROW_SERVER = parameter_server(), parameter_server(rows=True)
GATHER = SPARSE_ALL_GATHER


def lowered(graph: OperatorGraph, chosen: Strategy, topology: Topology = TWO) -> TaskGraph:
    return lower(build_plan(graph, chosen, topology), topology, PointCosts())


def looked_up(rows: int, width: int, batch: int) -> OperatorGraph:
    """``batch`` samples look up a row each in ``table``; no row twice."""
    g = GraphBuilder()
    return finish(g, g.embedding(g.input("ids", batch, dtype="int64"), rows, width, weight=g.parameter("table", rows, width), name="find"))


def test_gradients_are_pushed_and_values_pulled() -> None:
    graph = chain(4, 2, 3)
    tasks = lowered(graph, batch_split(graph, [0, 1]).with_parameter("l1.weight", SERVER))
    (served,) = tasks.plan.syncs
    assert (served.method, served.readers, served.shards) == ("parameter_server", (0, 1), (0,))
    schedule = simulate(tasks)
    spans = {task.name: (units(a), units(b)) for task, a, b in zip(tasks.tasks, schedule.start_ns, schedule.end_ns, strict=True)}
    assert spans["backward l1[1]"] == (24, 48)
    assert spans["push l1.weight[0]"] == (48, 72)
    assert spans["serve l1.weight[0]/0"] == (72, 72 + 24 + 1)  # 24 bytes are added, one update
    assert spans["pull l1.weight[0]"] == (97, 121)
    assert units(schedule.makespan_ns) == 121
    named, names = by_name(tasks), resource_names(tasks)
    assert named["push l1.weight[0]"].flows == ((1, 0, 24),) and named["pull l1.weight[0]"].flows == ((0, 1, 24),)
    assert [names[r] for r in named["push l1.weight[0]"].resources] == ["d1->d0"]
    assert [names[r] for r in named["serve l1.weight[0]/0"].resources] == ["d0"]  # a CPU serves itself
    assert predecessors(tasks, "push l1.weight[0]") == {"backward l1[0]", "backward l1[1]"}
    assert predecessors(tasks, "serve l1.weight[0]/0") == {"push l1.weight[0]"}
    assert not any(name.startswith(("sync", "update")) for name in named)
    assert link_bytes(tasks) == {"d0->d1": 24 + 4, "d1->d0": 24 + 4}  # beside the loss


def test_rows_are_pulled_before_the_step_and_pushed_behind_it() -> None:
    graph = looked_up(rows=8, width=3, batch=4)
    tasks = lowered(graph, batch_split(graph, [0, 1]).with_parameter("table", parameter_server(2, rows=True)))
    assert graph.sparse["table"].touched_by(2) == 2
    (served,) = (sync for sync in tasks.plan.syncs if sync.contract.has_servers)
    assert [tasks.plan.shards[i].devices for i in served.shards] == [(0,), (1,)] and served.method == "row_server"
    schedule = simulate(tasks)
    spans = {task.name: (int(a), int(b)) for task, a, b in zip(tasks.tasks, schedule.start_ns, schedule.end_ns, strict=True)}
    named = by_name(tasks)
    # each looks up two rows, one of them in each partition: 8 bytes say how many; 12 bytes come, 8 bytes say which
    asked = named[ASK_NAME]
    assert asked.flows == ((0, 1, 8), (1, 0, 8), (0, 1, 0), (1, 0, 0)) and asked.bytes == 16 and asked.predecessors == ()
    assert set(asked.resources) == {0, 1, *named["pull table[0]"].resources} and asked.cpu_overhead_ns == 0
    assert spans[ASK_NAME] == (0, 8 * UNIT_NS + 1)  # no time is less than a nanosecond
    assert named["pull table[0]"].flows == ((0, 1, 12 + 8), (1, 0, 12 + 8)) and predecessors(tasks, "pull table[0]") == {ASK_NAME}
    assert named["push table[0]"].flows == ((0, 1, 12), (1, 0, 12))
    assert spans["pull table[0]"] == (8 * UNIT_NS + 1, 28 * UNIT_NS + 1) and spans["forward find[0]"][0] == 28 * UNIT_NS + 1
    assert predecessors(tasks, "forward find[1]") == {"pull table[0]"}
    assert predecessors(tasks, "push table[0]") == {"backward find[0]", "backward find[1]"}
    assert predecessors(tasks, "serve table[0]/1") == {"push table[0]"}
    assert units(named["serve table[0]/1"].duration_ns) == 2 * 12 + 2 + 1  # two rows have to be found
    assert not any(name.startswith(("sync", "update")) for name in named)


def test_all_tables_are_asked_for_at_once_before_anything_is_computed() -> None:
    """With local aggregation the second device of a host tells the first one before; who has nothing to do with it goes on."""
    g = GraphBuilder()
    finds = [g.embedding(g.input(f"ids{i}", 6, dtype="int64"), 100, 3, name=f"find{i}") for i in range(2)]
    graph, topology = finish(g, *finds, g.linear(g.input("x", 6, 2), 3, bias=False, name="fc")), pairwise_cluster(2, 2)
    chosen = batch_split(graph, [0, 1, 2]).with_operator("fc", on(3, degrees=(1, 1, 1))).with_parameter("find0.weight", GATHER)
    for within, told in (("none", ()), ("host", ((1, 0, 8), (1, 0, 0)))):
        tasks = lowered(graph, chosen.with_parameter("find1.weight", parameter_server(1, within, rows=True)), topology)
        (asked,) = (task for task in tasks.tasks if task.name == ASK_NAME)
        (served,) = (sync for sync in tasks.plan.syncs if sync.contract.has_servers)
        (server,) = tasks.plan.shards[served.shards[0]].devices
        lists = {(a, b): 8 for a in range(3) for b in range(3) if a != b}
        for reader in sorted({*served.leaders} - {server}):
            lists[reader, server] = lists.get((reader, server), 0) + 8
        counted = tuple((a, b, size) for (a, b), size in sorted(lists.items()))
        assert asked.flows == (*told, *counted, *((a, b, 0) for a, b, _ in counted))
        first = {task.name: start for task, start in zip(tasks.tasks, simulate(tasks).start_ns, strict=True)}
        end = asked.duration_ns
        assert first[ASK_NAME] == 0 and first["forward fc[0]"] == (0 if server != 3 else end)
        assert min(start for name, start in first.items() if name.startswith("forward find")) == end


def test_rows_that_the_server_has_itself_do_not_travel() -> None:
    graph = looked_up(rows=8, width=3, batch=4)
    tasks = lowered(graph, batch_split(graph, [0]).with_parameter("table", ROW_SERVER))
    assert set(by_name(tasks)) == {"forward find[0]", "forward loss[0]", "backward find[0]", "backward loss[0]", "serve table[0]/0"}
    assert predecessors(tasks, "serve table[0]/0") == {"backward find[0]"}


def test_gathered_rows_update_every_copy() -> None:
    graph = looked_up(rows=100, width=3, batch=4)
    tasks = lowered(graph, batch_split(graph, [0, 1]).with_parameter("table", GATHER))
    gather = by_name(tasks)["gather table[0]"]
    assert gather.flows == ((0, 1, 2 * (12 + 8)), (1, 0, 2 * (12 + 8)))
    assert units(gather.duration_ns) == 40
    assert units(by_name(tasks)["update @1"].duration_ns) == 48 + 4 + 1  # what came and its own is added, each row found
    assert predecessors(tasks, "gather table[0]") == {"backward find[0]", "backward find[1]"}
    assert predecessors(tasks, "update @1") == {"gather table[0]", "backward find[1]", "backward loss[1]"}
    alone = lowered(graph, batch_split(graph, [1]).with_parameter("table", GATHER))
    assert "gather table[0]" not in by_name(alone) and units(by_name(alone)["update @1"].duration_ns) == 1


def test_other_parameters_are_summed_as_ever() -> None:
    graph = chain(4, 2, 3, 5)
    chosen, topology = batch_split(graph, [0, 1]), cluster([1, 1], GPU)
    tasks, plain = lowered(graph, chosen.with_parameter("l1.weight", SERVER), topology), lowered(graph, chosen, topology)
    assert set(by_name(plain)) - set(by_name(tasks)) == {"sync l2.weight[0]+1"}
    assert predecessors(tasks, "update @1") >= {"sync l2.weight[0]"}
    assert units(by_name(tasks)["update @1"].duration_ns) == 1
    memory, usual = memory_use(tasks.plan, 2), memory_use(plain.plan, 2)
    assert [use.optimizer for use in memory] == [use.optimizer - 2 * 24 for use in usual]  # the server has the states
    assert [use.gradients for use in memory] == [use.gradients for use in usual]


def test_a_sparse_table_takes_no_memory_of_accelerators() -> None:
    graph, topology = looked_up(rows=1000, width=3, batch=4), cluster([1, 1], GPU)
    plan = build_plan(graph, batch_split(graph, [0, 1]).with_parameter("table", parameter_server(3, rows=True)), topology)
    assert [(use.parameters, use.gradients, use.optimizer) for use in memory_use(plan, 2)] == [(24, 24, 0)] * 2  # two rows
    assert all(use.total < 1000 * 12 for use in memory_use(plan, 2))
    on_cpus = memory_use(build_plan(graph, batch_split(graph, [0, 1]).with_parameter("table", ROW_SERVER), TWO), 2)
    assert [use.optimizer for use in on_cpus] == [2 * 12000, 0]


def test_cores_of_the_host_take_partitions_in_turn() -> None:
    topology, graph = cluster([2, 1], GPU), chain(6, 4, 4, 6)
    server = parameter_server(4)
    chosen = batch_split(graph, [0, 2]).with_parameter("l1.weight", server).with_parameter("l2.weight", server)
    plan = build_plan(graph, chosen, topology)
    first = first_cores(topology)
    assert first == [3 + len(topology.links), 3 + len(topology.links) + 4]
    kept = [own for own in plan.syncs if own.contract.has_servers]
    assert [[plan.shards[i].devices for i in own.shards] for own in kept] == [[(2,), (0,)] * 2, [(0,), (2,)] * 2]
    resources = server_resources(plan, topology)
    cores = [[resources[i] - first[topology.devices[plan.shards[i].devices[0]].host] for i in own.shards] for own in kept]
    assert cores == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert core_names(topology)[:5] == ["host0/core0", "host0/core1", "host0/core2", "host0/core3", "host1/core0"]
    tasks = lower(plan, topology, PointCosts())
    assert busy_time_ns(tasks)["host1/core3"] > UNIT_NS
    threads = [e["args"]["name"] for e in chrome_trace(tasks, simulate(tasks))["traceEvents"] if e["name"] == "thread_name"]
    assert [name for name in threads if "core" in name] == core_names(topology)


def test_no_partition_is_empty() -> None:
    graph = chain(4, 2, 3)
    plan = build_plan(graph, batch_split(graph, [0, 1]).with_parameter("l1.weight", parameter_server(4096)), TWO)
    assert [shard_bytes(graph, plan.shards[i]) for i in plan.syncs[-1].shards] == [8] * 3


def test_a_device_without_gradient_pulls_and_pushes_zeros() -> None:
    split = strategy(l1=on(0, 1, degrees=(1, 1, 1), replicas=2), loss=on(1, 0, degrees=(1,), replicas=2))
    tasks = lowered(chain(4, 2, 6), split.with_parameter("l1.weight", SERVER))
    assert predecessors(tasks, "push l1.weight[0]") == {"backward l1[1]"}
    assert predecessors(tasks, "serve l1.weight[0]/0") == {"push l1.weight[0]"}
    assert by_name(tasks)["push l1.weight[0]"].flows == ((1, 0, 48),)


class RowCosts(PointCosts):
    """On rows a tile takes ten units forward, and twenty backward."""

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return 10 * UNIT_NS if tile.sparse_lookup else super().forward_ns(graph, tile, device)

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return 20 * UNIT_NS if tile.sparse_lookup else super().backward_ns(graph, tile, device)


class DenseCosts(PointCosts):
    """An update takes a unit for each byte, and rows without gradient change as well."""

    updates_rows_alone = False

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        return parameter_bytes * UNIT_NS


@pytest.mark.parametrize(("rows_alone", "units_updated"), [(True, 4 * 12), (False, 8 * 12 + 8 * 12 // 3)])
def test_an_optimizer_that_changes_all_rows_goes_over_the_whole_table(rows_alone: bool, units_updated: int) -> None:
    """Four of eight rows have gradients; three bytes of zeros take a unit."""
    graph, costs = looked_up(rows=8, width=3, batch=4), DenseCosts()
    costs.updates_rows_alone = rows_alone
    spread = batch_split(graph, [0, 1])
    gathered = lower(build_plan(graph, spread.with_parameter("table", GATHER), TWO), TWO, costs)
    assert units(by_name(gathered)[update_name(1)].duration_ns) == 4 * 12 + 4 + units_updated  # four rows are added up and found
    served = lower(build_plan(graph, spread.with_parameter("table", parameter_server(2, rows=True)), TWO), TWO, costs)
    assert units(by_name(served)["serve table[0]/1"].duration_ns) == 2 * 12 + 2 + units_updated // 2
    assert [size for _, size in device_updates(gathered.plan, rows_alone=rows_alone)] == [48 if rows_alone else 96] * 2


@pytest.mark.parametrize("sync", [SyncConfig(), GATHER, ROW_SERVER, parameter_server(2, "host", rows=True)])
def test_a_tile_is_on_rows_where_rows_travel(sync: SyncConfig) -> None:
    graph = looked_up(rows=8, width=3, batch=4)
    plan = build_plan(graph, batch_split(graph, [0, 1]).with_parameter("table", sync), TWO)
    named = by_name(lower(plan, TWO, RowCosts()))
    points = 2 * 8 * 3
    found = [units(named[f"{way} find[1]"].duration_ns) for way in ("forward", "backward")]
    assert found == ([points, 2 * points] if sync == SyncConfig() else [10, 20])
    assert units(named["forward loss[1]"].duration_ns) == 2
    assert not any(tile.sparse_lookup for tile in plan.tiles)


def test_with_two_tables_both_have_to_travel_by_rows() -> None:
    g = GraphBuilder()
    ids, names = g.input("ids", 4, dtype="int64"), ("one", "two")
    tables = [(g.parameter(name, 8, 3), [DimMap(1), WHOLE]) for name in names]
    factors = [Factor("b", 4, SAMPLE), Factor("v", 8, REDUCTION, summed=True)]
    found = g.operator("find", factors, [(ids, [DimMap(0)])], tables, [((4, 3), [DimMap(0), WHOLE])], name="find")[0]
    for place, name in enumerate(names):
        g.lookups[name] = [Lookup(0, place, (0,), 4)]
    graph = finish(g, found)
    for synced, expected in (((), set()), (("one",), set()), (("two",), set()), (names, {0})):
        assert sparse_lookup_operators(graph, dict.fromkeys(synced, GATHER)) == expected
    mixed = sparse_lookup_operators(graph, {"one": GATHER, "two": SyncConfig()})
    assert mixed == set()


def test_figures_of_a_core() -> None:
    assert server_type(cluster([1, 1], CPU), 1) is CPU
    assert server_type(cluster([1, 1], GPU), 1) is HOST_CORE


def test_what_one_device_keeps_needs_no_server() -> None:
    graph = chain(4, 2, 3)
    tasks = lowered(graph, batch_split(graph, [1]).with_parameter("l1.weight", SERVER))
    assert not tasks.plan.on_servers
    assert "update @1" in by_name(tasks)


@pytest.mark.parametrize("count", [0, -1, 4097])
def test_impossible_numbers_of_partitions(count: int) -> None:
    with pytest.raises(StrategyError, match=f"^synchronization by parameter_server in {count} partitions: expected 1 to 4096$"):
        parameter_server(count)
    with pytest.raises(StrategyError, match=r"^synchronization by allreduce in 2 partitions: expected 1$"):
        SyncConfig(partitions=2)


@MANY
@given(cases(servers=True))
def test_what_holds_for_every_plan(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks = lowered(graph, chosen, topology)
    plan, named = tasks.plan, by_name(tasks)
    assert len(named) == len(tasks.tasks) == len({task.id for task in tasks.tasks})
    resources = server_resources(plan, topology)
    active = {task.tile for task in tasks.tasks if task.kind is TaskKind.BACKWARD}
    for own in (sync for sync in plan.syncs if sync.contract.has_servers):
        assert chosen.sync(own.parameter).contract is own.contract
        push, pull = named.get(sync_name(own, "push")), named.get(sync_name(own, "pull"))
        servers = {plan.shards[i].devices[0] for i in own.shards}
        assert (push is None) == (pull is None) == (servers == set(own.readers) and len(servers) == 1)
        for index, (shard, resource) in enumerate(zip(own.shards, [resources[i] for i in own.shards], strict=True)):
            task = named[serve_name(own, index)]
            assert (task.resources, task.kind, task.bytes) == ((resource,), TaskKind.UPDATE, 0)
            device = topology.devices[plan.shards[shard].devices[0]]
            host = topology.hosts[device.host].name
            assert resource_names(tasks)[resource].startswith(device.name if device.type.kind == "cpu" else f"{host}/core")
        if push is None or pull is None:
            continue
        assert predecessors(tasks, sync_name(own, "push")) == {
            task.name for task in tasks.tasks if task.kind is TaskKind.BACKWARD and task.tile in {tile for tile, _ in own.uses} & active
        }
        for flows, ends in ((push.flows, servers), (tuple((b, a, n) for a, b, n in pull.flows), servers)):
            assert {a for a, _, _ in flows} | ends >= set(own.readers)
        if own.contract.by_rows:
            assert predecessors(tasks, sync_name(own, "pull")) == {ASK_NAME}
            after = tasks.tasks.index(pull)
            assert {task.tile for task in tasks.tasks if after in task.predecessors} == {tile for tile, _ in own.uses}
        else:
            assert predecessors(tasks, sync_name(own, "pull")) == {serve_name(own, index) for index in range(len(own.shards))}
    for own in (sync for sync in plan.syncs if sync.method == "sparse_all_gather"):
        shard = plan.shards[own.shards[0]]
        task = named.get(sync_name(own, "gather"))
        assert (task is None) == (len(shard.devices) == 1)
        lookups = DeviceLookups(graph, shard.parameter, plan.tiles, shard.uses)
        size = row_bytes(graph, shard.parameter, shard.box) + INDEX_BYTES
        rows = {device: touched_rows(graph.sparse[shard.parameter], shard.box, lookups((device,))) for device in shard.devices}
        if task is not None:
            assert set(task.flows) == {(a, b, rows[a] * size) for a in shard.devices for b in shard.devices if a != b}


def test_what_replicas_look_up_alike_counts_once() -> None:
    """Four devices on two hosts look up the same four rows; each has them come, a host with local aggregation once."""
    graph, topology = looked_up(rows=100, width=3, batch=4), pairwise_cluster(2, 2)
    alike = Strategy({"find": on(0, 1, 2, 3, degrees=(1, 1, 1), replicas=4), "loss": on(0, 1, 2, 3, degrees=(1,), replicas=4)})
    for within, crossing in (("none", 2), ("host", 1)):
        chosen = alike.with_parameter("table", parameter_server(1, within, rows=True))
        (pull,) = (task for task in lowered(graph, chosen, topology).tasks if task.name == "pull table[0]")
        hosts = [device.host for device in topology.devices]
        assert sum(n for a, b, n in pull.flows if hosts[a] != hosts[b]) == crossing * 4 * (12 + INDEX_BYTES)
    plan = build_plan(graph, alike, topology)
    lookups = DeviceLookups(graph, "table", plan.tiles, plan.shards[0].uses)
    assert [lookups((0,)), lookups((0, 1)), lookups(range(4))] == [4, 4, 4]
