"""Which computations a profile of a model needs: those of the strategies that people compare with, then all that a search may propose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.measure.this_machine import free_memory_bytes
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.plan.compression.seam import WORKS, Work, layout_of
from soap.plan.memory_kinds import MemoryKind
from soap.plan.row_counts import sparse_lookup_operators
from soap.plan.tiling import Tile, tiles_of
from soap.profiles.entries import COMPRESSION, COPY, RUNTIME, UPDATE, compression_key, copy_key, runtime_key, update_key
from soap.profiles.keys import TileKey, TileKeys, tile_kind
from soap.profiles.roofline import RooflineCosts
from soap.search.lossy import lossy_syncs, peer_counts
from soap.search.space import grids_of
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulation
from soap.strategy.compression import Compression, said_settings, written_settings
from soap.strategy.config import OpConfig, Strategy
from soap.units import format_bytes

SPACE = "search space"
UPKEEP = "runtime and updates"
OTHER_UPKEEP = "other updates, and copies"
COMPRESSED = "compression"
COMPRESSED_ELEMENTS = tuple(2**power for power in range(13, 25, 3))
"""Sizes of gradients whose compression is measured; above the largest, times are proportional."""
MAY_BE_NEEDED = frozenset((SPACE, OTHER_UPKEEP))
"""Groups that belong to no strategy."""
OPTIMIZERS = (2, 0, 1)
"""Numbers of tensors of a parameter's size that optimizers keep; Adam's first, as predictions count them."""
STAYS = (MemoryKind.VALUES, MemoryKind.GRADIENTS, MemoryKind.STATES)
"""Kinds of memory that a strategy has between its turns."""
UPKEEP_BYTES = tuple(2**power for power in range(6, 27, 4))
"""No larger sizes are measured: beyond 64 MiB memory decides, and times are proportional to the bytes."""


@dataclass(frozen=True, slots=True)
class Compressing:
    """A work of compressing a gradient, or decompressing."""

    how: Compression
    work: Work
    elements: int
    peers: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """One computation. ``group``: the first that needs it. ``tile``: None without an operator. ``estimated_ns``: of all tiles together."""

    key: TileKey
    kind: str
    name: str
    group: str
    tile: Tile | None
    estimated_ns: int
    optimizer_states: int = 0
    compressing: Compressing | None = None


def wanted(
    graph: OperatorGraph, topology: Topology, strategies: Mapping[str, Sequence[Strategy]], lossy: Sequence[Compression] = ()
) -> list[Wanted]:
    """Each computation once: what every prediction needs, what ``lossy`` methods take, the strategies' groups in their order, other
    optimizers, then the search space; of operators the most expensive first."""
    keys, costs, device = TileKeys(graph), RooflineCosts(topology), topology.devices[0].type
    first_upkeep, other_upkeep = upkeep(graph)
    compressing = [one for peers in peer_counts(topology) for one in compressions(graph, peers, lossy)]
    found: dict[TileKey, Wanted] = {one.key: one for one in (*first_upkeep, *compressing)}
    groups = {name: _tiles_of_strategies(graph, own) for name, own in strategies.items()}
    groups[SPACE] = _tiles_of_space(graph, keys, topology)
    for group, tiles in groups.items():
        if group == SPACE:
            found.update({one.key: one for one in other_upkeep})
        first: dict[TileKey, Tile] = {}
        spent: dict[TileKey, int] = {}
        for tile in tiles:
            if not tile.size:
                continue
            key = keys.key(tile)
            if key in found:
                continue
            first.setdefault(key, tile)
            spent[key] = spent.get(key, 0) + costs.forward_ns(graph, tile, device) + costs.backward_ns(graph, tile, device)
        for key in sorted(first, key=lambda key: (-spent[key], key.text)):
            tile = first[key]
            found[key] = Wanted(key, tile_kind(graph, tile), graph.operators[tile.operator].name, group, tile, spent[key])
    return list(found.values())


def upkeep(graph: OperatorGraph) -> tuple[list[Wanted], list[Wanted]]:
    """Computations that belong to no operator: first what the runtime adds to tiles and Adam's updates up to the size of the largest
    parameter; then updates of other optimizers, and copies up to the size of the largest tensor."""
    trained = [tensor.bytes for tensor in graph.parameters if tensor.requires_grad]
    updates = [
        Wanted(update_key(states, size), UPDATE, f"update of {size} bytes, {states} optimizer states", group, None, 0, states)
        for states, group in zip(OPTIMIZERS, (UPKEEP, OTHER_UPKEEP, OTHER_UPKEEP), strict=True)
        for size in _sizes(max(trained, default=0))
        if trained
    ]
    largest = max(tensor.bytes for tensor in graph.tensors.values())
    copies = [Wanted(copy_key(size), COPY, f"copy of {size} bytes", OTHER_UPKEEP, None, 0) for size in _sizes(largest)]
    runtime = Wanted(runtime_key(), RUNTIME, "what the runtime adds to a tile", UPKEEP, None, 0)
    first = [one for one in updates if one.group == UPKEEP]
    return [runtime, *first], [*(one for one in updates if one.group != UPKEEP), *copies]


def compressions(graph: OperatorGraph, peers: int, lossy: Sequence[Compression]) -> list[Wanted]:
    """The works of these methods, as they compress this model's parameters, in sizes up to that of the largest one."""
    ways = lossy_syncs(graph, lossy)
    most = max((prod(graph.tensors[name].shape) for name in ways), default=0)
    enough = next((i for i, size in enumerate(COMPRESSED_ELEMENTS) if size >= most), len(COMPRESSED_ELEMENTS) - 1)
    found = []
    for how in dict.fromkeys(sync.compression for own in ways.values() for sync in own):
        if how is None:
            continue
        several = len(layout_of(how, (2, 2), 4, peers).exchanges) > 1
        for elements in COMPRESSED_ELEMENTS[: enough + 1]:
            for work in WORKS if several else (WORKS[0], WORKS[-1]):
                name = f"{work} of {elements} elements, {said_settings(written_settings(how))}"
                own = Compressing(how, work, elements, peers)
                key = compression_key(how, work, elements, peers)
                found.append(Wanted(key, COMPRESSION, name, COMPRESSED, None, 0, compressing=own))
    return found if peers > 1 else []


