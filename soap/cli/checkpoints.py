"""``--save`` and ``--resume`` of ``soap-run``, when a checkpoint is due, and the losses so far, in a file that outlives the ranks."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soap import api, outputs
from soap.cli.command import Parser, UsageError
from soap.cli.options import Reading, data_spec, positive
from soap.cli.updating import Updating, imported
from soap.errors import ModelError, SoapError, SoapWarning
from soap.files import read_text, reason, write_text_atomically
from soap.runtime.checkpoint.manifest import check_place, complete, read_manifest, require_optimizer, resolve

if TYPE_CHECKING:
    from soap.cli.training import Job, Outcome
    from soap.model.graph import OperatorGraph
    from soap.runtime.trainer import Trainer
    from soap.runtime.training_options import OnStep, StepMetrics
    from soap.tracing.execute import TracedModel
    from soap.tracing.record import ExportRecord


@dataclass(frozen=True)
class Checkpoints:
    """``resume``: the checkpoint to go on from, saved after ``resumed_at`` steps with ``seed``. ``save``: the folder for new ones.
    ``weights``: the folder for weights alone after the last step, by ``names`` (those in the model -> those to write)."""

    resume: str | None = None
    resumed_at: int = 0
    seed: int = 0
    save: str | None = None
    save_every: int | None = None
    keep: int | None = None
    weights: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def add_checkpoints(parser: Parser) -> None:
    """The options."""
    parser.add_output("--save", kind=outputs.FOLDER, help="write a checkpoint into this folder after the last step")
    parser.add_argument("--save-every", metavar="N", type=positive, help="with --save: after every N steps as well")
    parser.add_argument("--keep", metavar="N", type=positive, help="with --save: keep only the last N checkpoints (default: all)")
    resume_help = "go on from the latest checkpoint in this folder, or from this checkpoint; whatever strategy it was saved under"
    parser.add_argument("--resume", metavar="DIR", help=resume_help)
    weights_help = "write the trained weights into this folder as safetensors after the last step, by the names of --weights or the model's"
    parser.add_output("--save-weights", kind=outputs.FOLDER, help=weights_help)


def chosen(args: argparse.Namespace) -> Checkpoints:
    """Read the options. CheckpointError before anything has started if they cannot be followed."""
    if args.save is None and (args.save_every or args.keep):
        raise UsageError(f"{'--save-every' if args.save_every else '--keep'} without --save; add --save DIR")
    step, seed, resume = 0, 0, None
    if args.resume is not None:
        resume = resolve(args.resume)
        manifest = read_manifest(resume)
        step, seed = manifest.step, manifest.seed
    if args.save is not None:
        check_place(args.save, step)
    if args.save_weights is not None:
        from soap.weights.safetensors_files import check_place_of_weights  # loads torch

        check_place_of_weights(Path(args.save_weights))
    return Checkpoints(None if resume is None else str(resume), step, seed, args.save, args.save_every, args.keep, args.save_weights)


def check_optimizer(args: argparse.Namespace) -> None:
    """CheckpointError if the options name another optimizer than the checkpoint that training goes on from was saved with."""
    if args.resume is not None and (own := Updating.of(args).only_name) is not None:
        checkpoint = resolve(args.resume)
        require_optimizer(checkpoint, read_manifest(checkpoint), own)


def going_on(args: argparse.Namespace) -> str:
    """How to go on after a signal, to end the line about that; empty without checkpoints."""
    saved = complete(Path(args.save)) if args.save is not None else []
    if saved:
        return f": --resume {args.save} goes on after step {saved[-1].step}"
    if args.resume is not None:
        return f": nothing new was saved, and --resume {args.resume} goes on from there again"
    return ": no checkpoint was due yet; --save-every N writes more of them" if args.save is not None else ""


class Saver:
    """Writes the checkpoints that are due. ``saved``: the last one's path."""

    def __init__(self, options: Checkpoints, steps: int) -> None:
        self._options = options
        self._last_step = options.resumed_at + steps
        self.saved: str | None = None

    def after_step(self, trainer: Trainer) -> None:
        """Call this on all ranks after each step."""
        every = self._options.save_every
        due = trainer.steps == self._last_step or (every is not None and trainer.steps % every == 0)
        if self._options.save is not None and due:
            self.saved = str(trainer.save(self._options.save, keep=self._options.keep))
        if self._options.weights is not None and trainer.steps == self._last_step:
            trainer.save_weights(self._options.weights, self._options.names)


def note_step(path: str, step: int, loss: float) -> None:
    """Note a step's loss. It is with the operating system when this returns."""
    with open(path, "a", encoding="ascii") as stream:
        stream.write(f"{step} {loss!r}\n")


def noted_bytes(path: Path) -> int:
    """Bytes of the file: it grows with each step that is done, also again."""
    return path.stat().st_size if path.exists() else 0


