"""Memory of gradients over simulated time: between operators, returning from other devices, and of parameters; and their copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from soap.model.regions import Box
from soap.plan.delivery import box_bytes, reduced_tensor
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Exchange, Message, Pattern, reduce_name, remote_parts
from soap.plan.syncs.bucketing import sums_of_one
from soap.simulator.memory.transit import cells_land_in_place, lies_in_one_piece
from tests.simulator.reference_memory.leaving import lies_in_rows
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.moving import Stay, packs_together
from tests.simulator.reference_memory.sizes import compact_parameters, is_remote, operand_bytes, told_parts
from tests.simulator.reference_memory.task_spans import Span, TaskSpans

Sum = tuple[int, str, Box]
"""What autograd adds up: (first tile of a segment, parameter, region)."""


class GradientResidency:
    """Writes into a ledger how long gradients are held."""

    def __init__(self, spans: TaskSpans, ledger: Ledger, behind: Mapping[Sum, int]) -> None:
        """``behind``: sum of a parameter's gradients in a segment -> bytes that are counted at its end, but are made only when what was
        added up has gone."""
        self.spans, self.ledger, self.plan, self._behind = spans, ledger, spans.plan, behind
        self.hold = ledger.hold

    def gradients(self) -> None:
        """Gradients between operators, and of parameters."""
        plan, graph = self.plan, self.plan.graph
        made: dict[int, int] = {}
        added: dict[int, list[tuple[Span, int]]] = {}
        apart: set[int] = set()
        leaves = Leaves(self.spans)
        for number, fetch in enumerate(plan.fetches):
            spans = [self.spans.backward[tile] for tile, _ in fetch.consumers if tile in self.spans.backward]
            if not spans or not graph.tensors[fetch.tensor].requires_grad:
                continue
            start = min(start for start, _ in spans)
            if any(is_remote(plan, fetch, piece) for piece in fetch.pieces):  # a leaf of autograd, held until all have taken their parts
                size = box_bytes(plan, fetch.tensor, fetch.box)
                self.hold(fetch.device, start, self.spans.taken(number), size, MemoryKind.WORKSPACE, late=True)
                for begun, over in sorted(spans)[1:]:  # each later one is held beside the sum that it is added to
                    self.hold(fetch.device, begun, over, size, MemoryKind.WORKSPACE)
                apart |= {piece.holding for piece in fetch.pieces}
                leaves.read_region(number)
                continue
            leaves.read_pieces(number)
            for piece in fetch.pieces:
                made[piece.holding] = min(made.get(piece.holding, start), start)
                added.setdefault(piece.holding, []).extend((span, box_bytes(plan, fetch.tensor, piece.box)) for span in spans)
        for holding, parts in added.items():
            for (start, end), size in sorted(parts)[1:]:  # as above
                self.hold(plan.holdings[holding].device, start, end, size, MemoryKind.WORKSPACE)
        for device, (start, end), size in leaves.copied():
            self.hold(device, start, end, size, MemoryKind.WORKSPACE)
        for holding in made.keys() | apart:
            self._collected(holding, made.get(holding), holding in apart)
        for summed in dict.fromkeys(held.reduction for i, held in enumerate(plan.holdings) if i in made or i in apart):
            if summed is not None:
                self._summed_gradient(summed)
        self._returns()
        self._parameter_gradients()

    def _parameter_gradients(self) -> None:
        """Parameter gradients that backward tasks make, and sums of them that autograd makes in a segment. If a single device owns the
        shard, the gradient that stays is counted elsewhere (``always``), from the first gradient on: it is that first gradient itself, or a
        copy of it, which is then there beside it (``Footprint.in_rows``). Later ones are added to it."""
        plan, graph = self.plan, self.plan.graph
        compact = compact_parameters(plan)
        kept = sums_of_one(plan)
        alone = {(plan.shards[i].parameter, plan.shards[i].box) for i in kept}
        shared: dict[Sum, list[tuple[Span, int]]] = {}
        copied: set[Sum] = set()
        for number, span in self.spans.backward.items():
            tile, (start, end) = plan.tiles[number], self.spans.weighed(number)
            op = plan.operator(tile)
            taken = self.spans.sizes[number].shares.in_rows
            for place, (o, box) in enumerate(zip(op.parameters, tile.parameters, strict=True), len(op.inputs)):
                if graph.tensors[o.tensor].requires_grad:
                    size = operand_bytes(plan, compact, tile, o.tensor, box)
                    key = self.spans.segment[number], o.tensor, box
                    shared.setdefault(key, []).append(((start, end), size))
                    copied |= set() if place in taken or o.tensor in graph.sparse else {key}
            for begun, over in {span, (start, end)}:
                self.hold(tile.device, begun, over, self.spans.sizes[number].backward, MemoryKind.WORKSPACE)
        thirds: dict[tuple[int, int], int] = {}
        first = _first_segments(shared)
        for (segment, name, box), uses in shared.items():
            device = plan.tiles[segment].device
            uses.sort()
            stays = (name, box) in alone and (segment, name, box) not in copied and (name in graph.sparse or segment == first[name, box])
            for (start, end), size in uses[1 if stays else 0 :]:
                self.hold(device, start, end, size, MemoryKind.GRADIENTS)
            for ((_, begun), _), ((_, end), size) in pairwise(uses if (name, box) not in alone else ()):
                self.hold(device, begun, end, size, MemoryKind.GRADIENTS)
            if len(uses) > 1 and name not in graph.sparse:  # both are still there while they are added up
                (_, end), size = uses[1]
                counted = self._behind.get((segment, name, box), 0) if end == uses[-1][0][1] else 0
                self.hold(device, end, end, max(0, 2 * size - counted), MemoryKind.GRADIENTS, early=True)
                thirds[device, end] = max(thirds.get((device, end), 0), min(size, max(0, 3 * size - counted)))
        for (device, end), size in thirds.items():  # the first sum may be of views, and is then a third tensor, one at a time
            self.hold(device, end, end, size, MemoryKind.GRADIENTS, early=True)

    def _collected(self, holding: int, made: int | None, apart: bool) -> None:
        """A holding's gradient. From ``made`` on it is what the local readers have left on a leaf. If other parts come separately
        (``apart``), all are added up in another tensor when the gradient is needed."""
        held = self.plan.holdings[holding]
        wanted, end = self.spans.wanted(holding)
        size = box_bytes(self.plan, held.tensor, held.box)
        if made is not None:
            self.hold(held.device, made, wanted if apart else end, size, MemoryKind.WORKSPACE, late=apart)
        if apart:
            self.hold(held.device, wanted, end, size, MemoryKind.WORKSPACE, early=True)

    def _summed_gradient(self, number: int) -> None:
        """The gradient of a sum, as its members gather or sum it."""
        plan, reduction = self.plan, self.plan.reductions[number]
        name = reduce_name(plan.graph.operators[reduction.operator], reduction, gradient=True)
        if name not in self.spans.named:
            return
        start, tensor = self.spans.named[name][0], reduced_tensor(plan, reduction)
        size = box_bytes(plan, tensor, reduction.box)
        for place, device in enumerate(reduction.devices):
            tiles = [tile for tile in reduction.tiles if plan.tiles[tile].device == device and tile in self.spans.backward]
            begun = min((self.spans.begun[self.spans.segment[tile]] for tile in tiles), default=start)
            until = max((self.spans.last(tile) for tile in tiles), default=start)
            self.hold(device, start, until, size, MemoryKind.WORKSPACE, early=True)
            if reduction.cells:
                self.ledger.send(device, start, self.spans.end_ns, box_bytes(plan, tensor, reduction.cells[place]))
                if not cells_land_in_place(reduction.box, reduction.cells):  # they come in another buffer first
                    self.hold(device, start, begun, size, MemoryKind.BUFFERS, late=True)

    def _returns(self) -> None:
        """Gradients that return from other devices: buffers in which each is received, buffers for several together, and what is sent."""
        plan = self.plan
        for carrier in self.spans.carriers():
            back = self.spans.returned.get(carrier.parts[0])
            if back is None:
                continue
            rooms: dict[int, list[tuple[int, int]]] = {}
            leaving: dict[int, dict[int, list[tuple[int, Box]]]] = {}
            for (number, _), (source, target, box, holding) in zip(carrier.parts, remote_parts(plan, carrier.parts), strict=True):
                size = box_bytes(plan, plan.holdings[holding].tensor, box)
                leaving.setdefault(target, {}).setdefault(source, []).append((number, box))
                rooms.setdefault(source, []).append((holding, size))
            for source, own in rooms.items():
                own = own[: len(told_parts(carrier))]
                for holding, size in own:
                    self.hold(source, back[0], self.spans.wanted(holding)[0], size, MemoryKind.BUFFERS, late=True)
                if len(own) > 1:
                    first = min(self.spans.wanted(holding)[0] for holding, _ in own)
                    self.hold(source, back[0], first, sum(size for _, size in own), MemoryKind.BUFFERS, late=True)
            for target, sent in leaving.items():
                over = self.ledger.arrived(target, back[1])
                if isinstance(carrier, Message):
                    over = min(over, self.spans.left_by(carrier, gradient=True, otherwise=over))
                self._leaves(carrier, target, (back[0], over), list(sent.values()))

    def _leaves(self, carrier: Message | Exchange, device: int, span: Span, parcels: Sequence[Sequence[tuple[int, Box]]]) -> None:
        """Gradients of parts of fetches that a device sends at once. Autograd leaves the gradient of a region that came row by row, as the
        region lies: a part in one piece leaves from there. What a broadcast brought is summed on the way back, in a copy."""
        plan, size, copied = self.plan, 0, 0
        stays: list[Stay] = []
        packed = isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST
        packed |= len(parcels) > 1 and packs_together(plan, device)
        for parts in parcels:
            own = sum(box_bytes(plan, plan.fetches[number].tensor, box) for number, box in parts)
            number, box = parts[0]
            fetch, size = plan.fetches[number], size + own
            apart = len(parts) > 1 or packed or not lies_in_one_piece(box, fetch.box)
            if apart or (plan.order is not None and box != fetch.box):  # see ``Leaving``
                copied += own
            else:
                stays.append(Stay(-1 - number, self.spans.taken(number), box_bytes(plan, fetch.tensor, fetch.box)))
        self.ledger.send(device, *span, size, held=copied, copied=True, stays=stays)


def _first_segments(sums: Mapping[Sum, Sequence[tuple[Span, int]]]) -> dict[tuple[str, Box], int]:
    """(parameter, region) -> the segment that is the first to make a gradient of it. ``sums``: when the tiles of segments make some."""
    found: dict[tuple[str, Box], tuple[Span, int]] = {}
    for (segment, name, box), uses in sums.items():
        own = min(span for span, _ in uses), segment
        found[name, box] = min(found.get((name, box), own), own)
    return {region: segment for region, (_, segment) in found.items()}


class Leaves:
    """Collects who reads leaves, from which segments start, and which gradients autograd copies when it brings them there.

    The first one is taken as it is if it lies row by row in memory of its own, as the leaf does (``Footprint.in_rows``). Others are copied:
    that of a shortcut is the gradient of what it is added to as well, that of a mean is one number repeated, that of a part is a view.
    Footprints know such gradients as made once, as within a segment they are.
    """

    def __init__(self, spans: TaskSpans) -> None:
        self._spans, self._plan = spans, spans.plan
        self._reads: dict[tuple[str, int], tuple[int, list[_Read]]] = {}  # leaf -> (bytes, its reads)
        self._spread: dict[int, bool] = {}  # holding -> whether only its segment reads it, once, and gives it a few numbers repeated

    def read_region(self, number: int) -> None:
        """Note the readers of a region with parts from elsewhere: it is one leaf, row by row."""
        plan, fetch = self._plan, self._plan.fetches[number]
        self._spread.update(dict.fromkeys((piece.holding for piece in fetch.pieces), False))
        for tile, place in fetch.consumers:
            self._note(("fetch", number), box_bytes(plan, fetch.tensor, fetch.box), tile, place in self._in_rows(tile))

    def read_pieces(self, number: int) -> None:
        """Note the readers of holdings that other segments have made, or that are sums. Of several pieces each gets a view."""
        plan, segment = self._plan, self._spans.segment
        fetch = plan.fetches[number]
        for holding in (piece.holding for piece in fetch.pieces):
            held, sole = plan.holdings[holding], len(fetch.pieces) == 1
            for tile, place in fetch.consumers:
                if tile not in self._spans.backward:
                    continue
                if held.reduction is not None or segment.get(held.tile) != segment[tile]:
                    taken = sole and place in self._in_rows(tile) and lies_in_rows(plan, holding)
                    self._note(("holding", holding), box_bytes(plan, held.tensor, held.box), tile, taken)
                    self._spread[holding] = False
                else:
                    spread = sole and place in self._spans.sizes[tile].shares.spread
                    self._spread[holding] = spread and holding not in self._spread

    def copied(self) -> Iterator[tuple[int, Span, int]]:
        """(device, when, bytes) of copies beside what they are made of: the last reader in the first segment to go back brings a leaf's
        gradient, added up. A copy may take the place of a gradient that it is made of, which counts, but takes hardly any memory."""
        copies: dict[int, int] = {}
        for size, reads in self._reads.values():
            own = [read for read in reads if read.segment == min(reads).segment]
            if not all(read.taken for read in own):
                tile = max(own).tile
                copies[tile] = copies.get(tile, 0) + size
        spare: dict[int, int] = {}
        for holding, spread in self._spread.items():
            held = self._plan.holdings[holding]
            if spread:
                spare[held.tile] = spare.get(held.tile, 0) + box_bytes(self._plan, held.tensor, held.box)
        for tile, size in copies.items():
            yield self._plan.tiles[tile].device, self._spans.backward[tile], max(0, size - spare.get(tile, 0))

    def _note(self, leaf: tuple[str, int], size: int, tile: int, taken: bool) -> None:
        if tile in self._spans.backward:
            read = _Read(self._spans.backward[tile], self._spans.segment[tile], tile, taken)
            self._reads.setdefault(leaf, (size, []))[1].append(read)

    def _in_rows(self, tile: int) -> frozenset[int]:
        return self._spans.sizes[tile].shares.in_rows


class _Read(NamedTuple):
    """A tile that reads a leaf goes back. ``taken``: its gradient may be the leaf's."""

    span: Span
    segment: int
    tile: int
    taken: bool
