"""Snapshots of partitions: what they are at some version, in a file, so that a log need not be read back from its beginning. A file is
`header | encoded message | checksum`. Two are kept, and the log from the older one on, so that a damaged newest one loses nothing.

One partition at its server: values, the optimizer's state, how many pushes it has counted and of which leases.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.layout import Partition
from soap.elastic.leases import Ledger, Steps
from soap.elastic.messages import Array, Kind, Message, decode, encode, size_bytes
from soap.errors import SoapWarning, first_line
from soap.files import synchronize_folder, write_parts_atomically
from soap.runtime.sync.row_update import RowGradient, Updater, add_up
from soap.runtime.updates.optimizers import OptimizerFactory, Recipe
from soap.runtime.updates.trial import try_optimizer

Gradient = RowGradient | Tensor
"""Of some rows, or of the whole cell. Rows count from the cell's first."""


class TooOld(ElasticError):
    """A version was asked for that is not there yet; the caller waits. ``version``: the one that is."""

    def __init__(self, partition: str, least: int, version: int) -> None:
        super().__init__(f"partition {partition!r} is at version {version}; expected at least {least}: ask again when more has been pushed")
        self.version = version


@dataclass(frozen=True)
class ShardState:
    """All that a partition is. ``optimizer``: the state that the optimizer keeps for it, tensors and numbers by key. ``pending``: by lease,
    the gradients of a step that are counted, but not in the values yet."""

    version: int
    counted: Ledger
    values: Tensor
    optimizer: Mapping[str, Any]
    pending: Mapping[int, Gradient] = field(default_factory=dict)


