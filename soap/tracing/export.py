"""Writing a training model to a ``.pt2`` file."""

from __future__ import annotations

import functools
import inspect
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soap.errors import ModelError
from soap.files import check_writable, write_bytes_atomically


def _with_loss(model: nn.Module, loss: Callable[..., torch.Tensor]) -> nn.Module:
    """A shallow copy of the model whose forward ends in the loss: no module is wrapped, so that all names stay the model's own.

    The state of a loss that is a module is exported as the submodule ``loss`` (``loss_`` if the model has that name).
    """
    kind = type(model)
    copied = object.__new__(kind)
    copied.__dict__.update(model.__dict__)
    own_forward = copied.__dict__.pop("forward", None)

    @functools.wraps(own_forward or kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(own_forward(*args, **kwargs) if own_forward else kind.forward(self, *args, **kwargs))

    if own_forward:  # bound already: torch.export reads the names of the inputs from a signature that begins with self
        own = inspect.signature(own_forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    if isinstance(loss, nn.Module):
        name = "loss_" if hasattr(model, "loss") else "loss"
        copied.__dict__["_modules"] = {**model._modules, name: loss}
    copied.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return copied


def export_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | Path,
    loss: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Export a training model with example inputs to ``path``, atomically.

    The model returns the scalar loss, or ``loss(output)`` does; names are the model's own either way. Batch sizes and all other shapes
    of the example inputs become fixed. The model's mode (training or not) is exported as it is. Raises ModelError if torch.export cannot
    trace the model or the output is no scalar.
    """
    from soap.tracing.importer import import_program

    check_writable(path)
    module = model if loss is None else _with_loss(model, loss)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns of harmless attributes that LSTMs assign
            exported = torch.export.export(module, *_separate(tuple(args), dict(kwargs or {})), strict=False)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"torch.export cannot trace {type(model).__name__}: {first}; see torch.export's documentation") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rules that are missing are reported when the file is planned
        import_program(exported, name=type(model).__name__, plan_only=True)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    write_bytes_atomically(path, buffer.getvalue())


def _separate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a copy of each tensor that occurs again: torch.export would take both for one input (ids and labels)."""
    seen: set[int] = set()

    def separate(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
            return leaf.clone()
        seen.add(id(leaf))
        return leaf

    changed: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map(separate, (args, kwargs))
    return changed
