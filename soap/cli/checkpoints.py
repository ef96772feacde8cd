"""``--save`` and ``--resume`` of ``soap-run``, when a checkpoint is due, and the losses so far, in a file that outlives the ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from soap import outputs
from soap.cli.command import Parser, UsageError
from soap.cli.options import positive
from soap.cli.updating import Updating
from soap.runtime.checkpoint.manifest import check_place, complete, read_manifest, require_optimizer, resolve
from soap.weights.places import check_place_of_weights

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


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
