"""Hypothesis generators shared by all tests: small operator graphs, topologies, configurations and strategies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from soap.cluster.overheads import NO_LATENCY_FACTOR, ColdPenalty, CollectiveLatencyFactor, CpuOverhead, Port, Share
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.errors import StrategyError
from soap.model.batch import MicroBatches, samples_of
from soap.model.graph import SUM_DTYPES, DimMap, Factor, Operator, OperatorGraph, TensorKind
from soap.model.regions import Box
from soap.schedules.named import parse
from soap.strategy.compression import Int8, PowerSgd, Rgc, RgcAsq
from soap.strategy.config import FLOATING, OpConfig, Strategy, SyncConfig, check_config, check_parts, settled_config
from soap.strategy.consistency import SYNC
from soap.strategy.marks import FEATURES, marks_of, with_mark
from soap.strategy.stages import chunks_of, stages_of_chunks
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, SPARSE_ALL_GATHER, compressed, parameter_server
from soap.strategy.sync_contracts import Within
from soap.strategy.workers import Workers
from tests.graph_builder import ATTRIBUTE, GraphBuilder

CPU = DeviceType("test-cpu", "cpu", {"float32": 1e10}, 1e10, 2**30, 1e-6, "made up for tests")
GPU = DeviceType("test-gpu", "cuda", {"float32": 1e12, "float16": 4e12}, 1e11, 2**32, 5e-6, "made up for tests")
SLOW_CPU = DeviceType("test-slow-cpu", "cpu", {"float32": 3e9, "float64": 1e9}, 4e9, 2**29, 3e-6, "made up for tests")
SLOW_GPU = DeviceType("test-slow-gpu", "cuda", {"float32": 4e11, "bfloat16": 6e11}, 3e10, 2**31, 9e-6, "made up for tests")
BESIDE = {CPU: (SLOW_CPU, GPU), GPU: (SLOW_GPU, SLOW_GPU, CPU)}
"""What may be in a cluster beside a type."""

MOVES = (
    "linear", "elementwise", "join", "norm", "conv", "embedding", "attention", "slice", "concat", "chunk", "center", "opaque",
    "shared", "table", "state", "frozen",
)  # fmt: skip
"""What ``graphs`` may add to a graph."""

WITHIN: tuple[Within, ...] = get_args(Within)


def boxes(dimensions: int, *, most: int = 8, allow_empty: bool = False) -> st.SearchStrategy[Box]:
    """Boxes of so many dimensions inside ``[0, most)``."""
    pair = st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda p: (min(p), max(p)))
    interval = pair if allow_empty else pair.filter(lambda p: p[0] < p[1])
    return st.tuples(*[interval] * dimensions)


@st.composite
def graphs(
    draw: st.DrawFn, *, max_moves: int = 6, batches: st.SearchStrategy[int] | None = None, moves: Sequence[str] = MOVES
) -> OperatorGraph:
    """Legal training graphs: chains, branches and joins, shared parameters, reductions, halos, slices, operators kept whole.

    Some of them in bfloat16, whose partial results are in float32, or in bfloat16 as well."""
    dtype, sum_dtype = draw(st.sampled_from((("float32", "float32"), *(("bfloat16", own) for own in SUM_DTYPES))))
    g = GraphBuilder("random", dtype)
    b, s, d = draw(st.integers(1, 6) if batches is None else batches), draw(st.integers(1, 5)), 2 * draw(st.integers(1, 4))
    values = [g.linear(g.input("x", b, s, d), d, name="first")]
    for _ in range(draw(st.integers(0, max_moves))):
        _move(g, values, draw, moves)
    read = {operand.tensor for op in g.operators for operand in op.inputs}
    losses = [g.mean(value) for value in values if value not in read]
    loss = losses[0] if len(losses) == 1 else g.sum(*losses)
    terms = losses if len(losses) > 1 and draw(st.booleans()) else ()
    held = [tensor.name for tensor in g.tensors.values() if tensor.kind is TensorKind.CONSTANT]
    if held:
        g.state(*(op.outputs[0].tensor for op in g.operators if any(operand.tensor in held for operand in op.inputs)))
    return g.build(loss, draw(st.sampled_from((None, 0.2, 0.7))), terms).summed_in(sum_dtype)


def _move(g: GraphBuilder, values: list[str], draw: st.DrawFn, moves: Sequence[str]) -> None:
    """Add an operator (or a few) that reads one of the values ``[b, s, d]``, and its results to the values."""
    x = draw(st.sampled_from(values))
    b, s, d = g.shape(x)
    match draw(st.sampled_from(moves)):
        case "linear":
            values.append(g.linear(x, draw(st.integers(1, 8)), bias=draw(st.booleans())))
        case "elementwise":
            values.append(g.elementwise(x))
        case "join":
            values.append(g.elementwise(x, draw(st.sampled_from([y for y in values if g.shape(y) == (b, s, d)]))))
        case "norm":
            values.append(g.norm(x))
        case "conv":
            values.append(g.conv(x, draw(st.integers(1, 4)), draw(st.sampled_from((1, 3))), draw(st.integers(1, 2))))
        case "embedding":
            ids = g.input(f"ids{len(g.operators)}", b, s, dtype="int64")
            known = draw(st.sampled_from([None, *(name for name in g.lookups if g.shape(name)[1] == d)]))
            rows = draw(st.integers(2, 9)) if known is None else g.shape(known)[0]
            values.append(g.elementwise(x, g.embedding(ids, rows, d, weight=known)))
        case "attention":
            heads = draw(st.sampled_from([h for h in (1, 2, 4) if d % h == 0]))
            values.append(g.attention(x, x, draw(st.sampled_from([y for y in values if g.shape(y) == (b, s, d)])), heads))
        case "slice":
            dim = draw(st.integers(1, 2))
            start = draw(st.integers(0, (s, d)[dim - 1] - 1))
            values.append(g.slice(x, dim, start, draw(st.integers(1, (s, d)[dim - 1] - start))))
        case "concat":
            values.append(g.concat(x, draw(st.sampled_from([y for y in values if g.shape(y)[:2] == (b, s)])), 2))
        case "chunk" if d > 1:
            values.extend(g.chunk(x, 2, draw(st.integers(1, d - 1))))
        case "center":
            values.append(g.elementwise(x, g.batch_mean(x)))
        case "opaque":
            values.append(g.opaque(x))
        case "shared":
            weight = f"{g.linear(x, d, bias=False)}.weight"
            values.append(g.linear(g.operators[-1].outputs[0].tensor, d, weight=weight, bias=False))
        case "frozen":  # with a gradient of what it reads, or without
            read = x if draw(st.booleans()) else g.input(f"x{len(g.operators)}", b, s, d)
            weight = g.parameter(f"frozen{len(g.operators)}", d, d, frozen=True)
            values.append(g.elementwise(x, g.linear(read, d, weight=weight, bias=False)))
        case "state":
            moved = g.elementwise(g.batch_mean(x), g.constant(f"held{len(g.operators)}", s, d))
            values.append(g.elementwise(x, moved))
        case "table":
            values.append(g.elementwise(x, _parameter_copy(g, s, d)))


def _parameter_copy(g: GraphBuilder, s: int, d: int) -> str:
    """An operator that reads nothing but a parameter: position embeddings."""
    table = g.parameter(f"table{len(g.operators)}", s + 1, d)
    factors = [Factor("s", s, ATTRIBUTE), Factor("d", d, ATTRIBUTE)]
    return g.operator("copy", factors, [], [(table, [DimMap(0), DimMap(1)])], [((s, d), [DimMap(0), DimMap(1)])])[0]


@st.composite
def topologies(draw: st.DrawFn, *, max_devices: int = 4, ports: bool = True) -> Topology:
    """One to three hosts with a switch each, joined by one more, or by rails, too, with up to ``max_devices`` devices, of one type or of
    two, given whole batches or their own samples; with ``ports`` at some links, and a price of waiting."""
    counts = draw(st.lists(st.integers(1, max_devices), min_size=1, max_size=3).filter(lambda c: sum(c) <= max_devices))
    made = cluster(counts, draw(st.sampled_from((CPU, GPU))), draw(st.sampled_from((1e8, 1e10))), draw(st.sampled_from((0.0, 1e-5))))
    made = mixed(made, draw(st.lists(st.integers(0, sum(counts) - 1), unique=True)), draw(st.integers(0, 2)))
    made = with_rails(made) if len(counts) > 1 and draw(st.booleans()) else made
    made = named(made, draw(st.sampled_from(("", "pcie", "nvlink4"))))
    made = with_servers(made, draw(st.integers(0, len(counts) - 1)) if draw(st.booleans()) else 0)
    made = replace(made, own_samples=draw(st.booleans()))
    busy = draw(st.lists(st.integers(0, len(made.links) - 1), max_size=4 if ports else 0, unique=True))
    own = 2 * sum(counts)  # a device's links come first, two for each
    shares = st.builds(Share, st.sampled_from((0, 700, 90_000)), st.sampled_from((0, 333, 1000)))
    own_ports = [Port(link, link // 2 if link < own else None, *draw(shares)) for link in busy]
    if not ports:
        return made
    overhead = CpuOverhead(*(((2, draw(shares)), (4, draw(shares))) for _ in range(2)))
    points = st.sampled_from(((), ((500, 700),), ((700, 300), (90_000, 5_000), (200_000, 5_001))))
    penalty = ColdPenalty(draw(points), draw(points))
    latency_factor = draw(st.sampled_from((NO_LATENCY_FACTOR, CollectiveLatencyFactor(((2, 1.5), (4, 0.4)), ((2, 2.0), (4, 0.5))))))
    return replace(made, ports=tuple(own_ports), cpu_overhead=overhead, latency_factor=latency_factor, cold_penalty=penalty)


def cluster(counts: list[int], kind: DeviceType = GPU, bandwidth_bytes_per_second: float = 1e9, latency_seconds: float = 1e-5) -> Topology:
    """Hosts with so many devices each; links between hosts are ten times slower than inside."""
    hosts = tuple(Host(f"host{i}", 4, 2**34) for i in range(len(counts)))
    places = [(host, k) for host, count in enumerate(counts) for k in range(count)]
    devices = tuple(Device(i, f"host{host}/device{k}", host, kind) for i, (host, k) in enumerate(places))
    edges = [(device.name, f"host{device.host}/switch", bandwidth_bytes_per_second) for device in devices]
    edges += [(f"host{i}/switch", "network", bandwidth_bytes_per_second / 10) for i in range(len(counts))]
    ends = [(a, b, rate) for x, y, rate in edges for a, b in ((x, y), (y, x))]
    links = tuple(Link(i, f"{a}>{b}", a, b, rate, latency_seconds) for i, (a, b, rate) in enumerate(ends))
    return Topology("test", devices, hosts, links)


def mixed(topology: Topology, numbers: Collection[int], other: int = 0) -> Topology:
    """The cluster whose devices of these numbers are of another type of ``BESIDE``."""
    choices = {number: BESIDE[topology.devices[number].type] for number in numbers}
    changed = {number: replace(topology.devices[number], type=own[other % len(own)]) for number, own in choices.items()}
    return replace(topology, devices=tuple([changed.get(own.index, own) for own in topology.devices]))


def with_servers(topology: Topology, count: int) -> Topology:
    """The cluster whose last hosts, so many, are servers."""
    first = len(topology.hosts) - count
    return replace(topology, hosts=tuple(replace(host, server=i >= first) for i, host in enumerate(topology.hosts)))


def named(topology: Topology, inside: str) -> Topology:
    """The cluster with links inside hosts that name their interconnect, and a network between; if it is nothing, as it was."""
    outside = ("network", "rail")
    names = ["network" if link.source.startswith(outside) or link.target.startswith(outside) else inside for link in topology.links]
    links = tuple(replace(link, interconnect=name) for link, name in zip(topology.links, names, strict=True))
    return replace(topology, links=links) if inside else topology


def with_rails(topology: Topology) -> Topology:
    """The cluster with a NIC for each device of a host that leads to a switch of its place, as fast as the hosts' links to each other."""
    places = [device.name.rpartition("device")[2] for device in topology.devices]
    edges = [(device.name, f"rail{place}") for device, place in zip(topology.devices, places, strict=True) if places.count(place) > 1]
    ends = [pair for a, b in edges for pair in ((a, b), (b, a))]
    bandwidth, latency = topology.links[-1].bandwidth_bytes_per_second, topology.links[-1].latency_seconds
    first = len(topology.links)
    more = tuple(Link(first + i, f"{a}>{b}", a, b, bandwidth, latency) for i, (a, b) in enumerate(ends))
    return replace(topology, links=topology.links + more)


