"""Marks on parameters that are to be cut into equally many partitions where servers keep them."""

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
    """Parameters of modules that are made inside share one number of partitions, which the runner chooses, where servers keep them.

    So it is with tables that are always read together: equally many partitions are then tried for all of them at once.
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
    """Names of parameters that were made inside of the same ``partitioner``."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, _MARK):
            found.setdefault(getattr(parameter, _MARK), []).append(name)
    return [tuple(names) for names in found.values()]
