"""The space of a compiled chain as arrays: grids and placements, neighbours and references, groups and segments.

``x_ptr``, ``x`` hold one list per item, as in ``simulator.compiled.graph_arrays``: item i has ``x[x_ptr[i]:x_ptr[i + 1]]``.

A wrong estimate of a candidate wastes proposals but does not bias the chain: the acceptance probability corrects for it (``moves``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf, log, perm, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import tiles_of
from soap.search.compiled.memory import ChainTables
from soap.search.sharing import owner_sets
from soap.search.space import Grid, OperatorSpace, Space, grid_of
from soap.simulator.compiled.graph_arrays import Floats, Ints, Longs
from soap.simulator.compiled.syncs.codes import SyncCodes
from soap.simulator.costs import CostModel
from soap.strategy.config import OpConfig
from soap.strategy.recomputation import LEVELS

_NUMBER = re.compile(r"\d+")
LONGEST = 512
"""The most operators in a segment: changing more amounts to another strategy."""


class Segment(NamedTuple):
    """``operators``: positions, ascending. ``alternatives``: the distinct ways in which reference strategies configure all of them, as far
    as these lie inside of the space."""

    operators: tuple[int, ...]
    alternatives: tuple[tuple[OpConfig, ...], ...]


def find_segments(space: Space) -> list[Segment]:
    """Segments with at least two alternatives, each set of operators once."""
    movable = set(space.movable)
    names: dict[str, list[int]] = {"": []}
    for position, op in enumerate(space.graph.operators):
        if position in movable:
            keys = {"", f"kind {op.kind}", *(op.name[: match.end()] for match in _NUMBER.finditer(op.name))}
            for key in sorted(keys):
                names.setdefault(key, []).append(position)
    found = []
    for operators in sorted({tuple(members) for members in names.values() if 1 < len(members) <= LONGEST}):
        segment = Segment(operators, _alternatives(space, operators))
        if len(segment.alternatives) > 1:
            found.append(segment)
    return found


def _alternatives(space: Space, operators: tuple[int, ...]) -> tuple[tuple[OpConfig, ...], ...]:
    found: dict[tuple[OpConfig, ...], None] = {}
    for strategy in space.references:
        configs = tuple(strategy.operators[space.graph.operators[i].name] for i in operators)
        if all(space.operators[i].log_weight(config) > float("-inf") for i, config in zip(operators, configs, strict=True)):
            found[configs] = None
    return tuple(found)


def rough_ns(graph: OperatorGraph, position: int, grids: Sequence[Grid], topology: Topology, costs: CostModel) -> Floats:
    """Rough time of each grid of an operator, ns, shape (grids,): forward and backward pass of the largest tile, on average over the
    devices, plus an all-reduce of each
    parameter over the copies of its shards, on the slowest link. Placements and neighbours are ignored."""
    op = graph.operators[position]
    (whole,) = tiles_of(graph, position, OpConfig((1,) * len(op.factors), (0,)))
    counts, backward = Counter(device.type for device in topology.devices), graph.needs_backward(op)
    times = {kind: costs.forward_ns(graph, whole, kind) + (costs.backward_ns(graph, whole, kind) if backward else 0) for kind in counts}
    compute_ns = sum(count * times[kind] for kind, count in counts.items()) / topology.device_count
    table = np.array(grids, np.int64).reshape(len(grids), 1 + len(op.factors))
    degrees = table[:, 1:]
    sizes = np.array([max(1, factor.size) for factor in op.factors], np.int64)
    found = compute_ns * np.prod(np.ceil(sizes / degrees) / sizes, axis=1)
    slowest = min(topology.effective_bandwidths, default=float("inf"))
    for operand in dict.fromkeys(op.parameters):
        tensor = graph.tensors[operand.tensor]
        if tensor.requires_grad:
            along = sorted({dim.factor for dim in operand.dims if dim.factor is not None})
            shards = np.prod(degrees[:, along], axis=1)
            copies = np.prod(table, axis=1) / shards
            found = found + 2e9 * (copies - 1) / copies * prod(tensor.shape) * tensor.itemsize / shards / slowest
    return np.asarray(found, np.float64)


Tables = TypeVar("Tables", bound=NamedTuple)

NO_WEIGHT = -1e300
"""Logarithm of 0."""


class GridTables(NamedTuple):
    """The configurations. Operators with equal spaces share one; grids are numbered over all distinct spaces.

    ``movable``: operators with a choice of configurations. ``space``: operator -> space.

    By space s: its grids are ``grid_ptr[s]`` to ``grid_ptr[s + 1]``; ``structured``: number of structured configurations; ``mass``: weight
    of all configurations; ``lookup``: a hash table of its grids by ``grid_key`` (``lookup_ptr``, ``lookup_mask``); ``device``: list of the
    devices that may be used; ``permitted[s * device count + device]``: 1 if that device may be used.

    By grid: ``before``: number of structured configurations of earlier grids of its space; ``replicas``; ``tiles``; ``degree``: list of
    degrees; ``places``: its set of placements; ``shuffled``: mass of the shuffled placements of its space's grids up to and with it;
    ``shuffled_log``: logarithm of the weight of one of its shuffled placements.

    By set of placements: ``place_count`` lists of one device per tile, from ``place[place_ptr[set]]`` on.

    ``estimate[estimate_ptr[op] + grid - grid_ptr[space]]``: rough time, ns (``rough_ns``). ``size``: list of an operator's factor
    sizes (1 if it cannot be split). ``sync_parameter``: parameters with a choice of methods; ``sync_choice``: list of their codes
    (``syncs.codes``). ``together``: list of the places in ``sync_parameter`` of each set of ``sharing.owner_sets``.
    ``again``: list of the operators of each of ``Space.marks``; ``again_mark``: of each, its mark at which extent (``Marked.at``).
    """

    movable: Ints
    space: Ints
    grid_ptr: Ints
    structured: Longs
    mass: Floats
    lookup_ptr: Ints
    lookup_mask: Ints
    lookup: Ints
    before: Longs
    replicas: Ints
    tiles: Ints
    degree_ptr: Ints
    degree: Ints
    places: Ints
    shuffled: Floats
    shuffled_log: Floats
    place_ptr: Longs
    place_count: Ints
    place: Ints
    device_ptr: Ints
    device: Ints
    permitted: Ints
    estimate_ptr: Ints
    estimate: Floats
    size_ptr: Ints
    size: Ints
    sync_parameter: Ints
    sync_ptr: Ints
    sync_choice: Ints
    together_ptr: Ints
    together: Ints
    again_ptr: Ints
    again: Ints
    again_mark: Ints


class NeighbourTables(NamedTuple):
    """What surrounds each operator.

    By edge (a list per operator): ``neighbour``; ``reads``: 1 if the operator reads the neighbour's output; ``bytes`` that are handed over;
    list of pairs of factors that follow the same dimension (``theirs``, ``mine``). By reference (a list per operator): a distinct
    configuration that a reference strategy gives the operator, inside of its space (``grid``, list ``dev``, ``log_weight``).
    """

    edge_ptr: Ints
    neighbour: Ints
    reads: Ints
    bytes: Floats
    pair_ptr: Ints
    theirs: Ints
    mine: Ints
    reference_ptr: Ints
    grid: Ints
    dev_ptr: Ints
    dev: Ints
    log_weight: Floats


class GroupTables(NamedTuple):
    """Operators that change together.

    ``group``: operator -> its group of equal layers (-1: none). ``member``: list of a group's operators. ``segment``: list of a segment's
    operators. ``choice``: list of a segment's alternatives, one after the other; each names one reference (its number in
    ``NeighbourTables``) per operator of the segment.
    """

    group: Ints
    member_ptr: Ints
    member: Ints
    segment_ptr: Ints
    segment: Ints
    choice_ptr: Ints
    choice: Ints


class SearchTables(NamedTuple):
    """What the moves of one chain read and write: the space and the chain itself. Compiled functions give each table one letter:
    ``Q, N, M, X = Z.grids, Z.neighbours, Z.groups, Z.chain``."""

    grids: GridTables
    neighbours: NeighbourTables
    groups: GroupTables
    chain: ChainTables


def grid_tables(space: Space, topology: Topology, costs: CostModel, codes: SyncCodes) -> GridTables:
    """The configurations of a space as arrays."""
    graph = space.graph
    spaces = list(dict.fromkeys(space.operators))
    pairs = [(own, grid) for own in spaces for grid in own.grids]
    grids = [grid for _, grid in pairs]
    shapes = [(own.devices, tuple(n for n in grid if n > 1)) for own, grid in pairs]  # what a grid's placements depend on
    options = {shape: own.placements(grid) for shape, (own, grid) in zip(shapes, pairs, strict=True)}
    number = {shape: i for i, shape in enumerate(options)}
    estimates = [rough_ns(graph, position, own.grids, topology, costs) for position, own in enumerate(space.operators)]
    before = [np.cumsum([0, *(len(own.placements(grid)) for grid in own.grids)])[:-1] for own in spaces]
    lookup_ptr, lookup_mask, lookup = _lookup(spaces)
    together = owner_sets(graph, space.syncs)
    place = {tensor.name: place for place, tensor in enumerate(own for own in graph.parameters if own.name in space.syncs)}
    return _pack(
        GridTables,
        movable=space.movable,
        space=[spaces.index(own) for own in space.operators],
        grid_ptr=_pointers(own.grids for own in spaces),
        structured=[own.structured_count for own in spaces],
        mass=[own.mass for own in spaces],
        lookup_ptr=lookup_ptr,
        lookup_mask=lookup_mask,
        lookup=lookup,
        before=np.concatenate(before),
        replicas=[grid[0] for grid in grids],
        tiles=[prod(grid) for grid in grids],
        degree_ptr=_pointers(grid[1:] for grid in grids),
        degree=[degree for grid in grids for degree in grid[1:]],
        places=[number[shape] for shape in shapes],
        shuffled=np.concatenate([np.cumsum([own.shuffled_mass(grid) for grid in own.grids]) for own in spaces]),
        shuffled_log=[_shuffled_log(own, grid) for own, grid in pairs],
        place_ptr=np.cumsum([0, *(len(found) * len(found[0]) for found in options.values())]),
        place_count=[len(found) for found in options.values()],
        place=[device for found in options.values() for devices in found for device in devices],
        device_ptr=_pointers(own.devices for own in spaces),
        device=[device for own in spaces for device in own.devices],
        permitted=[device in own.devices for own in spaces for device in range(space.device_count)],
        estimate_ptr=_pointers(estimates),
        estimate=np.concatenate(estimates),
        size_ptr=_pointers(op.factors for op in graph.operators),
        size=[factor.size if op.partitionable else 1 for op in graph.operators for factor in op.factors],
        sync_parameter=[number for number, tensor in enumerate(graph.parameters) if tensor.name in space.syncs],
        sync_ptr=_pointers(space.syncs[tensor.name] for tensor in graph.parameters if tensor.name in space.syncs),
        sync_choice=[codes.code(sync) for tensor in graph.parameters for sync in space.syncs.get(tensor.name, ())],
        together_ptr=_pointers(together),
        together=[place[name] for own in together for name in own],
        again_ptr=_pointers(space.marks),
        again=[each.position for own in space.marks for each in own],
        again_mark=[each.at(extent) for own in space.marks for each in own for extent in LEVELS],
    )


def _shuffled_log(own: OperatorSpace, grid: Grid) -> float:
    mass = own.shuffled_mass(grid)
    return log(mass) - log(perm(len(own.devices), prod(grid)) - len(own.placements(grid))) if mass > 0 else NO_WEIGHT


def grid_key(grid: Iterable[int]) -> int:
    """Hash of a grid."""
    key = 0
    for length in grid:
        key = (key * 31 + length) & 0x3FFFFFFF
    return key


def _lookup(spaces: Sequence[OperatorSpace]) -> tuple[Longs, list[int], Ints]:
    tables, first = [], 0
    for own in spaces:
        size = 4
        while size < 4 * len(own.grids):
            size *= 2
        table = np.full(size, -1, np.int32)
        for number, grid in enumerate(own.grids):
            place = grid_key(grid) & (size - 1)
            while table[place] >= 0:
                place = (place + 1) & (size - 1)
            table[place] = first + number
        tables.append(table)
        first += len(own.grids)
    return _pointers(tables), [len(table) - 1 for table in tables], np.concatenate(tables)


def neighbour_tables(space: Space) -> NeighbourTables:
    """What surrounds the operators of a space, as arrays."""
    edges = [edge for position in range(len(space.graph.operators)) for edge in _edges(space, position)]
    numbers = _grid_numbers(space)
    references = _references(space)
    flat = [(position, config) for position, own in enumerate(references) for config in own]
    return _pack(
        NeighbourTables,
        edge_ptr=_pointers(space.edges),
        neighbour=[edge[0] for edge in edges],
        reads=[edge[1] for edge in edges],
        bytes=[edge[2] for edge in edges],
        pair_ptr=_pointers(edge[3] for edge in edges),
        theirs=[theirs for edge in edges for theirs, _ in edge[3]],
        mine=[mine for edge in edges for _, mine in edge[3]],
        reference_ptr=_pointers(references),
        grid=[numbers[space.operators[position]][grid_of(config)] for position, config in flat],
        dev_ptr=_pointers(config.devices for _, config in flat),
        dev=[device for _, config in flat for device in config.devices],
        log_weight=[space.operators[position].log_weight(config) for position, config in flat],
    )


def _grid_numbers(space: Space) -> dict[OperatorSpace, dict[Grid, int]]:
    found: dict[OperatorSpace, dict[Grid, int]] = {}
    first = 0
    for own in dict.fromkeys(space.operators):
        found[own] = {grid: first + i for i, grid in enumerate(own.grids)}
        first += len(own.grids)
    return found


def _edges(space: Space, position: int) -> list[tuple[int, bool, float, tuple[tuple[int, int], ...]]]:
    """(neighbour, whether the operator reads it, bytes, pairs of factors) of each edge, in the order of ``Space.edges``."""
    graph = space.graph
    op, found = graph.operators[position], []
    for edge in space.edges[position]:
        other = graph.operators[edge.neighbour]
        read = {o.tensor for o in op.inputs} & {o.tensor for o in other.outputs}
        shared = read or {o.tensor for o in other.inputs} & {o.tensor for o in op.outputs}
        size = sum(prod(graph.tensors[name].shape) * graph.tensors[name].itemsize for name in shared)
        found.append((edge.neighbour, bool(read), float(size), edge.factors))
    return found


def _references(space: Space) -> list[list[OpConfig]]:
    found = []
    for op, own in zip(space.graph.operators, space.operators, strict=True):
        configs = dict.fromkeys(strategy.operators[op.name] for strategy in space.references)
        found.append([config for config in configs if own.log_weight(config) > -inf])
    return found


def group_tables(space: Space) -> GroupTables:
    """The groups and segments of a space as arrays."""
    group = np.full(len(space.graph.operators), -1)
    for number, members in enumerate(space.groups):
        group[list(members)] = number
    segments = find_segments(space)
    first, order = 0, list[dict[OpConfig, int]]()
    for own in _references(space):
        order.append({config: first + i for i, config in enumerate(own)})
        first += len(own)
    choices = [[order[op][c] for row in s.alternatives for op, c in zip(s.operators, row, strict=True)] for s in segments]
    return _pack(
        GroupTables,
        group=group,
        member_ptr=_pointers(space.groups),
        member=[op for members in space.groups for op in members],
        segment_ptr=_pointers(s.operators for s in segments),
        segment=[op for s in segments for op in s.operators],
        choice_ptr=_pointers(choices),
        choice=[number for own in choices for number in own],
    )


def _pack(kind: type[Tables], **values: Any) -> Tables:
    """A table of these values, as arrays of the dtypes that its fields are annotated with."""
    kinds = {"Longs": np.int64, "Floats": np.float64, "Ints": np.int32}
    types = {name: next(kinds[own] for own in kinds if own in str(annotation)) for name, annotation in kind.__annotations__.items()}
    arrays = {name: np.ascontiguousarray(own, types[name]) for name, own in values.items()}
    return kind._make(arrays[name] for name in types)


def _pointers(lists: Iterable[Any]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(own) for own in lists)])
