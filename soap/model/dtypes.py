"""What the types of tensors mean for training, in one place: which carry gradients, and which replaces which.

Types are torch's, or their names without the prefix (``complex64``), as graphs have them. Nothing here needs torch itself.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar


class DType(Protocol):
    """The part of ``torch.dtype`` that is used here."""

    @property
    def is_complex(self) -> bool:
        """Whether it is a type of complex numbers."""

    def to_complex(self) -> Self:
        """The complex type whose real and imaginary parts are of this type."""

    def to_real(self) -> Self:
        """The type of a complex number's parts."""


Kind = TypeVar("Kind", bound=DType)

_INEXACT = ("float", "bfloat", "complex")
_STORED = ("float8", "float4")
"""Types to keep numbers in, which nothing computes in: none replaces them."""

TF32 = "tf32"
"""Float32 whose operands the tensor cores of GPUs round to 10 bits of mantissa. It is a way to compute, and no tensor has this type."""

COMPLEX_PRODUCT = 4
"""Number of real products in one complex product."""


def name_of(dtype: DType | str) -> str:
    """The name without prefix: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def is_differentiable(dtype: DType | str) -> bool:
    """Whether tensors of the type can carry a gradient: floating-point and complex numbers."""
    return name_of(dtype).startswith(_INEXACT)


def is_complex(dtype: DType | str) -> bool:
    """Whether it is a type of complex numbers."""
    return name_of(dtype).startswith("complex")


def has_complex(dtype: DType | str) -> bool:
    """Whether torch has complex numbers whose parts are of this floating-point type."""
    return name_of(dtype) in ("float32", "float64")


def replaced(own: Kind, by: Kind | None) -> Kind:
    """The type that stands for ``own`` where ``by`` replaces all floating-point types; ``own`` if ``by`` is None.

    Complex numbers get both parts in that type, so it must be one that ``has_complex``.
    """
    if by is None or not is_differentiable(own) or name_of(own).startswith(_STORED):
        return own
    return by.to_complex() if own.is_complex else by


def part_of(dtype: Kind) -> Kind:
    """The floating-point type to which the numbers, or both parts of complex numbers, are rounded."""
    return dtype.to_real() if dtype.is_complex else dtype
