"""Marks on parameters that shall have the same number of partitions on servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_MARK = "_soap_partitioner"
_numbers = count()


@contextmanager
def partitioner() -> Iterator[None]:
    """Parameters of modules that are made inside get the same number of partitions if they are on servers. The runner chooses the number.

    Use it for tables that are always read together: the runner then tries the same number for all of them at once.
    """
    number = next(_numbers)

    def mark(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, _MARK):
            setattr(parameter, _MARK, number)

    hook = register_module_parameter_registration_hook(mark)
    try:
        yield
    finally:
        hook.remove()


def groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of parameters that were made inside of the same ``partitioner``, by name."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, _MARK):
            found.setdefault(getattr(parameter, _MARK), []).append(name)
    return [tuple(names) for names in found.values()]
