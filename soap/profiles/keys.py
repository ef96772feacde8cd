"""The identity of a measurement: a tile's computation, and the place where it ran. It is worked out from the operator graph alone,
without torch.

Two tiles have the same key if nothing that the graph knows tells their computations apart. Names are no part of it, so equal layers are
measured once. What the graph does not know (the numbers among a call's arguments, such as which form of GELU) is not in the key.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.presets import family
from soap.cluster.topology import DeviceType, Topology
from soap.errors import ProfileError
from soap.measure.this_machine import cpu_cores
from soap.model.dtypes import TF32
from soap.model.graph import DimMap, Operand, OperatorGraph, is_rounded_by_default
from soap.model.json_text import Schema
from soap.model.regions import lengths
from soap.plan.row_counts import parameters_held
from soap.plan.tiling import Tile, is_widened, iteration_points

VERSIONS = {"cpu": 9, "cuda": 3}
"""Version of the measurement and of its format, by kind of device; part of every environment. Since 2 with freed memory kept
(``malloc``), since 3 with Adam's updates in one pass (``runtime.updates.optimizers``), since 4 on emulated hosts without a quota, since
5 there by even time (``soap.emulation.reference_work``), since 6 with tiles in turns (``measure.tile_timing``), since 7 with reference
work that is the same in all processes, since 8 with updates of tensors that are not in the caches, since 9 with random numbers in the
work that is kept beside the times. On GPUs since 3 with casts that are named by their type, and fused updates."""

Word = Annotated[str, Schema(minLength=1, maxLength=200)]
Few = Annotated[int, Schema(minimum=0, maximum=10**6)]
SPARSE_LOOKUP = "on rows"
PART_OF_SUM = "part of a sum"
"""Mark of a part of a sum of a narrower type: it is computed in float32."""

_NUMBER = re.compile(r"_\d+(?=$|:)")
"""Part of a call's name that only numbers it: ``linear_3``, ``batch_norm_1:sums``."""

_CAST = re.compile(r".*:(bfloat16|float16|float32)(?:_\d+)?")
"""Name of a cast under autocast: the value's name and the type."""


@dataclass(frozen=True, slots=True)
class TileKey:
    """A tile's computation. ``family``: 16 hex digits, equal for tiles of like operators of any size. ``lengths``: one per factor.
    ``regions``: lengths of all regions of inputs, parameters and outputs, one after the other; of a sparse lookup, the regions of its
    parameters. ``entire``: each region is its whole tensor, so that plain calls run (or the same sparse lookup with other indices)."""

    family: str
    lengths: tuple[int, ...]
    regions: tuple[int, ...]
    entire: bool

    @property
    def text(self) -> str:
        """The key as one word."""
        sizes = ["x".join(map(str, part)) for part in (self.lengths, self.regions)]
        return ":".join([self.family, *sizes, "entire" if self.entire else "part"])


