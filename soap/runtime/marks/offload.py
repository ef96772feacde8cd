"""What autograd keeps for the tiles of offloading operators, in the host's memory between their passes
(``plan.marks.offload``).

Autograd's nodes hold what they have saved, and nobody can give them something else to hold from outside; to empty a tensor's memory would
empty it for all who read it. So while such a tile computes, hooks for saved tensors (``torch.autograd.graph.saved_tensors_hooks``) are in
force, on this thread alone. Nodes then hold handles. What a handle stands for is gone when its node has run.

On a GPU the host's memory is pinned, and copies in each direction run on a stream of their own. A rank that is a CPU makes the same copies
in its own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from soap.model.graph import Operator
from soap.plan.marks.offload import AWAY, BACK
from soap.plan.plan import tile_task_name
from soap.plan.tiling import Tile
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.marks.seam import OnRank, Timed
from soap.runtime.program.program import Program
from soap.simulator.tasks import TaskKind


class _Copy:
    """Bytes of one tensor, or of several that share memory. ``here``: on the device; None while they are on the host alone. ``away``: when
    the copy to the host is complete, ``back``: when the copy back is; None on CPUs, which wait."""

    __slots__ = ("__weakref__", "away", "back", "here", "host")

    def __init__(self, here: torch.Tensor) -> None:
        self.here: torch.Tensor | None = here
        self.host: torch.Tensor | None = None
        self.away: torch.cuda.Event | None = None
        self.back: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """Where a tensor is in a copy."""

    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Handle:
    """What an autograd node holds in place of a tensor that it has saved. ``tensor``: until the tile has computed."""

    __slots__ = ("copy", "tensor", "tile", "view")

    def __init__(self, tile: int, tensor: torch.Tensor) -> None:
        self.tile, self.tensor = tile, tensor
        self.copy: _Copy | None = None
        self.view: _View | None = None


class KeptOnHost(OnRank):
    """What a rank's tiles have offloaded."""

    def __init__(self, program: Program, comm: Communicator) -> None:
        self._plan, self._comm, self._device = program.plan, comm, comm.device
        self._first = program.come_back_with
        self._with: dict[int, list[int]] = {}
        for tile in sorted(self._first, reverse=True):  # those that the backward pass meets first come first
            self._with.setdefault(self._first[tile], []).append(tile)
        self._copies: dict[int, list[weakref.ref[_Copy]]] = {}
        self._pinned: dict[tuple[int, int], torch.Tensor] = {}
        streams = 2 if self._first and self._device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(self._device) for _ in range(streams)]  # type: ignore[no-untyped-call]

    @contextmanager
    def running(self, tile: int, stays: Iterable[torch.Tensor], timed: Timed) -> Iterator[None]:
        """While a tile computes: what autograd saves is copied to the host at the end, unless it shares memory with ``stays``."""
        places = {tensor.untyped_storage().data_ptr() for tensor in stays if tensor.numel()}
        saved: list[_Handle] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Handle:
            own = tensor.detach()
            plain = own.layout is torch.strided and own.device.type == self._device.type
            if not plain or not own.numel() or own.untyped_storage().data_ptr() in places:
                return own
            saved.append(_Handle(tile, own.resolve_conj().resolve_neg()))
            return saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        with timed(tile_task_name(AWAY.verb, *self._named(tile)), TaskKind.COPY):
            self._to_host(tile, saved)

    def goes_back(self, tile: int, timed: Timed | None = None) -> None:
        """Start to copy back what comes back with a tile, unless it is back already. ``timed``: times each tile's copy."""
        for own in self._with.get(self._first.get(tile, -1), ()):
            copies = [copy for ref in self._copies.pop(own, ()) if (copy := ref()) is not None]
            with nullcontext() if timed is None else timed(tile_task_name(BACK.verb, *self._named(own)), TaskKind.COPY):
                for copy in copies:
                    self._from_host(copy)

    @torch.no_grad()
    def _to_host(self, tile: int, saved: Sequence[_Handle]) -> None:
        """Copy what a tile's handles stand for; the device may use its memory again when that is done."""
        by_memory: dict[int, list[_Handle]] = {}
        for handle in saved:
            by_memory.setdefault(handle.tensor.untyped_storage().data_ptr(), []).append(handle)
        copies = [copy for handles in by_memory.values() for copy in _copies_of(handles)]
        if self._streams and copies:
            self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
        for number, copy in enumerate(copies):
            assert copy.here is not None
            copy.host = self._room(tile, number, copy.here.numel())
            self._comm.traffic.offloaded_bytes += copy.host.nbytes
            if not self._streams:
                copy.host.copy_(copy.here)
            else:
                with torch.cuda.stream(self._streams[0]):
                    copy.host.copy_(copy.here, non_blocking=True)
                    copy.away = self._streams[0].record_event()
                copy.here.record_stream(self._streams[0])
            copy.here = None
        self._copies[tile] = [weakref.ref(copy) for copy in copies]

    @torch.no_grad()
    def _from_host(self, copy: _Copy) -> None:
        """Start to copy bytes back. Their memory is the present stream's, which frees it in its own order."""
        assert copy.host is not None
        copy.here = torch.empty(copy.host.numel(), dtype=torch.uint8, device=self._device)
        self._comm.traffic.restored_bytes += copy.host.nbytes
        if not self._streams:
            copy.here.copy_(copy.host)
            copy.host = None
            return
        assert copy.away is not None
        stream = self._streams[1]
        stream.wait_stream(torch.cuda.current_stream(self._device))  # what used this memory before has run
        stream.wait_event(copy.away)
        with torch.cuda.stream(stream):
            copy.here.copy_(copy.host, non_blocking=True)
            copy.back = stream.record_event()
        copy.here.record_stream(stream)

    def _unpack(self, kept: torch.Tensor | _Handle) -> torch.Tensor:
        """The tensor that a node has saved."""
        if isinstance(kept, torch.Tensor):
            return kept
        copy, view = kept.copy, kept.view
        if copy is None or view is None:  # it is asked for while the tile still computes
            return kept.tensor
        if copy.here is None:
            self.goes_back(kept.tile)
        if copy.here is None:  # of a tile that has run once more since
            self._from_host(copy)
        assert copy.here is not None
        if copy.back is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.back)
        place = view.offset_bytes // view.dtype.itemsize
        return _tensor(copy.here, view.dtype, place, view.shape, view.stride)

    def _room(self, tile: int, number: int, size: int) -> torch.Tensor:
        """Memory of the host; pinned memory is kept for the next step, unless somebody still waits for what is in it."""
        if not self._streams:
            return torch.empty(size, dtype=torch.uint8)
        if any(ref() is not None for ref in self._copies.get(tile, ())):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        own = self._pinned.get((tile, number))
        if own is None or own.numel() != size:
            own = self._pinned[tile, number] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return own

    def _named(self, tile: int) -> tuple[Operator, Tile]:
        return self._plan.operator(self._plan.tiles[tile]), self._plan.tiles[tile]


