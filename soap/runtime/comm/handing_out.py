"""What rank 0 works out for all ranks, handed out to each."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from soap.errors import SoapError, StoppedBySignal


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
    received: list[Any] = [None]
    dist.scatter_object_list(received, given, src=0)
    error, own = received[0] if given is None else given[0]
    if error is not None:
        raise error
    shared = [alike]
    dist.broadcast_object_list(shared, src=0)
    return shared[0], own


class _Packing(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(value): name for name, value in known.items()}

    def persistent_id(self, value: object) -> str | None:
        return self._names.get(id(value))


class _Unpacking(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, name: str) -> object:
        return self._known[name]


def packed(value: object, known: Mapping[str, object]) -> bytes:
    """A value as bytes. ``known``: objects in it that every rank has, by name: only the name is written."""
    file = io.BytesIO()
    _Packing(file, known).dump(value)
    return file.getvalue()


def unpacked(data: bytes, known: Mapping[str, object]) -> Any:
    """The value, with this rank's own objects in place of those that are ``known``. From ranks of the same run only: it is a pickle."""
    return _Unpacking(io.BytesIO(data), known).load()