class Shard:
    """A partition's values, updated by one optimizer step for each push.

    With ``steps`` an update is that of a whole step: the sum of its leases' gradients, in their order, whoever pushed first. It is made
    when a later step reads (``bring_to``), so that all of a step read the same values, even those whose lease is dealt again.

    Whoever calls it holds ``lock``. ``version``: pushes that are counted. ``counted``: their leases. With ``lazy`` an update changes the
    rows that have a gradient alone, whatever the optimizer; else rows without one are left out only where a zero gradient changes nothing.
    """

    def __init__(
        self, partition: Partition, values: Tensor, make: OptimizerFactory, *, lazy: bool = False, steps: Steps | None = None
    ) -> None:
        if tuple(values.shape) != partition.cell:
            raise ElasticError(f"values of {partition.name!r} have shape {list(values.shape)}; expected {list(partition.cell)}")
        self.partition, self.lock = partition, threading.Lock()
        self.values = values.detach().clone(memory_format=torch.contiguous_format)
        self.version, self.counted = 0, Ledger()
        self.steps, self.pending = steps, dict[int, Gradient]()
        self.optimizer = make([self.values])
        self._updater = Updater(self.optimizer, {0: self.values}, {0: (partition.name, tuple((0, size) for size in partition.cell))}, lazy)

    def checked(self, gradient: Gradient) -> Gradient:
        """The gradient, if it can be applied. ElasticError in one line otherwise: a log must not hold what cannot be done again."""
        if isinstance(gradient, RowGradient):
            self._check_rows(gradient.rows)
            expected, found = (len(gradient.rows), *self.partition.cell[1:]), gradient.values
        else:
            expected, found = self.partition.cell, gradient
        if tuple(found.shape) != expected or found.dtype is not self.values.dtype:
            raise ElasticError(
                f"gradient {str(found.dtype).removeprefix('torch.')}{list(found.shape)} for partition {self.partition.name!r}; expected "
                f"{str(self.values.dtype).removeprefix('torch.')}{list(expected)}"
            )
        return gradient

    def _check_rows(self, rows: Tensor) -> None:
        cell = self.partition.cell
        if not cell:
            raise ElasticError(f"partition {self.partition.name!r} is a number; expected a dense gradient")
        fits = rows.dim() == 1 and rows.dtype is torch.int64
        if not fits or (len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= cell[0] or bool((rows[1:] <= rows[:-1]).any()))):
            raise ElasticError(f"rows of a gradient for {self.partition.name!r}; expected int64 that rise, from 0 to {cell[0] - 1}")

    def apply(self, gradient: Gradient, lease: int) -> int:
        """Count a lease's checked gradient: one step of the optimizer, or with ``steps`` a part of one. Returns the new version. Equal
        calls from equal states give equal bits, on one kind of machine with one number of threads."""
        if self.steps is None:
            self._update(gradient)
        else:
            self.bring_to(self.steps.of(lease))
            self.pending[lease] = gradient
        self.counted.add(lease)
        self.version += 1
        return self.version

    def bring_to(self, step: int) -> None:
        """Make the updates of all steps before this one, with ``steps``. ``TooOld`` if one of their leases is not counted."""
        if self.steps is None:
            return
        if self.pending and (own := self.steps.of(next(iter(self.pending)))) < step:
            if len(self.pending) < len(self.steps.members(own)):
                raise TooOld(self.partition.name, step, own)
            self._update(_sum([self.pending[lease] for lease in sorted(self.pending)]))
            self.pending.clear()
        if step and self.steps.members(step - 1)[-1] not in self.counted:
            raise TooOld(self.partition.name, step, self.steps.of(len(self.counted)))

    def _update(self, gradient: Gradient) -> None:
        if isinstance(gradient, RowGradient):
            self._updater.update({}, {0: gradient}, {})
        else:
            self._updater.update({0: gradient}, {}, {})

    def state(self) -> ShardState:
        """A copy of all that the partition is."""
        kept = self.optimizer.state.get(self.values, {})
        copied = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in kept.items()}
        return ShardState(self.version, self.counted.copy(), self.values.clone(), copied, dict(self.pending))

    def load(self, state: ShardState) -> None:
        """Go on from a state. ElasticError in one line if it is another partition's."""
        if state.values.shape != self.values.shape or state.values.dtype is not self.values.dtype:
            raise ElasticError(
                f"saved values of {self.partition.name!r} are {state.values.dtype}{list(state.values.shape)}; expected "
                f"{self.values.dtype}{list(self.values.shape)}: choose another folder"
            )
        self.values.copy_(state.values)
        self.version, self.counted, self.pending = state.version, state.counted.copy(), dict(state.pending)
        if state.optimizer:
            self.optimizer.state[self.values] = dict(state.optimizer)


