"""Folders of checkpoints, which exist as a whole or not at all: written under a temporary name, then renamed (docs/internals/runtime.md,
*Checkpoints*). No torch here: commands look into folders before they start anything."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from soap.errors import CheckpointError
from soap.files import reason, synchronize_folder

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
