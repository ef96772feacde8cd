"""A server's partitions, in memory and in a folder, so that nothing that was acknowledged is lost when the server is killed.

A push is written to its partition's log, then applied, then acknowledged. A server that starts again reads the latest snapshot of each
partition and applies the log behind it, by the same code that applied it first: the state is the same bit by bit. A lease counts once for
each partition, so a push that was applied but not acknowledged may be pushed again, and so may a batch that was dealt twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from soap.elastic.durable import DurableShard
from soap.elastic.faults import ElasticError
from soap.elastic.lookups import Lookups
from soap.elastic.messages import Kind, Message
from soap.elastic.partitions import Partition
from soap.elastic.shard import Gradient, Shard, ShardState, TooOld, check_optimizer
from soap.elastic.snapshots import Snapshotter
from soap.elastic.steps import Steps
from soap.elastic.store_folder import agree, described, locked
from soap.elastic.write_ahead import may_have_crashed, note_boot
from soap.errors import SoapError
from soap.files import reason
from soap.runtime.sync.row_gradient import RowGradient
from soap.runtime.updates.optimizers import OptimizerFactory


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

    def push(self, partition: int, lease: int, gradient: Gradient) -> int:
        """Count a lease's gradient, durably; a lease that has counted already changes nothing. Returns the version.

        A lease pushes to every partition, if only an empty gradient: so the ledgers of leases stay small, and versions tell how many
        leases are in all of them.
        """
        if isinstance(gradient, RowGradient):
            return self._count(Message.of(Kind.PUSH_ROWS, partition, gradient, lease=lease))
        return self._count(Message.of(Kind.PUSH, partition, [gradient], lease=lease))

    def push_outputs(self, partition: int, lease: int, lookups: Lookups, grad_out: Tensor) -> int:
        """The same of the gradient of the sums (samples, outputs) that these look-ups gave; that of the rows is computed here."""
        return self._count(Message.of(Kind.PUSH_OUTPUTS, partition, (grad_out, *lookups.tensors()), lease=lease))

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

    def state(self) -> tuple[ShardState, ...]:
        """A copy of all partitions, each by itself at one version."""
        return tuple(own.state() for own in self._shards)

    def save(self) -> None:
        """Take a snapshot of all partitions that have changed, and wait for it: a server that starts again has no log to read then."""
        self._snapshotter.ask(*range(len(self._shards)))
        self._snapshotter.settle()

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
