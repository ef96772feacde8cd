"""The memory that operators take beside their operands, found by running them forward and backward on tensors without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from soap.logs import TRIALS, silenced
from soap.model.graph import NARROW, RECURRENT_KINDS, FactorKind, Footprint, Operator
from soap.model.regions import lengths, relative, whole
from soap.plan.tiling import Tile, iteration_points, spatial_factors, tiles_of, windows
from soap.simulator.memory.footprint import Use, costly_cuts, tile_bytes
from soap.strategy.config import OpConfig
from soap.tracing.calls import BufferRef, Ref, TileContext, substitute
from soap.tracing.execute import TracedModel, given
from soap.tracing.part_footprints import PartFootprints, Parts
from soap.tracing.products import is_product
from soap.tracing.torch_parts import as_on_gpus

REALLY_RUN_FLOPS = 2**32
"""Recurrent layers keep a workspace that shows only where they really run. They run at import if they take at most so many
operations."""

FINER = 4
"""If half of an operator takes more than half of the memory, it is cut into so many parts as well, to see what does not shrink."""
NONE = (0, 0, 0, 0)
"""All of a footprint shrinks."""
LITTLE = 50
"""Memory below the bytes of an operator's operands divided by this is negligible."""

Footprints = tuple[Footprint, ...]
"""As in ``OperatorGraph.footprints``."""


def find_footprints(model: TracedModel, *, on_gpus: bool = False) -> tuple[dict[str, Footprints], dict[str, PartFootprints]]:
    """(footprints, of parts of sums that are computed in a wider type), both by operator, on CPUs or on GPUs; operators that cannot be run
    so are left out.

    The operators run one after the other, so that each gets its inputs laid out in memory as they will be. Equal ones run once and are
    tried once, however many layers have them.
    """
    graph = model.graph
    found: dict[str, Footprints] = {}
    parts: dict[str, PartFootprints] = {}
    known: dict[Hashable, tuple[Footprints | None, PartFootprints]] = {}
    laid: dict[Hashable, tuple[Layout, ...] | None] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpus() if on_gpus else nullcontext():
        tensors = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in graph.tensors.items()}
        context = TileContext(0, 0, {name: torch.empty(b.shape, dtype=b.dtype) for name, b in model.buffers.items()}, update_buffers=False)
        for position, op in enumerate(graph.operators):
            trials = _Trials(model, position, tensors, context)
            try:
                results = trials.results(laid)
            except Exception:  # any error: an operator may ask for values
                continue
            key = trials.key()
            if key not in known:
                own = trials.footprints()
                known[key] = own, {} if own is None else trials.of_parts(own, on_gpus=on_gpus)
            own, of_parts = known[key]
            if own is not None:
                found[op.name] = own
                if of_parts:
                    parts[op.name] = of_parts
            tensors.update(zip((o.tensor for o in op.outputs), results, strict=True))
    model.forget_tiles()
    return found, parts


