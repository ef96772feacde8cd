"""Handles: the structures of this package as compiled code receives them, one pointer instead of dozens of arrays.

Python keeps a structure as a named tuple of arrays; ``handle`` gives what compiled functions take for it, which shares the arrays. (Passing
tuples of so many arrays would cost microseconds per call, and minutes to compile.)
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

from numba import types
from numba.core import cgutils
from numba.experimental import structref
from numba.extending import intrinsic

from soap.simulator.compiled.jit import compiled

Structure = TypeVar("Structure", bound=NamedTuple)


class _Proxy(structref.StructRefProxy):
    """Made by compiled code alone."""

    def __new__(cls, *args: Any) -> Any:
        return structref.StructRefProxy.__new__(cls, *args)


class GraphHandle(_Proxy):
    """Of ``tables.GraphTables``."""


class ClusterHandle(_Proxy):
    """Of ``tables.ClusterTables``."""


class VariantHandle(_Proxy):
    """Of ``variants.VariantTables``."""


class ShardHandle(_Proxy):
    """Of ``state.ShardTables``."""


class ListsHandle(_Proxy):
    """Of ``state.Lists``."""


class GroupsHandle(_Proxy):
    """Of ``state.Groups``."""


class StateHandle(_Proxy):
    """Of ``state.State``."""


class ScratchHandle(_Proxy):
    """Of ``scratch.Scratch``."""


class TrialHandle(_Proxy):
    """Of ``events.Trial``."""


class UndoHandle(_Proxy):
    """Of ``change.Undo``."""


class HistoryHandle(_Proxy):
    """Of ``history.History``."""


class ChoicesHandle(_Proxy):
    """Of ``walk.Choices``."""


@structref.register
class GraphType(types.StructRef):
    """Of ``GraphHandle``."""


@structref.register
class ClusterType(types.StructRef):
    """Of ``ClusterHandle``."""


@structref.register
class VariantType(types.StructRef):
    """Of ``VariantHandle``."""


@structref.register
class ShardType(types.StructRef):
    """Of ``ShardHandle``."""


@structref.register
class ListsType(types.StructRef):
    """Of ``ListsHandle``."""


@structref.register
class GroupsType(types.StructRef):
    """Of ``GroupsHandle``."""


@structref.register
class StateType(types.StructRef):
    """Of ``StateHandle``."""


@structref.register
class ScratchType(types.StructRef):
    """Of ``ScratchHandle``."""


@structref.register
class TrialType(types.StructRef):
    """Of ``TrialHandle``."""


@structref.register
class UndoType(types.StructRef):
    """Of ``UndoHandle``."""


@structref.register
class HistoryType(types.StructRef):
    """Of ``HistoryHandle``."""


@structref.register
class ChoicesType(types.StructRef):
    """Of ``ChoicesHandle``."""


def _borrow(typing_context, arrays):  # type: ignore[no-untyped-def]
    """The arrays of a tuple without reference counts, which would go up and down (atomically) at every access. Python keeps the arrays."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        (kinds,) = signature.args
        made = []
        for kind, value in zip(kinds, cgutils.unpack_tuple(builder, arguments[0]), strict=True):
            if isinstance(kind, types.Array):
                array = context.make_array(kind)(context, builder, value=value)
                array.meminfo = cgutils.get_null_value(array.meminfo.type)
                array.parent = cgutils.get_null_value(array.parent.type)
                made.append(array._getvalue())
            else:
                context.nrt.incref(builder, kind, value)
                made.append(value)
        return context.make_tuple(builder, signature.return_type, made)

    return arrays(arrays), generate


_borrowed: Any = intrinsic(_borrow)
"""``_borrow``, as compiled code calls it: without the first argument."""


@compiled
def _graph(arrays):  # type: ignore[no-untyped-def]
    return GraphHandle(*_borrowed(arrays))


@compiled
def _cluster(arrays):  # type: ignore[no-untyped-def]
    return ClusterHandle(*_borrowed(arrays))


@compiled
def _variants(arrays):  # type: ignore[no-untyped-def]
    return VariantHandle(*_borrowed(arrays))


@compiled
def _shards(arrays):  # type: ignore[no-untyped-def]
    return ShardHandle(*_borrowed(arrays))


@compiled
def _lists(arrays):  # type: ignore[no-untyped-def]
    return ListsHandle(*_borrowed(arrays))


@compiled
def _groups(arrays):  # type: ignore[no-untyped-def]
    return GroupsHandle(*_borrowed(arrays))


@compiled
def _state(arrays):  # type: ignore[no-untyped-def]
    return StateHandle(*_borrowed(arrays))


@compiled
def _scratch(arrays):  # type: ignore[no-untyped-def]
    return ScratchHandle(*_borrowed(arrays))


@compiled
def _trial(arrays):  # type: ignore[no-untyped-def]
    return TrialHandle(*_borrowed(arrays))


@compiled
def _undo(arrays):  # type: ignore[no-untyped-def]
    return UndoHandle(*_borrowed(arrays))


@compiled
def _history(arrays):  # type: ignore[no-untyped-def]
    return HistoryHandle(*_borrowed(arrays))


@compiled
def _choices(arrays):  # type: ignore[no-untyped-def]
    return ChoicesHandle(*_borrowed(arrays))


_KINDS = {
    "GraphTables": (GraphHandle, GraphType, _graph),
    "ClusterTables": (ClusterHandle, ClusterType, _cluster),
    "VariantTables": (VariantHandle, VariantType, _variants),
    "ShardTables": (ShardHandle, ShardType, _shards),
    "Lists": (ListsHandle, ListsType, _lists),
    "Groups": (GroupsHandle, GroupsType, _groups),
    "State": (StateHandle, StateType, _state),
    "Scratch": (ScratchHandle, ScratchType, _scratch),
    "Trial": (TrialHandle, TrialType, _trial),
    "Undo": (UndoHandle, UndoType, _undo),
    "History": (HistoryHandle, HistoryType, _history),
    "Choices": (ChoicesHandle, ChoicesType, _choices),
}


def declare(kind: type[Structure]) -> type[Structure]:
    """Class decorator of a named tuple: makes its handle known to compiled code."""
    proxy, struct, _ = _KINDS[kind.__name__]
    structref.define_constructor(proxy, struct, list(kind._fields))
    structref.define_boxing(struct, proxy)
    return kind


def handle(structure: Structure) -> Structure:
    """What compiled functions take for a structure. To the type checker it is the structure itself; only compiled code can read it."""
    made = _KINDS[type(structure).__name__][2](tuple(handle(cast(Any, x)) if isinstance(x, tuple) else x for x in structure))
    return cast(Structure, made)
