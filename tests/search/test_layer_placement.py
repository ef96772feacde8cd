"""``ralp``: layers on servers. The cut is the one that trying all of them finds; what travels is what the formula says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.ralp import BATCH, CLUSTER, NETWORK, worker_bytes
from soap import api
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.errors import StrategyError
from soap.model.graph import WHOLE, DimMap, Factor, OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.layer_placement import layer_placement
from soap.search.options import SearchOptions
from soap.simulator.analysis.timeline import link_bytes
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulation, Simulator
from soap.simulator.tasks import TaskKind
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.strategy.ralp import cut_at, tails
from tests.graph_builder import SAMPLE, GraphBuilder
from tests.strategies import GPU, cluster, with_servers

COMPUTE = (TaskKind.FORWARD, TaskKind.BACKWARD)


def net(batch: int = 16, *, channels: int = 64, hidden: int = 256, residual: bool = False) -> OperatorGraph:
    """Convolutions with few parameters and much to compute, then dense layers with many."""
    g = GraphBuilder("net")
    x = g.conv(g.input("x", batch, channels, 256), channels, name="conv0")
    y = g.elementwise(g.conv(x, channels, name="conv1"), name="relu1")
    y = g.elementwise(y, x, name="join") if residual else y
    y = g.conv(y, channels, kernel=8, stride=8, padding=0, name="conv2")
    b, c, n = g.shape(y)
    dims = [DimMap(0), WHOLE, WHOLE]
    flat = g.operator("flatten", [Factor("b", b, SAMPLE)], [(y, dims)], [], [((b, c * n), [DimMap(0), WHOLE])], name="flatten")[0]
    z = g.linear(g.elementwise(g.linear(flat, hidden, name="fc0"), name="relu2"), 10, name="fc1")
    return g.build(g.cross_entropy(z, g.input("y", batch, dtype="int64")))


def workers_and_servers(workers: int, servers: int, bandwidth: float = 1e9) -> Topology:
    return with_servers(cluster([1] * (workers + servers), GPU, bandwidth), servers)


def simulator(graph: OperatorGraph, topology: Topology) -> Simulator:
    return Simulator(graph, topology, RooflineCosts(topology, 1), 1)


def computed_ns(simulation: Simulation, operators: range) -> int:
    """What the busiest device computes for some operators, from the tasks."""
    busy = [0] * simulation.tasks.topology.device_count
    for task in simulation.tasks.tasks:
        if task.kind in COMPUTE and task.tile is not None and simulation.plan.tiles[task.tile].operator in operators:
            busy[task.resources[0]] += task.duration_ns
    return max(busy)


def every_cut(own: Simulator, count: int | None = None) -> Iterator[tuple[int, int, tuple[int, ...], Strategy]]:
    """(time of a step, -position, tail, strategy) of every cut whose tail keeps up, by the reference simulation."""
    graph, topology = own.graph, own.topology
    total = len(graph.operators)
    for tail in tails(topology, count):
        for position in range(1, total):
            strategy = cut_at(graph, topology, position, tail)
            simulation = own.run(strategy)
            if computed_ns(simulation, range(position, total)) <= computed_ns(simulation, range(position)):
                yield simulation.makespan_ns, -position, tail, strategy


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 2)])
def test_the_cut_is_the_best_of_all(workers: int, servers: int, residual: bool) -> None:
    own = simulator(net(residual=residual), workers_and_servers(workers, servers))
    found = layer_placement(own.graph, own.topology, IncrementalSimulator(own), own.costs)
    assert found.best is not None and found.friendly and found.gain > 0.5
    least_ns = min(cost_ns for cost_ns, *_ in every_cut(own))
    assert found.best.cost_ns == least_ns == own.run(found.strategy).makespan_ns
    simulation = own.run(found.strategy)
    position, total = found.best.position, len(own.graph.operators)
    assert found.best.front_ns == computed_ns(simulation, range(position)) >= found.best.tail_ns
    assert found.best.tail_ns == computed_ns(simulation, range(position, total))
    assert found.best.position <= own.graph.index["fc0"]  # where the parameters are


def test_a_slow_server_has_a_shorter_tail_or_none() -> None:
    """Only cuts whose tail keeps up are taken, however fast they would be by themselves."""
    own = simulator(net(channels=16, hidden=2048), workers_and_servers(6, 1))
    found = layer_placement(own.graph, own.topology, IncrementalSimulator(own), own.costs)
    free = min(own.run(cut_at(own.graph, own.topology, cut, (6,))).makespan_ns for cut in range(1, len(own.graph.operators)))
    assert not found.friendly and found.strategy is found.plain and free < 0.5 * found.plain_ns
    expected = min((cost_ns for cost_ns, *_ in every_cut(own)), default=None)
    assert (None if found.best is None else found.best.cost_ns) == expected


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
def test_what_travels_is_what_the_formula_says(servers: int, residual: bool) -> None:
    """2·(front's parameters) + 2·B·a, by worker; tails of several devices sum their gradients, 2·(S − 1)/S of their bytes each."""
    graph, workers = net(residual=residual), 4
    own = simulator(graph, workers_and_servers(workers, servers))
    for cut in range(1, len(graph.operators)):
        tail = tails(own.topology, servers)[0]
        simulation = own.run(cut_at(graph, own.topology, cut, tail))
        carried, names = link_bytes(simulation.tasks), [device.name for device in own.topology.devices]
        for worker in own.topology.workers:
            card, switch = names[worker], f"host{worker}/switch"
            there, back = carried[f"{card}>{switch}"], carried[f"{switch}>{card}"]
            assert there + back == worker_bytes(graph, cut, workers)
        behind = sum(tensor.bytes for tensor in graph.parameters) - worker_parameters(graph, cut)
        sums = sum(carried[f"{names[server]}>host{server}/switch"] for server in tail)
        assert sums == workers * worker_bytes(graph, cut, workers) // 2 + 2 * (servers - 1) * (behind + 4)  # and the loss


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_of_thirty_workers_are_busy_with_what_is_theirs(servers: int) -> None:
    """30 + 1 and 30 + 2, without latencies: each server's card receives its part of all gradients and activations, and with two servers
    twice half of the tail's gradients; its GPU computes the tail for its part of all samples, and updates it."""
    graph, workers, rate = net(batch=4 * 30, channels=32), 30, 1e8
    topology = with_servers(cluster([1] * (workers + servers), GPU, 10 * rate, 0.0), servers)
    own, cut, tail = simulator(graph, topology), graph.index["fc0"], tails(topology, servers)[0]
    simulation = own.run(cut_at(graph, topology, cut, tail))
    behind = sum(tensor.bytes for tensor in graph.parameters) - worker_parameters(graph, cut)
    from_workers = workers * worker_bytes(graph, cut, workers) // 2 / servers
    samples = [tile for tile in simulation.plan.tiles if tile.operator >= cut and tile.device == tail[0]]
    kind = topology.devices[0].type
    computed = sum(ask(graph, tile, kind) for tile in samples for ask in (own.costs.forward_ns, own.costs.backward_ns))
    updated = sum(task.duration_ns for task in simulation.tasks.tasks if task.kind is TaskKind.UPDATE and task.resources == (tail[0],))
    assert {tile.intervals[0] for tile in samples if tile.intervals} == {(0, 120 // servers)} and updated > 1
    for device in tail:
        received = from_workers + 2 * (servers - 1) / servers * behind
        host = topology.hosts[topology.devices[device].host].name
        assert simulation.busy_ns[f"network>{host}/switch"] == pytest.approx(1e9 * received / rate, rel=0.01)
        assert simulation.busy_ns[topology.devices[device].name] == computed + updated


def worker_parameters(graph: OperatorGraph, cut: int) -> int:
    used = {operand.tensor for op in graph.operators[:cut] for operand in op.parameters}
    return sum(tensor.bytes for tensor in graph.parameters if tensor.name in used)


def test_unfriendly_models_stay_with_plain_servers() -> None:
    own = simulator(net(channels=128, hidden=1), workers_and_servers(4, 1))
    found = layer_placement(own.graph, own.topology, IncrementalSimulator(own), own.costs)
    assert not found.friendly and found.gain < 0.1 and found.strategy == found.plain
    assert found.plain == cut_at(own.graph, own.topology, len(own.graph.operators), ())
    kinder = layer_placement(own.graph, own.topology, IncrementalSimulator(own), own.costs, least_gain=-1.0)
    assert kinder.friendly and kinder.best is not None and kinder.strategy == kinder.best.strategy


def test_the_name_and_the_start() -> None:
    own = simulator(net(), workers_and_servers(4, 2))
    placed = api.placed_layers("ralp", own)
    assert api.simulated_name("ralp", own) == placed.strategy
    two = api.placed_layers("ralp:2", own)
    assert two.best is not None and two.best.tail == (4, 5)
    with pytest.raises(StrategyError, match="found by simulating; expected soap-simulate --builtin ralp, or ralp as a start of a search"):
        named("ralp", own.graph, own.topology)
    by_default = search(own.graph, own.topology, IncrementalSimulator(own), SearchOptions(budget=1), polish_up_to=0)
    starts = {start.name: start.cost_ns for start in by_default.starts}
    assert placed.best is not None and starts["ralp"] == placed.best.cost_ns < starts["data_parallel"]
    asked = search(own.graph, own.topology, IncrementalSimulator(own), SearchOptions(budget=1, starts=["ralp:2"]), polish_up_to=0)
    assert {start.name: start.cost_ns for start in asked.starts}["ralp:2"] == two.best.cost_ns


def test_bad_input_is_one_line() -> None:
    own = simulator(net(), workers_and_servers(4, 2))
    with pytest.raises(StrategyError, match=r"ralp:3 on cluster 'test', whose servers have 2 devices; expected a number from 1 to 2"):
        api.placed_layers("ralp:3", own)
    with pytest.raises(StrategyError, match=r"ralp on cluster 'test', none of whose hosts is a server; expected some: say 'server: true'"):
        api.placed_layers("ralp", simulator(net(), cluster([1, 1], GPU)))


def test_tails_begin_on_different_hosts() -> None:
    assert tails(with_servers(cluster([1, 2, 2], GPU), 2)) == [(1,), (1, 3), (1, 3, 2), (1, 3, 2, 4)]


FRIENDLY, UNFRIENDLY = ("alexnet", "vgg16", "vgg19"), ("inception_v3", "resnet50")


@pytest.mark.long
@pytest.mark.parametrize("name", [*FRIENDLY, *UNFRIENDLY])
def test_the_cut_of_published_nets_is_the_best_of_all(name: str) -> None:
    """The last two are unfriendly, as in the thesis."""
    topology = parse_cluster(CLUSTER.format(workers=8, servers=1, rate=NETWORK))
    own = simulator(api.load(f"zoo:{name}@{8 * BATCH}", plan_only=True).graph, topology)
    found = layer_placement(own.graph, topology, IncrementalSimulator(own), own.costs)
    assert found.best is not None and found.best.cost_ns == min(cost_ns for cost_ns, *_ in every_cut(own))
    assert found.friendly == (name in FRIENDLY)
