"""In which types a run computes and keeps a graph's tensors."""

from __future__ import annotations

from typing import Any

import torch

from soap.model.dtypes import replaced
from soap.model.graph import OperatorGraph


def run_dtype(graph: OperatorGraph, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a graph's tensor at run time: its own, or ``dtype`` in place of a floating-point one."""
    own: Any = getattr(torch, graph.tensors[name].dtype)
    assert isinstance(own, torch.dtype)
    return replaced(own, dtype)
