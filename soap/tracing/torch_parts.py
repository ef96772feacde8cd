"""Private parts of torch that we replace for a while: by ones of ours, each by a name that a version may lack, or to silence its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.export._trace

from soap.errors import ModelError
from soap.logs import silenced

TRIED = "2.11 to 2.13"
"""Versions of torch with which every such part is tested."""


@contextmanager
def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context a part of torch (a function, or ``Class.method``) is what ``make`` makes of it. ModelError if it is missing."""
    *within, last = name.split(".")
    try:
        owner: Any = import_module(module)
        for step in within:
            owner = getattr(owner, step)
        original = getattr(owner, last)
    except (ImportError, AttributeError):
        raise ModelError(
            f"torch {torch.__version__} has no {module}.{name}, in whose place SOAP has one of its own; expected torch {TRIED}: install "
            "one of these, or a newer SOAP"
        ) from None
    setattr(owner, last, make(original))
    try:
        yield
    finally:
        setattr(owner, last, original)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within this context torch's loggers write nothing, and torch.export prints no graphs, as it does for errors that it raises."""
    printing: Any = torch.export._trace
    printing.print = lambda *_, **__: None  # our ``print`` hides the built-in one, in that module alone
    try:
        with silenced("torch"):
            yield
    finally:
        del printing.print
