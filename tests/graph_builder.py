"""Operator graphs by hand: one method per operator, with the factors and maps that the tracing rules give such operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from soap.model.graph import KEEP_STATE, NEXT_STATE, WHOLE, DimMap, Factor, FactorKind, Operand, Operator, OperatorGraph, Tensor, TensorKind
from soap.model.sparse_access import Lookup, scaled, uniform

SAMPLE, ATTRIBUTE = FactorKind.SAMPLE, FactorKind.ATTRIBUTE
PARAMETER, REDUCTION = FactorKind.PARAMETER, FactorKind.REDUCTION
ITEM_BYTES = {"float32": 4, "float64": 8, "int64": 8, "bfloat16": 2}


class GraphBuilder:
    """Collects tensors and operators. Methods return the name of what they made; dimension 0 of activations is the batch."""

    def __init__(self, name: str = "model", dtype: str = "float32") -> None:
        self.name = name
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.lookups: dict[str, list[Lookup]] = {}

    def build(self, loss: str, alpha: float | None = None, terms: Sequence[str] = ()) -> OperatorGraph:
        """``alpha``: share of the rows of each sparse parameter that a batch touches, as far as it looks up so many. ``terms``: numbers of
        which the loss is the sum."""
        sparse = {}
        for name, lookups in self.lookups.items():
            if len(lookups) == sum(operand.tensor == name for op in self.operators for operand in op.parameters):
                access = uniform(self.shape(name)[0], lookups)
                sparse[name] = access if alpha is None else scaled(access, min(alpha, access.indices / access.rows))
        known = dict.fromkeys(terms, 1.0)
        return OperatorGraph(self.name, tuple(self.operators), dict(self.tensors), loss, sparse=sparse, loss_terms=known)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def input(self, name: str, *shape: int, dtype: str | None = None) -> str:
        return self._tensor(name, shape, TensorKind.INPUT, dtype=dtype)

    def constant(self, name: str, *shape: int, dtype: str | None = None) -> str:
        return self._tensor(name, shape, TensorKind.CONSTANT, dtype=dtype)

    def parameter(self, name: str, *shape: int, frozen: bool = False) -> str:
        return self._tensor(name, shape, TensorKind.PARAMETER, requires_grad=not frozen)

    def operator(
        self,
        kind: str,
        factors: Sequence[Factor],
        inputs: Sequence[tuple[str, Sequence[DimMap]]],
        parameters: Sequence[tuple[str, Sequence[DimMap]]],
        outputs: Sequence[tuple[Sequence[int], Sequence[DimMap]]],
        *,
        flops: int = 0,
        partitionable: bool = True,
        name: str | None = None,
        gradient: bool = True,
    ) -> list[str]:
        """Any operator: (tensor, maps) of what it reads, (shape, maps) of what it makes. Returns the outputs' names."""
        name = name or f"{kind}{len(self.operators)}"
        grad = gradient and any(self.tensors[t].requires_grad for t, _ in (*inputs, *parameters))
        outs = [name if len(outputs) == 1 else f"{name}.{k}" for k in range(len(outputs))]
        for out, (shape, _) in zip(outs, outputs, strict=True):
            self._tensor(out, shape, TensorKind.ACTIVATION, requires_grad=grad)
        self.operators.append(
            Operator(
                name=name,
                kind=kind,
                factors=tuple(factors),
                inputs=tuple(Operand(t, tuple(dims)) for t, dims in inputs),
                parameters=tuple(Operand(t, tuple(dims)) for t, dims in parameters),
                outputs=tuple(Operand(out, tuple(dims)) for out, (_, dims) in zip(outs, outputs, strict=True)),
                flops=flops,
                saved_bytes=sum(self.tensors[out].bytes for out in outs),
                partitionable=partitionable,
            )
        )
        return outs

    def linear(
        self, x: str, n: int, *, weight: str | None = None, bias: bool = True, heads: int | None = None, name: str | None = None
    ) -> str:
        """``[b, s…, k] -> [b, s…, n]``; ``heads``: the factor runs over heads, because a view into heads was fused."""
        name = name or f"linear{len(self.operators)}"
        *outer, k = self.shape(x)
        head = n // (heads or n)
        factors = [*self._outer(outer), Factor("k", k, REDUCTION, summed=True), Factor("n", n // head, PARAMETER)]
        rows, inner, column = [DimMap(i) for i in range(len(outer))], DimMap(len(outer)), _block(len(outer) + 1, head)
        weight = weight or self.parameter(f"{name}.weight", n, k)
        parameters = [(weight, [column, inner])]
        if bias:
            parameters.append((self.parameter(f"{name}.bias", n), [column]))
        inputs, outputs = [(x, [*rows, inner])], [((*outer, n), [*rows, column])]
        return self.operator("linear", factors, inputs, parameters, outputs, flops=2 * prod(outer) * k * n, name=name)[0]

    def elementwise(self, *xs: str, kind: str = "elementwise", name: str | None = None) -> str:
        """Pointwise over tensors of one shape; an input of fewer dimensions is broadcast over the first ones."""
        shape = max((self.shape(x) for x in xs), key=len)
        dims = [DimMap(i) for i in range(len(shape))]
        inputs = [(x, dims[len(shape) - len(self.shape(x)) :]) for x in xs]
        return self.operator(kind, self._outer(shape), inputs, [], [(shape, dims)], flops=prod(shape), name=name)[0]

    def norm(self, x: str, name: str | None = None) -> str:
        """Layer norm over the last dimension, which can't be split."""
        name = name or f"norm{len(self.operators)}"
        *outer, d = self.shape(x)
        dims = [*(DimMap(i) for i in range(len(outer))), WHOLE]
        scale = self.parameter(f"{name}.weight", d)
        flops = 8 * prod(outer) * d
        return self.operator("norm", self._outer(outer), [(x, dims)], [(scale, [WHOLE])], [((*outer, d), dims)], flops=flops, name=name)[0]

    def conv(self, x: str, o: int, kernel: int = 3, stride: int = 1, padding: int = 1, name: str | None = None) -> str:
        """Convolution over the last dimension, ``[b, c, l] -> [b, o, l']``: tiles need halos."""
        name = name or f"conv{len(self.operators)}"
        b, c, length = self.shape(x)
        out = (length + 2 * padding - kernel) // stride + 1
        factors = [Factor("b", b, SAMPLE), Factor("c", c, REDUCTION, summed=True), Factor("o", o, PARAMETER), Factor("l", out, ATTRIBUTE)]
        window = DimMap(3, stride, -padding, kernel - padding)
        weight = self.parameter(f"{name}.weight", o, c, kernel)
        return self.operator(
            "conv",
            factors,
            [(x, [DimMap(0), DimMap(1), window])],
            [(weight, [DimMap(2), DimMap(1), WHOLE])],
            [((b, o, out), [DimMap(0), DimMap(2), DimMap(3)])],
            flops=2 * b * c * o * out * kernel,
            name=name,
        )[0]

    def embedding(self, ids: str, v: int, d: int, *, weight: str | None = None, name: str | None = None) -> str:
        """``[b…] -> [b…, d]``; the vocabulary is a summed factor (masked look-up)."""
        name = name or f"embedding{len(self.operators)}"
        outer = self.shape(ids)
        factors = [*self._outer(outer), Factor("v", v, REDUCTION, summed=True), Factor("d", d, PARAMETER)]
        rows = [DimMap(i) for i in range(len(outer))]
        vocabulary, width = DimMap(len(outer)), DimMap(len(outer) + 1)
        weight = weight or self.parameter(f"{name}.weight", v, d)
        parameters, outputs = [(weight, [vocabulary, width])], [((*outer, d), [*rows, width])]
        self.lookups.setdefault(weight, []).append(Lookup(len(self.operators), 0, (0,), prod(outer)))
        return self.operator("embedding", factors, [(ids, rows)], parameters, outputs, flops=prod(outer) * d, name=name)[0]

    def attention(self, q: str, k: str, v: str, heads: int, *, offsets: tuple[int, int, int] = (0, 0, 0), d: int | None = None) -> str:
        """Scaled dot-product attention on ``[b, s, heads * size]``; ``offsets``: where q, k, v start in a joint tensor."""
        b, s, whole = self.shape(q)
        size = (d or whole) // heads
        factors = [Factor("b", b, SAMPLE), Factor("h", heads, ATTRIBUTE), Factor("q", s, ATTRIBUTE)]
        maps = [DimMap(1, size, offset, offset + size) for offset in offsets]
        inputs = [(q, [DimMap(0), DimMap(2), maps[0]]), (k, [DimMap(0), WHOLE, maps[1]]), (v, [DimMap(0), WHOLE, maps[2]])]
        outputs = [((b, s, heads * size), [DimMap(0), DimMap(2), _block(1, size)])]
        return self.operator("attention", factors, inputs, [], outputs, flops=4 * b * s * s * heads * size)[0]

    def slice(self, x: str, dim: int, start: int, length: int) -> str:
        """A contiguous part of one dimension."""
        shape = [length if i == dim else size for i, size in enumerate(self.shape(x))]
        dims = [DimMap(i) for i in range(len(shape))]
        read = [DimMap(i, 1, start, start + 1) if i == dim else m for i, m in enumerate(dims)]
        return self.operator("slice", self._outer(shape), [(x, read)], [], [(shape, dims)])[0]

    def concat(self, a: str, b: str, dim: int) -> str:
        """Two tensors side by side; some tiles read nothing of one of them."""
        first, second = self.shape(a), self.shape(b)
        shape = [n + second[i] if i == dim else n for i, n in enumerate(first)]
        dims = [DimMap(i) for i in range(len(shape))]
        later = [DimMap(i, 1, -first[dim], 1 - first[dim]) if i == dim else m for i, m in enumerate(dims)]
        return self.operator("concat", self._outer(shape), [(a, dims), (b, later)], [], [(shape, dims)])[0]

    def chunk(self, x: str, dim: int, at: int) -> list[str]:
        """One tensor cut in two; some tiles write nothing of one part."""
        shape = self.shape(x)
        dims = [DimMap(i) for i in range(len(shape))]
        later = [DimMap(i, 1, -at, 1 - at) if i == dim else m for i, m in enumerate(dims)]
        low, high = ([size if i == dim else n for i, n in enumerate(shape)] for size in (at, shape[dim] - at))
        return self.operator("chunk", self._outer(shape), [(x, dims)], [], [(low, dims), (high, later)])

    def sum(self, *xs: str, name: str | None = None) -> str:
        """The sum of numbers."""
        return self.operator("sum", [], [(x, []) for x in xs], [], [((), ())], name=name)[0]

    def batch_mean(self, x: str) -> str:
        """Mean over the batch: a summed sample factor, and an output without batch dimension."""
        b, *rest = self.shape(x)
        factors = [Factor("b", b, SAMPLE, summed=True), *(Factor(f"d{i}", n, ATTRIBUTE) for i, n in enumerate(rest))]
        kept = [DimMap(1 + i) for i in range(len(rest))]
        return self.operator("batch_mean", factors, [(x, [DimMap(0), *kept])], [], [(rest, kept)], flops=b * prod(rest))[0]

    def state(self, *values: str) -> None:
        """What ends a graph whose forward pass moves buffers to these values."""
        own = {value: [WHOLE] * len(self.shape(value)) for value in values}
        outputs = [(self.shape(value), maps) for value, maps in own.items()]
        taken = self.operator(NEXT_STATE, [], list(own.items()), [], outputs, gradient=False, name=NEXT_STATE)
        self.operator(KEEP_STATE, [], list(zip(taken, own.values(), strict=True)), [], [((), ())], gradient=False, name=KEEP_STATE)

    def opaque(self, x: str) -> str:
        """An operator without a rule: kept whole."""
        shape = self.shape(x)
        whole = [WHOLE] * len(shape)
        return self.operator("opaque", [], [(x, whole)], [], [(shape, whole)], flops=prod(shape), partitionable=False)[0]

    def mean(self, x: str, name: str | None = None) -> str:
        """Mean over everything: a loss."""
        shape = self.shape(x)
        factors = [Factor(f.name, f.size, f.kind if f.kind is SAMPLE else REDUCTION, summed=True) for f in self._outer(shape)]
        dims = [DimMap(i) for i in range(len(shape))]
        return self.operator("mean", factors, [(x, dims)], [], [((), ())], flops=prod(shape), name=name)[0]

    def cross_entropy(self, logits: str, targets: str) -> str:
        """Loss over classes in the last dimension, which each tile needs whole."""
        *outer, _ = self.shape(logits)
        factors = [Factor(f.name, f.size, f.kind if f.kind is SAMPLE else REDUCTION, summed=True) for f in self._outer(outer)]
        dims = [DimMap(i) for i in range(len(outer))]
        inputs = [(logits, [*dims, WHOLE]), (targets, dims)]
        return self.operator("cross_entropy", factors, inputs, [], [((), ())], flops=5 * prod(self.shape(logits)))[0]

    def _tensor(self, name: str, shape: Sequence[int], kind: TensorKind, *, dtype: str | None = None, requires_grad: bool = False) -> str:
        dtype = dtype or self.dtype
        assert name not in self.tensors, name
        self.tensors[name] = Tensor(name, tuple(shape), dtype, ITEM_BYTES[dtype], kind, requires_grad)
        return name

    def _outer(self, shape: Sequence[int]) -> list[Factor]:
        return [Factor("b" if i == 0 else f"d{i}", size, ATTRIBUTE if i else SAMPLE) for i, size in enumerate(shape)]


def _block(factor: int, scale: int) -> DimMap:
    return DimMap(factor, scale, 0, scale)


def counting(graph: OperatorGraph) -> OperatorGraph:
    """The same graph, each mean of which divides by what its devices count together if they are given their own samples."""
    operators = [replace(op, own_inputs=op.inputs) if op.factors and all(f.summed for f in op.factors) else op for op in graph.operators]
    return replace(graph, operators=tuple(operators))


def overlapping(graph: OperatorGraph) -> OperatorGraph:
    """The same graph, all of whose operators but lookups run in parts with the collectives of their edges."""
    return replace(graph, operators=tuple(replace(op, overlaps=op.kind != "embedding") for op in graph.operators))


def mlp(batch: int = 8, widths: Sequence[int] = (16, 32, 16), classes: int = 4) -> OperatorGraph:
    """linear, elementwise, linear, …, cross-entropy."""
    g = GraphBuilder("mlp")
    x = g.input("x", batch, widths[0])
    for i, width in enumerate(widths[1:]):
        x = g.elementwise(g.linear(x, width, name=f"fc{i}"), name=f"act{i}")
    x = g.linear(x, classes, name="head")
    return g.build(g.cross_entropy(x, g.input("y", batch, dtype="int64")))


def transformer(
    batch: int = 8, length: int = 6, d: int = 16, heads: int = 4, layers: int = 2, vocabulary: int = 64, *, joint: bool = False
) -> OperatorGraph:
    """A small GPT with tied embeddings; ``joint``: one matrix for queries, keys and values."""
    g = GraphBuilder("transformer")
    ids, positions = g.input("ids", batch, length, dtype="int64"), g.parameter("positions", length, d)
    x = g.embedding(ids, vocabulary, d, name="embedding")
    place = g.operator("copy", g._outer((length, d))[1:], [], [(positions, [WHOLE, DimMap(0)])], [((length, d), [WHOLE, DimMap(0)])])[0]
    x = g.elementwise(x, place, name="add_positions")
    for i in range(layers):
        y = g.norm(x, f"{i}.norm1")
        if joint:
            qkv = g.linear(y, 3 * d, name=f"{i}.qkv")
            y = g.attention(qkv, qkv, qkv, heads, offsets=(0, d, 2 * d), d=d)
        else:
            q, k, v = (g.linear(y, d, heads=heads, name=f"{i}.{part}") for part in "qkv")
            y = g.attention(q, k, v, heads)
        x = g.elementwise(x, g.linear(y, d, name=f"{i}.proj"), name=f"{i}.add1")
        y = g.linear(g.norm(x, f"{i}.norm2"), 4 * d, name=f"{i}.fc1")
        y = g.linear(g.elementwise(y, name=f"{i}.gelu"), d, name=f"{i}.fc2")
        x = g.elementwise(x, y, name=f"{i}.add2")
    x = g.linear(g.norm(x, "norm"), vocabulary, weight="embedding.weight", bias=False, name="head")
    return g.build(g.cross_entropy(x, g.input("y", batch, length, dtype="int64")))


def convnet(batch: int = 8, channels: int = 4, length: int = 12, classes: int = 10) -> OperatorGraph:
    """Convolutions with halos, then dense layers."""
    g = GraphBuilder("convnet")
    x = g.conv(g.input("x", batch, 3, length), channels, name="conv0")
    x = g.conv(g.elementwise(x, name="relu0"), channels, stride=2, name="conv1")
    b, c, n = g.shape(x)
    dims = [DimMap(0), WHOLE, WHOLE]
    flat = g.operator("flatten", [Factor("b", b, SAMPLE)], [(x, dims)], [], [((b, c * n), [DimMap(0), WHOLE])], name="flatten")[0]
    x = g.elementwise(g.linear(flat, 32, name="fc0"), name="relu1")
    x = g.linear(x, classes, name="fc1")
    return g.build(g.cross_entropy(x, g.input("y", batch, dtype="int64")))
