"""A partition that outlives its process: its shard in memory, its log and its snapshots in a folder."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from soap.elastic import arithmetic, snapshots, write_ahead
from soap.elastic.faults import ElasticError
from soap.elastic.lookups import Lookups
from soap.elastic.messages import Kind, Message
from soap.elastic.shard import Gradient, Shard, ShardState, TooOld
from soap.elastic.write_ahead import WriteAheadLog
from soap.errors import first_line
from soap.runtime.sync.row_gradient import RowGradient

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DurableShard:
    """``shard`` as its ``folder`` has it: the latest snapshot, and the log behind that; a new folder begins with a snapshot of the shard
    as it is. ``fsync``: of the log. ``crashed``: whether the machine may have since. ElasticError in one line if the folder is damaged."""

    def __init__(self, folder: Path, shard: Shard, *, fsync: bool = False, crashed: bool = True) -> None:
        self.folder, self.shard = folder, shard
        self._failure = ""
        folder.mkdir(exist_ok=True)
        state = snapshots.read_latest(folder)
        if state is None:
            if write_ahead.segments(folder):
                raise ElasticError(f"{str(folder)!r} has a log but no snapshot; bring back the files that were removed")
            state = shard.state()
            snapshots.write(folder, state)  # the log can be applied to these values only
        shard.load(state)
        self.snapshot_version = self._saved_version = state.version
        """Of the last snapshot that was begun, whether it could be written or not."""
        for message in write_ahead.read_back(folder, state.version, crashed=crashed):
            shard.apply(self.gradient(message), message.lease)
        self._log = WriteAheadLog(folder, shard.version, fsync=fsync)

    def check_lookups(self, lookups: Lookups) -> None:
        """ElasticError in one line if this partition cannot be looked up so."""
        shape = self.shard.partition.cell
        if len(shape) != 2:
            raise ElasticError(
                f"partition {self.shard.partition.name!r} has shape {list(shape)}; expected rows and outputs: pull it instead"
            )
        lookups.checked(shape[0])

    def gradient(self, message: Message) -> Gradient:
        """The gradient that a push brings, checked: by the same code when it comes and when it is read back."""
        tensors = message.tensors()
        if message.kind is Kind.PUSH_OUTPUTS and len(tensors) in (3, 4):
            lookups = Lookups.of(tensors[1:])
            self.check_lookups(lookups)
            return self.shard.checked(arithmetic.backward(lookups, tensors[0]))
        if message.kind is Kind.PUSH_ROWS and len(tensors) == 2:
            return self.shard.checked(RowGradient(*tensors))
        if message.kind is Kind.PUSH and len(tensors) == 1:
            return self.shard.checked(tensors[0])
        raise ElasticError(f"a message {message.kind.name} of {len(tensors)} arrays; expected a gradient")

    def count(self, message: Message, make_room: Callable[[], None]) -> int:
        """Write a push to the log, then apply it, unless its lease has counted. Returns the version. ``make_room``: called if the disk is
        full, before it is tried once more."""
        if message.lease < 0:
            raise ElasticError(f"lease {message.lease}; expected a number from 0 on")
        gradient = self.gradient(message)
        with self.shard.lock:
            if self._failure:
                raise ElasticError(self._failure)
            if message.lease in self.shard.counted:
                return self.shard.version
            if self.shard.steps is not None:
                self._bring_to(self.shard.steps.of(message.lease))
            self._write_and_apply(replace(message, version=self.shard.version + 1), gradient, make_room)
            return self.shard.version

    def _bring_to(self, step: int) -> None:
        """Make the updates of the steps before this one, under the lock. They follow from what is in the log, so nothing is written."""
        if self._failure:
            raise ElasticError(self._failure)
        name = self.shard.partition.name
        self._failure = f"partition {name!r} was interrupted in an update; start the server again, which recovers it"
        try:
            self.shard.bring_to(step)
        except TooOld:
            self._failure = ""
            raise
        except Exception as error:  # whatever a user's optimizer does
            self._failure = f"partition {name!r} failed in an update: {first_line(error)}; start the server again, which recovers it"
            raise ElasticError(self._failure) from error
        self._failure = ""

    def _write_and_apply(self, message: Message, gradient: Gradient, make_room: Callable[[], None]) -> None:
        """If it is interrupted, log and values may not agree, or half of the cell may be updated: then nothing more is counted."""
        name = self.shard.partition.name
        self._failure = f"partition {name!r} was interrupted in an update; start the server again, which recovers it"
        try:
            self._write(message, make_room)
        except ElasticError:  # the log is as it was
            self._failure = ""
            raise
        try:
            self.shard.apply(gradient, message.lease)
        except Exception as error:  # whatever a user's optimizer does
            self._failure = f"partition {name!r} failed in an update: {first_line(error)}; start the server again, which recovers it"
            self._log.take_back()
            raise ElasticError(self._failure) from error
        self._failure = ""

    def _write(self, message: Message, make_room: Callable[[], None]) -> None:
        try:
            try:
                self._log.append(message)
            except OSError as cause:
                if cause.errno not in _FULL:
                    raise
                make_room()
                self._log.append(message)
        except OSError as cause:
            raise write_ahead.unwritable(self._log.path, message.lease, cause) from None

    def state(self) -> ShardState:
        """A copy of the state."""
        with self.shard.lock:
            return self.shard.state()

    def take(self) -> ShardState | None:
        """A copy of the state, from where on the log begins a new segment; None if no push came behind the last snapshot that is there."""
        with self.shard.lock:
            if self._failure or self.shard.version == self._saved_version:
                return None
            self.snapshot_version = self.shard.version
            self._log.begin(self.shard.version)
            return self.shard.state()

    def saved(self, version: int) -> None:
        """Note that the snapshot of a version is there, and remove what the two latest ones stand for."""
        self._saved_version = version
        write_ahead.forget(self.folder, snapshots.keep_latest(self.folder))

    def look_up(self, lookups: Lookups, step: int = 0) -> tuple[int, Tensor]:
        """(version, sums): what ``arithmetic.forward`` gives of the cell's rows, with the updates of the steps before ``step``, if they are
        those of steps."""
        self.check_lookups(lookups)
        with self.shard.lock:
            self._bring_to(step)
            return self.shard.version, arithmetic.forward(self.shard.values, lookups)

    def pull(self, least: int = 0) -> tuple[int, Tensor]:
        """(version, a copy of the values), with the updates of the first ``least`` pushes, or steps, at least. ``TooOld`` without."""
        with self.shard.lock:
            self._bring_to(least)
            if self.shard.steps is None and self.shard.version < least:
                raise TooOld(self.shard.partition.name, least, self.shard.version)
            return self.shard.version, self.shard.values.clone()

    def close(self) -> None:
        """Close the log, when no push is under way."""
        with self.shard.lock:
            self._log.close()
