"""Which functions are compiled, and how: Python calls a few (``entry``), only compiled code calls the others (``compiled``).

They are compiled together, into one library (``machine_code``), by ``compiling``. Functions count no references; so they cannot make
arrays, which rules out ``sort`` and assignments to slices (see ``arrays``). They do not check for division by zero. Whole numbers are
passed as int64, whatever array they come from, so each function is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


class Compiled:
    """A function that only compiled code calls; numba compiles it for the types that its callers pass."""

    def __init__(self, function: Callable[..., Any], *, inline: bool = False) -> None:
        self.py_func, self._inline = function, inline
        update_wrapper(self, function)

    @cached_property
    def dispatcher(self) -> Any:
        """The function as numba has it."""
        from numba import njit  # takes half a second, and only who compiles needs it

        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "forceinline": self._inline}
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return njit(**options)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        """numba asks for it where a compiled function calls this one."""
        from soap.simulator.compiled.numba_types import Callee

        return Callee(self.dispatcher)

    def __call__(self, *arguments: Any) -> Any:
        """Only compiled code calls it. TypeError."""
        raise TypeError(f"{self.py_func.__qualname__} can only be called by compiled code")


def compiled(function: Function) -> Function:
    """For functions that only compiled code calls."""
    return cast(Function, Compiled(function))


def inlined(function: Function) -> Function:
    """``compiled``, and always inlined into the caller: for what a loop does in each turn."""
    return cast(Function, Compiled(function, inline=True))
