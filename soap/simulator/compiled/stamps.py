"""Stamps that tell whether machine code on disk is still that of its function.

numba checks only the function's own file. But everything that the function calls is compiled into it, and so are the values of constants
from any module.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from numba.core.registry import CPUDispatcher

CONSTANTS = (bool, int, float, complex, str, bytes, tuple, type(None), np.generic)
"""Types of constants that compiled code may take from modules; their values are compiled in. It may also use compiled functions, and what
numpy, math and Python itself have."""


@cache
def stamp(function: CPUDispatcher) -> str:
    """A hash of everything that is compiled into a function: the sources of compiled code, and the values of the constants that the
    function and everything it calls take from any module."""
    digest = hashlib.sha256(_sources())
    for called in _all_called(function):
        digest.update(repr((called.py_func.__qualname__, _known_constants(called))).encode())
        if Path(called.py_func.__code__.co_filename) not in _files():
            digest.update(Path(called.py_func.__code__.co_filename).read_bytes())
    return digest.hexdigest()


@cache
def _files() -> frozenset[Path]:
    return frozenset(Path(__file__).parents[2].glob("*/compiled/**/*.py"))


@cache
def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(_files()))


def _all_called(function: CPUDispatcher) -> list[CPUDispatcher]:
    """A compiled function and everything that it calls, directly or not, each once."""
    found = {function: None}
    todo = [function]
    while todo:
        for called in _used(todo.pop())[1]:
            if called not in found:
                found[called] = None
                todo.append(called)
    return list(found)


def _known_constants(function: CPUDispatcher) -> tuple[tuple[str, Any], ...]:
    return _used(function)[0]


@cache
def _used(function: CPUDispatcher) -> tuple[tuple[tuple[str, Any], ...], tuple[CPUDispatcher, ...]]:
    """(constants with their names, compiled functions) that a function takes from its module, from defaults of its arguments, or from an
    enclosing function. A name that occurs only as an attribute counts as well if its module has that name."""
    python = function.py_func
    known = python.__globals__
    taken = [(name, known[name]) for name in _names(python.__code__) if name in known]
    taken += [("default", value) for value in python.__defaults__ or ()]
    taken += zip(python.__code__.co_freevars, (cell.cell_contents for cell in python.__closure__ or ()), strict=True)
    constants = tuple((name, value) for name, value in taken if isinstance(value, CONSTANTS))
    return constants, tuple(value for _, value in taken if isinstance(value, CPUDispatcher))


def _names(code: CodeType) -> tuple[str, ...]:
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part))
    return (*code.co_names, *inner)