@st.composite
def configs(
    draw: st.DrawFn,
    op: Operator,
    device_count: int,
    *,
    max_tiles: int = 8,
    graph: OperatorGraph | None = None,
    cut: MicroBatches | None = None,
    among: Sequence[int] = (),
) -> OpConfig:
    """Any legal configuration of an operator with at most ``max_tiles`` tiles, devices in any order and more than once; recomputed, or
    offloading what it keeps, only if its graph is known. ``cut``: micro-batches, each of which has so many
    tiles. ``among``: the devices, if not all."""
    only = settled_config(op, device_count)
    if only is not None:
        return only
    degrees, room = [1] * len(op.factors), max_tiles
    for i in draw(st.permutations(range(len(op.factors)))) if op.partitionable else ():
        size = op.factors[i].size if cut is None else cut.least_size(cut.graph.index[op.name], i)
        degrees[i] = draw(st.integers(1, min(size, room, 4)))
        room //= degrees[i]
    replicas = draw(st.integers(1, min(room, 3)))
    tiles = replicas
    for degree in degrees:
        tiles *= degree
    each = st.sampled_from(among) if among else st.integers(0, device_count - 1)
    devices = draw(st.lists(each, min_size=tiles, max_size=tiles))
    repeats = cut is None or cut.may_repeat(cut.graph.index[op.name])
    own = [] if graph is None else [f for f in FEATURES if f.refusal(graph, op) is None and (repeats or not f.repeats)]
    marks = [0, *(mark for feature in own for mark in marks_of(feature.field))]
    config = with_mark(OpConfig(tuple(degrees), tuple(devices), replicas), draw(st.sampled_from(marks)))
    return with_shares(draw, op, config, cut)


