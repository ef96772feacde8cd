"""Whether a run's files fit on the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from soap.files import reason
from soap.preprocessing.container import PreprocessError
from soap.preprocessing.inputs import GZIP, Unit
from soap.preprocessing.resources import Machine
from soap.units import format_bytes

GZIP_RATIO = 4
"""Bytes of uncompressed lines for each of a ``.gz`` file, about."""


def disk_needed(units: Sequence[Unit], parquet: bool) -> int:
    """About how many bytes all files of a run take at their most: as much as the input for what steps leave for each other, and the final
    arrays; what is uncompressed; and Parquet."""
    raw = sum(unit.size * (GZIP_RATIO if unit.kind == GZIP else 1) for unit in units)
    inflated = sum(GZIP_RATIO * unit.size for unit in units if unit.kind == GZIP)
    return inflated + round(raw * (1.6 + 0.7 * parquet))


def place_of(out: Path) -> Path:
    """The folder in which ``out`` is or would be made. PreprocessError if nobody lets us look."""
    try:
        place = out
        while not place.exists():
            place = place.parent
        return place
    except OSError as cause:
        raise PreprocessError(f"cannot write {str(out)!r}: {reason(cause)}; choose another folder") from None


def require_disk(units: Sequence[Unit], out: Path, parquet: bool) -> None:
    """PreprocessError if the disk is surely too small. What earlier runs left in ``out`` counts as room."""
    free = Machine(place_of(out)).sample(()).disk_bytes + _held(out)
    needed = disk_needed(units, parquet) // 2
    if free < needed:
        raise PreprocessError(
            f"{str(out)!r} has {format_bytes(free)} free; expected at least {format_bytes(needed)}: make room, choose another folder, "
            "or leave Parquet out: parquet=False (--no-parquet)"
        )


def _held(folder: Path) -> int:
    """Bytes of all files in a folder, some of which a run that is under way may take away meanwhile."""
    found = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(top, name)).st_size
    return found
