"""Exports a module in place of another: all its names are the other's, but its arguments and results are changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def adapted(
    model: nn.Module,
    loss: Callable[..., Any] | None = None,
    take: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> nn.Module:
    """A shallow copy of the model whose forward ends in the loss. No module is wrapped, so all names stay the model's own. If the loss
    is a module, its state is exported as the submodule ``loss`` (``loss_`` if the model has that name). ``take``: applied first to the
    arguments of forward."""
    kind = type(model)
    copied = object.__new__(kind)
    copied.__dict__.update(model.__dict__)
    own_forward = copied.__dict__.pop("forward", None)

    @functools.wraps(own_forward or kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if take is not None:
            args, kwargs = take(args, kwargs)
        output = own_forward(*args, **kwargs) if own_forward else kind.forward(self, *args, **kwargs)
        return output if loss is None else loss(output)

    if own_forward:  # bound already: torch.export takes the names of the inputs from a signature that begins with self
        own = inspect.signature(own_forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    if isinstance(loss, nn.Module):
        name = "loss_" if hasattr(model, "loss") else "loss"
        copied.__dict__["_modules"] = {**model._modules, name: loss}
    copied.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return copied
