"""The manifest of a checkpoint, ``soap.json``: what it holds, and where. Plain JSON that is checked on reading.

Torch's own index of a checkpoint is a pickle, which could run code. It is written for other tools and never read here. No torch in this
module.

Folders of checkpoints, which exist as a whole or not at all: written under a temporary name, then renamed (docs/internals/runtime.md,
*Checkpoints*). No torch here: commands look into folders before they start anything.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from soap.errors import CheckpointError
from soap.files import read_text, reason, synchronize_folder
from soap.model.regions import Box, contains, volume, whole
from soap.strategy.json_text import Schema, read_as, record, schema_of

MANIFEST = "soap.json"
"""The file that makes a folder a checkpoint."""
_FINAL = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?")
_TEMPORARY = re.compile(r"\.step-\d{8,18}(?:-\d{1,9})?\.[0-9a-f]{16}\.tmp")


class Complete(NamedTuple):
    """A complete checkpoint. ``number``: 0 for a step's first save, then 1, 2, …; a later save of a step replaces the earlier ones."""

    step: int
    number: int
    path: Path


def complete(folder: Path) -> list[Complete]:
    """The complete checkpoints of a folder, oldest first; none if there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise CheckpointError(f"checkpoint folder {str(folder)!r} cannot be read: {reason(cause)}; check the path") from None
    matches = [found for name in names if (found := _FINAL.fullmatch(name))]
    entries = [Complete(int(found[1]), int(found[2] or 0), folder / found[0]) for found in matches]
    return sorted(entry for entry in entries if (entry.path / MANIFEST).is_file())


def resolve(path: str | Path) -> Path:
    """The checkpoint that a path stands for: the folder itself, or the latest complete one in it. CheckpointError if there is none."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = complete(path)
    if not found:
        what = "has no complete checkpoint" if path.is_dir() else "is no folder"
        raise CheckpointError(f"{str(path)!r} {what}; expected a checkpoint or the folder that checkpoints were saved to")
    return found[-1].path


def check_place(folder: str | Path, step: int) -> None:
    """Raise CheckpointError if a checkpoint of this step could not be saved there. To be asked before long work. Creates the folder."""
    folder = Path(folder)
    latest = complete(folder)[-1:]
    if latest and latest[0].step > step:
        raise CheckpointError(
            f"{str(folder)!r} has a checkpoint of step {latest[0].step}, later than step {step} of this run; "
            "resume from it, or save to another folder"
        )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = _temporary(folder, step)
        probe.mkdir()
        probe.rmdir()


def begin(folder: str | Path, step: int) -> Path:
    """Make a temporary folder for a checkpoint of this step, and remove what killed saves have left."""
    folder = Path(folder)
    check_place(folder, step)
    with _writing(folder):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                shutil.rmtree(folder / name)
        temporary = _temporary(folder, step)
        temporary.mkdir()
    return temporary


def publish(temporary: Path, step: int, keep: int | None) -> Path:
    """Give a written folder its final name, then remove all checkpoints but those of the last ``keep`` steps. Returns its path."""
    folder = temporary.parent
    with _writing(folder):
        number = max((entry.number + 1 for entry in complete(folder) if entry.step == step), default=0)
        final = folder / (f"step-{step:08}-{number}" if number else f"step-{step:08}")
        synchronize_folder(temporary)
        os.rename(temporary, final)
        synchronize_folder(folder)
        for old in _superfluous(complete(folder), keep):
            doomed = _temporary(folder, old.step)
            os.rename(old.path, doomed)
            shutil.rmtree(doomed)
    return final


def discard(temporary: Path) -> None:
    """Remove a temporary folder. What cannot be removed now is removed by the next save."""
    shutil.rmtree(temporary, ignore_errors=True)


def _superfluous(found: list[Complete], keep: int | None) -> list[Complete]:
    """The checkpoints to remove: earlier ones of a step that was saved again, and those of all but the last ``keep`` steps."""
    last = {entry.step: entry for entry in found}
    kept = sorted(last)[-keep:] if keep is not None else sorted(last)
    return [entry for entry in found if entry.step not in kept or entry != last[entry.step]]


def _temporary(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08}.{secrets.token_hex(8)}.tmp"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as cause:
        raise unwritable(folder, cause) from None


