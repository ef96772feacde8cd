"""What a graph says of its operators' memory, found when somebody asks for the first time.

Finding it takes most of the time in which a small model is read (``footprints``). Ranks that are handed their part of a plan never ask, nor
does whoever only wants the graph or its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from soap.logs import TRIALS, silenced
from soap.tracing.execute import ExecutableModel
from soap.tracing.footprints import Footprints, find_footprints
from soap.tracing.part_footprints import PartFootprints

Value = TypeVar("Value")


class FoundLater(Mapping[str, Value]):
    """A mapping that ``find`` makes when it is first looked into. Pickled, it is what was found."""

    def __init__(self, find: Callable[[], Mapping[str, Value]]) -> None:
        self._find = find

    def __getitem__(self, key: str) -> Value:
        return self._find()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())

    def __contains__(self, key: object) -> bool:
        return key in self._find()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def footprints_later(model: ExecutableModel, *, on_gpus: bool) -> tuple[FoundLater[Footprints], FoundLater[PartFootprints]]:
    """As ``find_footprints``. The model's parameters are not held meanwhile, for they may be large; no trial reads them."""
    bare: list[ExecutableModel] = [replace(model, parameters={}, example_inputs=(), unchanged={}, source=None)]

    @cache
    def found() -> tuple[dict[str, Footprints], dict[str, PartFootprints]]:
        with _disable_current_modes(), torch.device("cpu"), torch.enable_grad(), silenced(*TRIALS):  # wherever it is asked
            return find_footprints(bare.pop(), on_gpus=on_gpus)

    return FoundLater(lambda: found()[0]), FoundLater(lambda: found()[1])
