"""What the types of tensors mean for training, asked in one place: which carry gradients, and which replaces which.

Types are torch's, or their names without the prefix (``complex64``), as graphs have them. Nothing here needs torch itself.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar


class DType(Protocol):
    """What is asked of ``torch.dtype``."""

    @property
    def is_complex(self) -> bool:
        """Whether its numbers have two parts."""

    def to_complex(self) -> Self:
        """The type of complex numbers whose parts are of this one."""

    def to_real(self) -> Self:
        """The type of the parts."""


Kind = TypeVar("Kind", bound=DType)

_INEXACT = ("float", "bfloat", "complex")

COMPLEX_PRODUCT = 4
"""Products of real numbers in one of complex numbers."""


def name_of(dtype: DType | str) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def is_differentiable(dtype: DType | str) -> bool:
    """Whether tensors of the type can carry a gradient: floating-point and complex numbers."""
    return name_of(dtype).startswith(_INEXACT)


def is_complex(dtype: DType | str) -> bool:
    """Whether the type's numbers have two parts."""
    return name_of(dtype).startswith("complex")


def has_complex(dtype: DType | str) -> bool:
    """Whether torch computes with complex numbers of which both parts are of this floating-point type."""
    return name_of(dtype) in ("float32", "float64")


def replaced(own: Kind, by: Kind | None) -> Kind:
    """The type that stands for ``own`` where all floating-point types are replaced by another one; ``own`` if that is None.

    Complex numbers get both parts in that type: it has to be one that ``has_complex``.
    """
    if by is None or not is_differentiable(own):
        return own
    return by.to_complex() if own.is_complex else by


def part_of(dtype: Kind) -> Kind:
    """The floating-point type that the numbers, or both parts of complex ones, are rounded to."""
    return dtype.to_real() if dtype.is_complex else dtype
