"""Matrix products."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from soap.tracing.rules.notation import Local, Scope, Tiled, View, broadcast, einsum, rule


def _matmul_flops(view: View, inner: int) -> int:
    return 2 * prod(view.output_shapes[0]) * inner


def first_bias(local: Local) -> torch.Tensor | None:
    """The bias of ``linear``, if the tile adds it: of tiles that split k only the one that begins at 0, so that the sum is right."""
    return local.tensors[2] if len(local.tensors) > 2 and local.boxes[0][-1][0] == 0 else None


def _run_linear(local: Local) -> torch.Tensor:
    x, weight, bias = local.tensors[0], local.tensors[1], first_bias(local)
    if bias is not None and x.dim() == 3 and not x.is_contiguous():  # for which ATen adds the bias in a pass of its own
        return F.linear(x.reshape(-1, x.shape[2]), weight, bias).view(*x.shape[:2], -1)
    return F.linear(x, weight, bias)


@rule("aten.linear")
def linear(view: View) -> Tiled:
    """``x @ weight.T + bias``: b sample or attribute, k reduction, n parameter."""
    notation = "*b k, n k, n -> *b n" if view.has("bias") else "*b k, n k -> *b n"
    return einsum(view, notation, run=_run_linear, flops=_matmul_flops(view, view.shapes[0][-1]))


def _run_addmm(local: Local) -> torch.Tensor:
    _, a, b = local.tensors
    return added_to_bias(local, a @ b)


def added_to_bias(local: Local, product: torch.Tensor) -> torch.Tensor:
    """What ``addmm`` makes of the product of a tile's matrices: only the tile whose sum begins at 0 adds the bias."""
    alpha, beta, bias = local.get("alpha", 1), local.get("beta", 1), local.tensors[0]
    product = product if alpha == 1 else alpha * product
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


@rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot", "aten.vdot")
def matmul(view: View) -> Tiled:
    """``a @ b`` with broadcasting."""
    a, b = view.shapes
    plain = einsum_matmul(view, a, b)
    copies = view.itemsize * (
        prod(a) + prod(b) + sum(prod((*view.output_shapes[0][:-2], *s[-2:])) for s in (a, b))
    )  # expanded, made contiguous
    return Tiled(plain.factors, plain.operands, plain.outputs, summed=plain.summed, flops=_matmul_flops(view, a[-1]), saved_bytes=copies)


