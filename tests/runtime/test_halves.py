"""Backward passes in two: what each half makes, what stays between them, and what does not."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from soap.runtime.step.step import Halves
from soap.tracing.rules.random import dropped


def test_each_half_makes_its_own_gradients() -> None:
    """Of two outputs, one of which goes through an operator of ours, with the same sums as a whole backward pass."""
    torch.manual_seed(0)
    value, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (4, 3), (4,)))
    keep = torch.rand(5, 4) < 0.5

    def outputs() -> list[torch.Tensor]:
        made = F.linear(value, weight, bias)
        return [F.gelu(made), dropped(made, keep, 0.5)]

    given = [torch.randn(5, 4, dtype=torch.float64) for _ in range(2)]
    expected = torch.autograd.grad(outputs(), (value, weight, bias), given)
    halves = Halves([weight, bias])
    halves.inputs(7, given, outputs())
    assert value.grad is not None and torch.equal(value.grad, expected[0])
    assert weight.grad is None and bias.grad is None
    halves.weights(7)
    for leaf, gradient in zip((weight, bias), expected[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, gradient)
    assert torch.equal(value.grad, expected[0])
    halves.weights(7)  # nothing is left
    assert weight.grad is not None and torch.equal(weight.grad, expected[1])


def test_outputs_are_not_kept_for_weight_gradients_and_gradients_are_until_then() -> None:
    value, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    output, gradient = F.linear(value, weight), torch.randn(5, 4)
    made, given = weakref.ref(output), weakref.ref(gradient)
    halves = Halves([weight])
    halves.inputs(0, [gradient], [output])
    del output, gradient
    assert made() is None and given() is not None
    halves.weights(0)
    assert given() is None


def test_no_product_is_made_twice() -> None:
    """Of a linear layer and of a convolution, each half has as many operations as the forward pass."""
    value, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    image, kernel = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    for one, other, run in ((value, weight, F.linear), (image, kernel, F.conv2d)):
        halves, counts = Halves([other]), []
        with FlopCounterMode(display=False) as forward:
            made = F.gelu(run(one, other))
        for half in (lambda: halves.inputs(0, [torch.ones_like(made)], [made]), lambda: halves.weights(0)):  # noqa: B023
            with FlopCounterMode(display=False) as counter:
                half()
            counts.append(counter.get_total_flops())
        assert counts == [forward.get_total_flops()] * 2 and counts[0] > 0
