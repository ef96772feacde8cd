"""How this package's functions are compiled: few are called from Python, all others from compiled code alone.

Compiling all of it took more than a minute until these functions were made cheap to compile. So they count no references (which forbids
making arrays, and with it ``sort`` and assignments to slices: see ``arrays``), and do not check for divisions by zero. Whole numbers are
handed over as int64, whatever array they come from: one version of each function is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numba import types
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import CPUDispatcher

from soap.simulator.compiled.parts import PartCompiler
from soap.simulator.compiled.stamps import stamp

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def entry(function: Function) -> Function:
    """Compile what Python calls when it is first called, keep the machine code on disk, and let other threads of Python run meanwhile."""
    made = _Dispatcher(py_func=function, targetoptions=_OPTIONS)
    with suppress(RuntimeError):  # nowhere to write: it is compiled again in every process
        made.enable_caching()
        cache = vars(made)["_cache"]
        cache._cache_file = _MachineCode(made, cache.cache_path, cache._impl.filename_base)
    return cast(Function, made)


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether an entry's machine code is on disk."""
    file = getattr(getattr(function, "_cache", None), "_cache_file", None)
    return isinstance(file, _MachineCode) and bool(file._load_index())


def compiled(function: Function) -> Function:
    """Compile what compiled code calls, as a part of that; Python cannot call it. Structures and arrays need no type hints in it: it is
    compiled for what its callers hand in."""
    return cast(Function, _Part(py_func=function, targetoptions=_OPTIONS | {"no_cpython_wrapper": True}, pipeline_class=PartCompiler))


def inlined(function: Function) -> Function:
    """``compiled``, and a part of its caller's machine code: for what a loop does in each turn."""
    options = _OPTIONS | {"no_cpython_wrapper": True, "forceinline": True}
    return cast(Function, _Part(py_func=function, targetoptions=options, pipeline_class=PartCompiler))


class _Dispatcher(CPUDispatcher):
    """A function, and its versions by types of arguments."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Which version compiled code calls with arguments of such types."""
        return super().get_call_template([_wide(kind) for kind in args], {name: _wide(kind) for name, kind in kws.items()})


class _Part(_Dispatcher):
    """A function without machine code of its own."""

    def add_overload(self, cres: Any) -> None:
        """For compiled code alone."""
        self.overloads[tuple(cres.signature.args)] = cres

    def _compile_for_args(self, *_arguments: Any, **_named: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} can only be called by compiled code")


def _wide(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) else kind


class _MachineCode(IndexDataCacheFile):
    """An entry's machine code on disk. Its ``stamp`` is asked for at the first call, when all modules are loaded."""

    def __init__(self, function: CPUDispatcher, cache_path: str, filename_base: str) -> None:
        self._function = function
        super().__init__(cache_path, filename_base, None)

    @property
    def _source_stamp(self) -> str:
        return stamp(self._function)

    @_source_stamp.setter
    def _source_stamp(self, value: object) -> None:
        """numba's own is of the entry's file alone."""
