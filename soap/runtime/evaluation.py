"""The loss of batches without training on them.

A batch runs as the first micro-batch of a step that never ends: no gradient is exchanged, nothing is updated, and the next step begins with
gradients of its own. So it works for every plan, and takes the time of a step's computations, backward passes included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from soap.errors import RuntimeFailure
from soap.runtime.comm.whole import whole_buffers
from soap.runtime.inputs import Batch, BySamples, Given
from soap.runtime.sizes import BatchSizes
from soap.runtime.step.micro_batch import MicroBatch
from soap.tracing.model import TileContext, TracedModel

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer

UNFINISHED = MicroBatch(0, 2)
TOLD = 5


def mean_loss(trainer: Trainer, sizes: BatchSizes, batches: Sequence[Batch]) -> float:
    """The mean of the losses of some batches, the same on all ranks."""
    losses = []
    for batch in batches:
        sized = sizes.of(batch.shapes)
        context = TileContext(trainer.seed, 0, trainer.buffers, update_buffers=False, unread=sized.unread)
        losses.append(sized.runner_of(batch).run(sized.inputs(batch), context, UNFINISHED))
    mean = sum(loss() for loss in losses) / len(losses)
    trainer.alike.require()
    return mean


class Evaluation:
    """Evaluates by another program than the one that trains, of the same parameters: those that the trainer has at the time. Buffers are
    those that it had when this was made. Made on all ranks at once. RuntimeFailure in one line if that cannot be."""

    def __init__(self, trainer: Trainer, model: TracedModel) -> None:
        require_same(trainer.model, model)
        own = model.with_state({**trainer.model.unchanged, **_buffers(trainer)})
        handed = trainer.planned.evaluation(own, trainer.sizes.of().whole)
        trainer.comm.open_numbered(handed.groups, handed.group_count)
        self._trainer, self.sizes = trainer, BatchSizes(trainer, handed, other=own)
        self._purpose = f"evaluation by {id(self)}"

    def samples(self, size: int | None = None) -> BySamples:
        """As ``Trainer.samples``."""
        return self.sizes.of_samples(size).samples

    def loss(self, *inputs: Given) -> float:
        """The loss of a batch, given as to ``Trainer.evaluate``, the same on all ranks."""
        return mean_loss(self._trainer, self.sizes, self._trainer.given_batches(self.sizes, inputs, self._purpose))


def _buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The buffers in full, by name, on every rank. A rank's own copies are up to date only where its tiles change them."""
    whole = whole_buffers(trainer)
    found = {name: whole.get(name, torch.empty_like(own)).contiguous() for name, own in trainer.buffers.items()}
    for tensor in found.values():
        trainer.comm.broadcast(tensor, 0).wait()
    return {name: tensor.cpu() for name, tensor in found.items()}


def require_same(trained: TracedModel, other: TracedModel) -> None:
    """RuntimeFailure in one line unless the other program can evaluate, and has the same parameters: names and shapes."""
    require_evaluable(other, "one that was exported in evaluation mode")
    own, theirs = ({t.name: tuple(t.shape) for t in model.graph.parameters} for model in (trained, other))
    lacking = sorted(own.keys() ^ theirs.keys())
    wrong = [f"{name} {[*theirs[name]]} instead of {[*shape]}" for name, shape in own.items() if theirs.get(name, shape) != shape]
    if lacking or wrong:
        told = [*wrong, *(f"{name} in {'the one that trains' if name in own else 'the other'} alone" for name in lacking)]
        more = f" and {len(told) - TOLD} more" if len(told) > TOLD else ""
        raise RuntimeFailure(
            f"evaluation by {other.graph.name!r}: {', '.join(told[:TOLD])}{more}; expected the parameters of {trained.graph.name!r}: "
            "export the same module, in evaluation mode"
        )


def require_evaluable(model: TracedModel, instead: str) -> None:
    """RuntimeFailure in one line if the program does other things in training than outside of it: random numbers, or buffers that a step
    changes, as batch norm's statistics. A program cannot leave the mode in which it was exported. ``instead``: what to use."""
    apart = [op.name for position, op in enumerate(model.graph.operators) if not model.is_pure(position)]
    if apart or model.state:
        what = f"{apart[0]!r} (and {len(apart) - 1} more)" if apart else f"buffer {next(iter(model.state.values()))!r}"
        raise RuntimeFailure(
            f"evaluation: {model.graph.name!r} was exported in training mode, and {what} is not the same outside of it; "
            f"expected a program without dropout and batch norm's statistics: {instead}"
        )
