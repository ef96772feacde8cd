"""One training step of one rank: the program's actions, forward and backward, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from soap.runtime.backward import BackwardPass
from soap.runtime.forward import ForwardPass
from soap.runtime.prepared import PreparedTiles
from soap.runtime.program import Action, ActionKind, Program, part_of
from soap.runtime.redistribute import Communicator
from soap.runtime.shards import ShardStore
from soap.runtime.state import StepState
from soap.runtime.sync import WHOLE_STEP, GradientSync, MicroBatch, SyncSchedule
from soap.runtime.trace import Recorder
from soap.runtime.units import units_of
from soap.tracing.model import TileContext, TracedModel


class StepRunner:
    """Executes a program on one rank, again and again. After a step's last micro-batch, ``gradients`` holds the complete gradients.

    ``gradients``: those of another runner with the same buckets, if both work for the same steps. ``compiled``: by ``torch.compile``.
    """

    def __init__(
        self,
        program: Program,
        model: TracedModel,
        comm: Communicator,
        shards: ShardStore,
        dtype_of: Callable[[str], torch.dtype],
        recorder: Recorder | None = None,
        gradients: GradientSync | None = None,
        compiled: bool = False,
    ) -> None:
        self.program, self.model, self.comm, self.shards = program, model, comm, shards
        self.dtype_of, self.recorder = dtype_of, recorder
        self.gradients = gradients or GradientSync(program, shards.tensors, comm)
        self._units = units_of(program, model, comm.rank) if compiled else {}
        self._prepared = PreparedTiles(program, shards, comm.rank, dtype_of)
        self._schedule = SyncSchedule(program, comm.rank, early=recorder is None)
        self._forward, self._backward = _calls(program.forward, comm.rank), _calls(program.backward, comm.rank)
        self._without_sync = [call for call in self._backward if call[0] != ActionKind.SYNC.name]

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        context: TileContext,
        part: MicroBatch = WHOLE_STEP,
    ) -> Callable[[], float]:
        """Forward and backward on full ``tensors`` (inputs and constants by name). Returns what gives the loss, when it is
        wanted: the parameters can be updated meanwhile."""
        state = StepState(self.program, self.comm, self.dtype_of, self.recorder, 1.0 / part.count)
        forward = ForwardPass(state, self.model, self._prepared, self.shards, tensors, context, self._units)
        backward = BackwardPass(state, self.gradients)
        handlers = _handlers(forward, backward)
        with self.gradients.step(self._schedule, part):
            for kind, subject in self._forward:
                handlers[kind](subject)
            forward.release()
            for kind, subject in self._backward if part.last else self._without_sync:
                handlers[kind](subject)
        self.comm.finish_sends()
        return forward.loss_value


def _calls(actions: Sequence[Action], rank: int) -> list[tuple[str, int]]:
    """The rank's actions by the names of their kinds: enum members are slow keys."""
    return [(action.kind.name, action.subject) for action in part_of(actions, rank)]


def _handlers(forward: ForwardPass, backward: BackwardPass) -> dict[str, Callable[[int], None]]:
    handlers = {
        ActionKind.TILE: forward.run_tile,
        ActionKind.TRANSFER: forward.transfer,
        ActionKind.EXCHANGE: forward.exchange,
        ActionKind.REDUCE: forward.reduce,
        ActionKind.REDUCE_NUMBERS: forward.reduce_numbers,
        ActionKind.LOSS: forward.tell_loss,
        ActionKind.SEGMENT: backward.run_segment,
        ActionKind.RETURN: backward.return_message,
        ActionKind.RETURN_EXCHANGE: backward.return_exchange,
        ActionKind.REDUCE_GRADIENT: backward.reduce_gradient,
        ActionKind.SYNC: backward.synchronize,
    }
    return {kind.name: handler for kind, handler in handlers.items()}