def _copies_of(handles: Sequence[_Handle]) -> list[_Copy]:
    """Copies of what these handles stand for, in one memory: of the part that they span, or of each, as is fewer bytes."""
    views = {_view_of(handle.tensor): handle.tensor for handle in handles}
    widest = max(view.dtype.itemsize for view in views)
    start = min(view.offset_bytes for view in views) // widest * widest
    end = max(view.offset_bytes + _span_bytes(view) for view in views)
    found: dict[_View, tuple[_Copy, _View]] = {}
    if end - start <= sum(tensor.numel() * tensor.dtype.itemsize for tensor in views.values()):
        any_tensor = handles[0].tensor
        together = _Copy(_tensor(any_tensor, torch.uint8, start, (end - start,), (1,)))
        for view in views:
            found[view] = together, _View(view.offset_bytes - start, view.dtype, view.shape, view.stride)
    else:
        for view, tensor in views.items():
            alone = tensor.contiguous()
            here = _tensor(alone, torch.uint8, _offset_bytes(alone), (alone.nbytes,), (1,))
            found[view] = _Copy(here), _View(0, view.dtype, view.shape, alone.stride())
    for handle in handles:
        handle.copy, handle.view = found[_view_of(handle.tensor)]
    for handle in handles:
        del handle.tensor
    return list(dict.fromkeys(copy for copy, _ in found.values()))


def _view_of(tensor: torch.Tensor) -> _View:
    return _View(_offset_bytes(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _span_bytes(view: _View) -> int:
    """Bytes from its first element to the end of its last one."""
    steps = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    return (steps + 1) * view.dtype.itemsize


def _tensor(
    memory: torch.Tensor, dtype: torch.dtype, place: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A tensor in the memory of another one. ``place``: in elements of its own type."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), place, shape, stride)
