"""ZIP archives from outside, which may be small and yet hold gigabytes."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from soap.units import format_bytes

SPARE_BYTES = 2**26
"""Texts may be compressed, which is little beside tensors, which torch stores as they are."""


def check_archive(source: Path | bytes) -> None:
    """Raise ValueError, which says so in words, if what an archive holds is more than twice as long as the archive. Nothing is read of it
    but its list of entries. What is no archive passes."""
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    try:
        with zipfile.ZipFile(source if isinstance(source, Path) else io.BytesIO(source)) as archive:
            held = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile:
        return
    if held > 2 * size + SPARE_BYTES:
        raise ValueError(f"its {format_bytes(size)} hold {format_bytes(held)}; expected an archive that is not compressed")
