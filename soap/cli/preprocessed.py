"""Models and batches by what ``soap-preprocess`` wrote: ``--data preprocessed:OUT``, ``--alpha-from OUT``."""

from __future__ import annotations

from soap.cli.command import UsageError

PREFIX = "preprocessed:"
SIZED = ("zoo:dlrm",)
"""Models whose tables have as many rows as the data, if they are given data."""


def folder_of(data: str | None) -> str | None:
    """The folder of ``preprocessed:OUT``."""
    return data.removeprefix(PREFIX) if data is not None and data.startswith(PREFIX) else None


def sized(model: str, folder: str | None) -> str:
    """The model with tables as long as the dictionaries of the data. A model that brings its tables (a file, or ``:tables=``) stays."""
    name, at, batch = model.partition("@")
    if folder is None or not name.startswith(SIZED) or "=" in name:
        return model
    from soap.data import Preprocessed  # torch

    rows = Preprocessed(folder).table_rows
    if not rows:
        raise UsageError(f"{folder!r} has no categories; expected some, one for each table of {model}")
    return f"{name}:tables={'-'.join(str(max(1, count)) for count in rows)}{at}{batch}"
