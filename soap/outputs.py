"""Files that commands write never take the place of something else: a file that is there is written over only if it is of the output's own
kind, or empty."""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soap.errors import SoapError
from soap.files import reason

END_BYTES = 2**16
"""So much of a file's beginning and end is looked at."""


@dataclass(frozen=True)
class Kind:
    """A kind of output. ``name``: for people, with its article. ``is_own``: whether a file that is there, or a folder, is of it.
    ``is_folder``: whether it is a folder. ``is_path``: whether an option's value names a file, where it may be something else."""

    name: str
    is_own: Callable[[Path], bool]
    is_folder: bool = False
    is_path: Callable[[str], bool] = bool


def check(path: str | Path, kind: Kind, option: str = "", *, error: type[SoapError] = SoapError) -> None:
    """Raise ``error``, in one line that says what is there, if writing this kind of output to ``path`` would take the place of something
    else. ``option``: by which the path was given. Reads the file's ends; whether it can be written, ``files.check_writable`` says."""
    path = Path(path)
    named = f"{option} {str(path)!r}".lstrip()
    try:
        there = os.stat(path)
        if kind.is_folder:
            _check_folder(path, kind, named, error)
        if kind.is_folder or not stat.S_ISREG(there.st_mode):
            return
        if any(_is_stream(there, number) for number in (1, 2)):
            raise error(f"{named} is where this command prints to, which would be lost; choose another path")
        if there.st_size and not kind.is_own(path):
            raise error(f"{named} is there and seems to be {seems(path)}, not {kind.name}; choose another path, or remove the file first")
    except FileNotFoundError:
        parent = next(one for one in path.absolute().parents if one.exists())
        if kind.is_folder and not os.access(parent, os.W_OK | os.X_OK):
            raise error(f"{named} cannot be made: {str(parent)!r} is read-only; choose another path") from None
    except (OSError, ValueError) as cause:
        raise error(f"{named} cannot be looked at: {reason(cause)}; choose another path") from None


def _check_folder(path: Path, kind: Kind, named: str, error: type[SoapError]) -> None:
    if not path.is_dir():
        raise error(f"{named} is there and seems to be {seems(path)}; expected a folder: choose another path")
    if not kind.is_own(path):
        raise error(f"{named} is there and is not {kind.name}; choose another folder, or remove what is in it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise error(f"{named} is read-only; choose another folder")


def _is_stream(there: os.stat_result, descriptor: int) -> bool:
    """Whether the process prints into this file, as by ``> FILE``, or ``-o /dev/stdout``."""
    try:
        return os.path.samestat(there, os.fstat(descriptor))
    except OSError:  # closed
        return False


def seems(path: Path) -> str:
    """The likely kind of a file by its first bytes, or else its name, such as ``Python code``."""
    found = next((kind.name for kind in KINDS if not kind.is_folder and kind.is_own(path)), None)
    head = _head(path)
    found = found or next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if found:
        return found
    try:
        head[:-4].decode("utf-8")  # a character may be cut at the end
    except UnicodeDecodeError:
        return "binary data"
    return _SUFFIXES.get(path.suffix.lower(), "another JSON file" if head.lstrip()[:1] in (b"{", b"[") else "a text")


_MAGIC = {
    b"PK\x03\x04": "a zip archive", b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"GIF8": "a picture", b"%PDF": "a PDF file",
    b"\x1f\x8b": "a gzip file", b"SQLite format 3\0": "an SQLite database", b"\x7fELF": "a program", b"#!": "a script",
    b"<!DOCTYPE html": "a page of HTML", b"<html": "a page of HTML", b"\x93NUMPY": "a NumPy array", b"PAR1": "a Parquet file",
}  # fmt: skip
_SUFFIXES = {
    ".py": "Python code", ".md": "a Markdown text", ".yaml": "a YAML file", ".yml": "a YAML file", ".toml": "a TOML file",
    ".csv": "a table", ".svg": "a picture", ".sh": "a script", ".ipynb": "a notebook",
}  # fmt: skip

_CELL = re.compile(rb"\d+[A-Z_]+\d*|\([0-9FBIW;]+\)OVERLAP_F_B")


def _head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(END_BYTES)


def _tail(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - END_BYTES))
        return stream.read()


def _has(start: str, mark: str) -> Callable[[Path], bool]:
    """Whether a file starts so, and has this mark near its beginning or its end."""
    begins, pattern = re.compile(start.encode()), re.compile(mark.encode())

    def found(path: Path) -> bool:
        head = _head(path)
        return bool(begins.match(head) and (pattern.search(head) or pattern.search(_tail(path))))

    return found


def _json(form: str) -> Callable[[Path], bool]:
    return _has(r"\s*\{", rf'"format":\s*"{form}"')


def _is_model(path: Path) -> bool:
    """Whether it is an archive with the record of ``soap.export`` in it."""
    if not _head(path).startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/extra/soap.json") for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _is_log(path: Path) -> bool:
    """Whether its first line is a step's, with exactly the fields of ``StepMetrics``."""
    try:
        first = json.loads(_head(path).split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and list(first) == ["step", "loss", "seconds", "learning_rates", "gradient_norm"]


def _is_plan(path: Path) -> bool:
    """Whether it says that it is a plan's configuration; JSON, which has no comments, has no values but a plan's."""
    head = _head(path)
    if b" a plan of SOAP for " in head[:500]:  # near, or in earlier versions nearest to
        return True
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return False
    own = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "fp16", "zero_optimization"]
    return isinstance(found, dict) and [key for key in found if key not in ("communication_data_type", "tensor_parallel")] == own


def _is_table(path: Path) -> bool:
    """Whether the cells of its first line are a schedule's actions."""
    cells = [cell.strip() for cell in _head(path).split(b"\n", 1)[0].split(b",")[:1000]]
    return any(cells) and all(not cell or _CELL.fullmatch(cell) for cell in cells)


STRATEGY = Kind("a strategy file", _json("soap-strategy"))
TIMELINE = Kind("a timeline of ours", _json("soap-timeline"))
PAGE = Kind("a report of ours", _has("<!DOCTYPE html>", ": SOAP</title>"))
PICTURE = Kind("a picture of ours", _has(r"\x89PNG|%PDF|<\?xml", r"Software\0SOAP|/Creator \(SOAP\)|<dc:title>SOAP</dc:title>"))
LOG = Kind("a log of steps", _is_log)
MODEL = Kind("a model that soap-export wrote", _is_model)
PLAN = Kind("a plan for another trainer", _is_plan)
TABLE = Kind("a schedule's table", _is_table)
PROFILE = Kind("a file of measurements", _json("soap-profile"))
FOLDER = Kind("a folder", lambda _: True, is_folder=True)
SPARE_PLANS = Kind(
    "a folder whose spare-*.json are strategy files", lambda folder: all(map(STRATEGY.is_own, folder.glob("spare-*.json"))), is_folder=True
)
KINDS = (STRATEGY, TIMELINE, PAGE, PICTURE, LOG, MODEL, PLAN, TABLE, PROFILE, FOLDER, SPARE_PLANS)
