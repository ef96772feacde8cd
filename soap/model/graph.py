"""The operator graph: what a model computes, and along which factors each operator may be split.

Pure data, no torch. Terms: an operator iterates over named *factors*; each dimension of each operand follows at most one
factor through a ``DimMap``; a *tile* of an operator is one interval per factor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property
from math import prod
from typing import Any, cast

from soap.errors import ModelError
from soap.model.regions import Box, Interval, balanced
from soap.model.sparse_access import RowAccess

RECURRENT_KINDS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Kinds of operators that are recurrent layers."""

PRODUCT_KINDS = frozenset(
    {"linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum", "bilinear", "cdist", "_grouped_mm"}
)
"""Kinds of operators that are products of matrices."""


def is_rounded_by_default(kind: str) -> bool:
    """Whether torch computes this kind of operator in TF32 where there is hardware for it, unless that is switched off."""
    return kind.startswith("conv") or kind in RECURRENT_KINDS


NARROW = ("bfloat16", "float16")
SUM_DTYPES = {"float32": "float32", "own": "the activations' own type"}
"""Types in which partial results of tensors of ``NARROW`` types are made, sent and added up, and how people are told."""
LOCAL_BATCH_NORM = "batch_norm_local"
"""Kind of a batch norm of which each tile normalizes by its own samples."""
NEXT_STATE = "next_state"
"""Kind of the operator that takes the buffers' values at the end of the forward pass, on one device."""
KEEP_STATE = "keep_state"
"""Kind of the operator that keeps these values for the next step, on every device. Graphs whose buffers do not change have neither."""


