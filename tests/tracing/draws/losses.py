"""Losses with every reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from soap.tracing.rules.loss import BY_POSITION
from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def classes(d: Draw, name: str) -> Drawn:
    b, c = d.size(2, 6), d.size(2, 5)
    space = {"aten.nll_loss": (), "aten.nll_loss2d": d.shape(2)}.get(name, d.shape(0, 2))
    logits = name == "aten.cross_entropy_loss"
    x = d.floats(b, c, *space)
    reduction = d.some(0, 1, 2)
    weight = d.positive(c) if d.yes() else None
    smoothing = d.some(0.0, 0.2) if logits else 0.0
    if logits and d.yes(0.3):
        return call(name, x, d.floats(b, c, *space).softmax(1), weight, reduction, -100, smoothing, fixed=[weight])
    ignored = d.some(-100, 1)
    target = d.ids(c, b, *space)
    target = target.where(d.mask(b, *space), torch.full((), ignored))
    target.view(-1)[0] = 0
    x = x if logits else x.log_softmax(1)
    return call(name, x, target, weight, reduction, ignored, *([smoothing] if logits else []), fixed=[weight])


@draws("soap.cross_entropy_loss", "soap.nll_loss_nd")
def classes_by_position(d: Draw, name: str) -> Drawn:
    found = classes(d, name.replace("soap", "aten"))
    while len(found.args[0].shape) < 3 or found.args[0].shape == found.args[1].shape or found.args[3] == 0:
        found = classes(d, name.replace("soap", "aten"))
    x, *rest = found.args
    names = ("target", "weight", "reduction", "ignore_index", "label_smoothing")
    given = {key: value for key, value in zip(names, rest, strict=False) if value is not None}
    target = BY_POSITION[name.removeprefix("soap.")]
    return Drawn(target, (), {"self": x.movedim(1, -1).contiguous(), **given}, fixed=found.fixed)


@draws("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "hinge_embedding_loss", "poisson_nll_loss")
def pointwise(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    x, kind, reduction = d.floats(*shape), name.removeprefix("aten."), d.some(0, 1, 2)
    other = d.narrower(shape) if kind == "l1_loss" else shape
    if kind in ("smooth_l1_loss", "huber_loss"):
        return call(name, x, d.floats(*other), reduction, d.some(0.5, 1.0))
    if kind == "kl_div":
        return call(name, x, d.chances(*shape), reduction, log_target=d.yes())
    if kind == "hinge_embedding_loss":
        return call(name, x, _signs(d, *shape), d.some(0.5, 1.0), reduction)
    if kind == "poisson_nll_loss":
        return call(name, x, d.positive(*shape), d.yes(), d.yes(), 1e-8, reduction) if d.yes() else call(
            name, x.abs() + 0.1, d.positive(*shape) * 3, False, d.yes(), 1e-8, reduction)  # fmt: skip
    target = _signs(d, *shape) if kind == "soft_margin_loss" else d.floats(*other)
    return call(name, x, target, reduction, fixed=[target] if kind == "soft_margin_loss" else ())


def _signs(d: Draw, *shape: int) -> Tensor:
    return d.mask(*shape).double() * 2 - 1


@draws("binary_cross_entropy", "binary_cross_entropy_with_logits")
def binary(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    weight, reduction = d.positive(*d.narrower(shape)) if d.yes() else None, d.some(0, 1, 2)
    if name == "aten.binary_cross_entropy":
        return call(name, d.chances(*shape), d.chances(*shape), weight, reduction, fixed=[weight])
    positive = d.positive(shape[-1]) if d.yes() else None
    return call(name, d.floats(*shape), d.chances(*shape), weight, positive, reduction, fixed=[weight, positive])


@draws("margin_ranking_loss")
def margin_ranking(d: Draw, name: str) -> Drawn:
    b = d.size(2, 6)
    return call(name, d.floats(b), d.floats(b), _signs(d, b), d.some(0.0, 0.5), d.some(0, 1, 2))


@draws("cosine_embedding_loss")
def cosine_embedding(d: Draw, name: str) -> Drawn:
    b, k = d.size(2, 6), d.size()
    return call(name, d.floats(b, k), d.floats(b, k), _signs(d, b), d.some(0.0, 0.3), d.some(0, 1, 2))


@draws("triplet_margin_loss")
def triplet(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 3)
    one = (1, *shape[1:]) if d.yes(0.3) else shape
    return call(name, d.floats(*shape), d.floats(*one), d.floats(*shape), 1.0, d.some(1.0, 2.0), 1e-6, d.yes(), d.some(0, 1, 2))


@draws("multi_margin_loss", "multilabel_margin_loss")
def class_margins(d: Draw, name: str) -> Drawn:
    b, c = d.size(2, 6), d.size(2, 5)
    if name == "aten.multilabel_margin_loss":
        target = torch.stack([torch.randperm(c, generator=d.generator) for _ in range(b)])
        target[d.mask(b, c) & (torch.arange(c) > 0)] = -1
        return call(name, d.floats(b, c), target, d.some(0, 1, 2))
    weight = d.positive(c) if d.yes() else None
    return call(name, d.floats(b, c), d.ids(c, b), d.some(1, 2), 1, weight, d.some(0, 1, 2), fixed=[weight])