def _sum(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of one or more gradients, added in the given order. Where some are of rows and some of the whole cell, it is of the whole."""
    rows = [gradient for gradient in gradients if isinstance(gradient, RowGradient)]
    if len(rows) == len(gradients):
        return add_up(rows)
    size = next(len(gradient) for gradient in gradients if isinstance(gradient, Tensor)) if rows else 0
    whole = [gradient.dense(0, size) if isinstance(gradient, RowGradient) else gradient for gradient in gradients]
    total = whole[0].clone()
    for other in whole[1:]:
        total += other
    return total


def check_optimizer(make: OptimizerFactory, shape: tuple[int, ...]) -> None:
    """ElasticError in one line unless the update is elementwise, so that a parameter's cells may be updated each by itself."""
    tried = try_optimizer(Recipe(make).layout({"cell": shape}), {"cell": shape})
    if tried.whole:
        raise ElasticError(
            f"optimizer {tried.name} updates a parameter as a whole, but servers keep it in partitions; use one that updates each element "
            "by itself, such as torch.optim.Adagrad"
        )


KEPT = 2
PIECE_BYTES = 2**20
"""So much is written between two looks whether somebody else needs the disk's room."""
_HEADER = struct.Struct("<4s4xq")
"""Magic, bytes of the message."""
_TRAILER = struct.Struct("<I4x")
"""Checksum of the message."""
_MAGIC = b"SNAP"
_NAME = re.compile(r"snapshot-(\d{12,18})")
_TEMPORARY = re.compile(r"\.snapshot-\d{12,18}\.[0-9a-f]{16}\.tmp")


class _GaveWayError(ElasticError):
    """A snapshot was given up so that the log could be written."""


def write(folder: Path, state: ShardState, give_way: threading.Event | None = None) -> None:
    """Write a snapshot. ElasticError in one line if that fails, or ``give_way`` is set meanwhile; nothing is left of it then."""
    write_parts_atomically(folder / f"snapshot-{state.version:012}", _pieces(packed(state), give_way), error=ElasticError)
    synchronize_folder(folder)  # before anything is removed that it stands for


def keep_latest(folder: Path) -> int:
    """Remove all but the latest two snapshots. Returns the version of the older one."""
    found = _versions(folder)
    for version in found[:-KEPT]:
        (folder / f"snapshot-{version:012}").unlink(missing_ok=True)
    return found[-KEPT:][0]


def read_latest(folder: Path) -> ShardState | None:
    """The latest snapshot that is whole; None if there are none. Damaged ones are warned of. ElasticError if all are damaged."""
    remove_leftovers(folder)
    damaged: list[Path] = []
    for version in reversed(_versions(folder)):
        path = folder / f"snapshot-{version:012}"
        try:
            state = read(path)
        except ElasticError as cause:
            damaged.append(path)
            error = cause
            continue
        for bad in damaged:  # it must not count as one of the two that are kept
            warnings.warn(f"{error}; the one before it and the log are used", SoapWarning, stacklevel=2)
            bad.rename(folder / f"damaged-{bad.name}")
        return state
    if damaged:
        raise error
    return None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process has left of snapshots."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def read(path: Path) -> ShardState:
    """Read a snapshot. ElasticError in one line if it is damaged."""
    try:
        data = bytearray(path.stat().st_size)
        with path.open("rb") as stream:
            stream.readinto(data)
    except OSError as cause:
        raise ElasticError(f"snapshot {str(path)!r} cannot be read: {cause.strerror}") from None
    body = memoryview(data)[_HEADER.size : -_TRAILER.size]
    if len(data) < _HEADER.size + _TRAILER.size or _HEADER.unpack_from(data) != (_MAGIC, len(body)):
        raise ElasticError(f"snapshot {str(path)!r} is damaged: it has not the length that it was written with")
    if _TRAILER.unpack_from(data, len(data) - _TRAILER.size) != (zlib.crc32(body),):
        raise ElasticError(f"snapshot {str(path)!r} is damaged: it does not match its checksum")
    return unpacked(decode(body))


def packed(state: ShardState) -> Message:
    """A state as a message: a text that names the optimizer's state and the pending leases, then the ledger, the values, the state's
    tensors, and the pending gradients, those of rows one after the other."""
    tensors = {key: value for key, value in state.optimizer.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in state.optimizer.items() if key not in tensors}
    for key, value in others.items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise ElasticError(f"optimizer state {key!r} is a {type(value).__name__}; expected tensors and numbers: use another optimizer")
    rows = {lease: own for lease, own in state.pending.items() if isinstance(own, RowGradient)}
    whole = {lease: own for lease, own in state.pending.items() if isinstance(own, Tensor)}
    pending = {"rows": [[lease, len(own.rows)] for lease, own in rows.items()], "whole": list(whole)}
    text = json.dumps({"tensors": list(tensors), "others": others, **pending}).encode()
    arrays: list[Array] = [np.frombuffer(text, np.uint8), state.counted.array(), state.values.numpy()]
    arrays += [tensor.numpy() for tensor in tensors.values()]
    if rows:
        arrays += [torch.cat([own[part] for own in rows.values()]).numpy() for part in (0, 1)]
    if whole:
        arrays.append(torch.stack([*whole.values()]).numpy())
    return Message(Kind.SNAPSHOT, 0, 0, state.version, tuple(arrays))


def unpacked(message: Message) -> ShardState:
    """The state that ``packed`` made a message of."""
    names: dict[str, Any] = json.loads(message.arrays[0].tobytes())
    values, *kept = message.tensors()[2:]
    counted = Ledger.of(message.arrays[1].astype(np.int64))
    given = iter(map(Tensor.clone, kept))
    optimizer = {**{key: next(given) for key in names["tensors"]}, **names["others"]}
    pending: dict[int, Gradient] = {}
    if rows := names.get("rows"):
        lengths = [length for _, length in rows]
        parts = zip(torch.split(next(given), lengths), torch.split(next(given), lengths), strict=True)
        pending.update({lease: RowGradient(*own) for (lease, _), own in zip(rows, parts, strict=True)})
    if whole := names.get("whole"):
        pending.update(zip(whole, next(given).unbind(), strict=True))
    return ShardState(message.version, counted, values, optimizer, pending)


def _pieces(message: Message, give_way: threading.Event | None) -> Iterator[bytes | memoryview]:
    yield _HEADER.pack(_MAGIC, size_bytes(message))
    check = 0
    for part in encode(message):
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            if give_way is not None and give_way.is_set():
                raise _GaveWayError("a snapshot was given up, because the log needs the room on the disk: free space")
            piece = view[start : start + PIECE_BYTES]
            check = zlib.crc32(piece, check)
            yield piece
    yield _TRAILER.pack(check)


def _versions(folder: Path) -> list[int]:
    return sorted(int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name)))


