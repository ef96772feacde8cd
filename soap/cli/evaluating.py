"""``--eval-data`` of ``soap-run``: the loss on other data when training is over."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from soap.cli.command import Parser, UsageError
from soap.cli.options import data_spec, positive

if TYPE_CHECKING:
    from soap.cli.training import Job, Outcome
    from soap.runtime.trainer import Trainer
    from soap.tracing.model import TracedModel

STEPS = 10
HELP = (
    "when training is over, the mean loss on these batches (as --data's) without training on them; for programs without dropout and batch "
    "norm's statistics"
)


def add_evaluation(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--eval-data", metavar="PKG.MOD:CALLABLE", type=data_spec, help=HELP)
    parser.add_argument("--eval-steps", metavar="N", type=positive, help=f"on so many batches (default {STEPS})")


def chosen(args: argparse.Namespace) -> tuple[str, int] | None:
    """The data, and how many batches of them; None if nothing is to be evaluated."""
    if args.eval_data is None:
        if args.eval_steps is not None:
            raise UsageError("--eval-steps without --eval-data; add --eval-data PKG.MOD:CALLABLE")
        return None
    return args.eval_data, args.eval_steps or STEPS


def evaluate(job: Job, model: TracedModel, trainer: Trainer) -> float | None:
    """The mean loss of the batches, the same on all ranks; None if nothing is to be evaluated."""
    from soap.cli.batches import batch_size, user_batches
    from soap.cli.sampled import by_rank
    from soap.cli.training import converted

    if job.evaluated is None:
        return None
    data, steps = job.evaluated
    batches = by_rank(converted(job, user_batches(data, batch_size(model))), trainer)
    return sum(trainer.evaluate(*batches(step)) for step in range(steps)) / steps


def document(job: Job, outcome: Outcome) -> dict[str, Any] | None:
    """What was found, as plain JSON values; None if nothing was evaluated."""
    if job.evaluated is None:
        return None
    data, steps = job.evaluated
    return {"data": data, "batches": steps, "loss": outcome.evaluation}


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line of the text."""
    found = report["evaluation"]
    return [] if found is None else [("evaluation", f"loss {found['loss']:.6g} on {found['batches']} batches of {found['data']}")]
