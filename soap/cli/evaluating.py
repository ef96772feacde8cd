"""``--eval-data`` of ``soap-run``: the loss on other data when training is over."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soap import api
from soap.cli.command import Parser, UsageError
from soap.cli.options import data_spec, positive

if TYPE_CHECKING:
    from soap.cli.training import Job, Outcome
    from soap.runtime.trainer import Trainer
    from soap.tracing.execute import TracedModel

STEPS = 10
HELP = (
    "when training is over, the mean loss on these batches (as --data's) without training on them; for programs with dropout or batch "
    "norm's statistics by --eval-model"
)


def add_evaluation(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--eval-data", metavar="PKG.MOD:CALLABLE", type=data_spec, help=HELP)
    parser.add_argument("--eval-model", metavar="FILE.pt2", help="evaluate by this program: the same module, exported in evaluation mode")
    parser.add_argument("--eval-steps", metavar="N", type=positive, help=f"on so many batches (default {STEPS})")


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated at the end: ``steps`` batches of ``data``, by the program in the file ``model``, None: the one that trains."""

    data: str
    steps: int
    model: str | None = None


def chosen(args: argparse.Namespace) -> Evaluated | None:
    """What is to be evaluated; None if nothing is."""
    if args.eval_data is None:
        for option, value in (("--eval-steps", args.eval_steps), ("--eval-model", args.eval_model)):
            if value is not None:
                raise UsageError(f"{option} without --eval-data; add --eval-data PKG.MOD:CALLABLE")
        return None
    return Evaluated(args.eval_data, args.eval_steps or STEPS, args.eval_model)


def require_possible(job: Job, model: TracedModel) -> None:
    """SoapError in one line, before training, if what is to evaluate cannot. ``model``: the one that trains."""
    from soap.runtime.trainer import require_evaluable, require_same

    if job.evaluated is None:
        return
    if job.evaluated.model is None:
        require_evaluable(model, "--eval-model FILE.pt2, the same module exported in evaluation mode")
    else:
        require_same(model, api.load(job.evaluated.model, plan_only=True, dtype=job.dtype, **job.reading))


def evaluate(job: Job, model: TracedModel, trainer: Trainer) -> float | None:
    """The mean loss of the batches, the same on all ranks; None if nothing is to be evaluated."""
    from soap.cli.batches import batch_size, by_rank, user_batches
    from soap.cli.training import converted

    if job.evaluated is None:
        return None
    steps, path = job.evaluated.steps, job.evaluated.model
    own = None if path is None else trainer.evaluation(api.load(path, dtype=job.dtype, **job.reading))
    data = converted(job, user_batches(job.evaluated.data, batch_size(model)))
    batches = by_rank(data, trainer if own is None else own)
    loss = trainer.evaluate if own is None else own.loss
    return sum(loss(*batches(step)) for step in range(steps)) / steps


def document(job: Job, outcome: Outcome) -> dict[str, Any] | None:
    """What was found, as plain JSON values; None if nothing was evaluated."""
    if job.evaluated is None:
        return None
    own = job.evaluated
    return {"data": own.data, "batches": own.steps, "model": own.model, "loss": outcome.evaluation}


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line of the text."""
    found = report["evaluation"]
    return [] if found is None else [("evaluation", f"loss {found['loss']:.6g} on {found['batches']} batches of {found['data']}")]
