"""Handles and functions as numba sees them. A handle is an address, behind which each field is looked up; tables never change, which the
compiler is told, so it looks things up once per loop. Imported only by whoever compiles."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import from_dtype, types
from numba.extending import NativeValue, intrinsic, lower_getattr_generic, models, overload, register_model, unbox

from soap.simulator.compiled.handles import Array, Layout, arrays_of, layout_of


class HandleType(types.Record):
    """The type of a handle: as a record it has fields with types, but the handle is the address of a table of their addresses."""

    def __init__(self, layout: Layout) -> None:
        self.structure = layout.structure
        self.fields: dict[str, Any] = {name: (place, _type_of(kind)) for name, (place, kind) in layout.fields.items()}
        types.Type.__init__(self, f"{layout.structure.__name__}{[(name, str(kind)) for name, (_, kind) in self.fields.items()]}")

    def __repr__(self) -> str:
        return str(self.name)

    def typeof(self, key: str) -> Any:
        """The type of a field."""
        return self.fields[key][1]


def _type_of(kind: Array | Layout) -> Any:
    return handle_type(kind.structure) if isinstance(kind, Layout) else types.Array(from_dtype(kind.dtype), kind.dimensions, "C")


@cache
def handle_type(structure: Any) -> HandleType:
    """The type of handles of a structure."""
    return HandleType(layout_of(structure))


class Callee(types.Dispatcher):
    """The type of a function that compiled code calls: whole numbers are passed to it as int64."""

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        """Its signature for arguments of these types."""
        return super().get_call_type(context, tuple(map(_wide, args)), {name: _wide(kind) for name, kind in kws.items()})


def _wide(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) else kind


register_model(HandleType)(models.OpaqueModel)
register_model(Callee)(models.OpaqueModel)


@unbox(HandleType)
def _receive(kind, value, context):  # type: ignore[no-untyped-def]
    """From Python's object to the table's address."""
    number = context.pyapi.object_getattr_string(value, "address")
    address = context.pyapi.long_as_voidptr(number)
    context.pyapi.decref(number)
    return NativeValue(address)


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
    count = shape[0]
    for size in shape[1:]:
        count = builder.mul(count, size)
    array.meminfo, array.parent = array.meminfo.type(None), array.parent.type(None)
    array.data, array.itemsize, array.nitems = word(place, array.data.type), integer(item_bytes), count
    array.shape, array.strides = _packed(builder, shape), _packed(builder, strides)
    return array._getvalue()


def _packed(builder, numbers):  # type: ignore[no-untyped-def]
    made = ir.ArrayType(numbers[0].type, len(numbers))(ir.Undefined)
    for i, number in enumerate(numbers):
        made = builder.insert_value(made, number, i)
    return made


@intrinsic
def _arrays(_context, kind):  # type: ignore[no-untyped-def]
    made = types.NamedTuple([field for _, field in kind.fields.values()], kind.structure)

    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        values = [_look_up(context, builder, kind, arguments[0], name) for name in kind.fields]
        return context.make_tuple(builder, made, values)

    return made(kind), generate


@overload(arrays_of, inline="always")
def _arrays_of(structure):  # type: ignore[no-untyped-def]
    def arrays(structure):  # type: ignore[no-untyped-def]
        return _arrays(structure)  # type: ignore[call-arg]

    return arrays
