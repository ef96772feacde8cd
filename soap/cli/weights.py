"""``--weights`` of commands that train: a model's values from files of their own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from soap import api
from soap.cli.command import Parser
from soap.cli.options import Reading
from soap.errors import ModelError, SoapError, SoapWarning

if TYPE_CHECKING:
    from soap.cli.training import Job
    from soap.model.graph import OperatorGraph
    from soap.runtime.trainer import Trainer
    from soap.tracing.execute import TracedModel
    from soap.tracing.record import ExportRecord

HELP = (
    "the model's values: a safetensors file, a folder as Hugging Face writes it, a checkpoint of --save, or drawn by parameters' names: "
    "init:normal:STD or init:fan_in, with @SEED or without (default: those in MODEL)"
)


def add_weights(parser: Parser) -> None:
    """The option."""
    parser.add_argument("--weights", metavar="SPEC", help=HELP)


def load(job: Job) -> TracedModel:
    """The model on a rank. Weights that are not mapped, or those of a checkpoint, come when a trainer is there (``fill``)."""
    from soap.api.weights import open_weights
    from soap.weights.fitting import give, make_room, with_frozen

    model, resume = api.load(job.model, dtype=job.dtype, **job.reading), job.checkpoints.resume
    weights = None if job.weights is None else open_weights(job.weights, model)
    if weights is not None and weights.is_mapped:
        model = give(model, weights)
    elif weights is not None:
        model = with_frozen(model, weights)
        make_room(model)
    if resume is not None:
        with suppress(SoapError):  # which the trainer tells when it goes on from the checkpoint
            model = with_frozen(model, open_weights(resume, model))
        make_room(model)
    return model


def fill(job: Job, trainer: Trainer) -> None:
    """Give a trainer the weights that are no files, tensor by tensor."""
    from soap.api.weights import open_weights
    from soap.weights.fitting import OneByOne

    weights = None
    if job.weights is not None:
        with warnings.catch_warnings(action="ignore", category=SoapWarning):  # the command has shown them, once for all ranks
            weights = open_weights(job.weights, trainer.model)
    if weights is not None and not weights.is_mapped:
        state, cut = OneByOne(trainer.model, weights), {shard.parameter for shard in trainer.plan.shards}
        trainer.load_state_dict(state)
        for name, room in trainer.model.parameters.items():
            if name not in cut:  # which no tile reads, and so no rank keeps
                room.detach().copy_(state[name])


def read(
    model: str, weights: str | None, reading: Reading, *, resumed: bool
) -> tuple[OperatorGraph, ExportRecord | None, Mapping[str, str]]:
    """The model's graph, what its file says of its export, and what its parameters are called in the weights. ModelError in one line if
    these are not the model's, or if it has none, and no checkpoint gives them."""
    from soap.api.weights import open_weights
    from soap.weights.fitting import matched, remarks

    planned = api.load(model, plan_only=True, **reading)
    record: ExportRecord | None = getattr(planned, "record", None)
    if weights is not None:
        opened = open_weights(weights, planned)
        for line in remarks(planned, opened):
            warnings.warn(line, SoapWarning, stacklevel=2)
        return planned.graph, record, matched(planned, opened)
    if record is not None and not record.has_values and not resumed:
        said = "expected --weights SPEC: safetensors, as Hugging Face writes, or init:normal:0.02"
        raise ModelError(f"model {model!r} was exported without weights; {said}")
    return planned.graph, record, {}
