"""The seam between a step and the methods that synchronize parameters: one rank's part of a method, and how it is found. Programs and steps
walk over ``Plan.syncs`` and never ask for a method's name."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

import torch

from soap.plan.plan import Plan, ShardSync
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.program.sync_actions import task_name
from soap.runtime.step.early_start import EarlyStart
from soap.runtime.sync.row_requests import RowRequests
from soap.runtime.sync.row_update import RowGradient
from soap.runtime.sync.shards import ShardStore
from soap.runtime.trace import Watch, watch_nothing
from soap.simulator.tasks import TaskKind
from soap.strategy.sync_contracts import METHODS, Contract

Gradient = torch.Tensor | RowGradient
"""Gradient of a shard: of all of it, or of some rows."""


@dataclass(frozen=True)
class SyncContext:
    """What all methods of a rank share. ``dtype_of``: tensor of the graph -> the dtype that it is computed in. ``compressing``: how
    compressed parameters are trained. ``read_apart``: see ``TracedModel``."""

    plan: Plan
    comm: Communicator
    shards: ShardStore
    dtype_of: Callable[[str], torch.dtype]
    early: EarlyStart
    compressing: CompressedTraining = AS_IT_IS
    read_apart: Container[str] = ()

    @cached_property
    def requests(self) -> RowRequests:
        """The requests for rows; all synchronizations by rows share them, whatever their method."""
        return RowRequests(self.plan, self.comm)


class RankSync(ABC):
    """One rank's part in all synchronizations of a method. ``syncs``: those in which it takes part, by position in ``Plan.syncs``.

    The order of calls in a step:

    1. For each micro-batch: ``begin``, the actions before the forward pass (``sync_actions``), ``end``. Where values are gathered for their
       uses (``Contract.gathers_values``), also ``bring``, ``need``, ``free``, then ``bring_back``, ``need``, ``free``, or only the first
       three for all of it where values stay; a rank without such a use leaves ``need`` and ``free`` out.
    2. In the last micro-batch, before ``end``: the actions after the backward pass, each once.
    3. Then ``gradients`` of the shards that this rank owns.
    4. After the update, and whenever shards were loaded: the actions after it, then ``arrived``.
    """

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        self.context, self.syncs = context, syncs
        self.plan, self.comm, self.store, self.rank = context.plan, context.comm, context.shards, context.comm.rank
        self.watch: Watch = watch_nothing
        self._names: dict[tuple[ActionKind, int], str] = {}
        self.serves_early = False
        """Whether ``end`` may leave servers' gradients under way, which are then waited for one after the other."""

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Called before each micro-batch. The first one of a step drops what the last step left. ``watch``: times what is started."""
        self.watch = watch

    def bring(self, number: int) -> None:
        """Begin to send values from owners to leaders."""
        raise NotImplementedError

    def bring_back(self, number: int) -> None:
        """Begin to send values from owners to readers once more, for backward passes."""
        raise NotImplementedError

    def need(self, number: int) -> None:
        """Called before the first pass, forward or backward, that reads values which are gathered for it: wait for them."""
        raise NotImplementedError

    def free(self, number: int) -> None:
        """Called behind the last of these passes: free the values' memory."""
        raise NotImplementedError

    def hand_on(self, number: int) -> None:
        """Begin to send values from leaders to the other members."""
        raise NotImplementedError

    def collect(self, number: int) -> None:
        """Begin to send gradients from members to their leaders."""
        raise NotImplementedError

    @abstractmethod
    def synchronize(self, number: int) -> None:
        """Begin to send gradients to the owners, which add them up."""

    @abstractmethod
    def end(self, part: MicroBatch) -> None:
        """Called after each micro-batch: wait for everything that was started."""

    def arrived(self) -> None:  # noqa: B027 - most bring nothing
        """Wait for the values that were sent after an update."""

    @property
    @abstractmethod
    def shards(self) -> Iterable[int]:
        """The shards that this rank owns."""

    @abstractmethod
    def gradient(self, shard: int) -> Gradient:
        """The sum of all readers' gradients for a shard that this rank owns, in a fixed order: equal runs give equal bits."""

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """The same for several shards at once, which are complete already, so that no threads are needed."""
        return {shard: self.gradient(shard) for shard in shards}

    def state(self) -> Mapping[int, Mapping[str, torch.Tensor]]:
        """The method's own state for checkpoints (``Contract.state``): owned shard -> name -> tensor of the shard's shape, the same on all
        owners. Called on all ranks at once, so it may sum the ranks' own parts."""
        return {}

    def restore(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Go on from such a state, perhaps of another plan; called on all ranks at once. A shard without saved state starts fresh."""
        assert not state, f"{self.plan.syncs[next(iter(self.syncs))].contract.name} keeps no state"

    def take_gradients(self, leaf: torch.Tensor, number: int, put: Callable[..., None], *where: int) -> None:
        """Take autograd's contributions off a leaf, one segment after the other, and ``put(self, *where, gradient)`` each; then
        synchronization ``number`` may begin early. ``put`` must not hold this object: a tensor's hooks live as long as it does."""
        reference = weakref.ref(self)

        def take(tensor: torch.Tensor) -> None:
            own = reference()
            if own is None or not own.context.early.is_open:
                return
            gradient = tensor.grad
            assert gradient is not None
            tensor.grad = None
            put(own, *where, gradient)
            own.context.early.arrived(number)

        leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def named(self, kind: ActionKind, number: int, pending: Pending) -> Pending:
        """Give an exchange the name of its task, and time it if this step is traced."""
        if (kind, number) not in self._names:
            self._names[kind, number] = task_name(self.plan, kind, number)
        self.watch(self._names[kind, number], TaskKind.SYNC, pending)
        return pending


def rank_sync(contract: Contract) -> type[RankSync]:
    """The class of a rank's part of a method: ``METHOD`` in the method's module. Rows of whole buffers need none of their own."""
    module = "sums" if contract.sums_in_place and not contract.state else contract.name
    method: type[RankSync] = import_module(f"soap.runtime.sync.{module}").METHOD
    assert issubclass(method, RankSync)
    return method


def ranks_part(context: SyncContext) -> dict[int, RankSync]:
    """Synchronization in which this rank takes part -> the object that does it. All synchronizations of a method share one object."""
    plan, found = context.plan, dict[int, RankSync]()
    mine = {i: sync for i, sync in enumerate(plan.syncs) if context.comm.rank in plan.members(sync)}
    for contract in METHODS:
        own = {i: sync for i, sync in mine.items() if sync.contract is contract}
        if own:
            found.update(dict.fromkeys(own, rank_sync(contract)(context, own)))
    return found