class Source(Protocol):
    """A partition of which snapshots are taken."""

    folder: Path

    def take(self) -> ShardState | None:
        """A copy of its state, from where on the log begins a new segment; None if no push came behind the last snapshot."""

    def saved(self, version: int) -> None:
        """Told when the snapshot of a version is on the disk."""


class Snapshotter:
    """The thread that writes snapshots: of those that are asked for, and every so many seconds of all. If some cannot be written, it warns
    once until all of them were, and training goes on with the older ones and longer logs."""

    def __init__(self, sources: Sequence[Source], every_s: float | None = None) -> None:
        self._sources, self._every_s = sources, every_s
        self._asked: dict[int, None] = {}
        self._wake = threading.Condition()
        self._give_way, self._writing = threading.Event(), threading.Lock()
        self._closing = self._busy = False
        self._failed: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="soap-snapshots", daemon=True)
        self._thread.start()

    def ask(self, *numbers: int) -> None:
        """Have snapshots of some partitions taken soon."""
        with self._wake:
            self._asked.update(dict.fromkeys(numbers))
            self._wake.notify_all()

    def give_way(self) -> None:
        """Give up the snapshot that is being written, so that its room on the disk is free."""
        self._give_way.set()
        with self._writing:
            self._give_way.clear()

    def close(self) -> None:
        """End the thread; a snapshot that is being written is given up."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._give_way.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                left = None if self._every_s is None else max(0.0, last + self._every_s - time.monotonic())
                self._wake.wait_for(lambda: self._asked or self._closing, left)
                numbers = list(self._asked)
                self._asked.clear()
                self._busy = True
            if self._every_s is not None and time.monotonic() >= last + self._every_s:
                last, numbers = time.monotonic(), list(range(len(self._sources)))
            for number in numbers:
                if not self._closing:
                    self._save(number)
            if self._closing:
                return

    def _save(self, number: int) -> None:
        source = self._sources[number]
        try:
            state = source.take()
            if state is None:
                return
            with self._writing:
                write(source.folder, state, self._give_way)
            source.saved(state.version)
            self._failed.discard(number)
        except Exception as cause:  # want of memory, too: without this thread logs would grow for ever
            first = not self._failed
            self._failed.add(number)
            if first and not self._closing:
                warnings.warn(
                    f"no snapshot was taken: {first_line(cause)}; training goes on with the older one and the log",
                    SoapWarning,
                    stacklevel=1,
                )
