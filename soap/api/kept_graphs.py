"""Graphs of models that were read, kept in the user's cache folder: reading one again needs no torch, which takes seconds to import.

A kept graph is used if everything that it depends on is as it was: this package's sources, the versions of Python, torch and numpy, how the
model is read, and torch's own settings; of a ``.pt2`` file also all that it holds but the values of its parameters, wherever it lies. Any
other file is as if it was not there, and is written anew. Those that were not used for the longest time make room for others.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from soap.errors import SoapError, SoapWarning
from soap.files import cache_folder, check_archive, read_text, write_text_atomically
from soap.model.graph import OperatorGraph
from soap.model.json_text import plain, read_as

ZOO = "zoo:"
USUAL = ("torch.float32", "highest", True)
"""torch's settings that decide about graphs, in a process that has not changed them (``_settings``)."""
OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""A variable of torch's that changes them."""
MOST_GRAPHS, MOST_BYTES = 64, 2**28
"""So many are kept, in so much room."""
PART_BYTES = 2**20
"""A file is read in such parts."""


class KeptGraph:
    """The place of a model's graph. ``reading``: arguments of ``load``."""

    def __init__(self, spec: str, reading: dict[str, Any]) -> None:
        self._spec, self._reading = spec, _plain(reading)
        self._seen = _version_of(spec)

    def find(self) -> OperatorGraph | None:
        """The graph, if it was read before, with the warnings of that reading; None if it is not there."""
        if self._path is None or not self._path.exists():
            return None
        try:
            record = json.loads(read_text(self._path, what="cache file"))
            if record["key"] != self._key() or record["sha256"] != _digest([record["told"], record["graph"]]):
                return None
            graph: OperatorGraph = read_as(OperatorGraph, record["graph"])
            told = [str(text) for text in record["told"]]
        except (SoapError, ValueError, TypeError, KeyError, RecursionError):
            return None
        with suppress(OSError):
            os.utime(self._path)
        for text in told:
            warnings.warn(text, SoapWarning, stacklevel=3)
        return graph

    def keep(self, graph: OperatorGraph, told: Sequence[str]) -> None:
        """Keep a graph that was read, and what was warned of meanwhile, if it is one to keep and there is a place."""
        if self._path is None or self._seen != _version_of(self._spec):
            return
        values = plain(graph, rows=True)
        record = {"key": self._key(), "sha256": _digest([told, values]), "told": told, "graph": values}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._path, json.dumps(record) + "\n")
            _make_room(self._path)
        except (OSError, SoapError):  # it is read again by the next command
            return

    @cached_property
    def _model(self) -> list[str] | None:
        """Which model it is; None if it is none to keep: imports may do anything, and there may be no such file."""
        if self._reading.get("imports"):
            return None
        if self._spec.startswith(ZOO):
            return [self._spec]
        content = _content(Path(self._spec))
        return None if content is None else [Path(self._spec).stem, content]

    @cached_property
    def _path(self) -> Path | None:
        folder = cache_folder()
        if folder is None or self._model is None:
            return None
        return folder / f"graph-{_digest([self._model, self._reading])[:16]}.json"

    def _key(self) -> dict[str, Any]:
        default, precision, *others = _settings()
        return {
            "model": self._model,
            "reading": self._reading,
            "sources": _sources(),
            "python": platform.python_version(),
            "packages": [_version("torch"), _version("numpy")],
            "settings": [default, self._reading.get("matmul_precision", precision), *others],
        }


def _version_of(spec: str) -> tuple[int, ...]:
    """A file's place, size and time of change; empty if there is no file."""
    try:
        found = os.stat(spec)
    except (OSError, ValueError):
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _content(path: Path) -> str | None:
    """A hash of what a graph depends on in a ``.pt2`` file: all but the values of parameters, which may be many gigabytes. None if it
    cannot be read so."""
    digest = hashlib.sha256()
    if not path.is_file():
        return None
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            values = _values_of_parameters(archive)
            for info in archive.infolist():
                digest.update(f"{info.filename!r} {info.file_size} {info.compress_type}\n".encode())
                if info.filename not in values:
                    with archive.open(info) as stream:
                        while part := stream.read(PART_BYTES):
                            digest.update(part)
    except Exception:  # whatever is wrong with it, reading it says so
        return None
    return digest.hexdigest()


def _values_of_parameters(archive: zipfile.ZipFile) -> set[str]:
    """The entries that hold nothing but numbers of parameters, or are made of these."""
    own, others = set[str](), set[str]()
    for name in archive.namelist():
        folder, _, leaf = name.rpartition("/")
        if name.endswith("/.data/serialization_id"):
            own.add(name)
        if folder.endswith("/data/weights") and leaf.endswith("_config.json"):
            for entry in json.loads(archive.read(name))["config"].values():
                plain = entry["is_param"] is True and entry["use_pickle"] is False
                (own if plain else others).add(f"{folder}/{entry['path_name']}")
    return own - others


def _make_room(newest: Path) -> None:
    """Delete the graphs that were not used for the longest time, but for the newest."""
    found = sorted(((entry.stat().st_mtime_ns, entry.stat().st_size, entry) for entry in newest.parent.glob("graph-*.json")), reverse=True)
    room = MOST_BYTES
    for number, (_, size, path) in enumerate(found):
        room -= size
        if path != newest and (number >= MOST_GRAPHS or room < 0):
            path.unlink(missing_ok=True)


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
