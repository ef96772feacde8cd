"""The loss of batches without training on them.

A batch runs as the first micro-batch of a step that never ends: no gradient is exchanged, nothing is updated, and the next step begins with
gradients of its own. So it works for every plan, and takes the time of a step's computations, backward passes included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soap.errors import RuntimeFailure
from soap.runtime.inputs import Batch
from soap.runtime.step.micro_batch import MicroBatch
from soap.tracing.model import TileContext, TracedModel

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer

UNFINISHED = MicroBatch(0, 2)


def mean_loss(trainer: Trainer, batches: Sequence[Batch]) -> float:
    """The mean of the losses of some batches, the same on all ranks."""
    losses = []
    for batch in batches:
        sized = trainer.sizes.of(batch.shapes)
        context = TileContext(trainer.seed, 0, trainer.buffers, update_buffers=False, unread=sized.unread)
        losses.append(sized.runner.run(sized.inputs(batch), context, UNFINISHED))
    return sum(loss() for loss in losses) / len(losses)


def require_evaluable(model: TracedModel) -> None:
    """RuntimeFailure in one line if the program does other things in training than outside of it: random numbers, or buffers that a step
    changes, as batch norm's statistics. A program cannot leave the mode in which it was exported."""
    apart = [op.name for position, op in enumerate(model.graph.operators) if not model.is_pure(position)]
    if apart or model.state:
        what = f"{apart[0]!r} (and {len(apart) - 1} more)" if apart else f"buffer {next(iter(model.state.values()))!r}"
        raise RuntimeFailure(
            f"evaluation: {model.graph.name!r} was exported in training mode, and {what} is not the same outside of it; "
            "expected a program without dropout and batch norm's statistics: save the weights, and evaluate the module itself"
        )
