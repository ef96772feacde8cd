"""Products of matrices, contractions, embeddings."""

from __future__ import annotations

import torch

from soap.tracing.rules.experts import expert_mm
from soap.tracing.rules.index import equal_bags
from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("linear")
def linear(d: Draw, name: str) -> Drawn:
    lead, k, n = d.shape(0, 2), d.size(), d.size()
    x = d.floats(*lead[::-1], k).transpose(0, len(lead) - 1) if d.yes() else d.floats(*lead, k)  # memory in another order
    return call(name, x, d.floats(n, k), d.floats(n) if d.yes() else None)


@draws("matmul", "mm", "bmm", "mv", "dot", "vdot", "outer", "inner")
def products(d: Draw, name: str) -> Drawn:
    m, k, n, b = d.size(), d.size(), d.size(), d.size()
    if name == "aten.matmul":
        lead = d.shape(0, 2)
        pairs = [((k,), (k, n)), ((m, k), (k,)), ((*lead, m, k), (k, n)), ((*d.narrower(lead), m, k), (*lead, k, n))]
        a, c = d.some(*pairs)
        return call(name, d.floats(*a), d.floats(*c))
    shapes = {
        "mm": ((m, k), (k, n)), "bmm": ((b, m, k), (b, k, n)), "mv": ((m, k), (k,)), "dot": ((k,), (k,)), "vdot": ((k,), (k,)),
        "outer": ((m,), (n,)), "inner": ((*d.shape(0, 2), k), (*d.shape(0, 2), k)),
    }  # fmt: skip
    a, c = shapes[name.removeprefix("aten.")]
    return call(name, d.floats(*a), d.floats(*c))


@draws("addmm", "baddbmm", "addmv", "addr", "addbmm")
def added(d: Draw, name: str) -> Drawn:
    m, k, n, b = d.size(), d.size(), d.size(), d.size()
    out, a, c = {
        "addmm": ((m, n), (m, k), (k, n)), "baddbmm": ((b, m, n), (b, m, k), (b, k, n)), "addmv": ((m,), (m, k), (k,)),
        "addr": ((m, n), (m,), (n,)), "addbmm": ((m, n), (b, m, k), (b, k, n)),
    }[name.removeprefix("aten.")]  # fmt: skip
    options = {"beta": d.some(0.5, 2.0), "alpha": d.some(1, 3.0)} if d.yes() else {}
    return call(name, d.floats(*d.narrower(out)), d.floats(*a), d.floats(*c), **options)


@draws("bilinear")
def bilinear(d: Draw, name: str) -> Drawn:
    lead, k, m, n = d.shape(1, 2), d.size(), d.size(), d.size()
    return call(name, d.floats(*lead, k), d.floats(*lead, m), d.floats(n, k, m), d.floats(n) if d.yes() else None)


@draws("einsum")
def einsum(d: Draw, name: str) -> Drawn:
    equation = d.some(
        "bij,kj->bki", "ij,jk", "ij,jk,k->i", "bii->b", "...ij,...jk->...ik", "b...,c...->bc", "bhqd,bhkd->bhqk", "bij,bij->", "i,j->ij",
        "bii,ik->bk",
    )  # fmt: skip
    sizes = {letter: d.size() for letter in "bcdhijkq"}
    shapes = [
        [
            n
            for c in term.replace("...", ".")
            for n in (
                d.some(
                    (3, 2),
                )
                if c == "."
                else (sizes[c],)
            )
        ]
        for term in equation.split("->")[0].split(",")
    ]
    return call(name, equation, [d.floats(*shape) for shape in shapes])


@draws("tensordot")
def tensordot(d: Draw, name: str) -> Drawn:
    m, k, j, n = d.size(), d.size(), d.size(), d.size()
    if d.yes():
        return call(name, d.floats(m, k, j), d.floats(j, n, k), [1, 2], [2, 0])
    return call(name, d.floats(k, m), d.floats(n, k, j), [0], [1])


@draws("cdist", "_euclidean_dist")
def cdist(d: Draw, name: str) -> Drawn:
    lead, m, n, k = d.shape(0, 1), d.size(), d.size(), d.size()
    options = {"p": d.some(1.0, 2.0, 3.0)} if name == "aten.cdist" else {}
    return call(name, d.floats(*lead, m, k), d.floats(*lead, n, k), **options)


@draws("embedding")
def embedding(d: Draw, name: str) -> Drawn:
    rows, columns = d.size(3, 7), d.size()
    return call(name, d.floats(rows, columns), d.ids(rows, *d.shape(1, 2)), d.some(-1, 1))


@draws("embedding_bag")
def embedding_bag(d: Draw, name: str) -> Drawn:
    rows, columns, bags, count = d.size(3, 7), d.size(), d.size(2, 5), d.size(4, 12)
    mode, ends = d.some(0, 1, 2), d.yes()
    inner = d.ids(count, bags - 1).sort().values.tolist()
    offsets = torch.tensor([0, *inner, *([count] if ends else [])])
    scale = d.floats(count) if mode == 0 and d.yes() else None
    which, padding = d.some(("default", ()), ("padding_idx", (d.some(1, None),)))
    return call(name, d.floats(rows, columns), d.ids(rows, count), offsets, False, mode, False, scale, ends, *padding, which=which)


@draws("soap.equal_bags")
def equal_bags_of_rows(d: Draw, name: str) -> Drawn:
    rows, columns, bags, each = d.size(3, 7), d.size(), d.size(2, 5), d.size(1, 4)
    mode = d.some("sum", "mean", "max")
    scale = (d.floats(bags, each),) if mode == "sum" and d.yes() else ()
    return Drawn(equal_bags, (d.floats(rows, columns), d.ids(rows, bags, each), *scale), {"mode": mode, "padding_idx": d.some(None, 1)})


@draws("soap.expert_mm")
def rows_of_experts(d: Draw, name: str) -> Drawn:
    rows, k, n, experts = d.size(3, 12), d.size(), d.size(), d.size(2, 5)
    ids = d.ids(experts + 2, rows) - 1 if d.yes(0.3) else d.ids(experts, rows)  # some of them no expert's
    ids = ids.sort().values if d.yes(0.3) else ids
    weight = d.floats(experts, n, k).mT if d.yes() else d.floats(experts, k, n)  # as libraries keep them, or transposed
    return Drawn(expert_mm, (d.floats(rows, k), weight, ids))
