"""Reductions, scans, sorting: what some dimensions are needed whole for, or summed over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("sum", "mean", "nansum")
def total(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 4)
    x = d.floats(*shape)
    if name == "aten.nansum":
        x = x.where(x < 1, torch.full((), float("nan"), dtype=x.dtype))
        return call(name, x, d.some(None, d.dims(shape)), d.yes())
    return call(name, x) if d.yes(0.2) else call(name, x, d.some(None, d.dims(shape)), d.yes(), which="dim" if name == "aten.mean" else
                                                 "dim_IntList")  # fmt: skip


@draws("count_nonzero")
def count_nonzero(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    x = d.ids(3, *shape)
    return call(name, x, d.dims(shape), which="dim_IntList") if d.yes() else call(name, x, d.some(None, d.dim(shape)))


@draws("amax", "amin", "logsumexp", "special_logsumexp", "linalg_vector_norm", "linalg_norm", "norm", "nanmean")
def over_dims(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 4)
    x, dims, keep = d.floats(*shape), d.dims(shape), d.yes()
    if name == "aten.norm":
        return call(name, x, d.some(1, 2), dims, keep, which="ScalarOpt_dim") if d.yes(0.7) else call(name, x, 2, which="Scalar")
    order: Any = {"aten.linalg_vector_norm": (d.some(1, 2, 3.5),), "aten.linalg_norm": (None,)}.get(name, ())
    dims = dims[:2] if name == "aten.linalg_norm" else dims
    return call(name, x, *order, dims, keep)


@draws("linalg_matrix_norm")
def matrix_norm(d: Draw, name: str) -> Drawn:
    x = d.floats(d.size(), d.size(3, 4), d.size(3, 4))
    return call(name, x, "fro", d.some([-2, -1], [0, 2]), d.yes(), which="str_ord")


@draws("argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "max.dim", "min.dim", "prod", "any", "all", "aminmax")
def over_one(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    x, dim, keep = d.floats(*shape), d.dim(shape), d.yes()
    kind = name.removeprefix("aten.")
    if kind == "kthvalue":
        return call(name, x, 1, dim, keep)
    if kind == "aminmax":
        return call(name, x, dim=d.some(None, dim), keepdim=keep)
    if kind in ("argmax", "argmin"):
        return call(name, x, d.some(None, dim), keep)
    if kind in ("any", "all"):
        which, place = d.some(("dim", dim), ("dims", d.dims(shape)))
        return call(name, x > 0, place, keep, which=which) if d.yes(0.8) else call(name, x > 0)
    if kind in ("median", "nanmedian", "prod") and d.yes(0.2):
        return call(name, x)
    which = {"median": "dim", "nanmedian": "dim", "prod": "dim_int"}.get(kind)
    return call(name, x, dim, keep, which=which)


@draws("max.default", "min.default")
def of_all(d: Draw, name: str) -> Drawn:
    return call(name, d.floats(*d.shape(1, 3)))


@draws("quantile.scalar", "nanquantile.scalar")
def quantile(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    return call(name, d.floats(*shape), d.some(0.5, 0.3), d.some(None, d.dim(shape)), d.yes())


@draws("var", "std", "var_mean", "std_mean")
def variance(d: Draw, name: str) -> Drawn:
    shape = tuple(max(3, n) for n in d.shape(1, 3))
    dims = d.some(None, d.dims(shape))
    which: dict[str, Any] = d.some({"which": "correction", "correction": d.some(0, 1, 2)}, {"which": "dim", "unbiased": d.yes()})
    if which["which"] == "dim" and dims is None:
        return call(name, d.floats(*shape), d.yes(), which="default")
    return call(name, d.floats(*shape), dims, keepdim=d.yes(), **which)


@draws("cosine_similarity", "pairwise_distance")
def compared(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 3)
    x, y = d.floats(*shape), d.floats(*d.narrower(shape)[-len(shape) :])
    return call(name, x, y, d.dim(shape)) if name == "aten.cosine_similarity" else call(name, x, y, d.some(1.0, 2.0), 1e-6, d.yes())


@draws(
    "softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax", "_safe_softmax", "cumsum", "cumprod",
    "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk", "glu", "msort",
)  # fmt: skip
def along(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 4)
    dim = d.dim(shape)
    x, kind = _distinct(d, *shape), name.removeprefix("aten.")
    if kind in ("_softmax", "_log_softmax"):
        return call(name, x, dim, False)
    if kind == "topk":
        return call(name, x, d.random.randint(1, shape[dim]), dim, d.yes())
    if kind == "msort":
        return call(name, x)
    if kind == "sort" and d.yes():
        return call(name, x, stable=True, dim=dim, descending=d.yes(), which="stable")
    if kind in ("sort", "argsort"):
        return call(name, x, dim, d.yes())
    if kind == "glu":
        return call(name, d.floats(*[n * 2 if i == dim % len(shape) else n for i, n in enumerate(shape)]), dim)
    return call(name, x, dim)


def _distinct(d: Draw, *shape: int) -> Tensor:
    x = d.floats(*shape)
    return x + torch.arange(x.numel(), dtype=x.dtype).reshape(shape) * 1e-3


@draws("linalg_cross")
def cross(d: Draw, name: str) -> Drawn:
    shape = [d.size(), d.size(), d.size()]
    dim = d.dim(shape)
    shape[dim] = 3
    other = [1 if n != 3 and d.yes(0.2) else n for n in shape]
    return call(name, d.floats(*shape), d.floats(*other), dim=dim)


@draws("renorm")
def renorm(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 3)
    return call(name, d.floats(*shape), d.some(1, 2), d.dim(shape), d.some(0.5, 1.0))


@draws("histc")
def counted(d: Draw, name: str) -> Drawn:
    x = d.floats(*d.shape(1, 3))
    return call(name, x, d.some(3, 5), -1.0, d.some(0.5, 2.0), fixed=(x,))
