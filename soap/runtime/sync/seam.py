"""The seam between a step and the methods that synchronize parameters: one rank's part of a method, and how it is found.

A method says which exchanges each of its synchronizations needs in which phase of a step, starts them when the program comes to them (or
earlier, see ``early_start``), and has the gradients of the shards that this rank owns when a step's last micro-batch is over. Programs and
steps walk over ``Plan.syncs`` and ask, never for a method's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import ClassVar

import torch

from soap.plan.plan import Plan, ShardSync, sync_name
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.program.actions import ActionKind
from soap.runtime.step.early_start import EarlyStart
from soap.runtime.step.micro_batch import MicroBatch
from soap.runtime.sync.row_gradient import RowGradient
from soap.runtime.sync.row_requests import RowRequests
from soap.runtime.sync.row_update import parallel
from soap.runtime.sync.shards import ShardStore
from soap.runtime.trace import Watch, watch_nothing
from soap.simulator.tasks import TaskKind
from soap.strategy.methods import METHODS, Contract

Gradient = torch.Tensor | RowGradient
"""Of a shard: of all of it, or of some rows."""


@dataclass(frozen=True)
class SyncContext:
    """What all methods of a rank work with. ``dtype_of``: the type that a tensor of the graph is computed in."""

    plan: Plan
    comm: Communicator
    shards: ShardStore
    dtype_of: Callable[[str], torch.dtype]
    early: EarlyStart

    @cached_property
    def requests(self) -> RowRequests:
        """Which rows are looked up in all synchronizations by rows, whatever their method."""
        return RowRequests(self.plan, self.comm)


class RankSync(ABC):
    """One rank's part in all synchronizations of a method. ``syncs``: those in which it takes part, by position in ``Plan.syncs``.

    For each micro-batch ``begin``, then what ``before_forward`` names, then ``end``; before that in a step's last one what
    ``after_backward`` names, each once. Then the ``gradients`` of the shards that this rank owns are there. After the update, and whenever
    shards were loaded, what ``after_update`` names, then ``arrived``.

    ``collective``: what ``synchronize`` starts is one collective; with gloo such a one may pass messages (``Communicator.messages_apart``).
    ``gives``, ``brings``: the verbs of its tasks' names.
    """

    collective: ClassVar[bool] = False
    gives: ClassVar[str] = "sync"
    brings: ClassVar[str] = "pull"

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        self.context, self.syncs = context, syncs
        self.plan, self.comm, self.store, self.rank = context.plan, context.comm, context.shards, context.comm.rank
        self.watch: Watch = watch_nothing

    @classmethod
    def before_forward(cls, sync: ShardSync) -> tuple[ActionKind, ...]:
        """ASK, BRING and HAND_ON, as far as values have to be brought for each micro-batch."""
        return ()

    @classmethod
    def after_backward(cls, plan: Plan, sync: ShardSync) -> tuple[ActionKind, ...]:
        """What is done with its gradients: COLLECT within hosts first, if some readers deal with the others through a leader, then SYNC."""
        if len(plan.members(sync)) < 2:
            return ()
        return (ActionKind.COLLECT, ActionKind.SYNC) if sync.aggregated else (ActionKind.SYNC,)

    @classmethod
    def after_update(cls, sync: ShardSync) -> tuple[ActionKind, ...]:
        """BRING and HAND_ON, if readers keep copies of what others own."""
        return ()

    @classmethod
    def task_name(cls, sync: ShardSync, kind: ActionKind) -> str:
        """The simulator's task that an exchange is a part of."""
        return sync_name(sync, cls.brings if kind in (ActionKind.BRING, ActionKind.HAND_ON) else cls.gives)

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Before a micro-batch; what an earlier step has left is forgotten before the first. ``watch``: for what is started."""
        self.watch = watch

    def bring(self, number: int) -> None:
        """Begin to bring values from owners to leaders."""
        raise NotImplementedError

    def hand_on(self, number: int) -> None:
        """Begin to bring values from leaders to the other members."""
        raise NotImplementedError

    def collect(self, number: int) -> None:
        """Begin to bring gradients from members to their leaders."""
        raise NotImplementedError

    @abstractmethod
    def synchronize(self, number: int) -> None:
        """Begin to bring the gradients to the owners, who add them up."""

    @abstractmethod
    def end(self, part: MicroBatch) -> None:
        """Behind a micro-batch: wait for all that was begun."""

    def arrived(self) -> None:  # noqa: B027 - most bring nothing
        """Wait for values that were brought after an update."""

    @property
    @abstractmethod
    def shards(self) -> Iterable[int]:
        """The shards that this rank owns."""

    @abstractmethod
    def gradient(self, shard: int) -> Gradient:
        """What all readers give for a shard that this rank owns, added up in one order: equal runs give equal bits."""

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """The same for several shards at once."""
        return dict(zip(shards, parallel(self.gradient, shards), strict=True))

    def state(self) -> Mapping[int, Mapping[str, torch.Tensor]]:
        """What a checkpoint holds of it beside the optimizer's state (``Contract.state``): by shard that this rank owns, tensors of its
        shape by name, the same on all owners. Asked for on all ranks at once, so it may sum what ranks have of their own."""
        return {}

    def restore(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Go on from such a state, perhaps another plan's; on all ranks at once. Without one a method goes on from nothing."""
        assert not state, f"{self.plan.syncs[next(iter(self.syncs))].contract.name} keeps no state"

    def named(self, kind: ActionKind, number: int, pending: Pending) -> Pending:
        """An exchange among several devices under the name of its task, timed if this step is traced."""
        self.watch(self.task_name(self.plan.syncs[number], kind), TaskKind.SYNC, pending)
        return pending


def rank_sync(contract: Contract) -> type[RankSync]:
    """A rank's part of a method: ``METHOD`` of its module."""
    method: type[RankSync] = import_module(f"soap.runtime.sync.{contract.name}").METHOD
    assert issubclass(method, RankSync)
    return method


def ranks_part(context: SyncContext) -> dict[int, RankSync]:
    """By synchronization in which this rank takes part, what does it; one object for all of a method."""
    plan, found = context.plan, dict[int, RankSync]()
    mine = {i: sync for i, sync in enumerate(plan.syncs) if context.comm.rank in plan.members(sync)}
    for contract in METHODS:
        own = {i: sync for i, sync in mine.items() if sync.contract is contract}
        if own:
            found.update(dict.fromkeys(own, rank_sync(contract)(context, own)))
    return found
