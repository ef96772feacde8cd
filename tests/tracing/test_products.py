"""Second runs that do not compute products again: the same gradients, to the bit, from what is kept and what is made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from soap.errors import RuntimeFailure
from soap.tracing.products import Blank, first_run, is_product, second_run

Run = Callable[..., torch.Tensor]


class Counting(TorchDispatchMode):
    """How many products are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_product(func)
        return func(*args, **(kwargs or {}))


def gated(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(gate) * up, weight) + gate[:, :3]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k * 2, v, is_causal=True).transpose(1, 2).contiguous()


def activated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Something is saved behind the product that follows from it."""
    return torch.tanh(x @ weight * 0.5)


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.relu(x), weight, padding=1)


SHAPES: dict[Run, Sequence[tuple[int, ...]]] = {
    gated: [(4, 6), (4, 6), (3, 6)],
    attention: [(2, 2, 5, 4)] * 3,
    activated: [(4, 6), (6, 3)],
    convolved: [(2, 3, 5, 5), (4, 3, 3, 3)],
}


@pytest.mark.parametrize("run", SHAPES)
def test_gradients_are_those_of_one_run(run: Run) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES[run]]

    def leaves() -> list[torch.Tensor]:
        return [value.clone().requires_grad_() for value in values]

    usual = leaves()
    expected = run(*usual)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    before, again = leaves(), leaves()
    (output,), made = first_run(lambda: [run(*before)])
    assert torch.equal(output, expected) and not output.requires_grad
    with Counting() as computed:
        (second,) = second_run(lambda: [run(*again)], made)
    assert computed.count == 0
    second.backward(gradient)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(usual, again, strict=True) if one.grad is not None)


def test_only_what_something_may_follow_from_is_kept() -> None:
    for run, kept in ((gated, False), (convolved, False), (activated, True), (attention, True)):
        _, made = first_run(lambda run=run: [run(*(torch.randn(shape, requires_grad=True) for shape in SHAPES[run]))])
        assert made and all(isinstance(one, Blank) is not kept for one in made), run


def test_more_products_than_before_are_a_defect() -> None:
    with pytest.raises(RuntimeFailure, match="more often than the first one did"):
        second_run(lambda: [torch.ones(2, 2) @ torch.ones(2, 2)], [])