def _einsum_terms(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """The names of all dimensions of every operand and of the result. An ellipsis stands for dimensions that are aligned at the right."""
    left, arrow, right = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = left.split(",")
    hidden = [rank - len(term.replace(".", "")) for term, rank in zip(terms, ranks, strict=True)]
    longest = max((n for n, term in zip(hidden, terms, strict=True) if "." in term), default=0)
    every = [f"e{i}" for i in range(longest)]
    if not arrow:
        letters = sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        right = "".join(["." if "." in left else "", *letters])

    def named(term: str, count: int) -> list[str]:
        return [name for c in term for name in (every[longest - count :] if c == "." else [c])]

    return [named(term, n) for term, n in zip(terms, hidden, strict=True)], named(right, longest)


@rule("aten.einsum")
def contraction(view: View) -> Tiled:
    """``torch.einsum``: its own notation is the rule's. A letter that occurs twice in one operand (a diagonal) is needed whole."""
    terms, right = _einsum_terms(str(view.get("equation")), [len(shape) for shape in view.shapes])
    twice = {name for term in terms for name in term if term.count(name) > 1}
    sides = [" ".join(f"[{name}]" if name in twice else name for name in term) for term in (*terms, right)]
    notation = f"{', '.join(sides[:-1])} -> {sides[-1]}"
    sizes = {c: n for term, shape in zip(terms, view.shapes, strict=True) for c, n in zip(term, shape, strict=True) if n > 1}
    saved = 2 * view.itemsize * sum(map(prod, view.shapes))  # permuted copies
    return einsum(view, notation, flops=2 * prod(sizes.values()), saved_bytes=saved)


@rule("aten.outer")
def outer(view: View) -> Tiled:
    """Outer product of two vectors."""
    return einsum(view, "m, n -> m n", flops=prod(view.output_shapes[0]))


@rule("aten.inner")
def inner(view: View) -> Tiled:
    """Sums over the last dimension of both; the other dimensions follow one another."""
    a, b = view.shapes
    if not a or not b:
        raise NotImplementedError("a scalar operand")
    rows, columns = (" ".join(f"{n}{i}" for i in range(len(s) - 1)) for n, s in (("m", a), ("n", b)))
    flops = _matmul_flops(view, a[-1])
    return einsum(view, f"{rows} k, {columns} k -> {rows} {columns}", flops=flops, saved_bytes=view.itemsize * (prod(a) + prod(b)))


@rule("aten.tensordot")
def tensordot(view: View) -> Tiled:
    """Sums over pairs of dimensions; the others follow one another."""
    a, b = ([f"{n}{i}" for i in range(len(s))] for n, s in (("m", view.shapes[0]), ("n", view.shapes[1])))
    inner_size = 1
    for number, (i, j) in enumerate(zip(view.get("dims_self"), view.get("dims_other"), strict=True)):
        a[i], b[j] = f"k{number}", f"k{number}"
        inner_size *= view.shapes[0][i]
    out = [name for name in (*a, *b) if not name.startswith("k")]
    saved = 2 * view.itemsize * sum(map(prod, view.shapes))  # permuted copies
    return einsum(view, f"{' '.join(a)}, {' '.join(b)} -> {' '.join(out)}", flops=_matmul_flops(view, inner_size), saved_bytes=saved)


def _run_scaled(local: Local) -> torch.Tensor:
    # Of the tiles that split a sum, only the first adds the other term, so that the partial results sum up to the whole.
    bias, a, b = local.tensors
    alpha, beta = local.get("alpha", 1), local.get("beta", 1)
    product = torch.outer(a, b) if local.call.kind == "addr" else a @ b if local.call.kind == "addmv" else torch.einsum("bmk,bkn->mn", a, b)
    product = product if alpha == 1 else alpha * product
    summed = {"addr": (), "addmv": (1,), "addbmm": (0, 2)}[local.call.kind]
    if any(local.boxes[1][dim][0] != 0 for dim in summed):
        return product
    return product + (bias if beta == 1 else beta * bias)


@rule("aten.addmv", "aten.addr", "aten.addbmm")
def added_product(view: View) -> Tiled:
    """``bias + a @ b`` for a matrix and a vector, two vectors, or two batches of matrices that are summed as well."""
    notation = {"addmv": "^m, m k, k -> m", "addr": "^m ^n, m, n -> m n", "addbmm": "^m ^n, b m k, b k n -> m n"}[view.call.kind]
    bias, *_ = view.shapes
    kept = notation.split(",")[0].split()
    notation = notation.replace(" ".join(kept), " ".join(kept[len(kept) - len(bias) :]), 1)
    saved = 2 * view.itemsize * sum(map(prod, view.shapes))  # permuted copies
    flops = 2 * prod(view.shapes[1]) * (view.output_shapes[0][-1] if view.call.kind != "addmv" else 1)
    return einsum(view, notation, run=_run_scaled, flops=flops, saved_bytes=saved)


def _run_bilinear(local: Local) -> torch.Tensor:
    x, y, weight = local.tensors[:3]
    bias = local.tensors[3] if len(local.tensors) > 3 and local.boxes[0][-1][0] == 0 and local.boxes[1][-1][0] == 0 else None
    return F.bilinear(x, y, weight, bias)


@rule("aten.bilinear")
def bilinear(view: View) -> Tiled:
    """``x A y + bias`` for every output n: both inner dimensions are sums."""
    notation = "*b k, *b l, n k l, n -> *b n" if view.has("bias") else "*b k, *b l, n k l -> *b n"
    rows, k = prod(view.shapes[0][:-1]), view.shapes[0][-1]
    saved = view.itemsize * rows * k * (view.shapes[1][-1] + prod(view.shapes[2][::2]))  # products of pairs
    return einsum(view, notation, run=_run_bilinear, flops=2 * rows * prod(view.shapes[2]), saved_bytes=saved)


@rule("aten.cdist", "aten._euclidean_dist")
def distances(view: View) -> Tiled:
    """Distances between all pairs of vectors; the vectors are needed whole."""
    (*lead, m, d), (*other, n, _) = view.shapes
    if lead != other:
        raise NotImplementedError("batches that broadcast")
    saved = view.itemsize * (2 * prod(view.output_shapes[0]) + 4 * sum(map(prod, view.shapes)))
    return einsum(view, "*b m [d], *b n [d] -> *b m n", flops=3 * prod(lead) * m * n * d, saved_bytes=saved)
