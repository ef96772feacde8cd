"""The Python side of ``compiled.memory``: tables of what variants keep, filled in when a variant first occurs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import numpy as np

from soap.model.graph import TensorKind
from soap.model.regions import Box, volume
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.handles import blank, handle
from soap.simulator.compiled.memory import bound_memory
from soap.simulator.compiled.memory_tables import COLUMNS, PARTS, MemoryTables
from soap.simulator.compiled.ordered_memory import order_memory
from soap.simulator.compiled.pass_places import PlaceTables, count_passes
from soap.simulator.engine import Engine
from soap.simulator.memory.hosts import hosts_may_lack
from soap.simulator.memory.sweep import ALLOWANCE
from soap.simulator.memory.variant_memory import Regions, VariantMemory

NO_TABLES = handle(blank(MemoryTables))
"""Empty tables, for compiled code that does not use them."""

MOST_KNOWN = 2**27
"""Most entries of ``PlaceTables.done``: 4 bytes for each node and device. Where there would be more, nothing is known of other devices."""


class MemoryBound:
    """A bound of the memory that an engine's strategy needs on each device. It shares the engine's arrays: do not use both at once."""

    def __init__(self, engine: Engine, limits_bytes: Sequence[int], optimizer_states: int = 2) -> None:
        """``limits_bytes``: each device's memory. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it.
        Where a host may lack memory for parameter servers or for what it keeps, which is not bounded here, no verdict on strategies with
        these is FITS: UNKNOWN stands for it."""
        self._engine = engine
        graph = engine.graph.copies_of or engine.graph  # of all copies, whose footprints are known
        self._rows: Longs = np.zeros((1, COLUMNS), np.int64)
        self._cut_ptr: Longs = np.zeros(1, np.int64)
        self._data, self._cut = Growing(np.int64), Growing(np.int32)
        self._regions: dict[Box, int] = {}
        self._region_volume = Growing(np.int64)
        self._cuts: dict[frozenset[Box], int] = {}
        self._cut_volume = Growing(np.int64)
        self._filled: set[int] = set()
        self._seen, self._seen_by = np.zeros(1, np.int64), np.zeros(1, np.int64)
        users: list[list[tuple[int, int]]] = [[] for _ in graph.parameters]
        numbers = {tensor.name: number for number, tensor in enumerate(graph.parameters)}
        for position, op in enumerate(graph.operators):
            for place, operand in enumerate(op.parameters):
                users[numbers[operand.tensor]].append((position, place))
        pairs = np.array([pair for own in users for pair in own], np.int32).reshape(-1, 2)
        given = [t for t in graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)]
        most, devices = sum(t.bytes for t in given) + graph.next_state_bytes, engine.topology.device_count
        self._memories = engine.shared.memories
        lack = [hosts_may_lack(graph, engine.topology, optimizer_states, offloading=offloading) for offloading in (False, True)]
        self._fixed: dict[str, Any] = {
            "user_ptr": np.cumsum([0, *map(len, users)]).astype(np.int32),
            "user": np.ascontiguousarray(pairs[:, 0]),
            "user_operand": np.ascontiguousarray(pairs[:, 1]),
            "elements": np.array([volume(tuple((0, n) for n in t.shape)) for t in graph.parameters], np.int64),
            "itemsize": np.array([t.itemsize for t in graph.parameters], np.int64),
            "row_bytes": np.array([t.bytes // max(1, t.shape[0]) if t.shape else t.bytes for t in graph.parameters], np.int64),
            "operand_ptr": np.cumsum([0, *(len(op.parameters) for op in graph.operators)]).astype(np.int32),
            "operand": np.array([numbers[o.tensor] for op in graph.operators for o in op.parameters], np.int32),
            "looked_up": np.zeros(devices, np.int64),
            "trainable": np.array([t.requires_grad for t in graph.parameters], np.int32),
            "fixed": np.array([most, optimizer_states, *lack], np.int64),
            "limit": np.array(limits_bytes, np.int64),
            "part": np.zeros((PARTS, devices), np.int64),
            "step": np.zeros(devices * (len(graph.operators) + 2), np.int64),
            "total": np.zeros(devices, np.int64),
        }
        self._handle: MemoryTables | None = None

    def handle(self) -> MemoryTables:
        """The tables for compiled code, with all variants that the engine knows by now."""
        return self._with(range(len(self._engine.variants.made)))

    def _asked(self) -> MemoryTables:
        """The tables with the variants of the strategy that is asked about, and perhaps not all others."""
        return self._with(self._engine.state.variant[: len(self._engine.graph.operators)].tolist())

    def _with(self, variants: Iterable[int]) -> MemoryTables:
        missing = sorted({*variants} - self._filled)
        if self._handle is None or missing:
            self._make_rows(len(self._engine.variants.made))
            for number in missing:
                self._fill(number, self._memories.of(self._engine.variants.made[number]))
            self._filled.update(missing)
            room = 1 + self._region_volume.size * self._engine.topology.device_count
            if room > len(self._seen):
                self._seen, self._seen_by = np.zeros(2 * room, np.int64), np.zeros(2 * room, np.int64)
            arrays: dict[str, Any] = {
                "rows": self._rows, "data": self._data.array(), "cut": self._cut.array(),
                "cut_ptr": self._cut_ptr, "cut_volume": self._cut_volume.array(), "region_volume": self._region_volume.array(),
                "seen": self._seen, "seen_by": self._seen_by,
            }  # fmt: skip
            self._handle = handle(MemoryTables(**arrays, **self._fixed))
        return self._handle

    def verdict(self) -> int:
        """FITS or UNKNOWN: what the bound says about the engine's proposal, or, without one, the strategy that it holds."""
        return self._engine.consult(lambda: int(bound_memory(self._engine.world, self._asked())))

    def bound_bytes(self) -> list[int]:
        """At least the bound for any order (``peaks.memory_use``) on each device, for that strategy."""
        self.verdict()
        found: list[int] = self._fixed["total"].tolist()
        return found

    def in_order_bytes(self) -> list[int]:
        """An upper bound of what each device holds at its peak as passes follow the order of micro-batches, whatever they take."""
        total = self.bound_bytes()
        return _ordered_bytes(self._engine, self._asked()) if self._engine.variants.micro_batches.count > 1 else total

    def expected_bytes(self) -> list[int]:
        """The peak to expect at most on each device, in bytes: as ``sweep.expected_peaks``, without a plan."""
        return [min(most, ceil((1 + ALLOWANCE) * own)) for own, most in zip(self.in_order_bytes(), self.bound_bytes(), strict=True)]

    def _make_rows(self, variants: int) -> None:
        """Make room for so many variants."""
        if variants > len(self._rows):
            rows, pointers = np.zeros((2 * variants, COLUMNS), np.int64), np.zeros(2 * variants, np.int64)
            rows[: len(self._rows)], pointers[: len(self._rows)] = self._rows, self._cut_ptr
            self._rows, self._cut_ptr = rows, pointers

    def _fill(self, number: int, variant: VariantMemory) -> None:
        """Fill in a variant's row."""
        numbers = np.array([self._numbers(own) for own in variant.regions], np.int64)
        columns = variant.kept, variant.read, variant.gradients, variant.parameter_gradients, numbers
        rows = [-1, -1] if variant.compact is None else [self._data.add(variant.compact), self._data.add(variant.lookups)]
        rows += [self._data.add(own) for own in (variant.made, variant.products, variant.partials)]
        self._rows[number] = [*(self._data.add(column) for column in columns), *rows]
        self._cut_ptr[number] = self._cut.add([self._cut_number(own) for own in variant.regions])

    def _numbers(self, regions: Regions) -> Ints:
        """[tile]: number of its region of a parameter; -1 if that is empty."""
        return np.array([-1 if size == 0 else self._region(box, size) for box, size in regions.sizes.items()], np.int32)[regions.place]

    def _region(self, box: Box, size: int) -> int:
        if box not in self._regions:
            self._regions[box] = self._region_volume.add([size])
        return self._regions[box]

    def _cut_number(self, regions: Regions) -> int:
        found = self._cuts.get(regions.boxes)
        if found is None:
            found = self._cuts[regions.boxes] = len(self._cuts)
            self._cut_volume.add([regions.volume])
        return found