class FactorKind(StrEnum):
    """What splitting a factor means (FlexFlow's S, A, P, and reduction as an extension)."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"
    REDUCTION = "reduction"


class TensorKind(StrEnum):
    """Where a tensor comes from. Inputs and constants are available on every device.

    What a buffer holds when a step begins counts as a constant, whether the step changes it or not. Batch norm's buffers belong to
    their operator.
    """

    INPUT = "input"
    CONSTANT = "constant"
    PARAMETER = "parameter"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Factor:
    """One iteration dimension of an operator.

    ``summed``: no output is indexed by it, so that splitting it gives partial results to be added up (a matmul's inner
    dimension; the batch of a loss). A factor can be of kind *sample* and summed.
    """

    name: str
    size: int
    kind: FactorKind
    summed: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ModelError(f"factor {self.name!r} has size {self.size}; expected at least 1: export with non-empty inputs")


@dataclass(frozen=True, slots=True)
class DimMap:
    """Interval map of one tensor dimension: the factor's tile ``[a, b)`` touches ``[a*scale + lo, (b-1)*scale + hi)``, clipped.

    ``factor`` is an index into the operator's factors. Without a factor the whole dimension is needed, or, if ``scale`` is 0, the
    constant interval ``[lo, hi)``.
    """

    factor: int | None = None
    scale: int = 1
    lo: int = 0
    hi: int = 1

    def interval(self, tile: Sequence[Interval], size: int) -> Interval:
        """The part of a dimension of ``size`` elements that the tile touches; start == stop if it is empty."""
        if self.factor is None:
            return (0, size) if self.scale else (max(self.lo, 0), min(self.hi, size))
        a, b = tile[self.factor]
        start = min(max(a * self.scale + self.lo, 0), size)
        return (start, max(start, min((b - 1) * self.scale + self.hi, size)))

    @property
    def exact(self) -> bool:
        """Whether tiles of the factor partition the dimension (no halo, no offset)."""
        return self.factor is not None and self.lo == 0 and self.hi == self.scale


WHOLE = DimMap()


DRAWN_BLOCKS = 8
"""A mask is drawn in at most so many blocks along its dimension 0, each from a seed of its own: a tile of some of the samples draws little
more than it needs, and all tilings see the same."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers that a call draws, ``count`` in all, in blocks along a dimension of ``size`` elements. A tile draws whole blocks:
    those of which it needs something, as ``dim`` says."""

    dim: DimMap
    size: int
    count: int

    def by(self, tile: Sequence[Interval]) -> int:
        """How many numbers a tile with these intervals draws."""
        start, stop = self.dim.interval(tile, self.size)
        return self.count * sum(b - a for a, b in drawn_blocks(self.size) if a < stop and start < b) // max(1, self.size)


def drawn_blocks(size: int) -> list[Interval]:
    """The blocks of so many elements."""
    return balanced(size, min(DRAWN_BLOCKS, size)) if size else []


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor as an operator reads or writes it: one ``DimMap`` per dimension."""

    tensor: str
    dims: tuple[DimMap, ...]

    def box(self, tile: Sequence[Interval], shape: Sequence[int]) -> Box:
        """The region of the tensor that the tile touches."""
        return tuple(dim.interval(tile, size) for dim, size in zip(self.dims, shape, strict=True))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph. ``itemsize`` in bytes; ``dtype`` is torch's name without the prefix, e.g. ``float32``. ``own_sums``: partial
    results of which it is the sum are of its own type, though that is narrow (``OperatorGraph.summed_in``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    kind: TensorKind
    requires_grad: bool = False
    own_sums: bool = False

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return prod(self.shape) * self.itemsize

    @property
    def partial_itemsize(self) -> int:
        """Bytes per element of the partial results of which it is the sum. Those of narrower types are made, sent and added up in float32,
        unless ``own_sums``."""
        return 4 if self.dtype in NARROW and not self.own_sums else self.itemsize


@dataclass(frozen=True, slots=True)
class Operator:
    """One anchor call with the light calls fused into it.

    ``flops``: floating-point operations of the whole forward pass (a multiply-add counts two, of complex numbers eight).
    ``saved_bytes``: upper bound of what all tiles together keep for the backward pass besides inputs, parameters and outputs.
    ``calls``: names of the traced calls. ``partitionable`` is False for operators kept whole because no rule is known (or proven) for them.
    ``arithmetic``: the type in which the anchor call computes (``tf32``: float32 rounded to it by the hardware); empty: that of its first
    floating operand. ``skipped_share``: of ``flops``, what kernels leave out (causal attention: a half). ``fused_bytes``: of
    ``saved_bytes``, what kernels on GPUs never write (attention's weights, views). ``joined_bytes``: of the rest, what kernels that join
    calls do not write (``simulator.kernels``). ``views``: of ``calls``, those for which a GPU has nothing to do. ``drawn``: the random
    numbers of its calls. ``narrowing_bytes``: what casts to ``arithmetic`` move for each number that its product reads, and for each of its
    gradient. ``overlaps``: whether its collectives run in parts with it (``simulator.kernels``). These eight only change what an operator
    costs. ``own_inputs``: of a loss that divides by a number which all labels decide,
    ``inputs`` as a tile reads them that is told this number: of labels only those that belong to its scores. Empty for any other operator.
    These nine are no part of the graph's identity.
    """

    name: str
    kind: str
    factors: tuple[Factor, ...]
    inputs: tuple[Operand, ...]
    parameters: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    flops: int = 0
    saved_bytes: int = 0
    calls: tuple[str, ...] = ()
    partitionable: bool = True
    arithmetic: str = ""
    skipped_share: float = 0.0
    fused_bytes: int = 0
    views: int = 0
    drawn: tuple[Drawn, ...] = ()
    narrowing_bytes: tuple[int, int] = (0, 0)
    own_inputs: tuple[Operand, ...] = ()
    joined_bytes: int = 0
    overlaps: bool = False

    @property
    def summed(self) -> tuple[int, ...]:
        """Indices of the factors over which the outputs are sums."""
        return tuple(i for i, factor in enumerate(self.factors) if factor.summed)


_NOT_HASHED = ("arithmetic", "skipped_share", "fused_bytes", "joined_bytes", "views", "drawn", "narrowing_bytes", "own_inputs", "overlaps")
"""Fields of an operator that its graph's hash leaves out."""


@cache
def _hashed(kind: Any) -> tuple[str, ...]:
    """Names of a dataclass's fields that a graph's hash is made of."""
    return tuple(own.name for own in fields(kind) if kind is not Operator or own.name not in _NOT_HASHED)


def _hashed_values(own: object) -> dict[str, Any]:
    values = {name: getattr(own, name) for name in _hashed(cast(Hashable, type(own)))}
    if not values.get("own_sums", True):  # so that hashes of graphs without such sums stay as they were before there were any
        del values["own_sums"]
    return values


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A dimension of one of an operator's tensors along which it cannot be split, and why, in words."""

    tensor: str
    dim: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that an operator takes beside its inputs, parameters and outputs and the gradients of all these, in bytes.

    ``kept``: what autograd keeps for the backward pass. ``forward``, ``backward``: the most that its calls pass to each other at once
    beyond that; ``backward`` is negative if not all of the tensors above exist at the same time. ``product``: what its products make beside
    outputs, if a second run needs it. ``fixed``: the part of these four, in this order, that does not shrink when a factor is cut. By
    position among inputs, parameters and outputs: ``keeps``: which autograd keeps. ``in_rows``: which outputs certainly lie row by row, and
    gradients of which others do, by themselves: autograd takes these, and copies others. ``spread``: whose gradients repeat few numbers.
    ``views``: (output, input), each by position among its kind: the output has the input's memory, or a part of it.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    keeps: frozenset[int]
    fixed_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    product_bytes: int = 0
    in_rows: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()
    views: frozenset[tuple[int, int]] = frozenset()

    @property
    def lies(self) -> frozenset[int]:
        """The outputs that have an input's memory, by position among outputs."""
        return frozenset([output for output, _ in self.views])

    @property
    def sizes_bytes(self) -> tuple[int, int, int, int]:
        """The four sizes: kept, forward, backward, product."""
        return self.kept_bytes, self.forward_bytes, self.backward_bytes, self.product_bytes


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in topological order with the tensors between them. ``loss`` is the scalar that training minimises.

    ``aliases`` maps further state-dict names of a tied parameter to its canonical name. The other fields are no part of the graph's
    identity.

    ``unsplit``: by operator, the dimensions that no factor follows, and why; shown to people.

    ``footprints``: by operator, its memory: first of the whole operator; then with one factor cut, one entry for each factor; then with
    all factors cut, one entry for each factor, if that adds something; then, if some cuts are costly, with all factors cut but those
    (``simulator.memory.footprint.costly_cuts``). Sizes of a tile are scaled up as if it had all points. If there is only the first entry,
    it holds for all tiles. For operators left out, ``saved_bytes`` is the bound.

    ``part_footprints``: by operator, the memory of tiles that take a sum of terms (``tracing.part_footprints``): lengths of a tile's
    intervals -> what a tile of these lengths takes, not scaled up. Of tiles that are cut alike each factor has one length, or two, in all
    combinations.

    ``sparse``: by parameter, which of its rows a step touches; all other parameters are dense.

    ``sums_of``: by tensor of batch norm's sums, the tensor that they are of. Nobody reads sums if the tiles of their readers see all of
    that tensor, or all of some channels (dimension 1): these find them by themselves, and nobody makes the sums either.

    ``loss_terms``: if the loss is a sum of scaled numbers, by number the loss's gradient by it; only the *epilogue*, which adds them up,
    reads these. With micro-batches the backward pass begins there. Empty for any other loss.

    ``routed``: by tensor with the rows of each expert, the numbers of the experts that rows are for (``tracing.routing``). Its dimension 1
    is as long as if all experts had equally many.

    ``copies_of``: the graph of which this one has some of its equal copies (``soap.plan.copies``); micro-batches are cut as there.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    loss: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    unsplit: Mapping[str, tuple[Unsplit, ...]] = field(default_factory=dict)
    footprints: Mapping[str, tuple[Footprint, ...]] = field(default_factory=dict)
    part_footprints: Mapping[str, Mapping[tuple[int, ...], Footprint]] = field(default_factory=dict)
    sparse: Mapping[str, RowAccess] = field(default_factory=dict)
    sums_of: Mapping[str, str] = field(default_factory=dict)
    loss_terms: Mapping[str, float] = field(default_factory=dict)
    routed: Mapping[str, str] = field(default_factory=dict)
    copies_of: OperatorGraph | None = None

    def __post_init__(self) -> None:
        names: set[str] = set()
        available = {t.name for t in self.tensors.values() if t.kind is not TensorKind.ACTIVATION}
        for op in self.operators:
            if op.name in names:
                raise ModelError(f"operator name {op.name!r} occurs twice; expected unique names")
            names.add(op.name)
            for operand in (*op.inputs, *op.parameters):
                if operand.tensor not in available:
                    raise ModelError(f"operator {op.name!r} reads {operand.tensor!r} before it is produced")
            available.update(operand.tensor for operand in op.outputs)
        if self.loss not in available:
            raise ModelError(f"loss {self.loss!r} is produced by no operator")

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Operator name -> position in ``operators``."""
        return {op.name: i for i, op in enumerate(self.operators)}

    @cached_property
    def producers(self) -> Mapping[str, tuple[int, int]]:
        """Activation name -> (operator position, output position)."""
        return {out.tensor: (i, k) for i, op in enumerate(self.operators) for k, out in enumerate(op.outputs)}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Tensor name -> (operator position, input position) of every reader, in order."""
        readers: dict[str, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.operators):
            for k, operand in enumerate(op.inputs):
                readers.setdefault(operand.tensor, []).append((i, k))
        return {name: tuple(places) for name, places in readers.items()}

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """Trainable and frozen parameters, in definition order."""
        return tuple(t for t in self.tensors.values() if t.kind is TensorKind.PARAMETER)

    @cached_property
    def parameter_users(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Parameter name -> (operator position, parameter position) of every use, in order."""
        users: dict[str, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.operators):
            for k, operand in enumerate(op.parameters):
                users.setdefault(operand.tensor, []).append((i, k))
        return {name: tuple(places) for name, places in users.items()}

    @cached_property
    def backward_operators(self) -> frozenset[int]:
        """Positions of the operators to which a gradient of the loss may flow."""
        wanted, found = {self.loss}, set()
        for position in range(len(self.operators) - 1, -1, -1):
            op = self.operators[position]
            if any(out.tensor in wanted and self.tensors[out.tensor].requires_grad for out in op.outputs):
                found.add(position)
                wanted.update(operand.tensor for operand in op.inputs)
        return frozenset(found)

    @cached_property
    def epilogue(self) -> frozenset[int]:
        """Positions of the operators that make the loss of its terms; none if it has none."""
        wanted, found = {self.loss} - self.loss_terms.keys(), set()
        for position in range(len(self.operators) - 1, -1, -1) if self.loss_terms else ():
            if any(out.tensor in wanted for out in self.operators[position].outputs):
                found.add(position)
                wanted.update(o.tensor for o in self.operators[position].inputs if o.tensor not in self.loss_terms)
        return frozenset(found)

    @cached_property
    def known_gradients(self) -> frozenset[int]:
        """Positions of the operators that make a number by which the loss's gradient is known: a term of the loss, or the loss."""
        names = (name for name in self.loss_terms or (self.loss,) if name in self.producers and self.tensors[name].requires_grad)
        return frozenset(self.producers[name][0] for name in names)

    @cached_property
    def alike_footprints(self) -> list[int]:
        """[position]: the position of the first operator that has the same footprints."""
        first: dict[Hashable, int] = {}
        found = ((self.footprints.get(op.name), tuple(self.part_footprints.get(op.name, {}).items())) for op in self.operators)
        return [first.setdefault(own, position) for position, own in enumerate(found)]

    @cached_property
    def alike(self) -> dict[bool, list[int]]:
        """Answers of ``likeness.alike_operators``, with footprints and without."""
        return {}

    @cached_property
    def tensor_parallel(self) -> list[Any]:
        """The answer of ``strategy.tensor_parallel_chains.find_chains``, in a list; empty before it is asked for."""
        return []

    @cached_property
    def shares(self) -> dict[tuple[str, tuple[int, ...]], Any]:
        """What ``simulator.memory.footprint`` says of tiles (``Shares``), by operator and lengths of the tile's intervals. It depends on
        nothing else, and the tiles of an operator mostly have equal lengths."""
        return {}

    @cached_property
    def region_numbers(self) -> dict[tuple[str, Box], int]:
        """(tensor, region) -> its number, in the order in which they were first asked for (``simulator.memory.plan_arrays``)."""
        return {}

    @cached_property
    def next_state_bytes(self) -> int:
        """Bytes of the buffers' new values, which each device holds beside the old ones at the end of a step."""
        return sum(self.tensors[operand.tensor].bytes for op in self.operators if op.kind == KEEP_STATE for operand in op.inputs)

    def summed_in(self, sum_dtype: str) -> OperatorGraph:
        """The graph with partial results in float32, or in the types of their sums (``SUM_DTYPES``). Single numbers, such as losses, and
        what other results of their operator need in float32 are always summed in that. Footprints stay: those of cut sums may differ."""
        tensors = dict(self.tensors)
        for op in self.operators:
            made = [self.tensors[out.tensor] for out in op.outputs]
            own = sum_dtype == "own" and all(tensor.dtype in NARROW and tensor.shape for tensor in made)
            tensors.update((tensor.name, replace(tensor, own_sums=own)) for tensor in made if tensor.own_sums is not own)
        return replace(self, tensors=tensors)

    @cached_property
    def sum_dtype(self) -> str | None:
        """In which type its partial results are (``SUM_DTYPES``); None if there is only one way."""
        if any(tensor.own_sums for tensor in self.tensors.values()):
            return "own"
        return None if self.summed_in("own").tensors == self.tensors else "float32"

    def needs_backward(self, op: Operator) -> bool:
        """Whether any output of the operator carries a gradient."""
        return any(self.tensors[out.tensor].requires_grad for out in op.outputs)

    @cached_property
    def hash(self) -> str:
        """Identity of the model's structure (not of its weights): 16 hex digits of SHA-256."""
        values = [self.operators, list(self.tensors.values()), self.loss]
        text = json.dumps(values, sort_keys=True, default=_hashed_values)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
