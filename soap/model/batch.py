"""What one training step consumes: samples and tokens, read off the graph.

A step may be cut into micro-batches. An operator that follows the samples is cut along its sample factor, at the same samples as all
others: its *parts*. What reads only its own part of its inputs goes through by itself. An operator that needs several parts at once is a
*barrier*: batch norm over the batch, in-batch negatives, whatever has no sample factor. (Not the loss's epilogue: it runs behind all
passes.) So operators have *phases*, the number of barriers before them: an operator waits for all parts of what it reads across a barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from soap.model.dtypes import is_differentiable
from soap.model.graph import DimMap, FactorKind, Operand, Operator, OperatorGraph, TensorKind
from soap.model.regions import Interval, balanced, proportional

LOOKUP = "embedding"
BAGS = frozenset({"embedding_bag", "equal_bags"})
"""Lookups that add the rows of a bag up: the indices of a bag are features of a sample, and no sequence."""


def samples_of(graph: OperatorGraph) -> int | None:
    """Samples in a step: the most common length of the inputs' dimensions that follow a sample factor; None if there is none."""
    lengths: dict[tuple[str, int], int] = {}
    for op in graph.operators:
        for operand in op.inputs:
            tensor = graph.tensors[operand.tensor]
            if tensor.kind is TensorKind.INPUT:
                lengths.update({(tensor.name, d): size for d, size in enumerate(tensor.shape) if _is_sample(op, operand.dims[d])})
    return Counter(lengths.values()).most_common(1)[0][0] if lengths else None


def sample_factor(op: Operator) -> int | None:
    """Index of the factor along which the batch is split; None if the operator has none, or may not be split."""
    samples = [i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE and op.partitionable]
    return min(samples, key=lambda i: (op.factors[i].size == 1, op.factors[i].summed, i), default=None)


def tokens_of(graph: OperatorGraph) -> int | None:
    """Tokens in a step: positions of the token input that has most of them; None if there is no such input.

    A token input has whole numbers, samples in one dimension and a sequence in another, and is looked up row by row in a table. Only one
    counts, because further ones often belong to the same positions (segments, position numbers, labels of a sampled softmax). So of a
    translation's source and target the longer one counts.
    """
    read: dict[tuple[str, str], list[Interval]] = {}  # input and table -> what lookups in it read of each of the input's dimensions
    rest: dict[str, list[int]] = {}  # input -> its dimensions without samples
    for op, table, operand in _lookups(graph):
        tensor = graph.tensors[operand.tensor]
        if tensor.kind is not TensorKind.INPUT or is_differentiable(tensor.dtype) or tensor.dtype == "bool":
            continue
        others = [d for d, dim in enumerate(operand.dims) if not _is_sample(op, dim)]
        if len(others) < len(operand.dims):
            rest[tensor.name] = others
            box = operand.box([(0, factor.size) for factor in op.factors], tensor.shape)
            known = read.get((tensor.name, table), box)
            read[tensor.name, table] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, box, strict=True)]
    lengths = {key: [stop - start for start, stop in box] for key, box in read.items()}
    return max((prod(own) for (name, _), own in lengths.items() if any(own[d] > 1 for d in rest[name])), default=None)


def _lookups(graph: OperatorGraph) -> Iterator[tuple[Operator, str, Operand]]:
    """(operator, its table, operand with indices) of lookups of single rows. Other inputs fused into an embedding come with them."""
    for op in graph.operators:
        if op.kind == LOOKUP and op.parameters:
            yield from ((op, op.parameters[0].tensor, operand) for operand in op.inputs)
    for name, access in graph.sparse.items():
        for lookup in access.lookups:
            op = graph.operators[lookup.operator]
            if op.kind != LOOKUP and op.kind not in BAGS:
                yield from ((op, name, op.inputs[place]) for place in lookup.inputs)


def _is_sample(op: Operator, dim: DimMap) -> bool:
    return dim.factor is not None and op.factors[dim.factor].kind is FactorKind.SAMPLE


def sample_dims(graph: OperatorGraph, *, own_labels: bool = False) -> dict[str, int]:
    """By input, its dimension of samples; inputs that are not divided among samples are left out. ``own_labels``: of labels that a mean
    counts, too, of which each tile reads its own if it is told what to divide by (``Operator.own_inputs``)."""
    found: dict[str, int] = {}
    for op in graph.operators:
        for operand in (*(op.own_inputs if own_labels else ()), *op.inputs):
            if graph.tensors[operand.tensor].kind is TensorKind.INPUT:
                own = [d for d, dim in enumerate(operand.dims) if _is_sample(op, dim)]
                found |= {operand.tensor: own[0]} if own else {}
    return found


MAX_MICROBATCHES = 4096
"""Upper limit of ``Strategy.microbatches``: more than any pipeline has."""


