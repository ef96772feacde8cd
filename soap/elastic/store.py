"""A server's partitions, in memory and in a folder, so that nothing that was acknowledged is lost when the server is killed: a push is
written to its partition's log, then applied, then acknowledged (docs/internals/servers.md).

A server: the store of its partitions behind a listener. Killed and started anew by Ray, it recovers from its folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soap.elastic import snapshots, write_ahead
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Layout, Lookups, Partition, gradient_of_rows, sums_of_rows
from soap.elastic.leases import Steps
from soap.elastic.messages import Buffer, Kind, Message, decode, encode
from soap.elastic.session import module
from soap.elastic.snapshots import Gradient, Shard, ShardState, Snapshotter, TooOld, check_optimizer
from soap.elastic.transport import Listener
from soap.elastic.worker import Source
from soap.elastic.write_ahead import WriteAheadLog, may_have_crashed, note_boot
from soap.errors import SoapError, SoapWarning, first_line
from soap.files import read_text, reason, write_text_atomically
from soap.runtime.sync.row_update import RowGradient
from soap.runtime.updates.optimizers import OptimizerFactory, recorded_name

MANIFEST, LOCK = "store.json", "store.lock"
FORMAT = 1


def locked(folder: Path) -> int:
    """The folder, made if need be, locked for this process, however it ends. ElasticError in one line if another server has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as cause:
        raise ElasticError(f"cannot open the store {str(folder)!r}: {reason(cause)}; choose another folder") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ElasticError(f"store {str(folder)!r} is in use by another server; end that one, or choose another folder") from None
    return file


def described(
    partitions: Sequence[Partition], initial: Sequence[Tensor], make: OptimizerFactory, lazy: bool, steps: Steps | None = None
) -> dict[str, Any]:
    """What a store is of, as JSON gives it back."""
    made = make([torch.zeros(1, 1)])
    return {
        "format": FORMAT,
        "partitions": [[p.name, p.parameter, p.axis, p.start, p.stop, list(p.shape)] for p in partitions],
        "dtypes": [str(values.dtype) for values in initial],
        "optimizer": recorded_name(made),
        "options": [{key: repr(value) for key, value in group.items() if key != "params"} for group in made.param_groups],
        "lazy": lazy,
        "steps": None if steps is None else [steps.leases, steps.workers],
    }


def agree(folder: Path, own: Mapping[str, Any]) -> None:
    """Note what the store is of, or compare it with what is noted. ElasticError in one line if that differs."""
    path = folder / MANIFEST
    if not path.exists():
        write_text_atomically(path, json.dumps(own, indent=1), error=ElasticError)
        return
    try:
        noted = json.loads(read_text(path, what="store", error=ElasticError))
    except (ValueError, RecursionError) as cause:
        raise ElasticError(f"store {str(path)!r} is damaged: {cause}; bring it back from a copy, or begin in a new folder") from None
    for key, value in own.items():
        if not isinstance(noted, dict) or noted.get(key) != value:
            raise ElasticError(
                f"store {str(folder)!r} was made with other {key}; expected the same as before, or an empty folder: its logs can only be "
                "applied as they were written"
            )


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
            return self.shard.checked(gradient_of_rows(lookups, tensors[0]))
        if message.kind is Kind.PUSH_ROWS and len(tensors) == 2:
            return self.shard.checked(RowGradient(*tensors))
        if message.kind is Kind.PUSH and len(tensors) == 1:
            return self.shard.checked(tensors[0])
        raise ElasticError(f"a message {message.kind.name} of {len(tensors)} arrays; expected a gradient")

    def count(self, message: Message, make_room: Callable[[], None]) -> int:
        """Log a push, then apply it, unless its lease has counted. Returns the version. ``make_room``: called once if the disk is full."""
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
        with self._updating():
            self.shard.bring_to(step)

    def _write_and_apply(self, message: Message, gradient: Gradient, make_room: Callable[[], None]) -> None:
        with self._updating():
            self._write(message, make_room)
            try:
                self.shard.apply(gradient, message.lease)
            except Exception:
                self._log.take_back()
                raise

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """If what is within is interrupted, log and values may not agree, or half of the cell may be updated: then nothing more is counted.
        With an ElasticError of ours all is as it was."""
        name, again = self.shard.partition.name, "start the server again, which recovers it"
        self._failure = f"partition {name!r} was interrupted in an update; {again}"
        try:
            yield
        except ElasticError:
            self._failure = ""
            raise
        except Exception as error:  # whatever a user's optimizer does
            self._failure = f"partition {name!r} failed in an update: {first_line(error)}; {again}"
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
        """(version, sums): what ``sums_of_rows`` gives of the cell's rows, with the updates of the steps before ``step``."""
        self.check_lookups(lookups)
        with self.shard.lock:
            self._bring_to(step)
            return self.shard.version, sums_of_rows(self.shard.values, lookups)

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