def noted_losses(path: Path) -> dict[int, float]:
    """The loss of each step, of steps that were done again the last; a line that a killed rank has left unfinished is left out."""
    if not path.exists():
        return {}
    *lines, _ = path.read_text(encoding="ascii").split("\n")
    return {int(step): float(loss) for step, loss in (line.split(" ") for line in lines)}


WEIGHTS_HELP = (
    "the model's values: a safetensors file, a folder as Hugging Face writes it, a checkpoint of --save, or drawn by parameters' names: "
    "init:normal:STD or init:fan_in, with @SEED or without (default: those in MODEL)"
)


def load_weighed(job: Job) -> TracedModel:
    """The model on a rank. Weights that are not mapped, or those of a checkpoint, come when a trainer is there (``fill_weights``)."""
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


def fill_weights(job: Job, trainer: Trainer) -> None:
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


def read_weighed(
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


EVALUATED = 10
EVALUATION_HELP = (
    "when training is over, the mean loss on these batches (as --data's) without training on them; for programs with dropout or batch "
    "norm's statistics by --eval-model"
)


def add_evaluation(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--eval-data", metavar="PKG.MOD:CALLABLE", type=data_spec, help=EVALUATION_HELP)
    parser.add_argument("--eval-model", metavar="FILE.pt2", help="evaluate by this program: the same module, exported in evaluation mode")
    parser.add_argument("--eval-steps", metavar="N", type=positive, help=f"on so many batches (default {EVALUATED})")


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated at the end: ``steps`` batches of ``data``, by the program in the file ``model``, None: the one that trains."""

    data: str
    steps: int
    model: str | None = None


def chosen_evaluation(args: argparse.Namespace) -> Evaluated | None:
    """What is to be evaluated; None if nothing is."""
    if args.eval_data is None:
        for option, value in (("--eval-steps", args.eval_steps), ("--eval-model", args.eval_model)):
            if value is not None:
                raise UsageError(f"{option} without --eval-data; add --eval-data PKG.MOD:CALLABLE")
        return None
    return Evaluated(args.eval_data, args.eval_steps or EVALUATED, args.eval_model)


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


def evaluation_document(job: Job, outcome: Outcome) -> dict[str, Any] | None:
    """What was found, as plain JSON values; None if nothing was evaluated."""
    if job.evaluated is None:
        return None
    own = job.evaluated
    return {"data": own.data, "batches": own.steps, "model": own.model, "loss": outcome.evaluation}


def evaluation_facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line of the text."""
    found = report["evaluation"]
    return [] if found is None else [("evaluation", f"loss {found['loss']:.6g} on {found['batches']} batches of {found['data']}")]


CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def add_log(parser: Parser) -> None:
    """The option."""
    help_text = (
        "write each step's number, loss, seconds, learning rates and gradient norm into this file, a line of JSON each; or, as "
        "PKG.MOD:CALLABLE, call this once on rank 0: it returns a function that is given each step's soap.StepMetrics"
    )
    kind = replace(outputs.LOG, is_path=lambda value: not CALLABLE.fullmatch(value))
    parser.add_output("--log", kind=kind, help=help_text)


def logger(spec: str, *, after: int) -> OnStep:
    """A function that takes each step's metrics; asked for on rank 0, before the first step. ``after``: the step from whose checkpoint
    training goes on, and so does a file that is there; 0: it is written over."""
    if not CALLABLE.fullmatch(spec):
        return Lines(spec, after=after)
    made = imported(spec, "--log", "returns a function of metrics")()
    if not callable(made):
        raise SoapError(f"--log {spec}: it returned {type(made).__name__}; expected a function that takes soap.StepMetrics")
    found: OnStep = made
    return found


class Lines:
    """Appends a line of JSON for each step, which is with the operating system at once. Lines of a file that is there are kept up to step
    ``after``: a run that was ended has gone on beyond its checkpoint, and those steps are done again. SoapError in one line, which names
    the file, if it cannot be written."""

    def __init__(self, path: str, *, after: int) -> None:
        self._path = path
        there = read_text(path, what="log") if after and Path(path).exists() else ""
        write_text_atomically(path, "".join(line for line in there.splitlines(keepends=True) if 0 < _step(line) <= after))

    def __call__(self, metrics: StepMetrics) -> None:
        """Write the step's line, or nothing of it."""
        line = f"{json.dumps(asdict(metrics))}\n".encode("ascii")
        try:
            with open(self._path, "ab", buffering=0) as stream:
                begin = stream.seek(0, os.SEEK_END)
                if stream.write(line) != len(line):  # the disk was full in the middle
                    stream.truncate(begin)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as cause:
            remedy = "make room, and go on from the last checkpoint by --resume, if there is one (--save-every)"
            raise SoapError(f"cannot write log {self._path!r} of step {metrics.step}: {reason(cause)}; {remedy}") from None


def _step(line: str) -> int:
    """The step that a whole line is of; 0 if it is none."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