def with_shares(draw: st.DrawFn, op: Operator, config: OpConfig, cut: MicroBatches | None) -> OpConfig:
    """The configuration with uneven shares, sometimes, if they leave no part of it empty."""
    split = [degree for degree in config.degrees if degree > 1]
    if not split or not op.partitionable or not draw(st.booleans()):
        return config
    weights = st.integers(1, 5)
    shares = tuple([draw(st.one_of(st.just(()), st.tuples(*[weights] * degree))) for degree in split])
    try:
        found = replace(config, shares=shares)
        check_config(op, found, max(config.devices) + 1)
        if cut is not None:
            check_parts(cut, cut.graph.index[op.name], found)
    except StrategyError:
        return config
    return found


CONSISTENCIES = st.sampled_from(("sync", "bounded:0", "bounded:4", "async"))


@st.composite
def strategies_for(
    draw: st.DrawFn, graph: OperatorGraph, device_count: int, *, max_tiles: int = 8, servers: bool = False, stale: bool = False
) -> Strategy:
    """Any legal strategy for this graph; with ``servers`` any synchronization of its parameters, any number of micro-batches, and any
    stages with any schedule of them, too. With ``stale`` any consistency."""
    most = samples_of(graph) or 1
    count = draw(st.sampled_from([1, 1, *range(2, min(4, most) + 1)])) if servers else 1
    cut = MicroBatches(graph, count)
    stages, schedule = draw(pipelines(cut, device_count)) if servers and draw(st.booleans()) else ({}, None)
    stage_of = stages_of_chunks(len(stages) + 1, schedule)
    order = draw(st.permutations(range(device_count)))
    operators = {}
    for op, chunk in zip(graph.operators, chunks_of(graph, stages), strict=True):
        own = order[stage_of[chunk] :: max(stage_of) + 1] if stages else ()
        operators[op.name] = draw(configs(op, device_count, max_tiles=max_tiles, graph=graph, cut=cut, among=own))
    chosen = {parameter.name: draw(syncs(graph, parameter.name)) for parameter in graph.parameters} if servers else {}
    prefetch = draw(st.sampled_from((0, 1, 2, 4096))) if servers else 1
    other = {name: sync for name, sync in chosen.items() if sync != SyncConfig()}
    return Strategy(operators, other, prefetch, count, stages, schedule, draw(CONSISTENCIES) if stale else SYNC)


