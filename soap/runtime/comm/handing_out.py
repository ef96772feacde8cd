"""What rank 0 works out for all ranks, handed out to each."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch.distributed as dist

from soap.errors import SoapError, StoppedBySignal
from soap.runtime.comm import signs

T = TypeVar("T")


def from_first(make: Callable[[], T]) -> T:
    """What ``make`` gives on rank 0, on all ranks; what it raises of ours is raised on all of them. Called on all ranks at once."""
    held: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            held[0] = make()
        except SoapError as failure:
            held[0] = failure
    signs.meet()  # making it may take longer than a collective waits
    dist.broadcast_object_list(held, 0)
    if isinstance(held[0], SoapError):
        raise held[0]
    found: T = held[0]
    return found


def hand_out(rank: int, ranks: int, make: Callable[[], Iterable[bytes]]) -> tuple[bytes, bytes]:
    """What rank 0's ``make`` has for all ranks alike, and what it has for this rank: it gives the former first, then one value for each
    rank, in their order. Called on all ranks at once; what it raises of ours is raised on all of them. It travels as objects do in
    ``torch.distributed``, between the ranks of one run."""
    given: list[Any] | None = None
    alike = b""
    if rank == 0:
        try:
            alike, *every = make()
            given = [(None, own) for own in every]
        except StoppedBySignal:
            raise
        except SoapError as failure:
            given = [(failure, b"")] * ranks
    signs.meet()  # making it may take longer than a collective waits
    received: list[Any] = [None]
    dist.scatter_object_list(received, given, src=0)
    error, own = received[0] if given is None else given[0]
    if error is not None:
        raise error
    shared = [alike]
    dist.broadcast_object_list(shared, src=0)
    return shared[0], own


class _Ways(dict[type, Callable[[Any], Any]]):
    """How to write objects of a type, for a pickler, which asks with every object that is no plain value or container: so known objects are
    none of these. Of dataclasses with slots it would ask ``fields`` for each object; here they are made anew from their fields' values."""

    def __init__(self, known: Mapping[str, object]) -> None:
        super().__init__(copyreg.dispatch_table)
        names = {id(value): name for name, value in known.items()}

        def by_name(value: object) -> Any:
            name = names.get(id(value))
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if name is None else (_known, (name,))

        self.update({type(value): by_name for value in known.values()})

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        own = fields(kind) if is_dataclass(kind) and "__slots__" in vars(kind) else ()
        if len(own) < 2 or not all(field.init for field in own):
            raise KeyError(kind)  # the pickler's own way
        values = attrgetter(*(field.name for field in own))
        self[kind] = way = lambda value: (kind, values(value))
        return way


def _known(name: str) -> object:
    """Stands for a known object where it is written; ``_Unpacking`` puts it in."""
    raise NotImplementedError(name)


class _Unpacking(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        return self._known.__getitem__ if (module, name) == (__name__, _known.__name__) else super().find_class(module, name)


def packed(value: object, known: Mapping[str, object]) -> bytes:
    """A value as bytes. ``known``: objects of our classes in it that every rank has, by name: only the name is written."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _Ways(known)
    pickler.dump(value)
    return file.getvalue()


def unpacked(data: bytes, known: Mapping[str, object]) -> Any:
    """The value, with this rank's own objects in place of those that are ``known``. From ranks of the same run only: it is a pickle."""
    return _Unpacking(io.BytesIO(data), known).load()
