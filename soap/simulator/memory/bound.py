"""The Python side of ``compiled.memory``: tables of what variants keep, filled in when a variant first occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from soap.model.graph import Operand, Operator, TensorKind
from soap.model.regions import Box, cells, in_one_piece, volume
from soap.plan.row_counts import row_bytes, tile_lookups
from soap.plan.samples import divided_inputs
from soap.plan.tiling import Tile, windows
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.memory import bound_memory
from soap.simulator.compiled.memory_estimate import estimate_memory
from soap.simulator.compiled.memory_tables import (
    ASKED_AT,
    COLUMNS,
    FIT_UP_TO,
    FITS,
    LACKED_FROM,
    LACKING,
    PARTS,
    SLACK,
    UNKNOWN,
    WHOLE,
    MemoryTables,
)
from soap.simulator.engine import Engine
from soap.simulator.memory.certain import keepers, with_backward
from soap.simulator.memory.footprint import kept_places, kept_share, passing_share, product_share, work_share
from soap.simulator.memory.hosts import hosts_may_lack
from soap.simulator.memory.ordered import ordered_bytes
from soap.simulator.memory.peaks import PACKING_KINDS, padded_bytes
from soap.simulator.memory.residency import ALLOWANCE
from soap.simulator.memory.tile_regions import boxes_of, by_lengths, distinct, volumes
from soap.strategy.recomputation import has_product

NOTHING_LACKED = 1 << 62
FIRST_SLACK = WHOLE // 50
"""See ``memory_tables.SLACK``: 2%. Each answer that such a strategy does not fit halves it, each one that fits restores it."""


def _empty() -> MemoryTables:
    fields: dict[str, Any] = {}
    for name, kind in MemoryTables.__annotations__.items():
        fields[name] = np.zeros((1, 1) if name in ("rows", "part") else 1, np.int64 if "Longs" in str(kind) else np.int32)
    return MemoryTables(**fields)


NO_TABLES = handle(_empty())
"""Empty tables, for compiled code that does not use them."""


class MemoryBound:
    """Bounds of the memory that an engine's strategy needs on each device. It shares the engine's arrays: do not use both at once."""

    def __init__(self, engine: Engine, limits_bytes: Sequence[int], optimizer_states: int = 2, *, played: bool = True) -> None:
        """``limits_bytes``: each device's memory. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it.
        ``played``: whether a strategy fits if the order that is played does; if not, the upper bound decides and no verdict is UNKNOWN.
        But where a host may lack memory for parameter servers or for what it keeps, which is not bounded here, no verdict on strategies
        with these is FITS: UNKNOWN stands for it."""
        self._engine = engine
        self._graph = graph = engine.graph.copies_of or engine.graph  # of all copies, whose footprints are known
        self._rows, self._data, self._cut_ptr, self._cut = Growing(np.int64), Growing(np.int64), Growing(np.int64), Growing(np.int32)
        self._regions: dict[Box, int] = {}
        self._region_volume = Growing(np.int64)
        self._cuts: dict[frozenset[Box], int] = {}
        self._cut_volume = Growing(np.int64)
        self._known, self._seen, self._seen_by = 0, np.zeros(1, np.int64), np.zeros(1, np.int64)
        users: list[list[tuple[int, int]]] = [[] for _ in graph.parameters]
        numbers = {tensor.name: number for number, tensor in enumerate(graph.parameters)}
        for position, op in enumerate(graph.operators):
            for place, operand in enumerate(op.parameters):
                users[numbers[operand.tensor]].append((position, place))
        pairs = np.array([pair for own in users for pair in own], np.int32).reshape(-1, 2)
        given = [t for t in graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)]
        most, devices = sum(t.bytes for t in given) + graph.next_state_bytes, engine.topology.device_count
        read = sum(graph.tensors[name].bytes for name in divided_inputs(graph)) if engine.topology.own_samples else 0
        batch = most, most - read, most - read + read // devices
        self._with_backward, self._keepers = with_backward(graph), keepers(graph)
        self._packing = {device.type.kind != "cpu" for device in engine.topology.devices}
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
            "fixed": np.array([batch[0], optimizer_states, played, *lack, *batch[1:]], np.int64),
            "limit": np.array(limits_bytes, np.int64),
            "part": np.zeros((PARTS, devices), np.int64),
            "step": np.zeros(devices * (len(graph.operators) + 2), np.int64),
            "total": np.zeros(devices, np.int64),
            "least": np.zeros(devices, np.int64),
            "certain": np.zeros(devices, np.int64),
            "guess": np.array([0, NOTHING_LACKED, FIRST_SLACK, 0], np.int64),
            "level": np.zeros(devices, np.int64),
            "highest": np.zeros(devices, np.int64),
            "dropped": np.zeros(devices, np.int64),
            "leaves": np.zeros(len(graph.operators), np.int32),
        }
        self._handle: MemoryTables | None = None

    def handle(self) -> MemoryTables:
        """The tables for compiled code, with all variants that the engine knows by now."""
        variants = self._engine.variants
        if self._handle is None or len(variants.degrees) > self._known:
            for number in range(self._known, len(variants.degrees)):
                self._add(number)
            self._known = len(variants.degrees)
            room = 1 + self._region_volume.size * self._engine.topology.device_count
            if room > len(self._seen):
                self._seen, self._seen_by = np.zeros(2 * room, np.int64), np.zeros(2 * room, np.int64)
            arrays: dict[str, Any] = {
                "rows": self._rows.array().reshape(-1, COLUMNS), "data": self._data.array(), "cut": self._cut.array(),
                "cut_ptr": self._cut_ptr.array(), "cut_volume": self._cut_volume.array(), "region_volume": self._region_volume.array(),
                "seen": self._seen, "seen_by": self._seen_by,
            }  # fmt: skip
            self._handle = handle(MemoryTables(**arrays, **self._fixed))
        return self._handle

    def verdict(self) -> int:
        """FITS, UNKNOWN or LACKING: what the bounds say about the engine's proposal, or, without one, the strategy that it holds. With
        micro-batches also the bound for their order."""
        found = self._verdict_for_any_order()
        played = bool(self._fixed["fixed"][2])
        if found == FITS or (found == LACKING and played) or not self._is_ordered():
            return found
        fits_hosts, expected = self._expected_in_order()
        return FITS if fits_hosts and bool(np.all(expected <= self._fixed["limit"])) else found

    def _verdict_for_any_order(self) -> int:
        return self._engine.consult(lambda: int(bound_memory(self._engine.world, self.handle())))

    def _is_ordered(self) -> bool:
        return self._engine.variants.micro_batches.count > 1

    def _expected_in_order(self) -> tuple[bool, Longs]:
        """(whether hosts certainly have enough, by device what is expected of its peak at most); the verdict for any order is there."""
        fits_hosts, in_order = ordered_bytes(self._engine, self.handle())
        return fits_hosts, np.minimum(self._fixed["total"], np.ceil((1 + ALLOWANCE) * in_order).astype(np.int64))

    def likely(self, *, better: bool = True) -> int:
        """``verdict``, but where that is UNKNOWN perhaps LIKELY or UNLIKELY, as ``memory_estimate`` has it. ``better``: see there."""
        found = self.verdict()
        if found != UNKNOWN or not self._fixed["fixed"][2]:
            return found
        trial = self._engine.last_trial()
        return self._engine.consult(lambda: int(estimate_memory(self._engine.world, self.handle(), trial, better)))

    def estimated_share(self) -> float:
        """The estimated peak by the limit, of the device that is filled most; 0 if the bounds say that it fits, infinite if they say that
        it does not."""
        found = self.likely()
        if found in (FITS, LACKING):
            return 0.0 if found == FITS else inf
        return float(self._fixed["guess"][ASKED_AT]) / WHOLE

    def told(self, *, fits: bool) -> bool:
        """Learn what the exact model says of the strategy that was estimated last. False if that contradicts what was known: strategies
        that were likely to fit may not."""
        guess = self._fixed["guess"]
        asked, believed = guess[ASKED_AT], guess[ASKED_AT] <= guess[FIT_UP_TO]
        if fits:
            guess[FIT_UP_TO] = max(guess[FIT_UP_TO], asked)
            guess[SLACK] = FIRST_SLACK
            return True
        guess[SLACK] //= 2 if asked >= guess[LACKED_FROM] else 1
        guess[LACKED_FROM] = min(guess[LACKED_FROM], asked)
        guess[FIT_UP_TO] = min(guess[FIT_UP_TO], asked - 1)
        return not believed

    def in_order_bytes(self) -> list[int]:
        """An upper bound of what each device holds at its peak as passes follow the order of micro-batches, whatever they take."""
        self._verdict_for_any_order()
        found: Longs = ordered_bytes(self._engine, self.handle())[1] if self._is_ordered() else self._fixed["total"]
        return [int(size) for size in found]

    def most_overflow_bytes(self) -> Longs | None:
        """[device]: bytes by which its upper bound exceeds its memory: as much as it lacks or more. None if hosts may lack some."""
        if self._verdict_for_any_order() == UNKNOWN and bool(np.all(self._fixed["total"] <= self._fixed["limit"])):
            return None
        fits_hosts, most = self._expected_in_order() if self._is_ordered() else (True, self._fixed["total"])
        return np.maximum(0, most - self._fixed["limit"]) if fits_hosts else None

    def bounds_bytes(self) -> list[tuple[int, int]]:
        """(lower limit, upper limit) of the bound for any order (``peaks.memory_use``) on each device, for that strategy."""
        self._verdict_for_any_order()
        return list(zip(self._fixed["least"].tolist(), self._fixed["total"].tolist(), strict=True))

    def certain_bytes(self) -> list[int]:
        """A lower bound of the peak to expect on each device, in whatever order its tasks run, for that strategy."""
        self._verdict_for_any_order()
        found: list[int] = self._fixed["certain"].tolist()
        return found

    def least_overflow_bytes(self) -> int:
        """A lower bound of the bytes that the devices lack together, by the last verdict; 0 unless that is LACKING."""
        if not np.any(self._fixed["certain"] > self._fixed["limit"]):
            return 0
        return int(np.maximum(0, self._fixed["least"] - self._fixed["limit"]).sum())

    def _add(self, number: int) -> None:
        """Add a variant to the tables."""
        variants, graph = self._engine.variants, self._graph
        position, degrees, cut = variants.position(number), variants.degrees[number], variants.cuts[number]
        op = graph.operators[position]
        intervals, regions = variants.cut(position, degrees, variants.shares[number], cut)
        size = {o: volumes(regions[o]) * graph.tensors[o.tensor].itemsize for o in {*op.inputs, *op.outputs, *op.parameters}}
        parted = cut.parts(position) > 1 and cut.factors[position] in op.summed
        parted |= any(degree > 1 and factor.summed for degree, factor in zip(degrees, op.factors, strict=True))
        if parted:
            size |= {o: volumes(regions[o]) * graph.tensors[o.tensor].partial_itemsize for o in op.outputs}
        points = np.prod(intervals[:, :, 1] - intervals[:, :, 0], axis=1)
        kept, work = self._kept_and_work(op, intervals, regions)
        surely = np.zeros_like(kept)
        if position in self._with_backward and cut.count == 1:  # of several micro-batches there may be no moment in which all are kept
            surely = kept + self._surely_kept(position, intervals, regions, size)
        made = sum((size[o] for o in op.outputs), np.zeros_like(kept))
        kept = kept + made
        read = sum((self._part(o, regions[o], size[o], cut.parts(position)) for o in op.inputs), np.zeros(len(points), np.int64))
        if op.kind in PACKING_KINDS:
            packed = sum(size[o] for o in op.parameters)
            if self._packing == {True}:
                kept = kept + packed
            elif True in self._packing:  # only some devices pack: count it with what is read, which is in the upper bound alone
                read = read + packed
        wanted = [o for o in (*op.inputs, *op.outputs) if graph.tensors[o.tensor].requires_grad]
        gradients = sum((size[o] for o in wanted if graph.needs_backward(op)), work)
        own = sum((size[o] for o in op.parameters if graph.tensors[o.tensor].requires_grad), np.zeros(len(points), np.int64))
        numbers = np.array([self._number(regions[o]) for o in op.parameters], np.int64)
        compact, lookups = self._rows_of(op, position, intervals, regions)
        rows = [-1, -1] if compact is None else [self._data.add(compact), self._data.add(lookups)]
        products = np.zeros_like(made)
        if has_product(op):
            products += by_lengths(intervals, lambda cell: product_share(graph, op, cell))
        partials = self._let_go(op, intervals, size) if parted else np.zeros_like(made)
        rows += [self._data.add(surely), self._data.add(made), self._data.add(products), self._data.add(partials)]
        self._rows.add([*(self._data.add(column) for column in (kept, read, gradients, own, numbers)), *rows])
        self._cut_ptr.add([self._cut.add([self._cut_number(regions[o]) for o in op.parameters])])

    def _surely_kept(
        self, position: int, intervals: np.ndarray, regions: Mapping[Operand, np.ndarray], size: Mapping[Operand, Longs]
    ) -> Longs:
        """[tile]: bytes of the values that certainly stay until its backward pass, each counted once (``certain.keepers``)."""
        op, graph = self._graph.operators[position], self._graph
        operands, found = [*op.inputs, *op.parameters, *op.outputs], np.zeros(len(intervals), np.int64)
        own = [kept_places(graph, op, cell) or frozenset() for cell in boxes_of(intervals)]
        for place in self._keepers.get(position, ()):
            boxes = boxes_of(regions[operands[place]])
            if place >= len(op.inputs) or len(boxes) < 2 or (len({*boxes}) == len(boxes) and set(cells(dict.fromkeys(boxes))) == {*boxes}):
                found += np.where([place in places for places in own], size[operands[place]], 0)
        return found

    def _let_go(self, op: Operator, intervals: np.ndarray, size: Mapping[Operand, Longs]) -> Longs:
        """[tile]: bytes of outputs that are gone when they are summed, as autograd does not keep them."""
        own, found = [kept_places(self._graph, op, cell) for cell in boxes_of(intervals)], np.zeros(len(intervals), np.int64)
        for place, output in enumerate(op.outputs, len(op.inputs) + len(op.parameters)):
            found += np.where([places is not None and place not in places for places in own], size[output], 0)
        return found

    def _rows_of(
        self, op: Operator, position: int, intervals: np.ndarray, regions: Mapping[Operand, np.ndarray]
    ) -> tuple[Longs | None, Longs]:
        """Two tables [parameter operand, tile]: ``parameters.operand_bytes`` if the parameter is compact, and the rows that are looked up.

        The first is None if no operand is sparse.
        """
        graph = self._graph
        compact, lookups = (np.zeros((len(op.parameters), len(intervals)), np.int64) for _ in range(2))
        if not any(operand.tensor in graph.sparse for operand in op.parameters):
            return None, lookups
        for k, operand in enumerate(op.parameters):
            compact[k] = volumes(regions[operand]) * graph.tensors[operand.tensor].itemsize
            if operand.tensor not in graph.sparse:
                continue
            for number, (cell, box) in enumerate(zip(boxes_of(intervals), boxes_of(regions[operand]), strict=True)):
                tile = Tile(position, number, 0, 0, cell, (), (), ())
                lookups[k, number] = tile_lookups(graph, operand.tensor, tile)
                if graph.needs_backward(op):
                    rows = min(box[0][1] - box[0][0], lookups[k, number])
                    compact[k, number] = rows * row_bytes(graph, operand.tensor, box)
        return compact, lookups

    def _kept_and_work(self, op: Operator, intervals: np.ndarray, regions: Mapping[Operand, np.ndarray]) -> tuple[Longs, Longs]:
        """For each tile: ``kept_share`` plus padded copies; and ``work_share`` plus padded copies, or, without a backward pass, what its
        forward calls pass to each other."""
        graph = self._graph
        kept = by_lengths(intervals, lambda cell: kept_share(graph, op, cell))
        if graph.needs_backward(op):
            work = by_lengths(intervals, lambda cell: work_share(graph, op, cell))
        else:
            work = by_lengths(intervals, lambda cell: passing_share(graph, op, cell)[0])
        for k in windows(op):
            boxes = zip(boxes_of(regions[op.inputs[k]]), boxes_of(intervals), strict=True)
            padded = np.array([padded_bytes(graph, op, k, box, cell) for box, cell in boxes], np.int64)
            kept = kept + padded
            work = work + padded if graph.needs_backward(op) else work
        return kept, work

    def _part(self, operand: Operand, region: np.ndarray, size: Longs, micro_batches: int) -> Longs:
        """[tile]: bytes of parts of the batch or of constants that the tile may copy. The whole batch is held anyway. Micro-batches share
        the parts that are the same for all of them."""
        tensor = self._graph.tensors[operand.tensor]
        if tensor.kind not in (TensorKind.INPUT, TensorKind.CONSTANT):
            return np.zeros_like(size)
        first, place = distinct(region)
        copied = np.array([not in_one_piece(box, tensor.shape) for box in boxes_of(region[first])])[place]
        own = len(region) // micro_batches
        copied[own:] &= place[own:] != np.tile(place[:own], micro_batches)[own:]
        return np.where(copied, size, 0)

    def _number(self, region: np.ndarray) -> Ints:
        """[tile]: number of its region of a parameter; -1 if that is empty."""
        first, place = distinct(region)
        return np.array([self._region(box) if volume(box) else -1 for box in boxes_of(region[first])], np.int32)[place]

    def _region(self, box: Box) -> int:
        if box not in self._regions:
            self._regions[box] = self._region_volume.add([volume(box)])
        return self._regions[box]

    def _cut_number(self, region: np.ndarray) -> int:
        boxes = frozenset(box for box in boxes_of(region[distinct(region)[0]]) if volume(box) > 0)
        found = self._cuts.get(boxes)
        if found is None:
            found = self._cuts[boxes] = len(self._cuts)
            disjoint = len(boxes) < 2 or set(cells(dict.fromkeys(boxes))) == boxes
            self._cut_volume.add([sum(map(volume, boxes)) if disjoint else -1])
        return found