class _Trials:
    """Runs of one operator, forward and backward. ``tensors``: results of the operators before it, by name."""

    def __init__(self, model: TracedModel, position: int, tensors: dict[str, torch.Tensor], context: TileContext) -> None:
        self._model, self._position, self._tensors, self._context = model, position, tensors, context
        self._graph, self._op = model.graph, model.graph.operators[position]

    def results(self, laid: dict[Hashable, tuple[Layout, ...] | None]) -> tuple[torch.Tensor, ...]:
        """Outputs of the whole operator, without autograd. ``laid``: how those of operators that were run lie, by ``_calls``."""
        operands, key = [self._tensors[o.tensor] for o in (*self._op.inputs, *self._op.parameters)], (self.key(), self._calls())
        if (known := laid.get(key)) is not None:
            return like(known, operands)
        tile = self._tile()
        with torch.no_grad():
            results = self._run(tile, self._regions(tile, cut=False))
        laid[key] = layouts_of(results, operands)
        return results

    def _calls(self) -> Hashable:
        """All that decides how results lie beside ``key``: arguments, with values and buffers by what they are, not by their names; where
        inputs lie in their memory, and which of them share it."""
        program, numbers = self._model.programs[self._op.name], dict[str, int]()

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, BufferRef):
                return self._context.buffers[leaf.name].shape, self._context.buffers[leaf.name].dtype
            return numbers.setdefault(leaf.name, len(numbers)) if isinstance(leaf, Ref) else leaf

        for value, _ in (*program.inputs, *program.parameters):
            numbers.setdefault(value, len(numbers))
        calls = [(s.call.target, substitute((s.call.args, dict(s.call.kwargs)), plain), s.operands, s.outputs) for s in program.steps]
        made = [[numbers.setdefault(value, len(numbers)) for value in s.call.outputs] for s in program.steps]
        given = [self._tensors[o.tensor] for o in self._op.inputs]
        memories = {tensor.untyped_storage()._cdata: place for place, tensor in reversed(list(enumerate(given)))}
        places = [(memories[tensor.untyped_storage()._cdata], tensor.storage_offset()) for tensor in given]
        return repr((calls, made, [numbers[value] for value in program.outputs], places))

    def key(self) -> Hashable:
        """All properties that decide how much memory the operator takes."""
        op, tensors = self._op, [*self._op.inputs, *self._op.parameters, *self._op.outputs]
        made = [(o.dims, self._graph.tensors[o.tensor].shape, self._graph.tensors[o.tensor].dtype) for o in tensors]
        needed = [self._graph.tensors[o.tensor].requires_grad for o in tensors]
        given = [self._tensors[o.tensor] for o in op.inputs]
        laid = [(t.stride(), t.untyped_storage().nbytes()) for t in given]
        calls = [step.call.kind for step in self._model.programs[op.name].steps]
        return repr((op.kind, op.factors, made, needed, laid, calls, op.flops, op.saved_bytes))

    def footprints(self) -> Footprints | None:
        """The footprints; None if the operator cannot be run so."""
        try:
            if self._op.kind in RECURRENT_KINDS:
                return self._recurrent()
            own = self._footprint(self._tile(), cut=False)
            if windows(self._op):  # a tile is run like the whole, unless it is a part of a sum; its padding is counted separately
                return self._of_windows(own)
            degrees = tuple(min(2, factor.size) for factor in self._op.factors)
            parts = self._tile(degrees)
            cut = self._footprint(parts, cut=True)
            if self._covers(own, _of_all(cut, self._op, parts)):  # single cuts could add nothing
                return (replace(own, in_rows=own.in_rows & cut.in_rows, spread=own.spread & cut.spread),)
            alone = tuple(self._cut_by(i, own) for i in range(len(self._op.factors)))
            known = own, *alone
            together = self._together(cut, parts, degrees, known)
            return *known, *together, *(self._beside(degrees, known) if together else ())
        except Exception:  # as above; and not every operator has a backward pass
            return None

    def of_parts(self, known: Footprints, *, on_gpus: bool) -> PartFootprints:
        """As ``OperatorGraph.part_footprints``; empty if tiles take what ``known``, the operator's footprints, say."""
        parts = Parts(self._graph, self._position, lambda tile: self._footprint(tile, cut=True))
        try:
            found = parts.of_images(on_gpus=on_gpus)
            if self._has_wide_parts() and any(self._op.factors[i].summed for i in costly_cuts(self._op, known)):
                found |= parts.summed()
            return found
        except Exception:  # as above
            return {}

    def _of_windows(self, own: Footprint) -> Footprints:
        """The same footprint for all cuts of the image. Parts of a sum of a narrower type are computed in float32, casts of weights do not
        shrink with the samples or the image, and strided convolutions may be computed in float32 if the weight is cut. Of how gradients
        lie, one tile that is cut in all ways speaks for all."""
        own = replace(own, in_rows=own.in_rows & self._rows_of_parts())
        narrow = self._op.arithmetic in NARROW
        if not (narrow or self._has_wide_parts()):
            return (own,)
        space = spatial_factors(self._op)
        cuts = [self._cut_by(i, own) if f.summed or (narrow and i not in space) else own for i, f in enumerate(self._op.factors)]
        samples = [cut for cut, f in zip(cuts, self._op.factors, strict=True) if f.kind is FactorKind.SAMPLE and not f.summed]
        if narrow and samples:
            of_image = replace(own, fixed_bytes=_fixed(own, samples[0]))
            cuts = [of_image if i in space else cut for i, cut in enumerate(cuts)]
        return own, *cuts

    def _rows_of_parts(self) -> frozenset[int]:
        """``Footprint.in_rows`` of a tile that is cut by all factors."""
        try:
            return self._footprint(self._tile(tuple(min(2, factor.size) for factor in self._op.factors)), cut=True).in_rows
        except Exception:  # as above
            return frozenset()

    def _has_wide_parts(self) -> bool:
        """Whether parts of a sum are computed in a wider type than the sum."""
        lower = any(t.partial_itemsize > t.itemsize for t in (self._graph.tensors[o.tensor] for o in self._op.outputs))
        return (lower or self._op.arithmetic in NARROW) and any(factor.summed for factor in self._op.factors)

    def _beside(self, degrees: tuple[int, ...], known: Footprints) -> Footprints:
        """As ``_together``, with the factors whole by which a cut costs memory (``costly_cuts``); empty if there are none. Tiles that are
        cut by the others take nothing of their own if single cuts explain all."""
        costly = costly_cuts(self._op, known)
        if not costly:
            return ()
        apart = tuple(1 if i in costly else degree for i, degree in enumerate(degrees))
        parts = self._tile(apart)
        own = self._footprint(parts, cut=True)
        nothing = Footprint(0, 0, 0, frozenset(), in_rows=own.in_rows, spread=own.spread)
        return self._together(own, parts, apart, known) or (nothing,) * len(degrees)

    def _covers(self, one: Footprint, other: Footprint, little: int = 0) -> bool:
        """Whether one footprint is enough where the other holds, but for how gradients of inputs lie."""
        covered = all(a + little >= b for a, b in zip(one.sizes_bytes, other.sizes_bytes, strict=True))
        inputs = frozenset(range(len(self._op.inputs)))
        return covered and one.keeps >= other.keeps and one.in_rows - inputs <= other.in_rows and one.views == other.views

    def _cut_by(self, place: int, own: Footprint) -> Footprint:
        """The footprint with one factor cut. ``own``: the whole operator's."""
        if self._op.factors[place].size == 1:
            return own
        large, small = (self._tile_cut_by(place, parts, (1,) * len(self._op.factors)) for parts in (2, FINER))
        half = self._footprint(large, cut=True)
        in_proportion = _of_all(half, self._op, large)
        if self._covers(own, in_proportion, self._little()) or large.size == small.size:
            return in_proportion
        finer, points = self._footprint(small, cut=True), iteration_points(self._op)
        pairs = zip(half.sizes_bytes, finer.sizes_bytes, strict=True)
        lines = [_line((large.size, one), (small.size, other), points) for one, other in pairs]
        (kept, forward, backward, product), fixed = zip(*lines, strict=True)
        rows, repeated = half.in_rows & finer.in_rows, half.spread & finer.spread
        return Footprint(kept, forward, backward, half.keeps | finer.keeps, fixed, product, rows, repeated, half.views & finer.views)

    def _together(self, cut: Footprint, parts: Tile, degrees: tuple[int, ...], known: Footprints) -> Footprints:
        """Footprints with all factors cut, one for each: what does not shrink with it; empty if single cuts explain all uses."""
        expected = [tile_bytes(self._op, known, parts.intervals, use) for use in Use]
        sizes = [size if size > other else 0 for size, other in zip(cut.sizes_bytes, expected, strict=True)]
        rows = known[0].in_rows.intersection(*(one.in_rows for one in known))
        alike = cut.keeps <= frozenset[int]().union(*(one.keeps for one in known)) and all(cut.views == one.views for one in known)
        if max(sizes) <= 0 and alike and cut.in_rows >= rows:
            return ()
        if max(size - other for size, other in zip(sizes, expected, strict=True)) <= self._little():
            own = replace(cut, kept_bytes=sizes[0], forward_bytes=sizes[1], backward_bytes=sizes[2], product_bytes=sizes[3])
            return (_of_all(own, self._op, parts),) * len(degrees)
        lines = [self._lines_together(i, sizes, parts, degrees) for i in range(len(degrees))]
        of_all = [0 if size <= 0 else size * prod(line[use][0] for line in lines) // size ** len(lines) for use, size in enumerate(sizes)]
        fixed = [tuple(0 if size <= 0 else size * own[use][1] // own[use][0] for use, size in enumerate(of_all)) for own in lines]
        kept, forward, backward, product = of_all
        own = Footprint(kept, forward, backward, cut.keeps, NONE, product, cut.in_rows, cut.spread, cut.views)
        return tuple(replace(own, fixed_bytes=(one[0], one[1], one[2], one[3])) for one in fixed)

    def _lines_together(self, place: int, sizes: Sequence[int], parts: Tile, degrees: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each use of memory, given how much such a tile takes: (bytes with all of one factor, part that does not shrink with it)."""
        factor = self._op.factors[place]
        first, last = parts.intervals[place]
        if degrees[place] == 1:
            return [(size, 0) for size in sizes]
        points = parts.size * factor.size // (last - first)
        small = self._tile_cut_by(place, FINER, degrees)
        if small.size == parts.size:
            return [(-(-size * factor.size // (last - first)), 0) for size in sizes]
        finer = self._footprint(small, cut=True)
        return [_line((parts.size, one), (small.size, other), points) for one, other in zip(sizes, finer.sizes_bytes, strict=True)]

    def _little(self) -> int:
        """So many bytes are not worth further runs to see with which factor they shrink."""
        operands = (*self._op.inputs, *self._op.parameters, *self._op.outputs)
        return sum(self._graph.tensors[o.tensor].bytes for o in operands) // LITTLE

    def _recurrent(self) -> Footprints | None:
        """The footprint from really running it, whole and with one sample: what it needs however small it is, is the same for both."""
        if self._op.flops > REALLY_RUN_FLOPS:
            return None
        with _disable_current_modes():
            alone = self._tile(tuple(f.size for f in self._op.factors))
            own, one = (self._footprint(tile, cut=True) for tile in (self._tile(), alone))
        points = iteration_points(self._op)
        fixed = max(0, one.kept_bytes * points - own.kept_bytes * alone.size) // max(1, points - alone.size)
        rows, spread = own.in_rows & one.in_rows, own.spread & one.spread
        return (replace(own, fixed_bytes=(fixed, 0, 0, 0), product_bytes=0, in_rows=rows, spread=spread),)

    def _tile_cut_by(self, place: int, parts: int, degrees: tuple[int, ...]) -> Tile:
        """A tile with these degrees, but with one factor in so many parts, or as many as its size allows."""
        return self._tile((*degrees[:place], min(parts, self._op.factors[place].size), *degrees[place + 1 :]))

    def _tile(self, degrees: tuple[int, ...] | None = None) -> Tile:
        chosen = degrees or (1,) * len(self._op.factors)
        return tiles_of(self._graph, self._position, OpConfig(chosen, (0,) * prod(chosen)))[0]

    def _regions(self, tile: Tile, *, cut: bool) -> list[torch.Tensor]:
        """The regions that a tile reads. ``cut``: parameters are shards, each with memory of its own."""
        op = self._op
        found = []
        for o, box in zip((*op.inputs, *op.parameters), (*tile.inputs, *tile.parameters), strict=True):
            full = self._tensors[o.tensor]
            own = cut and (o in op.parameters or op.kind in RECURRENT_KINDS)
            region = torch.zeros(lengths(box), dtype=full.dtype) if own else full[relative(box, whole(full.shape))].detach()
            found.append(region.requires_grad_(self._graph.tensors[o.tensor].requires_grad))
        return found

    def _run(self, tile: Tile, regions: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        count = len(self._op.inputs)
        context = replace(self._context, unread=self._model.unread((tile,)))  # the operator's other tiles are cut in the same way
        return self._model.run_tile(tile, regions[:count], regions[count:], context)

    def _footprint(self, tile: Tile, *, cut: bool) -> Footprint:
        """The footprint of one run."""
        regions = self._regions(tile, cut=cut)
        memory = TrialMemory()
        memory.leave_out(regions)
        with memory:
            with torch.autograd.graph.saved_tensors_hooks(memory.pack, lambda tensor: tensor):
                results = list(self._run(tile, regions))
            most = memory.most_bytes
            room = memory.leave_out(results)
            kept, product = memory.kept_bytes() + room, memory.product_bytes()
            forward = most - kept - sum(map(bytes_of, results))
            keeps = frozenset(place for place, tensor in enumerate((*regions, *results)) if memory.keeps(tensor))
            rows = frozenset(place for place, tensor in enumerate(results, len(regions)) if tensor.is_contiguous())
            given_memory = [_memory(tensor) for tensor in regions[: len(self._op.inputs)]]
            views = frozenset((k, j) for k, own in enumerate(results) for j, one in enumerate(given_memory) if one == _memory(own))
            wanted = [tensor for tensor in regions if tensor.requires_grad]
            answers = [tensor for tensor in results if tensor.requires_grad]
            results.clear()
            backward, repeated = 0, frozenset[int]()
            if wanted and answers:
                gradients = [torch.zeros_like(tensor, requires_grad=False) for tensor in answers]
                memory.note(gradients)
                operands = sum(map(bytes_of, (*wanted, *gradients)))
                root = given(gradients, answers)
                seed = torch.ones_like(root)
                memory.leave_out((root, seed))
                answers.clear()
                memory.most_bytes = 0
                hooks = [tensor.register_hook(memory.arrived) for tensor in wanted]  # type: ignore[no-untyped-call]
                found = torch.autograd.grad(root, wanted, seed, allow_unused=True)
                for hook in hooks:
                    hook.remove()
                backward = memory.most_bytes - kept - operands
                made = list(zip((place for place, tensor in enumerate(regions) if tensor.requires_grad), found, strict=True))
                rows |= stolen(made, memory.knows)
                repeated = spread(made).intersection(range(len(self._op.inputs)))
        return Footprint(max(0, kept), max(0, forward), backward, keeps, NONE, product, rows, repeated, views)


def _of_all(footprint: Footprint, op: Operator, tile: Tile) -> Footprint:
    """The footprint scaled up as if a tile had all points."""
    points = iteration_points(op)
    kept, forward, backward, product = (-(-size * points // max(1, tile.size)) for size in footprint.sizes_bytes)
    return Footprint(kept, forward, backward, footprint.keeps, NONE, product, footprint.in_rows, footprint.spread, footprint.views)


def _fixed(own: Footprint, cut: Footprint) -> tuple[int, int, int, int]:
    """What does not shrink with a factor, by a footprint ``cut`` by it: if that has no line, what a half takes beyond half of it."""
    uses = zip(cut.fixed_bytes, cut.sizes_bytes, own.sizes_bytes, strict=True)
    kept, forward, backward, product = (max(fixed, size - whole, 0) for fixed, size, whole in uses)
    return kept, forward, backward if own.backward_bytes > 0 else 0, product


def _line(one: tuple[int, int], other: tuple[int, int], points: int) -> tuple[int, int]:
    """Bytes of all points together, and the part that does not shrink, rounded up: a line through two tiles' (points, bytes), of which
    the first one has more points. If more points take less, it counts as not shrinking."""
    (many, most), (few, least) = one, other
    if least > most:
        return least, least
    fixed = max(-(-(least * many - most * few) // (many - few)), min(0, least))
    return fixed + max(-(-(most - fixed) * points // many), -(-(least - fixed) * points // few)), fixed


FEW = 50
"""Numbers that are repeated at least so often are few."""

Found = tuple[int, torch.Tensor | None]
"""(place of an operand, the gradient of its region)."""


def stolen(found: Sequence[Found], is_held: Callable[[torch.Tensor], bool]) -> frozenset[int]:
    """The places whose gradient a leaf that lies row by row would steal: take as it is, since nothing else refers to it, and it lies as the
    leaf does (torch/csrc/autograd/functions/accumulate_grad.h). Others are copied, and both are there for a moment. ``found``: all that one
    backward pass has made. ``is_held``: whether others hold a tensor's memory."""
    made = {place: gradient for place, gradient in found if gradient is not None and gradient.layout is torch.strided}
    uses = Counter(_memory(gradient) for gradient in made.values())
    return frozenset(
        place
        for place, gradient in made.items()
        if uses[_memory(gradient)] == 1 and _lies_apart(gradient) and not is_held(gradient)
    )


def spread(found: Sequence[Found]) -> frozenset[int]:
    """The places whose gradients are a few numbers that are repeated: that of a mean is one number for all that it is of."""
    made = ((place, gradient) for place, gradient in found if gradient is not None and gradient.layout is torch.strided)
    return frozenset(place for place, gradient in made if FEW * gradient.untyped_storage().nbytes() <= gradient.nbytes)


def _lies_apart(gradient: torch.Tensor) -> bool:
    """Whether a gradient lies row by row in memory of its own, and is what it seems: marks (of complex numbers) are resolved by a copy."""
    alone = gradient.untyped_storage().nbytes() == gradient.nbytes
    return alone and gradient.is_contiguous() and 0 not in gradient.stride() and not (gradient.is_conj() or gradient.is_neg())


def _memory(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


@dataclass(frozen=True, slots=True)
class Layout:
    """One result. ``memory``: number of the operand whose memory it has; below 0: a piece of the results' own, of so many ``bytes``."""

    memory: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def layouts_of(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> tuple[Layout, ...] | None:
    """The layouts of results beside the operands; None if ``like`` could not make the same."""
    memories = {tensor.untyped_storage()._cdata: (place, tensor.dtype) for place, tensor in reversed(list(enumerate(operands)))}
    found = []
    for result in results:
        storage = result.untyped_storage()
        memory, dtype = memories.setdefault(storage._cdata, (-1 - len(memories), result.dtype))
        if result.is_conj() or result.is_neg() or dtype != result.dtype or storage.nbytes() % result.itemsize:
            return None
        found.append(Layout(memory, storage.nbytes(), result.dtype, tuple(result.shape), result.stride(), int(result.storage_offset())))
    return tuple(found)


def like(layouts: Sequence[Layout], operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors with these layouts, beside operands that lie as those did."""
    memories = dict(enumerate(operands))
    for own in layouts:
        if own.memory not in memories:
            memories[own.memory] = torch.empty(own.bytes // own.dtype.itemsize, dtype=own.dtype)
    return tuple([memories[own.memory].as_strided(own.shape, own.strides, own.offset) for own in layouts])


Value = TypeVar("Value")


class FoundLater(Mapping[str, Value]):
    """A mapping that ``find`` makes when it is first looked into. Pickled, it is what was found."""

    def __init__(self, find: Callable[[], Mapping[str, Value]]) -> None:
        self._find = find

    def __getitem__(self, key: str) -> Value:
        return self._find()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())

    def __contains__(self, key: object) -> bool:
        return key in self._find()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def footprints_later(model: TracedModel, *, on_gpus: bool) -> tuple[FoundLater[Footprints], FoundLater[PartFootprints]]:
    """As ``find_footprints``. The model's parameters are not held meanwhile, for they may be large; no trial reads them."""
    bare: list[TracedModel] = [replace(model, parameters={}, example_inputs=(), unchanged={}, source=None)]

    @cache
    def found() -> tuple[dict[str, Footprints], dict[str, PartFootprints]]:
        with _disable_current_modes(), torch.device("cpu"), torch.enable_grad(), silenced(*TRIALS):  # wherever it is asked
            return find_footprints(bare.pop(), on_gpus=on_gpus)

    return FoundLater(lambda: found()[0]), FoundLater(lambda: found()[1])


class TrialMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory that calls allocate. ``most_bytes``: the most that was there at once, without what is left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._products: list[tuple[StorageWeakRef, int, int]] = []
        self._needed = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self._left_out: dict[int, torch.UntypedStorage] = {}
        self._noted: dict[int, StorageWeakRef] = {}
        self._arrived: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._arrived:  # a leaf takes its gradient as soon as it is there: who reads it later holds it then
            read = (item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor))
            self.note(item for item in read if item.untyped_storage()._cdata in self._arrived)
        result = func(*args, **(kwargs or {}))
        made = [item.untyped_storage() for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        self._products += [(_reference(storage), storage._cdata, storage.nbytes()) for storage in made if is_product(func)]
        if made:
            self._live = {key: entry for key, entry in self._live.items() if _is_there(entry[0])}
            self._live.update((storage._cdata, (_reference(storage), storage.nbytes())) for storage in made)
            self.most_bytes = max(self.most_bytes, sum(size for key, (_, size) in self._live.items() if key not in self._left_out))
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that autograd keeps this tensor."""
        storage, self._needed = tensor.untyped_storage(), len(self._products)
        self._kept[storage._cdata] = (_reference(storage), storage.nbytes())
        return tensor

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> int:
        """Leave these tensors out: they are counted elsewhere. If they are parts of something larger that they keep, the rest counts."""
        room: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._left_out:
                self._left_out[storage._cdata] = storage
                room[storage._cdata] = storage.nbytes()
            if storage._cdata in room:
                room[storage._cdata] -= bytes_of(tensor)
        return sum(max(0, rest) for rest in room.values())

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know these tensors' memory, without keeping it."""
        self._noted.update((storage._cdata, _reference(storage)) for storage in (tensor.untyped_storage() for tensor in tensors))

    def arrived(self, gradient: torch.Tensor) -> None:
        """Note from now on who reads a leaf's gradient, which somebody keeps until the end."""
        self._arrived.add(gradient.untyped_storage()._cdata)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of one that was noted, read since it arrived, or left out, or that autograd has kept."""
        return any(tensor.untyped_storage()._cdata in own for own in (self._noted, self._left_out, self._kept))

    def kept_bytes(self) -> int:
        """Bytes that autograd keeps, without what is left out."""
        return sum(size for key, (storage, size) in self._kept.items() if key not in self._left_out and _is_there(storage))

    def product_bytes(self) -> int:
        """Bytes that products have made which a second run needs (``products.Products``), without what is left out."""
        made = self._products[: self._needed]
        return sum(size for storage, key, size in made if key not in self._left_out or not _is_there(storage))

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether autograd keeps the memory of a tensor."""
        return tensor.untyped_storage()._cdata in self._kept


def _reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_there(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements, wherever they lie."""
    return tensor.numel() * tensor.itemsize
