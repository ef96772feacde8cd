"""Hooks that change gradients, which a file does not hold, are refused at export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from soap.errors import ModelError
from tests.tracing.exporting import Exports, X, around


def on_parameter(module: nn.Sequential) -> None:
    module[0].weight.register_hook(lambda gradient: gradient * 0.5)


def clipping(module: nn.Sequential) -> None:
    module[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def on_module(module: nn.Sequential) -> None:
    module[2].register_full_backward_hook(lambda _module, given, _output: (given[0] * 3,))


def before_module(module: nn.Sequential) -> None:
    module[2].register_full_backward_pre_hook(lambda _module, given: (given[0] * 3,))


def at_once(module: nn.Sequential) -> None:
    def step(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    optimizer = torch.optim.SGD([module[0].weight], lr=0.1)
    module[0].weight.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (on_parameter, "a hook on parameter '0.weight' (test_export_hooks.py:"),
        (clipping, "a hook on parameter '0.weight' (test_export_hooks.py:"),
        (on_module, "a backward hook on module '2' (Linear) (test_export_hooks.py:"),
        (before_module, "a backward hook on module '2' (Linear) (test_export_hooks.py:"),
        (at_once, "a hook on parameter '0.weight' (test_export_hooks.py:"),
    ],
)
def test_hooks_that_change_gradients_are_refused(export: Exports, hook: Callable[[nn.Sequential], None], said: str) -> None:
    module = around(nn.ReLU())
    hook(module)
    with pytest.raises(ModelError) as caught:
        export(module, X)
    assert said in str(caught.value) and "whose backward code torch.export does not record" in str(caught.value)


def test_a_hook_on_a_tensor_is_found_where_it_is_made(export: Exports) -> None:
    class Hooked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: 2 * gradient)
            return x

    with pytest.raises(ModelError, match=r"a hook on a tensor \(test_export_hooks.py:\d+\)"):
        export(around(Hooked()), X)


def test_hooks_that_only_look_are_accepted(export: Exports) -> None:
    seen: list[tuple[int, ...]] = []
    module = around(nn.ReLU())
    module[0].weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    module[2].register_full_backward_hook(lambda *_: None)
    assert export(module, X).record.compared
    assert seen == [(6, 4)]
