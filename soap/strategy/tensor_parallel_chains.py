"""What tensor parallelism can split in a graph: weight matrices, vocabulary tables, and chains that stay split between matrices.

A *chain* starts in matrices split by columns (their *parameter* factor), goes through operators that follow the same split, and
ends in matrices split by rows (their *reduction* factor), whose partial results are summed: two matrices need one sum, as in
Megatron-LM. Factors and ``DimMap``s decide everything, names decide nothing. ``megatron`` places the chains on devices.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from soap.model.graph import DimMap, FactorKind, Operand, Operator, OperatorGraph


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight matrix, or one for each expert, applied to an input. ``column``: the factor over its outputs. ``row``: the factor over its
    inputs; None if that cannot be split. ``outputs``, ``inputs``: the matrix's two sizes, in elements.
    """

    column: int
    row: int | None
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter matrix whose entries are looked up by number. ``factor`` runs over its ``entries``; each has ``width`` elements."""

    factor: int
    entries: int
    width: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that can be split alike, from column-split matrices to row-split ones.

    ``factors``: operator position -> factor to split. ``periods``: operator position -> how many blocks of that factor lie side by side (a
    joint query-key-value matrix has 3, and each block is cut); 1 where there is no entry. ``rows``: positions of the last operators,
    whose sums every device gets.
    """

    factors: Mapping[int, int]
    periods: Mapping[int, int]
    rows: frozenset[int]

    def width(self, graph: OperatorGraph, devices: int) -> int:
        """The largest divisor of ``devices`` such that all members can be cut into so many parts at the same borders; 1 if none can."""
        sizes = [graph.operators[i].factors[f].size for i, f in self.factors.items()]
        same = len(set(sizes)) == 1 and not self.periods
        blocks = [size // self.periods.get(i, 1) for size, i in zip(sizes, self.factors, strict=True)]
        for width in range(devices, 1, -1):
            if devices % width == 0 and (width <= sizes[0] if same else all(block % width == 0 for block in blocks)):
                return width
        return 1


def dense(graph: OperatorGraph, op: Operator) -> Dense | None:
    """The operator's weight matrix, or None if it applies none that can be split by columns."""
    if not op.partitionable:
        return None
    for operand in op.parameters:
        rank = len(operand.dims)
        if rank != 2 and not (rank == 3 and operand.dims[0].factor == expert_factor(graph, op) is not None):
            continue
        shape = graph.tensors[operand.tensor].shape
        for outer, inner in ((rank - 2, rank - 1), (rank - 1, rank - 2)):
            column, row = operand.dims[outer], operand.dims[inner]
            if not _is_column(op, column) or not (row.factor is None or (row.exact and _is_reduction(op, row.factor))):
                continue
            if any(_applies(graph, source, row.factor, shape[inner]) for source in op.inputs):
                assert column.factor is not None
                return Dense(column.factor, row.factor, shape[outer], shape[inner])
    return None


def expert_factor(graph: OperatorGraph, op: Operator) -> int | None:
    """The factor over experts of an operator that has parameters of experts; None if it has none.

    Where rows are routed, what it makes follows it. Else it is summed and belongs to a parameter alone, which has a summed factor in common
    with what the operator reads, too: a table of vectors has no such second one.
    """
    if not op.partitionable:
        return None
    routed = {out.dims[0].factor for out in op.outputs if out.tensor in graph.routed} - {None}
    read = {dim.factor for operand in op.inputs for dim in operand.dims}
    for operand in op.parameters:
        exact = {dim.factor for dim in operand.dims if dim.exact}
        summed = {factor for factor in exact if factor is not None and op.factors[factor].summed}
        alone = routed & exact or (summed - read if summed & read else set())
        if len(alone) == 1:
            return alone.pop()
    return None


def table(graph: OperatorGraph, op: Operator) -> Table | None:
    """The operator's vocabulary table, or None if it has none that can be split by entries."""
    if not op.partitionable:
        return None
    for operand in op.parameters:
        shape = graph.tensors[operand.tensor].shape
        for outer, inner in ((0, 1), (1, 0)) if len(shape) == 2 else ():
            factor = operand.dims[outer].factor
            if factor is None or not operand.dims[outer].exact or not _is_reduction(op, factor):
                continue
            if not any(dim.factor == factor for source in op.inputs for dim in source.dims):
                return Table(factor, shape[outer], shape[inner])
    return None


def find_chains(graph: OperatorGraph) -> list[Chain]:
    """Disjoint chains, in graph order of their first matrices; found once for a graph."""
    if not graph.tensor_parallel:
        graph.tensor_parallel.append(_find_chains(graph))
    return list(graph.tensor_parallel[0])


def _find_chains(graph: OperatorGraph) -> list[Chain]:
    chains: list[Chain] = []
    taken: set[int] = set()
    for position, op in enumerate(graph.operators):
        matrix = None if position in taken else dense(graph, op)
        if matrix is None:
            continue
        chain = _Growth(graph, taken, joins=True).chain(position, matrix.column)
        chain = chain or _Growth(graph, taken, joins=False).chain(position, matrix.column)
        if chain is not None:
            chains.append(chain)
            taken.update(chain.factors)
    return chains


def _is_column(op: Operator, dim: DimMap) -> bool:
    return dim.exact and dim.factor is not None and _follows(op, dim.factor) and op.factors[dim.factor].kind is FactorKind.PARAMETER


def _is_reduction(op: Operator, factor: int) -> bool:
    return op.factors[factor].summed and op.factors[factor].kind is FactorKind.REDUCTION


def _follows(op: Operator, factor: int) -> bool:
    return op.partitionable and not op.factors[factor].summed and op.factors[factor].kind is not FactorKind.SAMPLE


def _applies(graph: OperatorGraph, source: Operand, row: int | None, size: int) -> bool:
    """Whether the input runs along the matrix's inner dimension (for a table, the input holds entry numbers instead)."""
    if row is not None:
        return any(dim.factor == row for dim in source.dims)
    shape = graph.tensors[source.tensor].shape
    return size > 1 and prod(n for n, dim in zip(shape, source.dims, strict=True) if dim.factor is None) == size


def _dimension(dims: Sequence[DimMap], factor: int) -> int | None:
    """The dimension that follows the factor without overlap; None unless exactly one follows the factor."""
    found = [d for d, dim in enumerate(dims) if dim.factor == factor]
    return found[0] if len(found) == 1 and dims[found[0]].hi - dims[found[0]].lo == dims[found[0]].scale else None


class _BrokenError(Exception):
    """No chain can start here, for example because a reader needs more than its share of the split."""


class _Growth:
    """One attempt to grow a chain. ``joins``: also split the other inputs of its members (keys and values beside queries)."""

    def __init__(self, graph: OperatorGraph, taken: Container[int], *, joins: bool) -> None:
        self._graph = graph
        self._taken = taken
        self._joins = joins
        self._factors: dict[int, int] = {}
        self._periods: dict[int, int] = {}
        self._rows: set[int] = set()
        self._queue: list[int] = []

    def chain(self, start: int, factor: int) -> Chain | None:
        """The chain that starts in this operator, or None."""
        try:
            self._add(start, factor)
            while self._queue:
                self._advance(self._queue.pop(0))
        except _BrokenError:
            return None
        if not self._rows:
            return None
        periods = {i: count for i, count in self._periods.items() if count > 1}
        return Chain(dict(sorted(self._factors.items())), periods, frozenset(self._rows))

    def _add(self, position: int, factor: int, *, row: bool = False) -> None:
        if position in self._factors:
            if self._factors[position] != factor or (position in self._rows) != row:
                raise _BrokenError
            return
        if position in self._taken:
            raise _BrokenError
        self._factors[position] = factor
        if row:
            self._rows.add(position)
        else:
            self._queue.append(position)

    def _advance(self, position: int) -> None:
        """Follow every output of a member to its readers."""
        factor = self._factors[position]
        for output in self._graph.operators[position].outputs:
            dimension = _dimension(output.dims, factor)
            if dimension is None:
                raise _BrokenError
            for reader, slot in self._graph.consumers.get(output.tensor, ()):
                self._enter(position, output.dims[dimension], dimension, reader, slot)

    def _enter(self, position: int, written: DimMap, dimension: int, reader: int, slot: int) -> None:
        """Let one reader of a split output follow the split, or end the chain in it."""
        op = self._graph.operators[reader]
        read = op.inputs[slot].dims[dimension]
        if read.factor is None or read.hi - read.lo != read.scale or not op.partitionable:
            raise _BrokenError
        self._align(position, written, op.factors[read.factor].size * read.scale, read.lo - written.lo)
        if _follows(op, read.factor):
            self._add(reader, read.factor)
            if self._joins:
                self._join_sources(reader, read.factor)
            return
        matrix = dense(self._graph, op)
        if matrix is None or matrix.row != read.factor or matrix.outputs > matrix.inputs:
            raise _BrokenError  # the output is wider than the input (a vocabulary's scores): gathering the input is cheaper than a sum
        self._add(reader, read.factor, row=True)
        if self._joins:
            self._join_sources(reader, read.factor)  # a gate's two matrices, whose product the last one reads

    def _align(self, position: int, written: DimMap, length: int, offset: int) -> None:
        """Check that the reader takes the whole split dimension, or one of several equal blocks of a matrix's columns."""
        assert written.factor is not None
        op = self._graph.operators[position]
        total = op.factors[written.factor].size * written.scale
        blocks, rest = divmod(total, length)
        if rest or offset % length or not 0 <= offset < total or op.factors[written.factor].size % blocks:
            raise _BrokenError
        if blocks > 1 and dense(self._graph, op) is None:
            raise _BrokenError
        if self._periods.setdefault(position, blocks) != blocks:
            raise _BrokenError

    def _join_sources(self, position: int, factor: int) -> None:
        """Add the producers of a member's other inputs to the chain, if they come from a matrix split by columns."""
        for operand in self._graph.operators[position].inputs:
            found = self._source(operand, factor)
            if found is not None and found[0] not in self._factors and self._from_column(*found):
                self._add(*found)
                if dense(self._graph, self._graph.operators[found[0]]) is None:
                    self._join_sources(*found)

    def _source(self, operand: Operand, factor: int) -> tuple[int, int] | None:
        """The operator that produces this operand and its factor along the split dimension; None if it cannot follow the split."""
        dimension, producer = _dimension(operand.dims, factor), self._graph.producers.get(operand.tensor)
        if dimension is None or producer is None or producer[0] in self._taken:
            return None
        op = self._graph.operators[producer[0]]
        written = op.outputs[producer[1]].dims[dimension]
        if written.factor is None or not _follows(op, written.factor):
            return None
        return producer[0], written.factor

    def _from_column(self, position: int, factor: int) -> bool:
        """Whether the split goes back to the columns of a matrix, through operators that follow it."""
        todo, seen = [(position, factor)], {position}
        while todo:
            position, factor = todo.pop()
            op = self._graph.operators[position]
            matrix = dense(self._graph, op)
            if matrix is not None:
                if matrix.column == factor:
                    return True
                continue
            for operand in op.inputs:
                found = self._source(operand, factor)
                if found is not None and found[0] not in seen:
                    seen.add(found[0])
                    todo.append(found)
        return False
