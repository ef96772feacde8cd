"""Shared by the tracing tests: importing a module, and reading what came out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from soap.model.graph import Operator
from soap.tracing.execute import TracedModel
from soap.tracing.importer import import_program


class Lambda(nn.Module):
    """A module from a function of itself and the inputs; ``members`` become its parameters, buffers and submodules."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def export(module: nn.Module, *args: Any, **kwargs: Any) -> ExportedProgram:
    """torch.export without the warnings of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, args, kwargs, strict=False)


def imported(module: nn.Module, *args: Any, **kwargs: Any) -> TracedModel:
    """The traced model of a module with example inputs, in float64."""
    return import_program(export(module, *args, **kwargs), name="model", dtype=torch.float64)


def described(operators: Sequence[Operator]) -> list[str]:
    """Operators in one line each: name, kind, factors with size and first letter of their kind (+: summed)."""
    return [f"{op.name} {op.kind} " + " ".join(f"{f.name}={f.size}{f.kind[0]}{'+' * f.summed}" for f in op.factors) for op in operators]


def asserted(h: torch.Tensor) -> torch.Tensor:
    """What it is given, after assertions that pytest leaves as they are written, which it does not do in modules of tests."""
    assert (h.abs() >= 0).all() and h.isfinite().all(), "not finite"
    assert not h.isnan().any()
    return h


def square() -> nn.Parameter:
    return nn.Parameter(torch.arange(12.0).reshape(3, 4).sin())
