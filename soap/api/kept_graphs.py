"""Graphs of the zoo's models, kept in the user's cache folder: reading one again needs no torch, which takes seconds to import.

A kept graph is used if everything that it depends on is as it was: this package's sources, the versions of Python, torch and numpy, how the
model is read, and torch's own settings. Any other file is as if it was not there, and is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from soap.errors import SoapError
from soap.files import cache_folder, read_text, write_text_atomically
from soap.model.graph import OperatorGraph
from soap.model.graph_json import graph_from, graph_values

ZOO = "zoo:"
USUAL = ("torch.float32", "highest", True)
"""torch's settings that decide about graphs, in a process that has not changed them (``_settings``)."""
OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""A variable of torch's that changes them."""


def kept_graph(spec: str, reading: dict[str, Any]) -> OperatorGraph | None:
    """The graph of a model that was read before; None if it is not there. ``reading``: arguments of ``load``."""
    path = _path(spec, reading)
    if path is None or not path.exists():
        return None
    try:
        record = json.loads(read_text(path, what="cache file"))
        if record["key"] != _key(spec, reading) or record["sha256"] != _digest(record["graph"]):
            return None
        return graph_from(record["graph"])
    except (SoapError, ValueError, TypeError, KeyError, RecursionError):
        return None


def keep(spec: str, reading: dict[str, Any], graph: OperatorGraph) -> None:
    """Keep a graph that was read, if it is one to keep and there is a place."""
    path = _path(spec, reading)
    if path is None:
        return
    values = graph_values(graph)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps({"key": _key(spec, reading), "sha256": _digest(values), "graph": values}) + "\n")
    except (OSError, SoapError):  # it is read again by the next command
        return


def _path(spec: str, reading: dict[str, Any]) -> Path | None:
    """Where a graph is kept; None if it is not: a user's file may change, imports may do anything, and ``matmul_precision`` is to be set in
    torch itself."""
    folder = cache_folder()
    if folder is None or not spec.startswith(ZOO) or reading.get("imports") or reading.get("matmul_precision") is not None:
        return None
    return folder / f"graph-{_digest([spec, _plain(reading)])[:16]}.json"


def _key(spec: str, reading: dict[str, Any]) -> dict[str, Any]:
    return {
        "spec": spec,
        "reading": _plain(reading),
        "sources": _sources(),
        "python": platform.python_version(),
        "packages": [_version("torch"), _version("numpy")],
        "settings": list(_settings()),
    }


def _plain(reading: dict[str, Any]) -> dict[str, Any]:
    """How a model is read, without what says nothing."""
    return {name: dict(value) if name == "batch_dims" else value for name, value in sorted(reading.items()) if value}


def _settings() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    own = USUAL
    if torch is not None:
        own = str(torch.get_default_dtype()), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return *own, os.environ.get(OVERRIDE, "")


@cache
def _sources() -> str:
    """A hash of this package's files."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
