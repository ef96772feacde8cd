"""A program held against its module: loss and every gradient of one eager step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from tests.tracing.programs import imported

ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference relative to the largest element of all gradients, by the coarsest type among them."""


def eager_step(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, loss: Callable[..., Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and the gradient of each trainable parameter: zero where none arrives."""
    output = module(*args, **(kwargs or {}))
    value = output if loss is None else loss(output)
    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, list(own.values()), allow_unused=True)
    return value.detach(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(own.items(), found, strict=True)}


def program_step(model: TracedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the plain calls of the traced program, on its example inputs."""
    parameters = {n: p.detach().clone().requires_grad_(model.graph.tensors[n].requires_grad) for n, p in model.parameters.items()}
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    value = model.reference_loss(model.example_inputs, parameters, context)
    wanted = {n: p for n, p in parameters.items() if p.requires_grad}
    found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
    return value.detach(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(wanted.items(), found, strict=True)}


def assert_as_eager(model: TracedModel, loss: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """The program's loss and gradients are these."""
    found, own = program_step(model)
    types = [g.dtype for g in gradients.values()]
    allowed = max((ROUNDING.get(dtype, ROUNDING[torch.float32]) for dtype in types), default=ROUNDING[torch.float32])
    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    assert abs(float(found) - float(loss)) <= allowed * max(1.0, abs(float(loss)))
    for name, gradient in gradients.items():
        mine = own.get(name, torch.zeros_like(gradient))
        apart = float((mine.to(gradient.dtype) - gradient).abs().max()) if gradient.numel() else 0.0
        assert apart <= allowed * largest, (name, apart, largest)


def equals_eager(module: nn.Module, *inputs: Tensor) -> None:
    """The plain program's loss and gradients are the module's."""
    module = module.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    model = imported(module, *(x.clone() for x in inputs))
    parameters = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
    loss = model.reference_loss([x.clone() for x in inputs], parameters, TileContext(0, 0, dict(model.buffers)))
    expected = module(*(x.clone() for x in inputs))
    torch.testing.assert_close(loss, expected.reshape(()))
    loss.backward()
    expected.sum().backward()
    for name, p in module.named_parameters():
        if name in parameters:
            torch.testing.assert_close(parameters[name].grad, p.grad)


def assert_equal_steps(module: nn.Module, model: TracedModel, x: Tensor) -> None:
    """A program in float64 computes the module's loss and gradients but for the last digits."""
    loss = module(x)
    loss.backward()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.parameters.items()}
    found = model.reference_loss([x], parameters, TileContext())
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0.0)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, module.get_parameter(name).grad, rtol=1e-9, atol=1e-15)