@dataclass(frozen=True)
class MicroBatches:
    """How the operators of a graph are cut into ``count`` micro-batches."""

    graph: OperatorGraph
    count: int

    @property
    def _whole(self) -> OperatorGraph:
        """The graph that says what is cut: the one with all copies, if there are others."""
        return self.graph.copies_of or self.graph

    @cached_property
    def samples(self) -> int | None:
        """Samples of a step, of all copies; None if the model has none."""
        return samples_of(self._whole)

    @cached_property
    def factors(self) -> tuple[int | None, ...]:
        """By operator: the position of the factor that is cut, None if it is not cut."""
        return tuple(self._factor(op) for op in self._whole.operators)

    def _factor(self, op: Operator) -> int | None:
        samples = self.samples
        if self.count == 1 or samples is None or not op.partitionable:
            return None
        own = (i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE and factor.size % samples == 0)
        return next(own, None)

    def parts(self, position: int) -> int:
        """In how many parts an operator runs: ``count``, or 1."""
        return 1 if self.factors[position] is None else self.count

    def pieces(self, position: int, factor: int, weights: Sequence[int]) -> list[list[Interval]]:
        """By micro-batch, the pieces of one of an operator's factors, in proportion to ``weights``. Pieces of one list if the operator is
        not cut; if another factor is cut, every micro-batch has the same ones."""
        size = self.graph.operators[position].factors[factor].size
        if self.factors[position] != factor:
            return [proportional(size, weights)] * self.parts(position)
        return [[(start + a, start + b) for a, b in proportional(stop - start, weights)] for start, stop in self.ranges(position)]

    def ranges(self, position: int) -> list[Interval]:
        """Of an operator that is cut: the part of its factor that belongs to each micro-batch."""
        return list(_ranges(*self._spans(position)))

    def _spans(self, position: int) -> tuple[int, int, int, int]:
        """``_ranges``' arguments, for an operator that is cut."""
        factor = self.factors[position]
        assert factor is not None and self.samples is not None
        size, whole = (graph.operators[position].factors[factor].size for graph in (self.graph, self._whole))
        return size, whole, self.samples, self.count

    def phases_within(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """By operator: how many barriers of its own chunk are before it, itself included. ``chunks``: by operator."""
        graph = self.graph
        found: list[int] = []
        for position, op in enumerate(graph.operators):
            phase = 0
            for operand in op.inputs:
                if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
                    maker, output = graph.producers[operand.tensor]
                    before = found[maker] if chunks[maker] == chunks[position] else 0
                    phase = max(phase, before + (not self.keeps_apart(maker, output, position, operand)))
            found.append(phase)
        return tuple(found)

    @cached_property
    def barriers(self) -> tuple[str, ...]:
        """Names of the operators that need several parts of what they read, and so make all micro-batches wait."""
        found = (op.name for position, op in enumerate(self.graph.operators) if self._waits(position, op))
        return tuple(found)

    def may_repeat(self, position: int) -> bool:
        """Whether an operator may run forward a second time. Not if it runs once for all micro-batches or is a barrier: its second run for
        one of them would wait for backward passes of others."""
        if self.count == 1:
            return True
        return self.factors[position] is not None and not self._waits(position, self.graph.operators[position])

    def _waits(self, position: int, op: Operator) -> bool:
        made = ((*self.graph.producers[operand.tensor], operand) for operand in op.inputs if operand.tensor in self.graph.producers)
        return any(not self.keeps_apart(maker, output, position, operand) for maker, output, operand in made)

    def keeps_apart(self, maker: int, output: int, reader: int, operand: Operand) -> bool:
        """Whether each part of the reader reads only what the same part of the maker makes."""
        made, read = self.factors[maker], self.factors[reader]
        if made is None or reader in self.graph.epilogue:  # which runs behind all passes
            return True
        dims = self.graph.operators[maker].outputs[output].dims
        place = next((d for d, dim in enumerate(dims) if dim.factor == made), None)
        if place is None or read is None or operand.dims[place].factor != read:
            return False
        sides = (dims[place], made, *self._spans(maker)), (operand.dims[place], read, *self._spans(reader))
        return _within(*sides, self.graph.tensors[operand.tensor].shape[place])

    def least_size(self, position: int, factor: int) -> int:
        """The size of one of an operator's factors in the smallest micro-batch."""
        if self.factors[position] != factor:
            return self.graph.operators[position].factors[factor].size
        return min(stop - start for start, stop in _ranges(*self._spans(position)))


_Side = tuple[DimMap, int, int, int, int, int]
"""How a dimension follows a factor, the factor's position, and ``_ranges``' arguments for it."""


@lru_cache(4096)
def _ranges(size: int, whole: int, samples: int, count: int) -> tuple[Interval, ...]:
    """``MicroBatches.ranges`` of a factor of this size, and of the one with all copies."""
    each = whole // samples
    return tuple([(start * each * size // whole, stop * each * size // whole) for start, stop in balanced(samples, count)])


@lru_cache(4096)
def _within(theirs: _Side, ours: _Side, size: int) -> bool:
    """Whether each part of one factor lies, along a tensor's dimension of this size, in the same part of the other."""
    (a, first, *parts), (b, second, *others) = theirs, ours
    pairs = zip(_ranges(*parts), _ranges(*others), strict=True)
    along = ((a.interval([(0, 0)] * first + [one], size), b.interval([(0, 0)] * second + [other], size)) for one, other in pairs)
    return all(start <= begin and end <= stop for (start, stop), (begin, end) in along)
