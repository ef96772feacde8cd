"""Private parts of torch that we replace for a while, each by a name that a version may lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from soap.errors import ModelError

TRIED = "2.11 to 2.13"
"""Versions of torch with which every such part is tested."""


@contextmanager
def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context a part of torch is what ``make`` makes of it. ``name``: a function's, or ``Class.method``. ModelError in one line
    if this version of torch has no such part."""
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
