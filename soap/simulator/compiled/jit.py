"""How this package's functions are compiled: one decorator, whatever the type hints of the installed numba.

Functions inside of a file take structures and arrays without type hints: they are compiled for what their callers, which have them,
hand in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile when first called, keep the machine code on disk, and let other threads of Python run meanwhile."""
    return cast(Function, njit(cache=True, nogil=True)(function))


def uncounted(function: Function) -> Function:
    """The same for functions of plain arrays and numbers that make no arrays: without reference counts, which cost more than short
    loops."""
    return cast(Function, njit(cache=True, nogil=True, _nrt=False)(function))  # type: ignore[call-overload]