def _sizes(most: int) -> list[int]:
    """Sizes up to the first one that is not smaller."""
    enough = next((i for i, size in enumerate(UPKEEP_BYTES) if size >= most), len(UPKEEP_BYTES) - 1)
    return list(UPKEEP_BYTES[: enough + 1])


def _tiles_of_strategies(graph: OperatorGraph, strategies: Iterable[Strategy]) -> Iterator[Tile]:
    for strategy in strategies:
        looked_up, cut = sparse_lookup_operators(graph, strategy.parameters), MicroBatches(graph, strategy.microbatches)
        for position, op in enumerate(graph.operators):
            for tile in tiles_of(graph, position, strategy.operators[op.name], cut):
                yield replace(tile, sparse_lookup=position in looked_up)


def _tiles_of_space(graph: OperatorGraph, keys: TileKeys, topology: Topology) -> Iterator[Tile]:
    """Tiles of the whole search space. Those with lookups come twice, as plain ones and as sparse lookups: a search tries both."""
    seen: set[tuple[object, ...]] = set()
    for position, op in enumerate(graph.operators):
        accesses = tuple(graph.sparse[operand.tensor] for operand in op.parameters if operand.tensor in graph.sparse)
        touched = tuple((access.weighed, access.touched) for access in accesses)
        likeness = keys.family(position), tuple(factor.size for factor in op.factors), op.partitionable, touched
        if likeness in seen:
            continue
        seen.add(likeness)
        for degrees in dict.fromkeys(grid[1:] for grid in grids_of(op, topology.device_count)):
            tiles = tiles_of(graph, position, OpConfig(degrees, (0,) * prod(degrees)))
            yield from tiles
            yield from (replace(tile, sparse_lookup=True) for tile in tiles if accesses)


def require_for_tiles(graph: OperatorGraph, topology: Topology) -> None:
    """RuntimeFailure unless every process can hold all tensors of the model, since each runs any of its tiles."""
    if not topology.has_gpus_alone:
        _require(topology.device_count * sum(tensor.bytes for tensor in graph.tensors.values()), free_memory_bytes(), "this machine")


def together(graph: OperatorGraph, topology: Topology, simulations: Mapping[str, Simulation]) -> list[str]:
    """The names of the strategies that can be trained in turns: as many of the first as fit, since all keep their parameters.
    RuntimeFailure if there is not enough memory for the first two, or for the only one."""
    names = list(simulations)
    least = min(len(names), 2 if names[0] == BASELINE else 1)
    while len(names) > least and not _fits(graph, topology, [simulations[name] for name in names]):
        names.pop()
    chosen = [simulations[name] for name in names]
    if not _fits(graph, topology, chosen):
        needed, there, where = _needed(graph, topology, chosen)
        _require(needed, there, where)
    return names


def _fits(graph: OperatorGraph, topology: Topology, simulations: Sequence[Simulation]) -> bool:
    needed, there, _ = _needed(graph, topology, simulations)
    return needed <= there


def _needed(graph: OperatorGraph, topology: Topology, simulations: Sequence[Simulation]) -> tuple[int, int, str]:
    """Bytes that are needed, bytes that are there, and where: on CPUs those of all ranks, which begin with all parameters; on GPUs
    those of the fullest GPU."""
    devices = [_held([(s.peak_by_kind[device.index], s.peak_bytes[device.index]) for s in simulations]) for device in topology.devices]
    if not topology.has_gpus_alone:
        loaded = topology.device_count * sum(tensor.bytes for tensor in graph.parameters)
        return loaded + sum(devices), free_memory_bytes(), "this machine"
    fullest = max(topology.devices, key=lambda device: devices[device.index] / device.type.memory_bytes)
    return devices[fullest.index], fullest.type.memory_bytes, fullest.name


def _held(peaks: Sequence[tuple[Mapping[str, int], int]]) -> int:
    """Bytes of one device: what stays of each strategy, and the largest that one needs for a while. ``peaks``: by kind, and in all."""
    stay = [sum(kinds[kind] for kind in STAYS) for kinds, _ in peaks]
    return sum(stay) + max(peak - own for own, (_, peak) in zip(stay, peaks, strict=True))


def _require(needed: int, there: int, where: str) -> None:
    if needed > there:
        raise RuntimeFailure(f"{format_bytes(needed)} of memory are needed, and {where} has {format_bytes(there)}")
