"""``--data``, and models and batches by what ``soap-preprocess`` wrote: ``--data preprocessed:OUT``, ``--alpha-from OUT``."""

from __future__ import annotations

from soap.cli.command import Parser, UsageError
from soap.cli.options import data_spec

PREFIX = "preprocessed:"
SIZED = ("zoo:dlrm",)
"""Models whose tables have as many rows as the data, if they are given data."""


def add_data(parser: Parser) -> None:
    """The option of whatever trains."""
    data_help = (
        "yields one sequence of tensors per step, the same on all ranks (compared in the first 8 steps, then in every 8th), "
        "or returns a torch dataset, of which each rank reads its samples; or zoo:NAME; or preprocessed:OUT, what soap-preprocess wrote "
        "(default: drawn like the example inputs, of which whole numbers other than indices and labels, such as offsets and masks, "
        "are taken as they are)"
    )
    parser.add_argument("--data", metavar="PKG.MOD:CALLABLE", type=data_spec, help=data_help)


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
