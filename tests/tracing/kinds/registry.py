"""What a kind of model is here, and how one is listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Built:
    """A training module with a batch for it. ``loss``: as ``soap.export`` takes it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Kind:
    """How one is made. ``draws``: its forward pass draws random numbers. ``refused``: what the one line of ``soap.export`` says of it, as a
    regular expression, if it cannot be trained exactly."""

    build: Callable[[], Built]
    draws: bool = False
    refused: str = ""

    def built(self) -> Built:
        """The same weights and batch each time."""
        torch.manual_seed(0)
        return self.build()


KINDS: dict[str, Kind] = {}


def kind(*, draws: bool = False, refused: str = "") -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """List what the function makes under the function's name."""

    def listed(build: Callable[[], Built]) -> Callable[[], Built]:
        assert build.__name__ not in KINDS
        KINDS[build.__name__] = Kind(build, draws, refused)
        return build

    return listed


class Lossy(nn.Module):
    """A module from its parts and a forward pass that reads them: ``Lossy(lambda m, x: m.a(x).mean(), a=nn.Linear(2, 3))``."""

    def __init__(self, run: Callable[..., torch.Tensor], **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.run(self, *args, **kwargs)


def weight(*shape: int, scale: float = 0.5) -> nn.Parameter:
    """A parameter drawn from a normal distribution."""
    return nn.Parameter(torch.randn(*shape) * scale)


def labels(count: int, *shape: int) -> torch.Tensor:
    """Classes below ``count``."""
    return torch.randint(count, shape)
