"""Where benchmarks put their pages."""

from __future__ import annotations

from pathlib import Path

from soap.files import write_text_atomically


def give(text: str, path: str | Path | None) -> None:
    """Write a page to ``path``; print it if there is none."""
    if path:
        write_text_atomically(path, text)
    else:
        print(text)
