"""Reading a model for planning or training: a ``.pt2`` file, or ``zoo:NAME[:tiny][@BATCH]``."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.export import ExportedProgram

from soap import zoo
from soap.errors import ModelError
from soap.tracing.archive import plain_archive
from soap.tracing.execute import ExecutableModel
from soap.tracing.importer import import_program

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    spec: str | Path, *, plan_only: bool = False, batch_dims: Mapping[str, int] | None = None, dtype: str | None = None
) -> ExecutableModel:
    """The traced model of a ``.pt2`` file or of a zoo model.

    ``plan_only`` reads shapes alone (zoo models are not even allocated). ``batch_dims``: input name -> batch dimension.
    ``dtype`` replaces all floating-point dtypes. Raises ModelError in one line.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    text = str(spec)
    if text.startswith("zoo:"):
        exported, name = export_zoo(text, plan_only=plan_only)
    else:
        exported, name = read_pt2(Path(spec)), Path(spec).stem
    return import_program(exported, name=name, batch_dims=batch_dims, plan_only=plan_only, dtype=None if dtype is None else DTYPES[dtype])


def export_zoo(spec: str, *, plan_only: bool) -> tuple[ExportedProgram, str]:
    """A zoo model's program and its canonical name; on the meta device if only a plan is wanted."""
    model = zoo.build(spec.removeprefix("zoo:"), fake=plan_only)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of harmless attributes that LSTMs assign
        exported = torch.export.export(model.module, model.args, dict(model.kwargs), strict=False)
    return exported, f"zoo:{model.name}"


def read_pt2(path: Path) -> ExportedProgram:
    """The exported program in a file, without running any code that the file might hold."""
    if not path.exists():
        raise ModelError(
            f"model file {str(path)!r} does not exist; expected a .pt2 file made by soap.export or torch.export.save, or zoo:NAME"
        )
    try:
        archive = plain_archive(path)
        with warnings.catch_warnings(), _quiet("torch.export"), _weights_only():
            warnings.simplefilter("ignore")
            return torch.export.load(archive)
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model file {str(path)!r} cannot be read ({reason}); expected a .pt2 file that torch.export.save wrote"
        ) from error


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Silence a logger that prints tracebacks for files it cannot read: the error itself says enough."""
    target = logging.getLogger(logger)
    level = target.level
    target.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        target.setLevel(level)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Torch's own switch that no ``torch.load`` inside may run code: a second lock behind the checks of the archive."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
