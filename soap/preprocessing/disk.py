"""Whether a run's files fit on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soap.preprocessing.container import PreprocessError
from soap.preprocessing.inputs import GZIP, Unit
from soap.preprocessing.resources import Machine
from soap.units import format_bytes


def disk_needed(units: Sequence[Unit], parquet: bool) -> int:
    """About how many bytes all files of a run take at their most: as much as the input for what steps leave for each other, and the final
    arrays; what is uncompressed; and Parquet."""
    raw = sum(unit.size * (4 if unit.kind == GZIP else 1) for unit in units)
    inflated = sum(4 * unit.size for unit in units if unit.kind == GZIP)
    return inflated + round(raw * (1.6 + 0.7 * parquet))


def require_disk(units: Sequence[Unit], out: Path, parquet: bool) -> None:
    """PreprocessError if the disk is surely too small. What earlier runs left in ``out`` counts as room."""
    place = out
    while not place.exists():
        place = place.parent
    free = Machine(place).sample(()).disk_bytes + sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    needed = disk_needed(units, parquet) // 2
    if free < needed:
        raise PreprocessError(
            f"{str(out)!r} has {format_bytes(free)} free; expected at least {format_bytes(needed)}: make room, choose another -o, "
            "or leave Parquet out (--no-parquet)"
        )
