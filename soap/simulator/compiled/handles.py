"""Handles: how compiled code receives the structures of this package: one pointer instead of dozens of arrays.

Python keeps a structure as a named tuple of arrays. ``handle`` makes the object that compiled functions take in its place; it shares the
arrays. To compiled code it is the address of a table, which has each array's address and shape (arrays are contiguous), and for a structure
inside the structure the address of its table. Tables never change; the compiler is told so, and looks things up once per loop. Passing
tuples of so many arrays would cost microseconds per call; such tuples, and numba's own mutable structures, take minutes to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import from_dtype, types
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import NativeValue, infer_getattr, intrinsic, lower_getattr_generic, register_model, unbox
from numba.np.arrayobj import populate_array

Structure = TypeVar("Structure", bound=NamedTuple)


class HandleType(types.Type):
    """The type of a handle for the compiler. ``structure``: the named tuple. ``fields``: name -> (place in the table, type)."""

    def __init__(self, structure: type, layout: tuple[tuple[str, Any], ...]) -> None:
        self.structure, name = structure, structure.__name__
        self.fields: dict[str, tuple[int, Any]] = {}
        place = 0
        for field, kind in layout:
            self.fields[field] = (place, kind)
            place += 1 if isinstance(kind, HandleType) else 1 + kind.ndim
        self._described = f"{name}{[(field, kind.key) for field, kind in layout]}"
        super().__init__(name)

    @property
    def key(self) -> str:
        """Identifies the type: code that was compiled for other fields is not used."""
        return self._described


_array_type = cache(lambda kind, dimensions: types.Array(from_dtype(kind), dimensions, "C"))
_handle_type = cache(HandleType)


class _Handle:
    """A handle. It keeps alive all arrays that its table points to. numba looks for its type under the name ``_numba_type_``."""

    address: int
    _numba_type_: HandleType

    def __init__(self, structure: Any) -> None:
        layout: list[tuple[str, Any]] = []
        words: list[int] = []
        self._kept: list[Any] = [structure]
        for name, value in zip(structure._fields, structure, strict=True):
            if isinstance(value, (tuple, _Handle)):
                inner = value if isinstance(value, _Handle) else _Handle(value)
                self._kept.append(inner)
                layout.append((name, inner._numba_type_))
                words.append(inner.address)
                continue
            if not value.flags.c_contiguous:
                raise ValueError(f"{name} of {type(structure).__name__} is not contiguous")
            layout.append((name, _array_type(value.dtype, value.ndim)))
            words += [value.ctypes.data, *value.shape]
        table = np.array(words, np.int64)
        self._kept.append(table)
        self.address = table.ctypes.data
        self._numba_type_ = _handle_type(cast(Hashable, type(structure)), tuple(layout))


def handle(structure: Structure) -> Structure:
    """The handle of a structure, parts of which may be handles already. To the type checker it is the structure itself, but only compiled
    code can read it."""
    return cast(Structure, _Handle(structure))


register_model(HandleType)(models.OpaqueModel)


@unbox(HandleType)
def _receive(kind, value, context):  # type: ignore[no-untyped-def]
    """From Python's object to the table's address."""
    number = context.pyapi.object_getattr_string(value, "address")
    address = context.pyapi.long_as_voidptr(number)
    context.pyapi.decref(number)
    return NativeValue(address)


@infer_getattr
class _Fields(AttributeTemplate):
    """Types of a structure's fields."""

    key = HandleType

    def generic_resolve(self, kind, name):  # type: ignore[no-untyped-def,override]
        return kind.fields[name][1] if name in kind.fields else None


@lower_getattr_generic(HandleType)
def _look_up(context, builder, kind, table, name):  # type: ignore[no-untyped-def]
    """A field: its address in the table, and its shape, which follows there."""
    place, field = kind.fields[name]
    integer = context.get_value_type(types.intp)
    words = builder.bitcast(table, integer.as_pointer())

    def word(number, kind):  # type: ignore[no-untyped-def]
        address = builder.gep(words, [integer(number)])
        found = builder.load(builder.bitcast(address, kind.as_pointer()))
        found.set_metadata("invariant.load", builder.module.add_metadata([]))
        return found

    if isinstance(field, HandleType):
        return word(place, context.get_value_type(field))
    array = context.make_array(field)(context, builder)
    item_bytes = field.dtype.bitwidth // 8
    shape = [word(place + 1 + i, integer) for i in range(field.ndim)]
    strides = [integer(item_bytes)]
    for size in shape[:0:-1]:
        strides.insert(0, builder.mul(size, strides[0]))
    populate_array(array, data=word(place, array.data.type), shape=shape, strides=strides, itemsize=item_bytes, meminfo=None)
    return array._getvalue()


@intrinsic
def _arrays_of(_context, kind):  # type: ignore[no-untyped-def]
    made = types.BaseTuple.from_types([field for _, field in kind.fields.values()], kind.structure)

    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        values = [_look_up(context, builder, kind, arguments[0], name) for name in kind.fields]
        return context.make_tuple(builder, made, values)

    return made(kind), generate


arrays_of: Callable[[Structure], Structure] = cast(Any, _arrays_of)
"""For compiled code: the named tuple of a handle's arrays. It keeps their addresses in registers for a loop that uses them in branches;
from the handle such a loop would read them again in each turn."""