class TileKeys:
    """The keys of one graph's tiles."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self._families: dict[tuple[int, tuple[str, ...]], str] = {}
        self._shapes: dict[int, tuple[tuple[int, ...], ...]] = {}

    def key(self, tile: Tile) -> TileKey:
        """The key of a tile of the graph."""
        sizes = tuple([lengths(box) for box in (*tile.inputs, *tile.parameters, *tile.outputs)])
        held = (*tile.inputs, *parameters_held(self.graph, tile), *tile.outputs)
        regions = tuple([size for box in held for size in lengths(box)])
        marks = (SPARSE_LOOKUP,) * tile.sparse_lookup + (PART_OF_SUM,) * is_widened(self.graph, tile)
        return TileKey(self.family(tile.operator, marks), lengths(tile.intervals), regions, sizes == self._whole(tile.operator))

    def family(self, position: int, marks: tuple[str, ...] = ()) -> str:
        """Identity of what the operator at ``position`` computes, whatever the sizes of its factors. ``marks``: in what way a tile does
        it differently."""
        found = self._families.get((position, marks))
        if found is None:
            signature = _signature(self.graph, position)
            found = self._families[position, marks] = digest([signature, *marks] if marks else signature)
        return found

    def _whole(self, position: int) -> tuple[tuple[int, ...], ...]:
        found = self._shapes.get(position)
        if found is None:
            op = self.graph.operators[position]
            shapes = (self.graph.tensors[operand.tensor].shape for operand in (*op.inputs, *op.parameters, *op.outputs))
            found = self._shapes[position] = tuple(shapes)
        return found


@dataclass(frozen=True)
class Environment:
    """Where something was measured. Measurements of another environment are never used. ``device``: the device type's name.
    ``threads``: of each process, 0 on GPUs. ``neighbours``: number of processes that were kept busy meanwhile. ``version``: today's if
    not given."""

    device: Word
    kind: Annotated[str, Schema(enum=[*VERSIONS])]
    torch: Word
    threads: Few
    neighbours: Few
    version: Few = 0

    def __post_init__(self) -> None:
        if not self.version:
            object.__setattr__(self, "version", VERSIONS[self.kind])

    @cached_property
    def hash(self) -> str:
        """16 hex digits."""
        return digest(asdict(self))

    @property
    def text(self) -> str:
        """The environment as one line."""
        if self.kind == "cuda":
            return f"{self.device}, torch {self.torch}"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        beside = f"{self.neighbours} busy process{'' if self.neighbours == 1 else 'es'} beside it"
        return f"{self.device}, torch {self.torch}, {threads}, {beside if self.neighbours else 'alone'}"


def environments(topology: Topology, torch: str | None = None) -> dict[str, Environment]:
    """Device type name -> the environment in which its tiles run when all devices of the cluster work. ``torch``: the version, if not
    the installed one. All hosts of a cluster that was measured are this machine, emulated ones as well."""
    if family(topology.name) == EMULATED:
        return {device.type.name: _emulated(device.type, topology.device_count, torch) for device in topology.devices}
    busy: dict[str, tuple[DeviceType, int, int]] = {}
    for device in topology.devices:
        if topology.measured:
            busy[device.type.name] = device.type, topology.device_count, cpu_cores()
        elif device.type.name not in busy:
            processes = sum(other.host == device.host for other in topology.devices)
            busy[device.type.name] = device.type, processes, topology.hosts[device.host].cpu_cores
    return {name: environment(*found, torch) for name, found in busy.items()}


def only_environment(topology: Topology) -> Environment:
    """The environment of all devices; ProfileError if they are of several kinds, of which only one can be measured at a time."""
    found = environments(topology)
    if len(found) > 1:
        kinds = ", ".join(found)
        raise ProfileError(f"cluster {topology.name!r} has devices of several kinds ({kinds}); expected one kind: take fewer devices")
    return next(iter(found.values()))


def environment(device: DeviceType, processes: int, cores: int, torch: str | None = None) -> Environment:
    """The environment of one of so many processes of a host. On CPUs each process has its share of the cores as threads. As many others
    are kept busy as there are cores: more of them would only take turns, which measured processor time does not show, and which
    ``tile_timing`` adds."""
    known = torch if torch is not None else torch_version()
    if device.kind == "cuda":
        return Environment(device.name, device.kind, known, 0, 0)
    threads = max(1, cores // processes)
    return Environment(device.name, device.kind, known, threads, max(0, min(processes, cores // threads) - 1))


def _emulated(device: DeviceType, processes: int, torch: str | None) -> Environment:
    """The environment of a device of emulated hosts. With one thread it has no busy neighbours: the thread's time is even, which stands
    for what others do to a core. With busy neighbours the same tile's even time differed by 26% from one profile to the next, without
    them by 8%. Several threads have no even time; then all others are busy, as each has its own share."""
    alone = environment(device, processes, cpu_cores(), torch)
    return replace(alone, neighbours=0 if alone.threads == 1 else processes - 1)


def torch_version() -> str:
    """The installed torch's version, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def tile_kind(graph: OperatorGraph, tile: Tile) -> str:
    """The kind under which measurements and estimates are compared: an operator's kind; sparse lookups are a kind of their own."""
    kind = graph.operators[tile.operator].kind
    return f"{kind} {SPARSE_LOOKUP}" if tile.sparse_lookup else kind


def call_kind(name: str) -> str:
    """The kind of a traced call by its name: ``linear`` for ``linear_3``, ``cast:bfloat16`` for a cast of whatever value."""
    cast = _CAST.fullmatch(name)
    return f"cast:{cast[1]}" if cast else _NUMBER.sub("", name)


def _signature(graph: OperatorGraph, position: int) -> list[Any]:
    op = graph.operators[position]
    read = (*op.inputs, *op.parameters)
    rounded = [op.arithmetic] if any(op.narrowing_bytes) or (op.arithmetic == TF32 and not is_rounded_by_default(op.kind)) else []
    return [
        op.kind,
        [call_kind(name) for name in op.calls],
        [factor.summed for factor in op.factors],
        [[_operand(graph, operand) for operand in group] for group in (op.inputs, op.parameters, op.outputs)],
        [read.index(operand) for operand in read],  # an operand that occurs twice
        position in graph.backward_operators,
        round(op.flops / iteration_points(op), 3),  # which tells grouped from ungrouped convolutions
        *rounded,
    ]


def _operand(graph: OperatorGraph, operand: Operand) -> list[Any]:
    tensor = graph.tensors[operand.tensor]
    return [tensor.dtype, tensor.requires_grad, [_dim(dim, size) for dim, size in zip(operand.dims, tensor.shape, strict=True)]]


def _dim(dim: DimMap, size: int) -> list[int]:
    """Which factor a dimension follows and how wide; without a factor, its length."""
    if dim.factor is None:
        start, stop = dim.interval((), size)
        return [-1, stop - start, 0]
    return [dim.factor, dim.scale, dim.hi - dim.lo]


def digest(value: Any) -> str:
    """Hash of plain JSON values: 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