def unwritable(folder: Path, cause: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    return CheckpointError(
        f"cannot write a checkpoint to {str(folder)!r}: {reason(cause)}; earlier checkpoints are as they were: "
        "free space, or choose another folder"
    )


FORMAT = "soap-checkpoint"
VERSION = 1

Natural = Annotated[int, Schema(minimum=0, maximum=2**62)]
Peers = Annotated[int, Schema(minimum=1, maximum=2**20)]
Whole = Annotated[int, Schema(minimum=-(2**62), maximum=2**62)]
Number = tuple[Annotated[str, Schema(enum=["float32", "float64"])], float]
"""A type, and a number of it."""
Region = tuple[tuple[Natural, Natural], ...]
"""A box."""
Names = tuple[str, ...]
Schedule = Annotated[Mapping[str, Any], record(name=str, state=Mapping[str, Any])]
Scale = Annotated[float, Schema(minimum=2.0**-24, maximum=2.0**127)]
LossScaling = Annotated[Mapping[str, Any], record(scale=Scale, since=Natural, skipped=Natural)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of a tensor, and the part of a file that holds it."""

    box: Region
    file: Annotated[str, Schema(pattern=r"^__\d+_\d+\.distcp$")]
    offset: Natural
    length: Natural


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor. Its ``chunks`` are disjoint and cover it. ``dtype``: torch's name without the prefix ``torch.``."""

    dtype: Annotated[str, Schema(pattern="^[a-z0-9_]{1,40}$")]
    shape: tuple[Natural, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer's state of a parameter. ``options``: of its parameter group. ``regions``: names of tensors that are split like the
    parameter. ``scalars``: names of tensors with a single number. ``values``: name -> plain number. ``others``: names of tensors of other
    shapes, for parameters that are kept whole."""

    options: Mapping[str, Any]
    regions: Names
    scalars: Names
    values: Mapping[str, Any]
    others: Names = ()


NO_STATE = ParameterState({}, (), (), {})


@dataclass(frozen=True, slots=True)
class RankEntry:
    """What the rank at ``place`` of a region's ``peers`` keeps: ``numbers`` by name, and ``own``: name -> (dtype, number)."""

    box: Region
    place: Natural
    peers: Peers
    numbers: Mapping[str, Whole]
    own: Mapping[str, Number]


@dataclass(frozen=True, slots=True)
class RankStates:
    """What ranks keep of a compressed parameter, each for itself. ``names``: of tensors of the parameter's shape, each with a part for each
    of ``peers`` places, which is the most that a region has. ``method``: of compression, with its settings as in strategy files.
    ``common``: names of tensors that ranks share. ``entries``: one for each region and rank."""

    names: Names
    peers: Peers
    method: Mapping[str, Any]
    common: Names
    entries: tuple[RankEntry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents. ``aliases``: further names of tied parameters. ``optimizer``: name of its class; None if nothing is trained.
    ``schedule``: see ``runtime.updates.optimizers``. ``sync_states``: parameter -> names of the state of its method of synchronization.
    ``rank_states``: compressed parameter -> what each rank keeps of it. ``compressing``: momentum correction and warm-up that they were
    trained with. ``loss_scaling``: see ``runtime.updates.loss_scaling``."""

    save_id: str
    step: Natural
    seed: int
    model: str
    parameters: Names
    buffers: Names
    aliases: Mapping[str, str]
    optimizer: str | None
    states: Mapping[str, ParameterState]
    tensors: Mapping[str, StoredTensor]
    schedule: Schedule | None = None
    sync_states: Mapping[str, Names] = field(default_factory=dict)
    rank_states: Mapping[str, RankStates] = field(default_factory=dict)
    compressing: Mapping[str, Any] | None = None
    loss_scaling: LossScaling | None = None

    @property
    def files(self) -> dict[str, int]:
        """Data file -> its size in bytes."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
        return sizes

    def text(self) -> str:
        """The file's content. Rare entries are left out if they are empty, so that older programs can read the file."""
        content = asdict(self)
        for state in content["states"].values():
            if not state["others"]:
                del state["others"]
        for name in ("schedule", "sync_states", "rank_states", "compressing", "loss_scaling"):
            if not content[name]:
                del content[name]
        return json.dumps({"format": FORMAT, "version": VERSION, **content}) + "\n"


def require_optimizer(checkpoint: Path, manifest: Manifest, name: str | None) -> None:
    """CheckpointError in one line if a checkpoint was saved with another optimizer than the one of this name."""
    if None not in (name, manifest.optimizer) and name != manifest.optimizer:
        raise CheckpointError(
            f"checkpoint {str(checkpoint)!r} was saved with optimizer {manifest.optimizer}, this run has {name}; use the same optimizer"
        )


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. CheckpointError in one line if it is invalid, or if a data file is missing or has another size."""
    path = checkpoint / MANIFEST
    try:
        document = json.loads(read_text(path, what="checkpoint", error=CheckpointError))
    except (ValueError, RecursionError):
        raise damaged(path, "it is no valid JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise damaged(path, f"expected {FORMAT!r} as its format")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(f"checkpoint {str(checkpoint)!r} has version {str(version)[:40]!r}; this program reads version {VERSION}")
    _check_schema(path, document)
    manifest = _manifest(path, document)
    for name, size in manifest.files.items():
        _check_file(checkpoint / name, size)
    return manifest


def model_name(name: str) -> str:
    """The name of a parameter or buffer among a checkpoint's tensors."""
    return f"model.{name}"


def state_name(parameter: str, key: str) -> str:
    """The name of a part of the optimizer's state among a checkpoint's tensors."""
    return f"optim.state.{parameter}.{key}"


def sync_state_name(parameter: str, name: str) -> str:
    """The name of a method of synchronization's state of a parameter among a checkpoint's tensors."""
    return f"sync.state.{parameter}.{name}"


def place_name(parameter: str, name: str, place: int) -> str:
    """The name of what one of a compressed parameter's readers keeps among a checkpoint's tensors."""
    return sync_state_name(parameter, f"{name}@{place}")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a damaged file."""
    return CheckpointError(f"checkpoint file {str(path)!r} is damaged: {what}; take another checkpoint")


def _check_file(path: Path, size: int) -> None:
    if not path.is_file():
        raise damaged(path, "it is missing")
    if path.stat().st_size != size:
        raise damaged(path, f"it has {path.stat().st_size} bytes, expected {size}")


_HEAD = {"format": {"const": FORMAT}, "version": {"const": VERSION}}
_CONTENT = schema_of(Manifest)
SCHEMA = {**_CONTENT, "properties": {**_HEAD, **_CONTENT["properties"]}, "required": [*_HEAD, *_CONTENT["required"]]}


def _check_schema(path: Path, document: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator  # slow to import, and needed for files only
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(SCHEMA).iter_errors(document))
    if error is not None:
        place = "/".join(str(part)[:60] for part in error.absolute_path) or "top level"
        raise damaged(path, f"at {place}: {' '.join(error.message.split())[:120]}")


def _manifest(path: Path, document: Mapping[str, Any]) -> Manifest:
    """The manifest of a document that is valid by the schema. Checks what the schema cannot express."""
    manifest: Manifest = read_as(Manifest, {name: value for name, value in document.items() if name not in _HEAD})
    for name, own in manifest.tensors.items():
        for chunk in own.chunks:
            if not _lies_in(chunk.box, own.shape):
                raise damaged(path, f"region {chunk.box} of {name!r} lies outside its shape {own.shape}")
        if sum(volume(chunk.box) for chunk in own.chunks) != prod(own.shape):
            raise damaged(path, f"the regions of {name!r} do not cover its shape {own.shape}")
    _check_complete(path, manifest)
    return manifest


def _lies_in(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(a <= b for a, b in box) and contains(whole(shape), box)


def _check_complete(path: Path, manifest: Manifest) -> None:
    """CheckpointError unless every named parameter, buffer and state has its tensor, in the right shape."""
    tensors = manifest.tensors

    def has_shape_of(parameter: str, name: str) -> bool:
        found, own = tensors.get(name), tensors.get(model_name(parameter))
        return found is not None and own is not None and found.shape == own.shape

    for name in (*manifest.parameters, *manifest.buffers, *manifest.aliases.values()):
        if model_name(name) not in tensors:
            raise damaged(path, f"it lacks {name!r}")
    for name, state in manifest.states.items():
        for key in (*state.regions, *state.scalars):
            own = state_name(name, key)
            if model_name(name) not in tensors or not (has_shape_of(name, own) if key in state.regions else _is_number(tensors.get(own))):
                raise damaged(path, f"it lacks state {key!r} of {name!r}, or has it in another shape")
        for key in state.others:
            if state_name(name, key) not in tensors:
                raise damaged(path, f"it lacks state {key!r} of {name!r}")
    for name, keys in manifest.sync_states.items():
        for key in keys:
            if not has_shape_of(name, sync_state_name(name, key)):
                raise damaged(path, f"it lacks the synchronization state {key!r} of {name!r}, or has it in another shape")
    if manifest.rank_states and manifest.compressing is None:
        raise damaged(path, "it lacks the momentum correction and warm-up of its compressed parameters")
    for name, ranks in manifest.rank_states.items():
        _check_entries(path, name, ranks, tensors.get(model_name(name)))
        for key in (f"{key}@{place}" for key in ranks.names for place in range(ranks.peers)):
            if not has_shape_of(name, sync_state_name(name, key)):
                raise damaged(path, f"it lacks {key!r} of compressed parameter {name!r}, or has it in another shape")


def _is_number(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.shape == ()


def _check_entries(path: Path, name: str, own: RankStates, parameter: StoredTensor | None) -> None:
    """CheckpointError unless each entry's region lies in the parameter, its place is one of its peers', and its numbers can be floats."""
    shape = () if parameter is None else parameter.shape
    for entry in own.entries:
        if not _lies_in(entry.box, shape):
            raise damaged(path, f"region {entry.box} of compressed parameter {name!r} lies outside its shape {shape}")
        if not entry.place < entry.peers <= own.peers:
            place = f"place {entry.place} of {entry.peers}"
            raise damaged(path, f"{place} ranks of compressed parameter {name!r}, which has {own.peers}")
        for key, (_, value) in entry.own.items():
            if isinstance(value, int) and abs(value) > 2**62:
                raise damaged(path, f"{key!r} of compressed parameter {name!r} is too large")
