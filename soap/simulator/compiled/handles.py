"""Handles: how compiled code receives the structures of this package: one pointer instead of dozens of arrays.

Python keeps a structure as a named tuple of arrays. ``handle`` makes the object that compiled functions take in its place; it shares the
arrays. To compiled code it is the address of a table, which has each array's address and shape (arrays are contiguous), and for a structure
inside the structure the address of its table. A structure's annotations say which arrays it has: types of their elements, and dimensions.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import numpy as np

Structure = TypeVar("Structure", bound=NamedTuple)


class Array(NamedTuple):
    """An array in a structure: its elements, and its dimensions."""

    dtype: np.dtype[Any]
    dimensions: int


class Layout(NamedTuple):
    """A structure as compiled code sees it. ``fields``: name -> (place in the table, an array or another structure)."""

    structure: Any
    fields: dict[str, tuple[int, Array | Layout]]


@cache
def layout_of(structure: Any) -> Layout:
    """The layout of a structure, by its annotations."""
    fields: dict[str, tuple[int, Array | Layout]] = {}
    place = 0
    for name, kind in get_type_hints(structure, localns=structures()).items():
        found = layout_of(kind) if hasattr(kind, "_fields") else _array_of(kind)
        fields[name] = (place, found)
        place += 1 if isinstance(found, Layout) else 1 + found.dimensions
    return Layout(structure, fields)


def structures() -> dict[str, type]:
    """By name, all structures of compiled code that are there: some name one another where modules cannot import one another."""
    return {own.__name__: own for own in tuple.__subclasses__() if hasattr(own, "_fields") and ".compiled." in own.__module__}


def _array_of(kind: Any) -> Array:
    shape, dtype = get_args(kind)
    return Array(np.dtype(get_args(dtype)[0]), 1 if Ellipsis in get_args(shape) else len(get_args(shape)))


class Handle:
    """A handle. It keeps alive all arrays that its table points to. ``layout``: see ``layout_of``."""

    address: int

    def __init__(self, structure: Any) -> None:
        self.layout = layout_of(cast(Hashable, type(structure)))
        words: list[int] = []
        self._kept: list[Any] = [structure]
        for value, (name, (_, kind)) in zip(structure, self.layout.fields.items(), strict=True):
            if isinstance(kind, Layout):
                inner = value if isinstance(value, Handle) else Handle(value)
                self._kept.append(inner)
                words.append(inner.address)
                continue
            if (value.dtype, value.ndim) != kind or not value.flags.c_contiguous:
                raise ValueError(
                    f"{name} of {type(structure).__name__} has {value.ndim} dimensions of {value.dtype}, or is not contiguous: expected "
                    f"{kind.dimensions} of {kind.dtype}, contiguous"
                )
            words += [value.ctypes.data, *value.shape]
        table = np.array(words, np.int64)
        self._kept.append(table)
        self.address = table.ctypes.data

    @property
    def _numba_type_(self) -> Any:
        """numba asks for it where compiled code gets the handle from Python by itself."""
        return import_module("soap.simulator.compiled.numba_types").handle_type(self.layout.structure)


def handle(structure: Structure) -> Structure:
    """The handle of a structure, parts of which may be handles already. To the type checker it is the structure itself, but only compiled
    code can read it."""
    return cast(Structure, Handle(structure))


def blank(structure: type[Structure]) -> Structure:
    """A structure of small arrays of zeros, for compiled code that does not use them."""
    make: Any = structure
    kinds = (kind for _, kind in layout_of(structure).fields.values())
    own = (blank(kind.structure) if isinstance(kind, Layout) else np.zeros((2,) * kind.dimensions, kind.dtype) for kind in kinds)
    return cast(Structure, make(*own))


def arrays_of(structure: Structure) -> Structure:
    """For compiled code: the named tuple of a handle's arrays. It keeps their addresses in registers for a loop that uses them in branches;
    from the handle such a loop would read them again in each turn."""
    raise NotImplementedError("only compiled code calls it")
