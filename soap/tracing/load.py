"""Reading a model for planning or training: a ``.pt2`` file, or ``zoo:NAME[:tiny][@BATCH]``.

Files come from outside. ``torch.export.load`` unpickles some parts of an archive, so every pickled part is first read with torch's weights-only
unpickler, which runs no code; an archive with a part that this refuses is not opened at all.
"""

from __future__ import annotations

import io
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram

from soap import zoo
from soap.errors import ModelError
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
    return import_program(
        exported, name=name, batch_dims=batch_dims, plan_only=plan_only, dtype=None if dtype is None else DTYPES[dtype]
    )


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
        raise ModelError(f"model file {str(path)!r} does not exist; expected a .pt2 file made by soap.export or torch.export.save, or zoo:NAME")
    try:
        _refuse_code(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model file {str(path)!r} cannot be read ({reason}); expected a .pt2 file that torch.export.save wrote") from error


def _refuse_code(path: Path) -> None:
    """Raise ModelError if loading the archive could run code from it."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise ModelError(f"model file {str(path)!r} is not a .pt2 archive; expected a file that torch.export.save wrote")
    with zipfile.ZipFile(path) as archive:
        pickled: set[str] = set()
        for name in archive.namelist():
            leaf = name.rsplit("/", 1)[-1]
            if leaf.startswith(("custom_obj", "opaque_obj")) or name.endswith((".so", ".py")):
                raise ModelError(f"model file {str(path)!r} holds a custom object or code ({leaf}); expected tensors only")
            if name.endswith("_config.json"):
                config = json.loads(archive.read(name)).get("config", {})
                pickled |= {str(entry.get("path_name")) for entry in config.values() if entry.get("use_pickle")}
            if "/models/" in name and name.endswith(".json"):
                _refuse_expressions(path, archive.read(name).decode())
        for name in archive.namelist():
            leaf = name.rsplit("/", 1)[-1]
            if leaf in pickled or name.endswith(".pt"):
                content = archive.read(name)
                if content:
                    _weights_only(path, leaf, content)


def _weights_only(path: Path, leaf: str, content: bytes) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ModelError(f"model file {str(path)!r}: part {leaf} is not plain tensors; expected an archive without pickled objects") from error


def _refuse_expressions(path: Path, text: str) -> None:
    """Symbolic shapes are stored as expressions, which torch evaluates; static programs have none."""
    if re.search(r'"expr_str"\s*:', text):
        raise ModelError(f"model file {str(path)!r} has dynamic shapes; expected static shapes: export without dynamic_shapes")
