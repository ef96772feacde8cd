"""Views, joins, padding and other moves of elements."""

from __future__ import annotations

from math import prod

import torch

from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("view.default", "reshape", "_unsafe_view")
def reshape(d: Draw, name: str) -> Drawn:
    parts = [d.size(2, 4) for _ in range(d.random.randint(2, 4))]
    cuts = sorted(d.random.sample(range(1, len(parts)), d.random.randint(0, len(parts) - 1)))
    target = [prod(parts[a:b]) for a, b in zip([0, *cuts], [*cuts, len(parts)], strict=True)]
    cuts = sorted(d.random.sample(range(1, len(parts)), d.random.randint(0, len(parts) - 1)))
    source = [prod(parts[a:b]) for a, b in zip([0, *cuts], [*cuts, len(parts)], strict=True)]
    if d.yes(0.3):
        target.insert(d.random.randint(0, len(target)), 1)
    return call(name, d.floats(*source), target)


@draws("flatten", "ravel", "unflatten", "squeeze", "unsqueeze")
def other_views(d: Draw, name: str) -> Drawn:
    kind = name.removeprefix("aten.")
    shape = d.shape(2, 4)
    x = d.floats(*shape)
    if kind == "flatten":
        first = d.random.randrange(len(shape))
        return call(name, x, first, d.random.randrange(first, len(shape)))
    if kind == "ravel":
        return call(name, x)
    if kind == "unsqueeze":
        return call(name, x, d.random.randrange(-len(shape) - 1, len(shape) + 1))
    if kind == "unflatten":
        return call(name, d.floats(shape[0], 12, *shape[2:]), 1, d.some([3, 4], [2, -1], [2, 2, 3]))
    x = d.floats(d.size(), 1, d.size(), 1)
    which, args = d.some(("default", ()), ("dim", (1,)), ("dims", ([1, -1],)))
    return call(name, x, *args, which=which)


@draws("permute", "transpose", "t")
def permute(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 4)
    if name == "aten.permute":
        return call(name, d.floats(*shape), d.random.sample(range(len(shape)), len(shape)))
    return call(name, d.floats(*shape), d.dim(shape), d.dim(shape)) if name == "aten.transpose" else call(name, d.floats(*d.shape(1, 2)))


@draws("expand", "broadcast_to")
def expand(d: Draw, name: str) -> Drawn:
    out = d.shape(2, 4)
    return call(name, d.floats(*d.narrower(out)), list(out))


@draws("slice", "narrow", "select.int")
def pieces(d: Draw, name: str) -> Drawn:
    shape = (d.size(3, 7), d.size(3, 7), d.size())
    x, dim = d.floats(*shape), d.some(0, 1, -2)
    size = shape[dim]
    if name == "aten.select.int":
        return call(name, x, dim, d.random.randrange(-size, size))
    first = d.random.randrange(size - 1)
    stop = d.random.randint(first + 1, size)
    if name == "aten.narrow":
        return call(name, x, dim, first, stop - first)
    return call(name, x, dim, d.some(first, first - size), d.some(stop, 99), d.some(1, 1, 2, 3), which="Tensor")


@draws("cat")
def cat(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    parts = [[d.size(1, 4) if i == dim % len(shape) else n for i, n in enumerate(shape)] for _ in range(d.some(2, 3))]
    return call(name, [d.floats(*part) for part in parts], dim)


@draws("pad", "constant_pad_nd")
def pad(d: Draw, name: str) -> Drawn:
    amounts = [d.random.randint(0, 3) for _ in range(d.some(2, 4))]
    x = d.floats(d.size(), d.size(), *[d.size(5, 6) for _ in amounts[::2]])
    if name == "aten.constant_pad_nd" or d.yes(0.3):
        amounts = [d.random.randint(-2, 3) if d.yes() else n for n in amounts]  # cut off on one side or on both
        return call(name, x, amounts, *(["constant"] if name == "aten.pad" else []), d.some(0.0, 1.5))
    return call(name, x, amounts, d.some("reflect", "replicate", "circular"))


@draws(
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d"
)  # fmt: skip
def mirrored(d: Draw, name: str) -> Drawn:
    rank = int(name[-2])
    x = d.floats(d.size(), d.size(), *[d.size(4, 6 if rank < 3 else 4) for _ in range(rank)])
    return call(name, x, [d.random.randint(0, 3) for _ in range(2 * rank)])


@draws("flip", "roll")
def moved(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 3)
    dims = d.dims(shape)
    if name == "aten.flip":
        return call(name, d.floats(*shape), dims)
    return call(name, d.floats(*shape), [d.some(1, -2, 3) for _ in dims], dims)


@draws("repeat", "tile")
def repeat(d: Draw, name: str) -> Drawn:
    x = d.floats(*d.shape(1, 3))
    return call(name, x, [d.some(1, 2, 3) for _ in range(x.dim() + d.some(0, 1))])


@draws("repeat_interleave.self_int")
def repeat_interleave(d: Draw, name: str) -> Drawn:
    shape, times = d.shape(1, 3), d.some(1, 2, 3)
    dim = d.dim(shape)
    size = {"output_size": times * shape[dim]} if d.yes() else {}
    return call(name, d.floats(*shape), times, dim, **size)


@draws("unfold")
def unfold(d: Draw, name: str) -> Drawn:
    shape = (d.size(), d.size(4, 8), d.size())
    return call(name, d.floats(*shape), d.some(1, -2), d.some(1, 2, 3), d.some(1, 2, 3))


@draws("diagonal", "diag_embed")
def diagonal(d: Draw, name: str) -> Drawn:
    if name == "aten.diagonal":
        first, second = d.some((0, 1), (1, 2), (-1, 0))
        return call(name, d.floats(d.size(3, 5), d.size(3, 5), d.size(3, 5)), d.some(0, 1, -1), first, second)
    return call(name, d.floats(*d.shape(2)), d.some(0, 1, -2), *d.some((-2, -1), (0, 2), (1, 0)))


@draws("tril", "triu")
def triangle(d: Draw, name: str) -> Drawn:
    return call(name, d.floats(*d.shape(0, 1), d.size(), d.size()), d.some(-2, -1, 0, 1, 3))


@draws("to.dtype", "clone", "detach")
def copies(d: Draw, name: str) -> Drawn:
    x = d.floats(*d.shape(0, 3))
    return call(name, x, d.some(torch.float64, torch.int64)) if name == "aten.to.dtype" else call(name, x)
