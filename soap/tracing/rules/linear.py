"""Matrix products and embeddings."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from soap.tracing.rules.notation import Local, Scope, Tiled, View, broadcast, einsum
from soap.tracing.rules.registry import rule


def _matmul_flops(view: View, inner: int) -> int:
    return 2 * prod(view.output_shapes[0]) * inner


def _run_linear(local: Local) -> torch.Tensor:
    # Of the tiles that split k, only the one that begins at 0 adds the bias, so that the partial results sum up to the whole.
    x, weight = local.tensors[0], local.tensors[1]
    bias = local.tensors[2] if len(local.tensors) > 2 and local.boxes[0][-1][0] == 0 else None
    return F.linear(x, weight, bias)


@rule("aten.linear")
def linear(view: View) -> Tiled:
    """``x @ weight.T + bias``: b sample or attribute, k reduction, n parameter."""
    notation = "*b k, n k, n -> *b n" if view.has("bias") else "*b k, n k -> *b n"
    return einsum(view, notation, run=_run_linear, flops=_matmul_flops(view, view.shapes[0][-1]))


def _run_addmm(local: Local) -> torch.Tensor:
    bias, a, b = local.tensors
    alpha, beta = local.get("alpha", 1), local.get("beta", 1)
    product = a @ b if alpha == 1 else alpha * (a @ b)
    if local.boxes[1][-1][0] != 0:
        return product
    return product + (bias if beta == 1 else beta * bias)


@rule("aten.addmm", "aten.baddbmm")
def addmm(view: View) -> Tiled:
    """``bias + a @ b`` for matrices or batches of matrices."""
    product = einsum_matmul(view, view.shapes[1], view.shapes[2])
    bias = broadcast(product.outputs[0], view.output_shapes[0], view.shapes[0])
    return Tiled(
        product.factors,
        (bias, *product.operands),
        product.outputs,
        summed=product.summed,
        run=_run_addmm,
        flops=_matmul_flops(view, view.shapes[1][-1]),
    )


def einsum_matmul(view: View, a: tuple[int, ...], b: tuple[int, ...]) -> Tiled:
    """torch.matmul's rule for two shapes, broadcasting the leading dimensions."""
    out_shape = view.output_shapes[0]
    scope = Scope()
    rows = scope.factor("m", a[-2]) if len(a) > 1 else None
    batch = tuple(scope.factor(f"b{i}", size) for i, size in enumerate(out_shape[: len(out_shape) - (len(a) > 1) - (len(b) > 1)]))
    batch_shape = out_shape[: len(batch)]
    inner = scope.factor("k", a[-1])
    columns = scope.factor("n", b[-1]) if len(b) > 1 else None
    a_map = (*broadcast(batch, batch_shape, a[:-2]), rows, inner) if rows is not None else (inner,)
    b_map = (*broadcast(batch, batch_shape, b[:-2]), inner, columns) if columns is not None else (inner,)
    out = (*batch, *(dim for dim in (rows, columns) if dim is not None))
    summed = () if inner.factor is None else (inner.factor,)
    return Tiled(tuple(scope.factors), (a_map, b_map), (out,), summed=summed)


@rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot")
def matmul(view: View) -> Tiled:
    """``a @ b`` with broadcasting."""
    a, b = view.shapes
    plain = einsum_matmul(view, a, b)
    copies = view.itemsize * (
        prod(a) + prod(b) + sum(prod((*view.output_shapes[0][:-2], *s[-2:])) for s in (a, b))
    )  # expanded, made contiguous
    return Tiled(plain.factors, plain.operands, plain.outputs, summed=plain.summed, flops=_matmul_flops(view, a[-1]), saved_bytes=copies)


def _run_embedding(local: Local) -> torch.Tensor:
    weight, indices = local.tensors
    start, stop = local.boxes[0][0]
    padding = local.get("padding_idx", -1)
    if (start, stop) == (0, local.shapes[0][0]):
        return F.embedding(indices, weight, padding if padding >= 0 else None)
    # Rows of other tiles give zero here; the sum over the tiles is the lookup. An index lies in exactly one tile.
    inside = (indices >= start) & (indices < stop)
    here = (indices - start).clamp(0, stop - start - 1)
    rows = F.embedding(here, weight)
    if padding >= 0:  # the padding row takes no gradient
        rows = torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


@rule("aten.embedding")
def embedding(view: View) -> Tiled:
    """Rows of a table: v reduction (masked lookup and sum), d parameter. Gradients are dense."""
    if view.get("scale_grad_by_freq", False):
        raise NotImplementedError("gradients that depend on how often an index occurs in the batch")
    out = prod(view.output_shapes[0])
    return einsum(view, "v d, *b -> *b d", run=_run_embedding, flops=out, saved_bytes=17 * prod(view.shapes[1]) + 2 * view.itemsize * out)


@rule("aten.einsum")
def contraction(view: View) -> Tiled:
    """``torch.einsum``: its own notation is the rule's. A letter that occurs twice in one operand (a trace) is not split by regions."""
    equation = str(view.get("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation or any(len(set(term)) != len(term) for term in (*terms, right)):
        raise NotImplementedError("ellipsis or repeated letter")
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    notation = f"{', '.join(' '.join(term) for term in terms)} -> {' '.join(right)}"
    sizes = {c: n for term, shape in zip(terms, view.shapes, strict=True) for c, n in zip(term, shape, strict=True) if n > 1}
    saved = 2 * view.itemsize * sum(map(prod, view.shapes))  # permuted copies
    return einsum(view, notation, flops=2 * prod(sizes.values()), saved_bytes=saved)


@rule("aten.outer")
def outer(view: View) -> Tiled:
    """Outer product of two vectors."""
    return einsum(view, "m, n -> m n", flops=prod(view.output_shapes[0]))
