"""Small graphs, clusters and costs whose plans and schedules can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.model.graph import WHOLE, DimMap, Factor, OperatorGraph
from soap.model.regions import lengths
from soap.plan.compression.seam import Layout, Work
from soap.plan.tiling import Tile
from soap.profiles.roofline import RooflineCosts
from soap.simulator.costs import nanoseconds
from soap.simulator.draws import Communicated, Error
from soap.simulator.tasks import Task, TaskGraph, TaskKind
from soap.strategy.compression import Compression
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.division import Half
from tests.graph_builder import ATTRIBUTE, SAMPLE, GraphBuilder

UNIT_NS = 1_953_125
"""Nanoseconds of which schedules by hand are counted: 2**-9 seconds, so that floating-point times are exact."""
SLOW = DeviceType("test-slow", "cpu", {"float32": 1e10}, 3 * 2.0**9, 2**30, 1e-6, "made up for tests")
"""Adds a byte per unit."""


class PlainCosts:
    """What tests do not care for: nothing is launched, halves take half, compressing a gradient as long as it takes to go over memory."""

    description = "made up for tests"
    hash = "0" * 16
    updates_rows_alone = True

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        return 0

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return self.forward_ns(graph, tile, device)

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        return -(-self.backward_ns(graph, tile, device) // 2)

    def compression_ns(self, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
        on_host = device.kind == "cpu"
        moved_bytes = layout.effort(compression, work, on_host=on_host).moved_bytes(on_host=on_host)
        return nanoseconds(moved_bytes / device.memory_bandwidth_bytes_per_second)

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        raise NotImplementedError

    backward_ns = forward_ns


class PointCosts(PlainCosts):
    """A unit per point of a tile (two backward); updates and second runs without products 1."""

    def __init__(self, unit_ns: int = UNIT_NS) -> None:
        self.unit_ns = unit_ns

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return self.unit_ns * max(1, tile.size)

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return self.unit_ns

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return 2 * self.unit_ns * max(1, tile.size)

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        return self.unit_ns


class LaunchedCosts(RooflineCosts):
    """The roofline on devices for which a processor launches: sometimes for longer than they compute, sometimes not at all."""

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        known = (self.forward_ns, self.backward_ns)[backward](graph, tile, device)
        return known * ((tile.size * 5 + backward) % 4) * 2 // 3


class ExampleSpreads:
    """Errors of every kind, large enough that plans change places. ``times``: all spreads are so many times as large."""

    hash = "0" * 16

    def __init__(self, times: float = 1.0) -> None:
        self.times = times

    def _errors(self, *names: tuple[str, ...]) -> tuple[Error, ...]:
        return tuple(Error(name, 0.3 * self.times / (1 + place)) for place, name in enumerate(names))

    def of_tile(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> tuple[Error, ...]:
        kind = graph.operators[tile.operator].kind
        regions = [lengths(box) for box in (tile.intervals, *tile.inputs, *tile.parameters, *tile.outputs)]
        return self._errors(("rate", device.name), ("kind", kind, str(backward)), ("shape", kind, str(regions), str(backward)))

    def of_launch(self, device: DeviceType) -> tuple[Error, ...]:
        return self._errors(("launch", device.name))

    def of_update(self, device: DeviceType) -> tuple[Error, ...]:
        return self._errors(("rate", device.name), ("update",))

    def of_server(self) -> tuple[Error, ...]:
        return self._errors(("server",))

    def of_compression(self, device: DeviceType, *, selects: bool) -> tuple[Error, ...]:
        return self._errors(("rate", device.name), ("compression", device.name, str(selects)))

    def of_communication(self, kind: Communicated) -> tuple[Error, ...]:
        return self._errors(("links",), ("links", str(kind)))

    def of_overhead(self) -> tuple[Error, ...]:
        return self._errors(("overhead",))


def units(duration_ns: int) -> int:
    """Whole units."""
    assert duration_ns % UNIT_NS == 0
    return duration_ns // UNIT_NS


def pairwise_cluster(*counts: int, latency: int = 0) -> Topology:
    """``counts[h]`` devices on host h; every ordered pair of devices has a link of its own, numbered by source, then target.

    A byte takes a unit on a link, a row one to be found. ``latency``: of a link, in units.
    """
    places = [host for host, count in enumerate(counts) for _ in range(count)]
    devices = tuple(Device(i, f"d{i}", host, SLOW) for i, host in enumerate(places))
    ends = [(a.name, b.name) for a in devices for b in devices if a is not b]
    links = tuple(Link(i, f"{a}->{b}", a, b, 2.0**9, latency * 2.0**-9) for i, (a, b) in enumerate(ends))
    return Topology("test", devices, tuple(Host(f"h{i}", 1, 2**30, row_seconds=2.0**-9) for i in range(len(counts))), links)


def stencil(g: GraphBuilder, x: str, lo: int, hi: int, name: str) -> str:
    """Factors b, h: position h of the output reads positions h + lo to h + hi - 1 (clipped) of ``x``."""
    b, h = g.shape(x)
    factors = [Factor("b", b, SAMPLE), Factor("h", h, ATTRIBUTE)]
    window, point = DimMap(1, 1, lo, hi), DimMap(1)
    return g.operator("stencil", factors, [(x, [DimMap(0), window])], [], [((b, h), [DimMap(0), point])], name=name)[0]


def finish(g: GraphBuilder, *values: str) -> OperatorGraph:
    """Close the graph with the operator ``loss``: one factor, the summed batch; every tile reads its rows whole."""
    rows = g.shape(values[0])[0]
    reads = [(value, [DimMap(0), *[WHOLE] * (len(g.shape(value)) - 1)]) for value in values]
    return g.build(g.operator("loss", [Factor("b", rows, SAMPLE, summed=True)], reads, [], [((), ())], name="loss")[0])


def beside_a_barrier(rows: int = 4) -> OperatorGraph:
    """``v`` is read by ``mean`` over the batch; by ``behind``, which reads that, too; and by ``before``. ``m1`` and ``m2`` are terms of the
    loss, means of the latter two. In micro-batches the backward pass comes to ``m1`` and ``behind`` first, though their positions are
    lower."""
    g = GraphBuilder()
    v = g.linear(g.input("x", rows, 2), 2, bias=False, name="v")
    mean = g.elementwise(g.batch_mean(v), g.constant("held", 2), name="mean")
    behind = g.mean(g.elementwise(v, mean, name="behind"), name="m1")
    before = g.mean(g.elementwise(v, name="before"), name="m2")
    return g.build(g.sum(behind, before, name="loss"), terms=(behind, before))


def across_a_barrier(norms: int = 2, rows: int = 12) -> OperatorGraph:
    """``norms`` norms ``n0``, ``n1``, …, each with a weight; their mean over the batch; ``behind``, which reads both; and ``after``, which
    reads that, and the last norm once more. If the norms and ``after`` run again, all second runs of ``after`` come before any norm goes
    back."""
    g = GraphBuilder()
    v = g.linear(g.input("x", rows, 3, 4), 4, bias=False, name="first")
    for i in range(norms):
        v = g.norm(v, name=f"n{i}")
    return g.build(g.mean(g.elementwise(g.elementwise(v, g.batch_mean(v), name="behind"), v, name="after"), name="loss"))


def chain(rows: int, *widths: int) -> OperatorGraph:
    """Input ``x`` of widths[0] columns through linear operators ``l1``, ``l2``, … (factors b, k, n) of the other widths to the loss."""
    g = GraphBuilder()
    last = g.input("x", rows, widths[0])
    for i, width in enumerate(widths[1:], 1):
        last = g.linear(last, width, bias=False, name=f"l{i}")
    return finish(g, last)


def on(*devices: int, degrees: tuple[int, ...], replicas: int = 1) -> OpConfig:
    """A configuration, read as "on these devices by these degrees"."""
    return OpConfig(degrees, devices, replicas)


def strategy(**configs: OpConfig) -> Strategy:
    """A strategy by operator name."""
    return Strategy(configs)


def batch_split(graph: OperatorGraph, devices: Sequence[int]) -> Strategy:
    """Every operator split along its first factor over the devices; one without factors on the first device."""
    degrees = {op.name: tuple(len(devices) if i == 0 else 1 for i in range(len(op.factors))) for op in graph.operators}
    return Strategy({name: OpConfig(own, tuple(devices if own else devices[:1])) for name, own in degrees.items()})


def by_name(tasks: TaskGraph) -> dict[str, Task]:
    """Tasks by name."""
    return {task.name: task for task in tasks.tasks}


def predecessors(tasks: TaskGraph, name: str) -> set[str]:
    """Names of the tasks that a task waits for."""
    return {tasks.tasks[p].name for p in by_name(tasks)[name].predecessors}


def counts(tasks: TaskGraph) -> dict[TaskKind, int]:
    """Number of tasks of each kind that occurs."""
    kinds = [task.kind for task in tasks.tasks]
    return {kind: kinds.count(kind) for kind in TaskKind if kind in kinds}
