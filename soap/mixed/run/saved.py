"""Checkpoints of virtual workers: servers' values of a whole version, and what each worker has beside it.

A folder with one file for each server and each stage, and a manifest that is written last. Nothing in them is unpickled but tensors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soap.errors import CheckpointError, first_line
from soap.files import check_archive, read_text, reason, write_bytes_atomically, write_text_atomically
from soap.mixed.run.plan import WavePlan

FORMAT = 1
MANIFEST = "workers.json"


@dataclass(frozen=True)
class StageState:
    """``incomplete``: see ``StageValues``. ``buffers``: batch norm's, those of the stage."""

    momentum: Tensor | None
    incomplete: tuple[int, Tensor] | None
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """``finished``: minibatches of each worker. ``seed``: of data and of what the model draws."""

    folder: str
    finished: int
    seed: int = 0

    def server(self, number: int) -> Path:
        """The file of a server."""
        return Path(self.folder) / f"server-{number}-at-{self.finished}.pt"

    def stage(self, worker: int, stage: int) -> Path:
        """The file of a stage."""
        return Path(self.folder) / f"worker-{worker}-stage-{stage}-at-{self.finished}.pt"


def save_server(at: Checkpoint, number: int, values: Sequence[Tensor]) -> None:
    """A server's pieces."""
    _write(at.server(number), {"values": [own.clone() for own in values]})


def save_stage(at: Checkpoint, worker: int, stage: int, state: StageState) -> None:
    """What a stage has beside them."""
    count, update = (0, None) if state.incomplete is None else state.incomplete
    kept = {"momentum": state.momentum, "minibatches": count, "update": update, "buffers": state.buffers}
    _write(at.stage(worker, stage), kept)


def save_manifest(at: Checkpoint, plan: WavePlan) -> None:
    """What the rest belongs to; from now on the checkpoint is there, and an earlier one in this folder is removed."""
    text = json.dumps({"format": FORMAT, "finished": at.finished, "seed": at.seed, "plan": _look(plan)}, indent=1)
    write_text_atomically(Path(at.folder) / MANIFEST, text, error=CheckpointError)
    for old in Path(at.folder).glob("*-at-*.pt"):
        if not old.name.endswith(f"-at-{at.finished}.pt"):
            old.unlink(missing_ok=True)


def checkpoint_of(folder: str, plan: WavePlan) -> Checkpoint:
    """The checkpoint in a folder. CheckpointError in one line if there is no checkpoint, or it is of another plan."""
    place = Path(folder) / MANIFEST
    text = read_text(place, what="checkpoint of virtual workers", error=CheckpointError)
    try:
        found = json.loads(text)
        made, found_one, look = found["format"], Checkpoint(folder, int(found["finished"]), int(found["seed"])), found["plan"]
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        said = f"no checkpoint of virtual workers ({first_line(cause)})"
        raise CheckpointError(f"{place}: {said}; expected what soap-run --save wrote") from None
    if made != FORMAT:
        raise CheckpointError(f"{place}: format {made}; expected {FORMAT}: of this version")
    own = _look(plan)
    for name, value in own.items():
        if look.get(name) != value:
            raise CheckpointError(f"{place}: saved with other {name}; expected those of the strategy: resume with the same one")
    return found_one


def server_values(at: Checkpoint, number: int) -> list[Tensor]:
    """See ``save_server``."""
    found = _read(at.server(number))
    values: list[Tensor] = found["values"]
    return values


def stage_state(at: Checkpoint, worker: int, stage: int) -> StageState:
    """See ``save_stage``."""
    found = _read(at.stage(worker, stage))
    begun = None if found["update"] is None else (int(found["minibatches"]), found["update"])
    return StageState(found["momentum"], begun, found["buffers"])


def _look(plan: WavePlan) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    stages = [[[stage.device, stage.first, stage.end] for stage in own] for own in plan.workers]
    pieces = {name: [[*piece.span, piece.server] for piece in own] for name, own in plan.pieces.items()}
    return {"stages": stages, "minibatches in flight": plan.in_flight, "pieces": pieces}


def _write(place: Path, kept: dict[str, Any]) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise CheckpointError(f"{place.parent}: cannot be made: {reason(cause)}; save to another folder") from None
    stream = io.BytesIO()
    torch.save(kept, stream)
    write_bytes_atomically(place, stream.getvalue(), error=CheckpointError)


def _read(place: Path) -> dict[str, Any]:
    try:
        check_archive(place)
        found: dict[str, Any] = torch.load(place, weights_only=True)
    except Exception as cause:  # torch fails in many ways
        raise CheckpointError(f"{place}: cannot be read ({first_line(cause)}); take another checkpoint") from None
    return found
