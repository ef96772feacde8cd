"""How this package's functions are compiled: Python calls a few (``entry``), only compiled code calls the others (``compiled``).

Three things keep compiling fast. Functions count no references; so they cannot make arrays, which rules out ``sort`` and assignments to
slices (see ``arrays``). They do not check for division by zero. Whole numbers are passed as int64, whatever array they come from, so each
function is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

from numba import typeof, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from soap import collector
from soap.simulator.compiled.claims import claimed
from soap.simulator.compiled.kept import KeptCode, MachineCode
from soap.simulator.compiled.parts import PartCompiler

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def entry(function: Function) -> Function:
    """For functions that Python calls: compiled at the first call; the machine code is kept on disk; other Python threads run meanwhile."""
    return cast(Function, _Entry(py_func=function, targetoptions=_OPTIONS))


def compile_unless_claimed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Compile an entry for arguments of these types and keep it on disk, unless another process is at it. Returns whether it is done."""
    assert isinstance(function, _Entry)
    return function.compile_unless_claimed(tuple(typeof(argument) for argument in arguments))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether an entry's machine code is on disk."""
    return isinstance(function, _Entry) and function.file.is_there


def is_entry(function: Callable[..., Any]) -> bool:
    """Whether Python calls it, so that its machine code is kept on disk."""
    return isinstance(function, _Entry)


def file_of(function: Callable[..., Any]) -> MachineCode:
    """An entry's machine code on disk."""
    assert isinstance(function, _Entry)
    return function.file


def compiled(function: Function) -> Function:
    """For functions that only compiled code calls: compiled as a part of their callers, for the types that these pass, with or without type
    hints. Python cannot call them."""
    return cast(Function, _Part(py_func=function, targetoptions=_OPTIONS | {"no_cpython_wrapper": True}, pipeline_class=PartCompiler))


def inlined(function: Function) -> Function:
    """``compiled``, and always inlined into the caller: for what a loop does in each turn."""
    options = _OPTIONS | {"no_cpython_wrapper": True, "forceinline": True}
    return cast(Function, _Part(py_func=function, targetoptions=options, pipeline_class=PartCompiler))


class _Dispatcher(CPUDispatcher):
    """A function, and its compiled versions by argument types."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The version that compiled code calls for these argument types; whole numbers count as int64."""
        return super().get_call_template([_wide(kind) for kind in args], {name: _wide(kind) for name, kind in kws.items()})


class _Entry(_Dispatcher):
    """A function that Python calls. ``file``: its machine code on disk."""

    file: MachineCode

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cache = KeptCode(self)
        self.file = self._cache.file

    def compile(self, sig: Any) -> Any:
        """Compile it, or load it; if another process compiles it, wait for that."""
        with global_compiler_lock, self._claimed(), collector.seldom():  # in this order also where a function asks for another
            return super().compile(sig)

    def compile_unless_claimed(self, sig: Any) -> bool:
        """``compile``, but False at once if another process compiles it."""
        with global_compiler_lock, self._claimed(wait=False) as own, collector.seldom():
            if own:
                super().compile(sig)
            return own

    def _claimed(self, *, wait: bool = True) -> AbstractContextManager[bool]:
        claim = self.file.claim
        return nullcontext(True) if claim is None else claimed(claim, wait=wait)


class _Part(_Dispatcher):
    """A function without machine code of its own."""

    def add_overload(self, cres: Any) -> None:
        """Register a version for compiled code only."""
        self.overloads[tuple(cres.signature.args)] = cres

    def _compile_for_args(self, *_arguments: Any, **_named: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} can only be called by compiled code")


def _wide(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) else kind
