"""Small programs around one kind of call each. Each is a function of float64 tensors that some anchor has made, so that it is neither
folded nor computed from inputs alone; whole numbers, masks and weights come in as inputs and parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """``function(*activations, *extra)``. ``shapes``: of the activations, each made by an anchor of its own. ``extra``: inputs.

    ``positive``: activations are made positive. ``weights``: shapes of parameters that follow the activations. ``whole``: no rule is
    expected to split it.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    extra: tuple[Tensor, ...] = ()
    weights: tuple[Shape, ...] = ()
    positive: bool = False
    whole: bool = False
    random: bool = False


class Probe(nn.Module):
    """A training model around a case: its loss weighs every element of every result differently."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.case = case
        draw = lambda shape: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))  # noqa: E731
        self.x = nn.ParameterList([draw(shape) for shape in case.shapes])
        self.w = nn.ParameterList([draw(shape) for shape in case.weights])

    def forward(self, *extra: Tensor) -> Tensor:
        values = [made(x) for x in self.x]
        if self.case.positive:
            values = [value.abs() + 0.5 for value in values]
        result = self.case.function(*values, *self.w, *extra)
        results = result if isinstance(result, (list, tuple)) else [result]
        return torch.stack([weighed(r) for r in results if isinstance(r, Tensor)]).sum()


def made(x: Tensor) -> Tensor:
    """The tensor out of an anchor: its cumulative sum along its last dimension, scaled."""
    return x.reshape(1).cumsum(0).reshape(()) if x.dim() == 0 else x.cumsum(-1) * 0.5


def weighed(value: Tensor) -> Tensor:
    """A sum in which every element counts differently."""
    value = value.to(torch.float64)
    weights = torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape).sin()
    return (value * weights).sum()


CASES: list[Case] = []


def case(name: str, function: Callable[..., Any], *shapes: Shape, **options: Any) -> None:
    """Add a case."""
    assert all(name != other.name for other in CASES), name
    CASES.append(Case(name, function, shapes, **options))


def ids(most: int, *shape: int, seed: int = 3) -> Tensor:
    """Whole numbers below ``most``."""
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 5) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