class Store:
    """Partitions, each named by its place in ``partitions``. Safe to call from several threads; calls for different partitions run at once.

    ``initial``: values of each cell, used where the folder does not hold it yet. ``optimizer``: makes the optimizer of one cell; its
    update must be elementwise. ``lazy``, ``steps``: see ``Shard``. ``fsync``: pushes outlive a crash of the machine, not only of the
    process. Snapshots are taken every so many pushes of a partition, and every so many seconds, by a thread. ElasticError in one line if
    the folder is in use, damaged, or another store's.
    """

    def __init__(
        self,
        folder: str | Path,
        partitions: Sequence[Partition],
        initial: Sequence[Tensor],
        optimizer: OptimizerFactory,
        *,
        lazy: bool = False,
        fsync: bool = False,
        snapshot_every_pushes: int | None = 1000,
        snapshot_every_s: float | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.folder, self.partitions = Path(folder), tuple(partitions)
        self._every_pushes = snapshot_every_pushes
        if len(initial) != len(self.partitions):
            raise ElasticError(f"{len(initial)} initial values for {len(self.partitions)} partitions; expected one for each")
        for shape in {len(partition.shape): partition.cell for partition in self.partitions}.values():
            check_optimizer(optimizer, shape)
        self._lock = locked(self.folder)
        self._shards: list[DurableShard] = []
        try:
            agree(self.folder, described(self.partitions, initial, optimizer, lazy, steps))
            crashed = may_have_crashed(self.folder)
            for number, (partition, values) in enumerate(zip(self.partitions, initial, strict=True)):
                shard = Shard(partition, values, optimizer, lazy=lazy, steps=steps)
                self._shards.append(DurableShard(self.folder / f"partition-{number:06}", shard, fsync=fsync, crashed=crashed))
            if crashed:
                note_boot(self.folder)
        except OSError as cause:
            self._let_go()
            raise ElasticError(
                f"cannot open the store {str(self.folder)!r}: {reason(cause)}; free space, or choose another folder"
            ) from None
        except BaseException:
            self._let_go()
            raise
        self._snapshotter = Snapshotter(self._shards, snapshot_every_s)

    def look_up(self, partition: int, lookups: Lookups, step: int = 0) -> tuple[int, Tensor]:
        """(version, sums (samples, outputs)): for each sample the sum of the cell's rows that it names, each times its value. ``step``: of
        the reader; with ``steps`` the updates of all before it are made."""
        return self._shard(partition).look_up(lookups, step)

    def pull(self, partition: int, least_version: int = 0) -> tuple[int, Tensor]:
        """(version, a copy of the values). ``TooOld`` if the version is below ``least_version``; with ``steps`` these are counted."""
        return self._shard(partition).pull(least_version)

    def answer(self, message: Message) -> Message:
        """What a message asks for. Errors are answered, too, in one line."""
        act = _ANSWERS.get(message.kind)
        try:
            if act is None:
                raise ElasticError(f"a server does not answer {message.kind.name}; expected {', '.join(kind.name for kind in _ANSWERS)}")
            return act(self, message)
        except TooOld as old:
            return Message(Kind.TOO_OLD, message.partition, message.lease, old.version)
        except SoapError as error:
            return Message(Kind.ERROR, message.partition, message.lease, 0, (np.frombuffer(str(error).encode(), np.uint8),))

    def close(self) -> None:
        """End the thread and close the files; what was pushed is in them already."""
        self._snapshotter.close()
        self._let_go()

    def _let_go(self) -> None:
        for own in self._shards:
            own.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _shard(self, partition: int) -> DurableShard:
        if not 0 <= partition < len(self._shards):
            raise ElasticError(f"partition {partition} is not here; expected 0 to {len(self._shards) - 1}")
        return self._shards[partition]

    def _count(self, message: Message) -> int:
        """Count a lease's gradient, durably; a lease that has counted already changes nothing. Returns the version.

        A lease pushes to every partition, if only an empty gradient: so the ledgers of leases stay small, and versions tell how many
        leases are in all of them.
        """
        own = self._shard(message.partition)
        version = own.count(message, self._snapshotter.give_way)
        if self._every_pushes is not None and version - own.snapshot_version >= self._every_pushes:
            self._snapshotter.ask(message.partition)
        return version


def _look_up(store: Store, message: Message) -> Message:
    version, sums = store.look_up(message.partition, Lookups.of(message.tensors()), message.version)
    return Message.of(Kind.SUMS, message.partition, [sums], lease=message.lease, version=version)


def _pull(store: Store, message: Message) -> Message:
    version, values = store.pull(message.partition, message.version)
    return Message.of(Kind.VALUES, message.partition, [values], lease=message.lease, version=version)


def _push(store: Store, message: Message) -> Message:
    return Message(Kind.VERSION, message.partition, message.lease, store._count(message))


_ANSWERS: Mapping[Kind, Callable[[Store, Message], Message]] = {
    Kind.LOOK_UP: _look_up, Kind.PULL: _pull, Kind.PUSH: _push, Kind.PUSH_ROWS: _push, Kind.PUSH_OUTPUTS: _push,
}  # fmt: skip


@dataclass(frozen=True)
class Keeping:
    """How servers keep partitions, see ``Store``: each below ``folder`` on its own machine. ``temporary``: removed on close."""

    folder: str
    optimizer: OptimizerFactory
    lazy: bool = False
    fsync: bool = False
    snapshot_every_pushes: int | None = 1000
    snapshot_every_s: float | None = None
    temporary: bool = False

    def remove(self, server: int) -> None:
        """Remove what a closed server has on its machine, if it is temporary; the folder too, if nothing else is there."""
        if self.temporary:
            shutil.rmtree(self._own(server), ignore_errors=True)
            with suppress(OSError):
                Path(self.folder).rmdir()

    def _own(self, server: int) -> Path:
        return Path(self.folder) / f"server-{server}"

    def store(
        self, server: int, layout: Layout, source: Source, steps: Steps | None = None, initial: Sequence[Tensor] | None = None
    ) -> Store:
        """The server's store, as its folder has it, or as the model begins. ``steps``: if an update is that of a whole step. ``initial``:
        values of the server's partitions to begin with; None: the model's."""
        values = layout.initial(server, source.load().parameters) if initial is None else initial
        return Store(
            self._own(server),
            layout.of_server(server),
            values,
            self.optimizer,
            lazy=self.lazy,
            fsync=self.fsync,
            snapshot_every_pushes=self.snapshot_every_pushes,
            snapshot_every_s=self.snapshot_every_s,
            steps=steps,
        )


class Server:
    """In an actor. ``host``: the address to listen on; None: Ray's of this machine. ``steps``, ``initial``: see ``Keeping.store``."""

    def __init__(
        self,
        server: int,
        layout: Layout,
        source: Source,
        keeping: Keeping,
        secret: bytes,
        host: str | None = None,
        steps: Steps | None = None,
        initial: Sequence[Tensor] | None = None,
    ) -> None:
        self._warned: list[str] = []
        warnings.simplefilter("always", SoapWarning)
        warnings.showwarning = lambda message, *_, **__: self._warned.append(str(message))  # the launcher shows them
        self._remove = partial(keeping.remove, server)
        self._store = keeping.store(server, layout, source, steps, initial)
        self._listener = Listener(self._answer, secret, host or str(module().util.get_node_ip_address()))

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._listener.host, self._listener.port

    def warnings(self) -> list[str]:
        """What there was to warn of since this was last asked."""
        said, self._warned = self._warned, []
        return said

    def process(self) -> int:
        """This process's number."""
        return os.getpid()

    def close(self) -> list[str]:
        """Answer nobody any more, and let the store go; of a temporary one nothing is left. Returns what ``warnings`` does."""
        self._listener.close()
        self._store.close()
        self._remove()
        return self.warnings()

    def _answer(self, frame: memoryview) -> Sequence[Buffer]:
        return encode(self._store.answer(decode(frame)))
