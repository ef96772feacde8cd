"""A graph of another number of samples, without exporting the model again."""

from __future__ import annotations

from dataclasses import replace

from soap.model.batch import samples_of
from soap.model.graph import FactorKind, Footprint, Operator, OperatorGraph, TensorKind


def with_samples(graph: OperatorGraph, samples: int) -> OperatorGraph | str:
    """The graph as if it had been exported with so many samples a step, or why it cannot be told, in one line.

    Lengths, operations and bytes that follow the samples are scaled. Row counts of sparse parameters are left out: the graph says nothing
    of them.
    """
    whole = samples_of(graph)
    if whole is None:
        return "the model has no samples"
    scaling = _Scaling(whole, samples)
    operators = []
    for op in graph.operators:
        own = [place for place, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE and factor.size % whole == 0]
        if len(own) > 1 or not scaling.note(graph, op, own[0] if own else None):
            return f"operator {op.name!r} does not follow the samples one by one"
        operators.append(scaling.operator(op, own[0]) if own else op)
    tensors = dict(graph.tensors)
    for name, dim in scaling.dims.items():
        shape = list(tensors[name].shape)
        if dim is not None:
            shape[dim] = scaling.of(shape[dim])
            tensors[name] = replace(tensors[name], shape=tuple(shape))
    footprints = {
        name: tuple(map(scaling.footprint, own)) if scaling.is_scaled[name] else own for name, own in graph.footprints.items()
    }
    return replace(
        graph, operators=tuple(operators), tensors=tensors, footprints=footprints, sparse={}, unsplit={}, copies_of=None
    )  # fmt: skip


class _Scaling:
    """From ``whole`` samples to ``samples``. ``dims``: by tensor, the dimension of its samples; None if it has none."""

    def __init__(self, whole: int, samples: int) -> None:
        self._whole, self._samples = whole, samples
        self.dims: dict[str, int | None] = {}
        self.is_scaled: dict[str, bool] = {}

    def of(self, size: int) -> int:
        """A number that follows the samples."""
        return -(-size * self._samples // self._whole)

    def note(self, graph: OperatorGraph, op: Operator, factor: int | None) -> bool:
        """Whether all that reads and makes a tensor agrees which of its dimensions has the samples. Of the model's inputs some may read all
        samples: labels, for how many of them count."""
        self.is_scaled[op.name] = factor is not None
        for operand in (*op.inputs, *op.own_inputs, *op.parameters, *op.outputs):
            found = [d for d, dim in enumerate(operand.dims) if factor is not None and dim.factor == factor]
            if len(found) > 1 or any(not operand.dims[d].exact for d in found):
                return False
            own, kind = found[0] if found else None, graph.tensors[operand.tensor].kind
            if own is None and kind is TensorKind.INPUT:
                continue
            if self.dims.setdefault(operand.tensor, own) != own or (own is not None and kind is TensorKind.PARAMETER):
                return False
        return True

    def operator(self, op: Operator, factor: int) -> Operator:
        """The operator with the other length of a factor."""
        factors = list(op.factors)
        factors[factor] = replace(factors[factor], size=self.of(factors[factor].size))
        flops, saved, fused, joined = (self.of(size) for size in (op.flops, op.saved_bytes, op.fused_bytes, op.joined_bytes))
        drawn = tuple(
            replace(own, size=self.of(own.size), count=self.of(own.count)) if own.dim.factor == factor else own for own in op.drawn
        )
        return replace(op, factors=tuple(factors), drawn=drawn, flops=flops, saved_bytes=saved, fused_bytes=fused, joined_bytes=joined)

    def footprint(self, own: Footprint) -> Footprint:
        """The footprint of such an operator."""
        kept, forward, backward, product = (
            fixed + self.of(size - fixed) for size, fixed in zip(own.sizes_bytes, own.fixed_bytes, strict=True)
        )
        return replace(own, kept_bytes=kept, forward_bytes=forward, backward_bytes=backward, product_bytes=product)
