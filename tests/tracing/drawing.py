"""Random calls for the rules: a registry of functions, one name of a rule each, that draw shapes, attributes and tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from soap.tracing.calls import substitute, walk

T = TypeVar("T")


@dataclass(frozen=True)
class Drawn:
    """One call on real tensors. ``whole``: what computes all of it from its tensors, if that is not the call's own target. ``fixed``: those
    that carry no gradient. ``kept``: factors that are not split in the check, because by the rule's meaning tiles then differ from the
    whole."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    whole: Callable[..., Any] | None = None
    random: bool = False
    fixed: tuple[Tensor, ...] = ()
    kept: tuple[str, ...] = ()


class Draw:
    """A source of small random sizes, tensors and decisions; the same for the same seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))

    def size(self, low: int | None = None, high: int = 6) -> int:
        """A size of at least ``low``; without it at least 2, but 1 now and then."""
        return 1 if low is None and self.yes(0.08) else self.random.randint(2 if low is None else low, high)

    def shape(self, low: int, high: int | None = None) -> tuple[int, ...]:
        """A shape of ``low`` to ``high`` dimensions."""
        return tuple(self.size(high=5) for _ in range(self.random.randint(low, low if high is None else high)))

    def some(self, *options: T) -> T:
        """One of the options."""
        return self.random.choice(options)

    def yes(self, chance: float = 0.5) -> bool:
        """A decision."""
        return self.random.random() < chance

    def dim(self, shape: Sequence[int]) -> int:
        """A dimension, counted from either end."""
        return self.random.randrange(-len(shape), len(shape))

    def dims(self, shape: Sequence[int]) -> list[int]:
        """Some dimensions, at least one."""
        return sorted(self.random.sample(range(len(shape)), self.random.randint(1, len(shape))))

    def floats(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def complex(self, *shape: int) -> Tensor:
        """Normal numbers in the plane."""
        return torch.randn(shape, generator=self.generator, dtype=torch.complex128)

    def positive(self, *shape: int) -> Tensor:
        """Numbers from 0.1 to 1.1."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.1

    def chances(self, *shape: int) -> Tensor:
        """Numbers between 0 and 1, away from both."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.9 + 0.05

    def ids(self, most: int, *shape: int) -> Tensor:
        """Whole numbers below ``most``."""
        return torch.randint(most, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        """True or false."""
        return torch.rand(shape, generator=self.generator) < 0.6

    def apart(self, most: int, count: int) -> Tensor:
        """Different whole numbers below ``most``."""
        return torch.randperm(most, generator=self.generator)[:count]

    def narrower(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        cut = self.random.randrange(len(shape) + 1) if self.yes(0.4) else 0
        return tuple(1 if self.yes(0.2) else n for n in shape[cut:])


def in_the_plane(d: Draw, drawn: Drawn) -> Drawn | None:
    """The same call on complex numbers in place of all floating-point ones; None if torch does not compute or differentiate it so."""
    change: Any = lambda leaf: d.complex(*leaf.shape) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf  # noqa: E731
    found = replace(drawn, args=substitute(tuple(drawn.args), change), kwargs=substitute(dict(drawn.kwargs), change))
    leaves: Any = lambda leaf: leaf.clone().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_complex() else leaf  # noqa: E731
    if drawn.random or drawn.fixed or drawn.whole or not any(isinstance(a, Tensor) and a.is_complex() for a in walk(found.args)):
        return None
    try:
        results = drawn.target(*substitute(found.args, leaves), **substitute(dict(found.kwargs), leaves))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if result.requires_grad:
                result.abs().sum().backward()
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return found


Maker = Callable[[Draw, str], Drawn]
DRAWS: dict[str, Maker] = {}


def draws(*names: str) -> Callable[[Maker], Maker]:
    """The decorated function draws calls for the rules of these names (without ``aten.``)."""

    def decorate(maker: Maker) -> Maker:
        for name in names:
            full = name if name.startswith("soap.") else f"aten.{name}"
            assert full not in DRAWS, f"{full} is drawn twice"
            DRAWS[full] = maker
        return maker

    return decorate


def overload(name: str, which: str | None = None) -> Any:
    """The ATen overload of a rule's name: the named one, else ``default``, else the first."""
    kind, *own = name.removeprefix("aten.").split(".")
    packet = getattr(torch.ops.aten, kind)
    which = which or (own[0] if own else "default" if "default" in packet.overloads() else packet.overloads()[0])
    return getattr(packet, which)


def call(
    name: str, *args: Any, which: str | None = None, random: bool = False, fixed: Sequence[Tensor | None] = (), **kwargs: Any
) -> Drawn:
    """A call of a rule's operator."""
    return Drawn(overload(name, which), args, kwargs, random=random, fixed=tuple(t for t in fixed if t is not None))
