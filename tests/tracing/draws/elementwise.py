"""Pointwise calls that lack the tag, and calls that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.tracing.drawing import Draw, Drawn, call, draws

_ONE = (
    "absolute", "fix", "hardswish", "isreal", "log_sigmoid", "negative", "arcsinh", "arctan", "special_erf", "special_erfc", "special_exp2",
    "special_expit", "special_expm1", "special_ndtr", "special_sinc", "special_round", "zero", "special_i0",
)  # fmt: skip
_ONE_POSITIVE = ("special_digamma", "special_psi", "special_gammaln", "special_log1p")
_ONE_CHANCE = ("arccos", "arcsin", "arctanh", "special_logit")
_TWO = (
    "divide", "greater", "greater_equal", "isclose", "less", "less_equal", "multiply", "not_equal", "subtract", "arctan2", "floor_divide",
    "rsub", "special_xlogy", "special_gammainc", "special_gammaincc",
)  # fmt: skip


@draws(*_ONE, *_ONE_POSITIVE, *_ONE_CHANCE, "arccosh")
def one(d: Draw, name: str) -> Drawn:
    shape, kind = d.shape(0, 3), name.removeprefix("aten.")
    if kind == "arccosh":
        return call(name, d.positive(*shape) + 1)
    return call(name, d.chances(*shape) if kind in _ONE_CHANCE else d.positive(*shape) if kind in _ONE_POSITIVE else d.floats(*shape))


@draws(*_TWO)
def two(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    shapes = (shape, d.narrower(shape))
    first, second = shapes if d.yes() else shapes[::-1]
    x, y = d.positive(*first), d.positive(*second)
    return call(name, x, y, fixed=(x, y) if "floor" in name else (x,) if "gammainc" in name else ())  # where torch has no derivative


@draws("special_multigammaln", "special_polygamma", "fill")
def with_number(d: Draw, name: str) -> Drawn:
    x = d.positive(*d.shape(1, 3)) + 2
    if name == "aten.special_polygamma":
        return call(name, 1, x)
    return call(name, x, 2) if name != "aten.fill" or d.yes() else call(name, x, d.floats(), which="Tensor")


@draws("__and__", "__or__", "__xor__")
def logic(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    return call(name, d.mask(*shape), d.mask(*d.narrower(shape)), which="Tensor")


@draws("where")
def where(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    condition, x = d.mask(*d.narrower(shape)), d.floats(*shape)
    other, which = d.some((0.5, "ScalarOther"), (d.floats(*d.narrower(shape)), "self"))
    return call(name, condition, x, other, which=which)


@draws("prelu")
def prelu(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 4)
    return call(name, d.floats(*shape), d.floats(d.some(1, shape[1])))


@draws("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
def dropout(d: Draw, name: str) -> Drawn:
    train = d.yes(0.8)
    return call(name, d.floats(*d.shape(2, 4)), 0.4, train, random=train or name not in ("aten.dropout", "aten.feature_dropout"))


@draws("bernoulli.default", "bernoulli.p", "bernoulli.Tensor")
def bernoulli(d: Draw, name: str) -> Drawn:
    x = d.chances(*d.shape(1, 3))
    chance = {"aten.bernoulli.p": (0.3,), "aten.bernoulli.Tensor": (d.chances(*x.shape),)}.get(name, ())
    return call(name, x, *chance, random=True)


@draws("rrelu")
def rrelu(d: Draw, name: str) -> Drawn:
    return call(name, d.floats(*d.shape(1, 3)), 0.1, 0.4, d.yes(0.7), random=True)


@draws("rand", "randn", "randint", "randperm", "normal.float_float")
def factories(d: Draw, name: str) -> Drawn:
    shape = list(d.shape(1, 3))
    first = {"aten.randint": (7,), "aten.normal.float_float": (0.5, 2.0)}.get(name, ())
    return call(name, *first, shape[0] if name == "aten.randperm" else shape, random=True)


@draws("rand_like", "randn_like", "randint_like", "uniform", "exponential", "normal_functional")
def like(d: Draw, name: str) -> Drawn:
    x = d.floats(*d.shape(1, 3))
    return call(name, x, *((7,) if name == "aten.randint_like" else ()), random=True)


def overloads() -> list[torch._ops.OpOverload]:
    """Every functional ATen overload that carries the ``pointwise`` tag: the rules take all of them alike."""
    found = []
    for kind in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, kind)
        if kind.startswith("__") or not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for which in packet.overloads():
            target = getattr(packet, which)
            mutable = target._schema.is_mutable or any(a.is_out for a in target._schema.arguments)
            if torch.Tag.pointwise in target.tags and not mutable and torch.Tag.nondeterministic_seeded not in target.tags:
                found.append(target)
    return found


UNUSABLE = {"equal.default", "frexp.Tensor"}
"""Tagged overloads that torch cannot differentiate, or not on small tensors of any dtype that training has."""


def any_call(d: Draw, target: torch._ops.OpOverload) -> Drawn | None:
    """A call of a pointwise overload by its schema, on floats, whole numbers, or truth values: the first that it takes, if any."""
    shape = d.shape(1, 3)
    shapes = [shape, *(d.narrower(shape) for _ in target._schema.arguments)]
    for kind in (d.chances, lambda *s: d.ids(5, *s) + 1, d.mask):
        tensors = [kind(*s) for s in shapes]
        for numbers in ((0.7, 0.9), (2, 3)):
            args, kwargs = _arguments(target, tensors, numbers)
            for fixed in ((), tensors[:1], tensors):  # some can be differentiated by the others only
                drawn = Drawn(target, args, kwargs, fixed=tuple(fixed))
                if _runs(drawn):
                    return drawn
    return None


def _arguments(
    target: torch._ops.OpOverload, tensors: list[torch.Tensor], numbers: tuple[float, float]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    following, scalars = iter(tensors), iter([*numbers, *numbers])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        if argument.has_default_value() and argument.name not in ("min", "max"):
            continue
        kind = str(argument.type)
        value: Any = next(following) if "Tensor" in kind else "floor" if "str" in kind else next(scalars)
        value = int(value) if kind == "int" else value
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _runs(drawn: Drawn) -> bool:
    fixed = {id(t) for t in drawn.fixed}
    wanted = lambda t: isinstance(t, torch.Tensor) and t.is_floating_point() and id(t) not in fixed  # noqa: E731
    args = [t.clone().requires_grad_() if wanted(t) else t for t in drawn.args]
    kwargs = {name: t.clone().requires_grad_() if wanted(t) else t for name, t in drawn.kwargs.items()}
    try:
        result = drawn.target(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(result, torch.Tensor) and not result.is_complex()
