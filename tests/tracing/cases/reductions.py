"""Reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tests.tracing.cases.probe import case


def _reductions() -> None:
    dims: Sequence[Any] = [None, 0, 1, -1, (0, 2), (0, 1, 2)]
    for dim in dims:
        for keep in (False, True):
            label = f"{dim}{', kept' if keep else ''}"
            for name in ("sum", "mean", "amax", "amin"):
                options = {} if dim is None else {"dim": dim, "keepdim": keep}
                if dim is None and keep:
                    continue
                case(f"{name} {label}", lambda x, n=name, o=options: getattr(x, n)(**o), (3, 4, 5))
            if dim is not None:
                case(f"var {label}", lambda x, o=options: x.var(**o), (3, 4, 5))
    case("mean, scalar", lambda x: x.mean(), ())
    case("sum, cast", lambda x: x.sum(1, dtype=torch.float64), (3, 4))
    case("sum, of whole numbers", lambda x: [x, (x > 0).sum(0)], (5, 4))
    case("var, correction", lambda x: x.var(0, correction=2), (5, 4))
    case("std", lambda x: [x.std(0), x.std(1, correction=0, keepdim=True), x.std()], (5, 4))
    case("var_mean", lambda x: torch.var_mean(x, 1), (5, 4))
    case("std_mean", lambda x: torch.std_mean(x, 0, keepdim=True), (5, 4))
    case("max and min", lambda x: [*x.max(1), *x.min(0, keepdim=True), x.max(), x.min()], (5, 4))
    case("argmax, argmin", lambda x: [x, x.argmax(1), x.argmin(0, keepdim=True), x.argmax()], (5, 4))
    case("nansum, count", lambda x: [x.where(x > 0, torch.nan).nansum(1), torch.count_nonzero(x > 0, 0)], (5, 4))
    case("aminmax, kthvalue, mode", lambda x: [*x.aminmax(dim=1), *x.kthvalue(2, 1), *x.mode(1)], (5, 4))
    case("norms", lambda x: [torch.linalg.norm(x), torch.linalg.matrix_norm(x), x.norm(p=1, dim=1), x.quantile(0.3, 1)], (5, 4))
    case("cosine_similarity", lambda x, y: [F.cosine_similarity(x, y), F.pairwise_distance(x, y)], (5, 4), (5, 4))
    case("median", lambda x: x.median(1), (5, 4))
    case("logsumexp", lambda x: x.logsumexp((0, 2)), (3, 4, 5))
    case("prod", lambda x: [x.prod(1), x.prod()], (3, 4))
    case("any, all", lambda x: [x, (x > 0).any(1), (x > 0).all(0), (x > 9).any(), (x > 0).all()], (3, 4))
    case("vector_norm", lambda x: [torch.linalg.vector_norm(x, dim=1), x.norm(), F.normalize(x)], (3, 4))
    case("histc", lambda x: x * torch.histc(x.detach(), 4, -1.0, 1.0).sum(), (5, 4))
    case("histc, any range", lambda x: x * torch.histc(x.detach(), 4), (5, 4), whole=True)


_reductions()
