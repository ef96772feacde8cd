"""Every registered rule on random shapes and attributes, tile by tile, against the whole call in float64: outputs, gradients, and an upper
bound for what is kept. A rule that nothing draws fails the suite."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch

from soap.tracing.rules import notation, registered
from tests.extent import ALL, CHOSEN, so_many
from tests.tracing import draws
from tests.tracing.drawing import DRAWS, Draw, Drawn, in_the_plane
from tests.tracing.tile_check import Problem, check, follows, kept_bytes, linear, problem, splits

SEEDS = range({"quick": 2, "test": 2, "all": 14}[CHOSEN])
BY_DATA = {"soap.combine", "soap.dispatch", "soap.expert_product", "soap.expert_rows", "soap.hand_over"}
"""Rules of routed rows, of which there are as many as experts were chosen for: ``test_routing``."""
FIXED = sorted({*registered()} - BY_DATA)
NEVER_SPLIT = {"aten.max.default", "aten.min.default", "soap.keep_state", "soap.next_state"}
"""Rules that say that all of a tensor is needed at once."""


def undrawn(names: Collection[str]) -> list[str]:
    """The names that no draw is registered for."""
    return [name for name in names if name not in DRAWS]


def _checked(name: str, seed: int, record: Callable[[str, object], None]) -> Problem:
    d = Draw(f"{name} {seed}")
    found = problem(DRAWS[name](d, name))
    target = notation.target_name(found.call.target)
    assert name in (target, target.rsplit(".", 1)[0]), f"{target} is drawn for {name}"
    record("rule", name)
    record("overload", target)
    assert found.rule.known and follows(found.rule)
    for pieces in splits(found.rule, d.random, None, found.drawn.kept):
        check(found, pieces)
    kept, bound = kept_bytes(found)
    assert kept <= bound
    assert not found.rule.linear or linear(found)
    return found


@pytest.mark.parametrize("name", FIXED)
def test_drawn_calls_by_tiles(name: str, record_property: Callable[[str, object], None]) -> None:
    found = [_checked(name, seed, record_property) for seed in SEEDS]
    split = any(f.rule.factors for f in found)
    assert not (split and name in NEVER_SPLIT)
    assert split or name in NEVER_SPLIT or not ALL  # few calls may all be such that nothing can be split


def test_every_rule_is_drawn() -> None:
    assert undrawn(FIXED) == []
    assert sorted(DRAWS) == FIXED


def test_a_rule_that_nothing_draws_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notation, "_RULES", dict(notation._RULES))
    notation.register("aten.made_up", "b -> b")
    assert undrawn([*FIXED, "aten.made_up"]) == ["aten.made_up"] and "aten.made_up" in registered()


def _wrong(run: Callable[[notation.Local], torch.Tensor] | None, operand: tuple[int, ...], **options: object) -> Problem:
    """``relu`` of 5 numbers under a rule of one's own."""
    drawn = Drawn(torch.ops.aten.relu.default, (torch.arange(5, dtype=torch.float64) - 1.5,))
    found = problem(drawn)
    dim = notation.DimMap(*operand)
    found.rule = notation.Tiled((("b", 5),), ((dim,),), ((notation.DimMap(0),),), run=run, **options)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        _wrong(None, (0, 1, 1, 2)),  # reads its neighbour
        _wrong(lambda local: local.plain() * 2, (0,)),  # other numbers
        _wrong(lambda local: local.plain().detach(), (0,)),  # no gradients
        _wrong(None, (0,), summed=(0,)),  # no sum
    ],
    ids=["region", "numbers", "gradients", "sum"],
)
def test_wrong_rules_are_caught(wrong: Problem) -> None:
    with pytest.raises(AssertionError):
        check(wrong, ([(0, 3), (3, 5)],))


def test_right_rule_passes() -> None:
    check(_wrong(None, (0,)), ([(0, 3), (3, 5)],))


POINTWISE = draws.elementwise.overloads()


@pytest.mark.parametrize("target", POINTWISE, ids=lambda target: str(target).removeprefix("aten."))
def test_pointwise_overloads_by_tiles(target: torch._ops.OpOverload, record_property: Callable[[str, object], None]) -> None:
    for seed in SEEDS[:2]:
        d = Draw(f"{target} {seed}")
        drawn = draws.elementwise.any_call(d, target)
        if drawn is None:
            assert str(target).removeprefix("aten.") in draws.elementwise.UNUSABLE
            return
        found = problem(drawn)
        record_property("overload", notation.target_name(target))
        assert found.rule.known and len(found.rule.factors) == sum(n > 1 for n in found.results[0].shape)
        for pieces in splits(found.rule, d.random, 4):
            check(found, pieces)


IN_THE_PLANE = {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "outer", "inner", "addmm", "baddbmm", "addmv", "addr", "addbmm", "einsum",
    "tensordot", "sum", "mean", "cat", "reshape", "permute", "expand", "slice", "select.int", "detach", "to.dtype", "clone", "where",
    "multiply", "divide", "subtract", "absolute", "linalg_vector_norm", "prod", "cumsum", "index_select", "gather", "pad",
}  # fmt: skip
"""What has to be tried with complex numbers, at least; other rules are as far as torch takes these."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_drawn_calls_on_complex_numbers_by_tiles(name: str) -> None:
    tried = 0
    for seed in range(so_many(2, 4)):
        d = Draw(f"{name} {seed} in the plane")
        drawn = in_the_plane(d, DRAWS[name](d, name))
        if drawn is None:
            continue
        found = problem(drawn)
        for pieces in splits(found.rule, d.random, 6, drawn.kept):
            check(found, pieces)
        kept, bound = kept_bytes(found)
        assert kept <= bound
        assert not found.rule.linear or linear(found)
        tried += 1
    assert tried or name.removeprefix("aten.") not in IN_THE_PLANE


def test_pointwise_overloads_on_complex_numbers_by_tiles() -> None:
    tried = set()
    for target in POINTWISE:
        d = Draw(f"{target} in the plane")
        real = draws.elementwise.any_call(d, target)
        drawn = None if real is None else in_the_plane(d, replace(real, fixed=()))
        if drawn is not None:
            tried.add(str(target).removeprefix("aten."))
            found = problem(drawn)
            for pieces in splits(found.rule, d.random, 2):
                check(found, pieces)
    assert {
        "abs.default", "angle.default", "sgn.default", "exp.default", "log.default", "tanh.default", "sigmoid.default", "sqrt.default",
        "mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal.default",
        "addcmul.default", "lerp.Scalar", "conj_physical.default", "neg.default", "square.default",
    } <= tried  # fmt: skip
