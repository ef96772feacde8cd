"""In which types a run computes and keeps a graph's tensors."""

from __future__ import annotations

from typing import Any

import torch

from soap.errors import RuntimeFailure
from soap.model.dtypes import name_of, replaced
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.tracing.model import TracedModel


def run_dtype(graph: OperatorGraph, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a graph's tensor at run time: its own, or ``dtype`` in place of a floating-point one."""
    own: Any = getattr(torch, graph.tensors[name].dtype)
    assert isinstance(own, torch.dtype)
    return replaced(own, dtype)


def model_in_type(model: TracedModel, plan: object, dtype: torch.dtype | None) -> TracedModel:
    """The model to compute in ``dtype``: traced again if its program names other types. RuntimeFailure if the plan is for these."""
    other = model if dtype is None else model.in_type(dtype)
    if other is not model and isinstance(plan, Plan):
        name = name_of(dtype)  # type: ignore[arg-type]
        raise RuntimeFailure(
            f"dtype {name}: the program of {model.graph.name!r} names types, and the plan is for them; expected a plan for the model of "
            f"soap.load(..., dtype={name!r})"
        )
    return other
