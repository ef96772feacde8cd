"""``--input 'ids=int64[8,128]<50257'``: example inputs of a module in words. Parsing needs no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOATING = ("float32", "float64", "bfloat16", "float16")
WHOLE = ("int64", "int32", "uint8", "bool")
FORM = "NAME=TYPE[SIZE,…], whole numbers with <N behind it, such as 'ids=int64[8,128]<50257'"
_INPUT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<dtype>\w+)\[(?P<shape>[0-9,]*)\](?:<(?P<below>[0-9]{1,18}))?", re.ASCII)
MOST_ELEMENTS = 2**32


@dataclass(frozen=True)
class ExampleInput:
    """``below``: whole numbers are drawn from 0 to below that; 1: they are zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    below: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{','.join(map(str, self.shape))}]"


def example_input(text: str) -> ExampleInput:
    """Parse one ``--input``."""
    found = _INPUT.fullmatch("".join(text.split()))
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed; expected {FORM}")
    dtype, below, sizes = found["dtype"], found["below"], found["shape"].split(",") if found["shape"] else []
    if dtype not in (*FLOATING, *WHOLE):
        raise argparse.ArgumentTypeError(f"type {dtype!r} in {text[:100]!r}; expected one of {', '.join((*FLOATING, *WHOLE))}")
    if not all(0 < len(size) < 10 for size in sizes):
        raise argparse.ArgumentTypeError(f"sizes [{found['shape'][:50]}] in {text[:100]!r}; expected {FORM}")
    shape = tuple(map(int, sizes))
    if 0 in shape or prod(shape) > MOST_ELEMENTS:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} has {prod(shape)} elements; expected 1 to {MOST_ELEMENTS}")
    if below is not None and (dtype in FLOATING or int(below) < 1):
        raise argparse.ArgumentTypeError(f"'<{below}' in {text[:100]!r}; expected a limit of at least 1, behind whole numbers alone")
    return ExampleInput(found["name"], dtype, shape, 1 if below is None else int(below))


def drawn(inputs: Sequence[ExampleInput], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of these types and shapes: floating-point numbers of a normal distribution, whole ones below their limit."""
    import torch

    found = {}
    for own in inputs:
        dtype: torch.dtype = getattr(torch, own.dtype)
        if own.dtype in FLOATING:
            found[own.name] = torch.randn(own.shape, generator=generator).to(dtype)
        else:
            found[own.name] = torch.randint(own.below, own.shape, generator=generator).to(dtype)
    return found