@st.composite
def workers_of(draw: st.DrawFn, device_count: int) -> Workers:
    """Virtual workers on some of so many devices."""
    order = draw(st.permutations(range(device_count)))
    cuts = sorted(draw(st.sets(st.integers(1, device_count), min_size=1)))
    return Workers(tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)), draw(st.integers(1, 8)))


@st.composite
def pipelines(draw: st.DrawFn, cut: MicroBatches, device_count: int) -> tuple[dict[str, int], str | None]:
    """``Strategy.stages`` and a schedule that serves them."""
    names = [op.name for op in cut.graph.operators][1:]
    chunks = 1 + draw(st.integers(0, min(5, len(names))))
    others = ("accumulation", "1f1b", "zb-h1", "zb-2p", "v-half", "interleaved:2", "interleaved:3")
    legal = (None, "gpipe", "gpipe:2", "gpipe:2:v") + (() if cut.barriers else others)
    each = {name: 1 if name is None else parse(name).chunks for name in legal}
    served = [name for name, own in each.items() if chunks % own == 0 and chunks // own <= device_count]
    if not served:
        return {}, None
    borders = sorted(draw(st.sets(st.integers(0, len(names) - 1), min_size=chunks - 1, max_size=chunks - 1))) if names else []
    return {names[place]: chunk for chunk, place in enumerate(borders, 1)}, draw(st.sampled_from(served))


LOSSY = (Rgc(density=0.2), Rgc(density=0.2, ragged=True), RgcAsq(selection="exact"), PowerSgd(), Int8())
"""Compressions with one exchange of messages, one of sizes before it, two sums, and two exchanges of parts."""


SHARED = (SHARDED_STATE, replace(SHARDED_STATE, within="host"), SHARDED, SHARDED_IN_HOSTS)
"""Ways in which readers own parts."""


def syncs(graph: OperatorGraph, parameter: str) -> st.SearchStrategy[SyncConfig]:
    """Any synchronization of a parameter."""
    rows = parameter in graph.sparse
    servers = [parameter_server(partitions, within, rows=rows) for partitions in (1, 3) for within in WITHIN]
    gathered = [SPARSE_ALL_GATHER] if parameter in graph.sparse else []
    lossy = [compressed(how, within) for how in LOSSY for within in WITHIN if not rows and graph.tensors[parameter].dtype in FLOATING]
    here = [SyncConfig(), *SHARED]
    return st.sampled_from([*here, *(replace(sync, offload=True) for sync in here), *gathered, *servers, *lossy])


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_moves: int = 6,
    max_devices: int = 4,
    max_tiles: int = 8,
    servers: bool = False,
    ports: bool = False,
    stale: bool = False,
) -> tuple[OperatorGraph, Topology, Strategy]:
    """A graph, a topology, and a legal strategy for both."""
    graph = draw(graphs(max_moves=max_moves))
    topology = draw(topologies(max_devices=max_devices, ports=ports))
    return graph, topology, draw(strategies_for(graph, topology.device_count, max_tiles=max_tiles, servers=servers, stale=stale))