def _ordered_bytes(engine: Engine, tables: MemoryTables) -> list[int]:
    """The upper bound in bytes, by device, of the strategy that an engine holds or proposes, if its passes follow its order of
    micro-batches. ``tables``: of ``bound_memory``, which was called for this strategy."""
    devices = engine.topology.device_count
    fixed: dict[str, Any] = {"sizes": np.zeros(2, np.int64)}
    fixed |= {name: np.zeros(devices + 1, np.int32) for name in ("base", "node_base", "next")}
    fixed |= {name: np.zeros(devices, np.int64) for name in ("steady", "ordered")}

    def work() -> None:
        counting = _tables(fixed)
        count_passes(engine.world, counting)
        slots, actions = fixed["sizes"].tolist()
        places = _begins(fixed["base"], 1)
        nodes = _begins(fixed["node_base"], 0)
        sizes = {"rank": actions + 1, "place": slots, "node": places, "change": places + 1, "node_rank": nodes, "node_first": nodes}
        sizes["done"] = nodes * devices if nodes * devices <= MOST_KNOWN else 0
        order_memory(engine.world, tables, _tables(fixed, sizes))

    engine.consult(work)
    found: list[int] = fixed["ordered"].tolist()
    return found


def _begins(counts: np.ndarray[tuple[int, ...], np.dtype[np.int32]], spare: int) -> int:
    """Make of each device's number where its own begin, with so many spare ones after them; returns how many there are."""
    own = counts[:-1] + spare
    counts[1:] = np.cumsum(own)
    counts[0] = 0
    return int(counts[-1])


def _tables(fixed: dict[str, Any], sizes: dict[str, int] | None = None) -> PlaceTables:
    """The handle of tables of these sizes, by name, and of those that are there."""
    arrays = dict(fixed)
    for name, kind in PlaceTables.__annotations__.items():
        if name not in arrays:
            arrays[name] = np.zeros((sizes or {}).get(name, 0), np.int64 if "Longs" in str(kind) else np.int32)
    return handle(PlaceTables(**arrays))
