"""Which samples of a batch's inputs each device reads. Pure data.

A device reads of an input what its tiles read, so nothing of a batch has to travel: samples that tiles of several devices read are read by
each of these.

A mean over labels may be given its own labels alone. It divides by a number that all labels decide: how many are not to be ignored, or the
sum of their weights. Its tiles are told that number. Where several devices share the labels of a mean out, each counts its own when the
step begins, and the counts are summed over the devices that sum the loss. A device that has all of them counts alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from soap.model.batch import sample_dims, samples_of
from soap.model.graph import OperatorGraph, Tensor, TensorKind
from soap.model.regions import Interval, cells
from soap.plan.plan import Plan, Reduction
from soap.plan.tiling import Tile

COUNT_BYTES = 8
"""Size of a count: a float64 holds numbers of labels and sums of weights alike."""


@dataclass(frozen=True, slots=True)
class LabelCount:
    """Tiles of one replica of a mean (positions in ``Plan.tiles``; in a device's own part of a plan, its own), whose labels are counted
    together. ``name``: of the sum over ``devices``, if these are several."""

    operator: int
    tiles: tuple[int, ...]
    devices: tuple[int, ...]
    name: str


def with_own_labels(graph: OperatorGraph, tile: Tile) -> Tile:
    """The tile as it is where batches come in parts: of labels it reads its own alone."""
    operands = graph.operators[tile.operator].own_inputs
    if not operands:
        return tile
    return replace(tile, inputs=tuple([own.box(tile.intervals, graph.tensors[own.tensor].shape) for own in operands]))


def count_name(graph: OperatorGraph, reduction: Reduction) -> str:
    """Task name of the sum of counted labels over the group that sums the loss."""
    return f"count labels of {graph.operators[reduction.operator].name}#{reduction.replica}"


def label_counts(plan: Plan) -> Iterator[LabelCount]:
    """What is counted together: the tiles of each sum of such means; others each by themselves. In the order of the plan's sums, then of
    its tiles."""
    summed = set[int]()
    for reduction in plan.reductions:
        if plan.graph.operators[reduction.operator].own_inputs:
            summed.update(reduction.tiles)
            yield LabelCount(reduction.operator, reduction.tiles, reduction.devices, count_name(plan.graph, reduction))
    for number, tile in enumerate(plan.tiles):
        if plan.operator(tile).own_inputs and number not in summed:
            yield LabelCount(tile.operator, (number,), (tile.device,), "")


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one input that a device reads, of a batch of ``size``. ``dim``: the input's dimension of samples; None if it has none,
    then the device reads all of it. ``intervals``: ascending, apart from each other, none empty.
    """

    dim: int | None
    size: int
    intervals: tuple[Interval, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(stop - start for start, stop in self.intervals)

    @property
    def indices(self) -> list[int]:
        """Their numbers in the batch, ascending: the order in which a part of a batch has them. A list, by which tensors can be indexed."""
        return list(chain.from_iterable(range(start, stop) for start, stop in self.intervals))

    def place(self, interval: Interval) -> Interval:
        """Where in a part of a batch an interval is that a tile reads. ValueError if the device does not read it."""
        start, stop = interval
        before = 0
        for a, b in self.intervals:
            if a <= start and stop <= b:
                return before + start - a, before + stop - a
            before += b - a
        if start < stop:
            raise ValueError(f"samples {start} to {stop - 1}: expected some of {self.intervals}")
        return 0, 0


def divided_inputs(graph: OperatorGraph) -> dict[str, int]:
    """Inputs with one element for each sample -> their dimension of samples. Where all that read an input read all of it, that is dimension
    0 if it is as long."""
    samples, known = samples_of(graph), sample_dims(graph, own_labels=True)
    inputs = [tensor for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT and tensor.shape]
    dims = {tensor.name: known.get(tensor.name, 0) for tensor in inputs}
    return {tensor.name: dims[tensor.name] for tensor in inputs if tensor.shape[dims[tensor.name]] == samples}


def samples_read(plan: Plan, device: int, divided: Mapping[str, int], whole: Collection[str] = ()) -> dict[str, Samples]:
    """What a device reads of each input if batches come in parts (of labels that a mean counts its own: ``own_labels``); nothing if the
    plan has no such device. ``divided``: see ``divided_inputs``, of the graph or of the same one at another batch size. ``whole``: inputs
    of which every device reads all samples."""
    read = _intervals_read(plan, divided, [device])
    found: dict[str, Samples] = {}
    for tensor in _inputs(plan.graph):
        dim = divided.get(tensor.name)
        size = 0 if dim is None else tensor.shape[dim]
        all_of_it = [(0, size)] if tensor.name in whole and device < plan.device_count else read.get((device, tensor.name), ())
        found[tensor.name] = Samples(dim, size, joined(all_of_it))
    return found


def given_bytes(plan: Plan) -> list[int]:
    """For each device, bytes of the inputs that it is given: all of each, or with ``Plan.own_samples`` the samples that it reads, beside
    inputs that no sample has and those that name rows (``looked_up_in``): a rank may need these of all samples."""
    graph = plan.graph
    divided = divided_inputs(graph) if plan.own_samples else {}
    for name in looked_up_in(graph, plan):
        divided.pop(name, None)
    found = [sum(tensor.bytes for tensor in _inputs(graph) if tensor.name not in divided)] * plan.device_count
    for (device, name), intervals in _intervals_read(plan, divided, range(plan.device_count)).items():
        tensor = graph.tensors[name]
        samples = tensor.shape[divided[name]]
        found[device] += tensor.bytes // max(1, samples) * Samples(divided[name], samples, joined(intervals)).count
    return found


def looked_up_in(graph: OperatorGraph, plan: Plan) -> frozenset[str]:
    """Inputs with the rows that sparse parameters look up. A rank that updates such rows alone needs those of all samples
    (``runtime.sync.look_ups``), unless they come by rows."""
    by_rows = {sync.parameter for sync in plan.syncs if sync.contract.by_rows}
    uses = [use for name, access in graph.sparse.items() if name not in by_rows for use in access.lookups]
    read = {operand.tensor for use in uses for operand in graph.operators[use.operator].inputs}
    return frozenset(name for name in read if graph.tensors[name].kind is TensorKind.INPUT)


def _inputs(graph: OperatorGraph) -> list[Tensor]:
    return [tensor for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT]


def _intervals_read(plan: Plan, divided: Mapping[str, int], devices: Collection[int]) -> dict[tuple[int, str], set[Interval]]:
    """(device, input with samples) -> the intervals of samples that tiles there read."""
    found: dict[tuple[int, str], set[Interval]] = {}
    names = divided.keys() & {tensor.name for tensor in _inputs(plan.graph)}
    for op, (first, behind) in zip(plan.graph.operators, pairwise((*plan.first_tile, len(plan.tiles))), strict=True) if names else ():
        places = [place for place, operand in enumerate(op.inputs) if operand.tensor in names]
        for tile in (tile for tile in plan.tiles[first:behind] if tile.device in devices) if places else ():
            boxes = with_own_labels(plan.graph, tile).inputs
            for place in places:
                name = op.inputs[place].tensor
                found.setdefault((tile.device, name), set()).add(boxes[place][divided[name]])
    return found


def pieces_read(read: Iterable[Samples]) -> list[Interval]:
    """The pieces of a batch of which each device reads all or nothing. ``read``: by device, what it reads of one input."""
    return [piece for (piece,) in cells((interval,) for own in read for interval in own.intervals)]


def joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same numbers in as few intervals as possible."""
    found: list[Interval] = []
    for start, stop in sorted(own for own in intervals if own[0] < own[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)
