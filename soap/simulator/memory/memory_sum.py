"""The Python side of ``compiled.memory_sum``: tables of what variants keep, filled in when a variant first occurs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from soap.model.graph import TensorKind
from soap.model.regions import Box, volume
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.handles import blank, handle
from soap.simulator.compiled.memory_sum import COLUMNS, PARTS, SumTables, sum_memory
from soap.simulator.engine import Engine
from soap.simulator.memory.hosts import hosts_may_lack
from soap.simulator.memory.sweep import without_allowance
from soap.simulator.memory.variant_memory import Regions, VariantMemory

NO_TABLES = handle(blank(SumTables))
"""Empty tables, for compiled code that does not use them."""


class MemorySum:
    """At least the bytes that an engine's strategy needs on each device. It shares the engine's arrays: do not use both at once."""

    def __init__(self, engine: Engine, limits_bytes: Sequence[int], optimizer_states: int = 2) -> None:
        """``limits_bytes``: each device's memory. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it.
        Where a host may lack memory for parameter servers or for what it keeps, which is not in it, no verdict on strategies with
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
        self._seen = np.zeros(1, np.int64)
        users: list[list[tuple[int, int]]] = [[] for _ in graph.parameters]
        numbers = {tensor.name: number for number, tensor in enumerate(graph.parameters)}
        for position, op in enumerate(graph.operators):
            for place, operand in enumerate(op.parameters):
                users[numbers[operand.tensor]].append((position, place))
        pairs = np.array([pair for own in users for pair in own], np.int32).reshape(-1, 2)
        given = [t for t in graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)]
        most, devices = sum(t.bytes for t in given) + graph.next_state_bytes, engine.topology.device_count
        lack = [hosts_may_lack(graph, engine.topology, optimizer_states, offloading=offloading) for offloading in (False, True)]
        self._fixed: dict[str, Any] = {
            "user_ptr": np.cumsum([0, *map(len, users)]).astype(np.int32),
            "user": np.ascontiguousarray(pairs[:, 0]),
            "user_operand": np.ascontiguousarray(pairs[:, 1]),
            "elements": np.array([volume(tuple((0, n) for n in t.shape)) for t in graph.parameters], np.int64),
            "itemsize": np.array([t.itemsize for t in graph.parameters], np.int64),
            "row_bytes": np.array([t.bytes // max(1, t.shape[0]) if t.shape else t.bytes for t in graph.parameters], np.int64),
            "fixed": np.array([most, optimizer_states, *lack], np.int64),
            "limit": np.array([without_allowance(limit) for limit in limits_bytes], np.int64),
            "part": np.zeros((PARTS, devices), np.int64),
            "step": np.zeros(devices * (len(graph.operators) + 2), np.int64),
            "read": np.zeros(devices, np.int64),
            "total": np.zeros(devices, np.int64),
        }
        self._handle: SumTables | None = None

    def handle(self) -> SumTables:
        """The tables for compiled code, with all variants that the engine knows by now."""
        return self._with(range(len(self._engine.variants.made)))

    def _with(self, variants: Iterable[int]) -> SumTables:
        missing = sorted({*variants} - self._filled)
        if self._handle is None or missing:
            self._make_rows(len(self._engine.variants.made))
            for number in missing:
                self._fill(number, self._engine.shared.memories.of(self._engine.variants.made[number]))
            self._filled.update(missing)
            room = 1 + self._region_volume.size * self._engine.topology.device_count
            if room > len(self._seen):
                self._seen = np.zeros(2 * room, np.int64)
            self._handle = handle(SumTables(
                rows=self._rows, data=self._data.array(), cut=self._cut.array(), cut_ptr=self._cut_ptr,
                cut_volume=self._cut_volume.array(), region_volume=self._region_volume.array(), seen=self._seen, **self._fixed,
            ))  # fmt: skip
        return self._handle

    def verdict(self) -> int:
        """FITS or UNKNOWN, of the engine's proposal, or, without one, the strategy that it holds."""
        own = self._engine.state.variant[: len(self._engine.graph.operators)].tolist()  # and perhaps not all others
        return self._engine.consult(lambda: int(sum_memory(self._engine.world, self._with(own))))

    def _make_rows(self, variants: int) -> None:
        """Make room for so many variants."""
        if variants > len(self._rows):
            rows, pointers = np.zeros((2 * variants, COLUMNS), np.int64), np.zeros(2 * variants, np.int64)
            rows[: len(self._rows)], pointers[: len(self._rows)] = self._rows, self._cut_ptr
            self._rows, self._cut_ptr = rows, pointers

    def _fill(self, number: int, variant: VariantMemory) -> None:
        """Fill in a variant's row."""
        regions = np.array([self._numbers(own) for own in variant.regions], np.int64)
        work = variant.gradients + 3 * variant.parameter_gradients  # two of a parameter that are added up, and their sum
        columns = variant.kept + variant.read, variant.made, variant.products, work, regions
        self._rows[number] = [self._data.add(own) for own in columns]
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
