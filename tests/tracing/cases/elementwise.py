"""Pointwise calls, and random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.tracing.cases.probe import case, ids

aten = torch.ops.aten


def _pointwise() -> None:
    case("broadcasting", lambda x, y, z: (x + y) * z - 2 * x, (3, 4, 5), (4, 1), (1,))
    case("scalars", lambda x, y: x * y + y, (3, 4), ())
    case("where", lambda x, y: torch.where(x > y, x, y) + torch.where(x > 0, x, 0.0), (3, 4), (4,))
    case("masked_fill", lambda x, m: x.masked_fill(m, -1.0), (3, 4), extra=(ids(2, 4).bool(),))
    logic = lambda x, m: [x, (x > 0) & m, (x > 0) | m, (x > 0) ^ m, ~(x > 0), torch.logical_and(x > 0, m)]  # noqa: E731
    case("logic", logic, (3, 4), extra=(ids(2, 4).bool(),))
    for name in ("__and__", "__or__", "__xor__"):
        case(f"torch's {name}", lambda x, m, n=name: [x, getattr(aten, n).Tensor(x > 0, m)], (3, 4), extra=(ids(2, 4).bool(),))
    activations = (
        F.relu, F.gelu, F.silu, F.elu, F.selu, F.celu, F.leaky_relu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.mish, F.softplus,
        F.logsigmoid, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, torch.tanh, torch.sigmoid, torch.exp, torch.sin, torch.erf,
    )  # fmt: skip
    for function in activations:
        case(f"activation {function.__name__}", function, (3, 5))
    case("prelu", lambda x, w: F.prelu(x, w), (3, 4, 5), weights=((4,),))
    case("prelu, one slope, square", lambda x, w: F.prelu(x, w), (3, 4, 4), weights=((1,),))
    case("prelu, square", lambda x, w: F.prelu(x, w), (3, 4, 4), weights=((4,),))
    case("clamp, lerp, addcmul", lambda x, y: x.clamp(min=0.1).clamp(y, y + 1).lerp(y, 0.3).addcmul(x, y), (3, 4), (3, 4))
    case("powers", lambda x, y: x.sqrt() + x.log() + x.rsqrt() + x**y + x.reciprocal() + x.square(), (3, 4), (4,), positive=True)
    names = (
        "multiply", "subtract", "divide", "greater", "less", "greater_equal", "less_equal", "not_equal", "isclose", "arctan2",
        "special_xlogy",
    )  # fmt: skip
    for name in names:
        case(f"torch's {name}", lambda x, y, n=name: [x, y, getattr(aten, n)(x, y)], (3, 4), (4,), positive=True)
    names = (
        "negative", "absolute", "fix", "isreal", "arctan", "arcsinh", "special_expit", "special_erf", "special_erfc", "special_exp2",
        "special_expm1", "special_log1p", "special_gammaln", "special_digamma", "special_ndtr", "special_sinc",
    )  # fmt: skip
    for name in names:
        case(f"torch's {name}", lambda x, n=name: [x * 2, getattr(aten, n)(x)], (3, 4), positive=True)
    for name in ("arccos", "arcsin", "arctanh", "special_logit"):
        case(f"torch's {name}", lambda x, n=name: getattr(aten, n)(x.sigmoid()), (3, 4))
    case("torch's arccosh", lambda x: aten.arccosh(x + 1), (3, 4), positive=True)
    case("fill, zero", lambda x: aten.fill.Scalar(x, 2.0) + aten.zero(x) + x, (3, 4))
    case("in place", lambda x, y: (x * 1).mul_(y).add_(y).relu_() + x, (3, 4), (4,))
    case("in place, copy", lambda x, y: (x * 1).copy_(y) + x, (3, 4), (4,))
    case("in place, keeps its dtype", lambda x: (x.float() * 1).add_(x.detach()).double() + x, (3, 4))
    case("in place, fill", lambda x: (x * 1).fill_(3.0) * x, (3, 4))


def _random() -> None:
    case("dropout", lambda x: F.dropout(x, 0.4), (4, 5), random=True)
    case("dropout, off", lambda x: F.dropout(x, 0.4, training=False), (4, 5))
    case("dropout, all", lambda x: F.dropout(x, 1.0) + x, (4, 5))
    case("dropout, in place", lambda x: F.dropout(x * 1, 0.4, inplace=True) + x, (4, 5), random=True)
    case("dropout2d", lambda x: F.dropout2d(x, 0.4), (3, 4, 2, 3), random=True)
    case("alpha_dropout", lambda x: F.alpha_dropout(x, 0.4, training=True), (4, 5), random=True)
    case("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x, 0.4, training=True), (3, 4, 2), random=True)
    case("native_dropout", lambda x: torch.native_dropout(x, 0.4, True)[0], (4, 5), random=True)
    case("rrelu", lambda x: F.rrelu(x, training=True), (4, 5), random=True)
    case("rrelu, off", lambda x: F.rrelu(x), (4, 5))
    case("bernoulli, chances", lambda x: x * torch.bernoulli(x.sigmoid()), (4, 5), random=True)
    case("randperm", lambda x: x * torch.randperm(5), (4, 5), random=True)
    case("rand_like", lambda x: x * torch.rand_like(x), (4, 5), random=True)
    case("randn_like", lambda x: x * torch.randn_like(x), (4, 5), random=True)
    case("rand", lambda x: x * torch.rand(4, 5, dtype=torch.float64), (4, 5), random=True)
    case("randn", lambda x: x * torch.randn(4, 5), (4, 5), random=True)
    case("randint", lambda x: x * torch.randint(9, (4, 5)), (4, 5), random=True)
    case("randint_like", lambda x: x * torch.randint_like(x, 9), (4, 5), random=True)
    case("bernoulli", lambda x: x * aten.bernoulli.p(x, 0.5), (4, 5), random=True)
    case("uniform", lambda x: x * torch.empty_like(x).uniform_(), (4, 5), random=True)
    case("exponential", lambda x: F.gumbel_softmax(x), (4, 5), random=True)
    case("normal", lambda x: x * torch.empty_like(x).normal_(), (4, 5), random=True)


_pointwise()
_random()
