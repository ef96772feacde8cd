"""Reading and writing by index or position."""

from __future__ import annotations

from math import prod

import torch

from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("index_select")
def index_select(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    return call(name, d.floats(*shape), dim, d.ids(shape[dim], d.size()))


@draws("gather", "take_along_dim")
def gather(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    same = name == "aten.take_along_dim"
    index = [(1 if d.yes(0.2) else n) if same else d.random.randint(1, n) for n in shape]
    index[dim] = d.size()
    order = (d.ids(shape[dim], *index), dim) if same else (dim, d.ids(shape[dim], *index))
    return call(name, d.floats(*shape), *order)


@draws("take")
def take(d: Draw, name: str) -> Drawn:
    x = d.floats(*d.shape(1, 3))
    return call(name, x, d.ids(x.numel(), *d.shape(1, 2)))


@draws("index.Tensor")
def index(d: Draw, name: str) -> Drawn:
    shape = (d.size(), d.size(), d.size())
    picks = d.some([0], [1], [0, 1], [1, 2], [0, 2])
    chosen = d.shape(1, 2)
    return call(name, d.floats(*shape), [d.ids(shape[i], *d.narrower(chosen)) if i in picks else None for i in range(max(picks) + 1)])


@draws("index_put", "_unsafe_index_put")
def index_put(d: Draw, name: str) -> Drawn:
    shape = (d.size(2, 5), d.size(3, 5), d.size(3, 5))
    x, adds = d.floats(*shape), d.yes()
    if name == "aten.index_put" and d.yes(0.4):
        return call(name, x, [d.mask(*shape[: d.some(1, 2, 3)])], d.floats(*d.some((), (1,))), adds)
    picks = d.some([0], [1], [0, 1], [1, 2], [0, 2])
    count = d.size(1, 3)
    places = [d.apart(shape[i], min(count, shape[0])) if i in picks else None for i in range(max(picks) + 1)]
    count = len(next(p for p in places if p is not None))
    rest = [shape[i] for i in range(3) if i not in picks]
    at = picks[0] if picks == list(range(picks[0], picks[-1] + 1)) else 0
    return call(name, x, places, d.floats(*d.narrower([*rest[:at], count, *rest[at:]])), adds)


@draws("scatter", "scatter_add", "scatter_reduce")
def scatter(d: Draw, name: str) -> Drawn:
    shape = [d.size(3, 5) for _ in range(d.some(1, 2, 3))]
    dim = d.dim(shape)
    at = dim % len(shape)
    index = [d.random.randint(1, n) if d.yes(0.3) or i == at else n for i, n in enumerate(shape)]
    places = torch.argsort(torch.rand(shape, generator=d.generator), dim)[tuple(slice(n) for n in index)]  # each at most once
    source = d.floats(*[n + d.some(0, 0, 0, 1) if name != "aten.scatter_reduce" else n for n in index])
    fixed = [source] if source.shape != places.shape else []  # torch itself cannot differentiate by what is larger than the index
    x = d.floats(*shape)
    if name == "aten.scatter":
        if d.yes(0.4):
            return call(name, x, dim, places, 1.5, which="value")
        return call(name, x, dim, places, source, which="src", fixed=fixed)
    places = d.ids(shape[dim], *index)
    if name == "aten.scatter_add":
        return call(name, x, dim, places, source, fixed=fixed)
    return call(name, x, dim, places, source, d.some("sum", "prod", "mean", "amax", "amin"), include_self=d.yes(), which="two")


@draws("index_add", "index_copy", "index_fill")
def index_along(d: Draw, name: str) -> Drawn:
    shape = [d.size(3, 6) for _ in range(d.some(1, 2, 3))]
    dim = d.dim(shape)
    x, count = d.floats(*shape), d.random.randint(1, shape[dim])
    if name == "aten.index_fill":
        value, which = d.some((1.5, "int_Scalar"), (d.floats(), "int_Tensor"))
        below = d.some(0, 0, shape[dim])
        fixed = [x, value] if isinstance(value, torch.Tensor) else [x]  # torch itself cannot differentiate with an index below zero
        return call(name, x, dim, d.apart(shape[dim], count) - below, value, which=which, fixed=fixed if below else ())
    source = [count if i == dim % len(shape) else n for i, n in enumerate(shape)]
    if name == "aten.index_copy":
        return call(name, x, dim, d.apart(shape[dim], count), d.floats(*source))
    return call(name, x, dim, d.ids(shape[dim], count), d.floats(*source), alpha=d.some(1, 2.5))


@draws("masked_scatter")
def masked_scatter(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    return call(name, d.floats(*shape), d.mask(*d.narrower(shape)), d.floats(prod(shape) + d.some(0, 2)))


@draws("select_scatter", "slice_scatter")
def slice_scatter(d: Draw, name: str) -> Drawn:
    shape = [d.size(3, 7), d.size(3, 7), d.size()]
    dim = d.some(0, 1, -2)
    size, at = shape[dim], dim % 3
    if name == "aten.select_scatter":
        return call(name, d.floats(*shape), d.floats(*shape[:at], *shape[at + 1 :]), dim, d.random.randrange(-size, size))
    first, step = d.random.randrange(size), d.some(1, 1, 2, 3)
    stop = d.random.randint(first + 1, size)
    source = [-(-(stop - first) // step) if i == at else n for i, n in enumerate(shape)]
    end = stop if stop < size else d.some(None, 99)
    return call(name, d.floats(*shape), d.floats(*source), dim, d.some(first, first - size), end, step)


@draws("diagonal_scatter")
def diagonal_scatter(d: Draw, name: str) -> Drawn:
    x, place = d.floats(d.size(3, 5), d.size(3, 5), d.size(3, 5)), (d.some(0, 1, -1), *d.some((0, 1), (1, 2), (-1, 0)))
    return call(name, x, d.floats(*x.diagonal(*place).shape), *place)


@draws("one_hot")
def one_hot(d: Draw, name: str) -> Drawn:
    return call(name, d.ids(4, *d.shape(1, 2)), d.some(4, 6))


@draws("searchsorted.Tensor", "bucketize.Tensor", "isin.Tensor_Tensor")
def looked_up(d: Draw, name: str) -> Drawn:
    x = d.floats(*d.shape(1, 3))
    edges = d.floats(4).sort().values
    if name == "aten.isin.Tensor_Tensor":
        return call(name, d.ids(6, *x.shape), d.ids(6, 3))
    return call(name, *((edges, x) if "searchsorted" in name else (x, edges)), right=d.yes())
