"""Weights in safetensors files: one file, or a folder as Hugging Face writes it, with an index if there are several files.

Writing weights as safetensors, one tensor after the other, so that only one is in memory; as Hugging Face names the files.

The format: eight bytes with the header's length, the header (JSON: type, shape and place of each tensor), then the tensors end to end.
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from soap.errors import ModelError, SoapError, SoapWarning, first_line
from soap.files import check_writable, read_text, reason, write_parts_atomically, write_text_atomically
from soap.strategy.json_text import parse_json
from soap.weights.fitting import Kind

SUFFIX = ".safetensors"
SINGLE = f"model{SUFFIX}"
INDEX = f"{SINGLE}.index.json"


def check_place_of_weights(folder: Path) -> None:
    """Make the folder. SoapError in one line if weights could not be written there, or some are there: two sets would be taken for one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = sorted(path.name for path in folder.iterdir() if path.name == INDEX or path.suffix == SUFFIX)
    except OSError as cause:
        raise SoapError(f"cannot write weights into {str(folder)!r}: {reason(cause)}; choose another folder") from None
    if known:
        raise SoapError(f"folder {str(folder)!r} has weights already ({known[0]}); choose another folder, or remove them")
    check_writable(folder / SINGLE)


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Those of the format that models here may have."""


class SafetensorsFiles:
    """See ``Weights``. Where there is an index, it decides which file has a tensor; a SoapWarning says what else has one."""

    is_mapped = True

    def __init__(self, path: Path) -> None:
        self.said = str(path)
        self.kinds: Mapping[str, Kind] = {}
        self._files: dict[str, Any] = {}
        others: list[str] = []
        for file, expected in _files(path).items():
            others += self._open(file, expected)
        if (path / INDEX).is_file() and (path / SINGLE).is_file() and not others and (path / SINGLE) not in _indexed(path):
            others = [SINGLE]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            warnings.warn(f"weights {str(path)!r}: {others[0]}{more} not read, because {INDEX} does not say so", SoapWarning, stacklevel=3)

    def tensor(self, name: str) -> torch.Tensor:
        """See ``Weights``."""
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def _open(self, path: Path, expected: frozenset[str]) -> list[str]:
        """Take a file's tensors, or of these what the index expects there. Returns the others, in words."""
        from safetensors import SafetensorError, safe_open

        try:
            opened: Any = safe_open(path, framework="pt", device="cpu")
            names = frozenset(opened.keys())
        except (OSError, SafetensorError) as error:
            said = first_line(error)
            raise ModelError(f"weights file {str(path)!r} cannot be read ({said}); expected a whole safetensors file") from None
        if missing := sorted(expected - names):
            raise ModelError(f"weights file {str(path)!r} lacks {missing[0]!r}, which {INDEX} says it has; copy the folder again")
        found: dict[str, Kind] = {}
        for name in sorted(expected or names):
            part = opened.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise ModelError(f"weights file {str(path)!r}: {name!r} has type {part.get_dtype()}; expected one of {', '.join(DTYPES)}")
            found[name] = Kind(tuple(part.get_shape()), DTYPES[part.get_dtype()])
            self._files[name] = opened
        self.kinds = {**self.kinds, **found}
        return [f"{name!r} in {path.name}" for name in sorted(names - expected)] if expected else []


def _files(path: Path) -> Mapping[Path, frozenset[str]]:
    """The files, and what each must have."""
    if path.is_file():
        return {path: frozenset()}
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return {path / SINGLE: frozenset()}
    found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if len(found) != 1:
        what = f"has {len(found)} {SUFFIX} files and no {INDEX}" if path.is_dir() else "does not exist"
        raise ModelError(f"weights {str(path)!r} {what}; expected a {SUFFIX} file, or a folder with {SINGLE} or {INDEX}")
    return {found[0]: frozenset()}


def _indexed(folder: Path) -> dict[Path, frozenset[str]]:
    text = read_text(folder / INDEX, what="index of weights", error=ModelError)
    try:
        places = parse_json(text)["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file in places.items():
            if Path(file).name != file or not file.endswith(SUFFIX):  # files come from outside: none beyond the folder
                raise ModelError(f"index of weights {str(folder / INDEX)!r}: file {file!r}; expected the name of a file in its folder")
            by_file.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"index of weights {str(folder / INDEX)!r} is no index ({first_line(error)}); expected a weight_map") from None
    return {folder / file: frozenset(names) for file, names in by_file.items()}


FILE_BYTES = 5 * 10**9
"""A file has at most so many, unless a single tensor has more."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_ALIGNMENT = 8


def write_weights(folder: Path, kinds: Mapping[str, Kind], tensors: Iterable[torch.Tensor], file_bytes: int = FILE_BYTES) -> None:
    """Write tensors, which come in the order of ``kinds``, into a folder that exists. SoapError in one line if that fails: then what is
    there is no set of weights, since the index is written last, or the only file is not there."""
    groups = _grouped(kinds, file_bytes)
    coming = iter(tensors)
    if len(groups) == 1:
        _write(folder / SINGLE, groups[0], coming)
        return
    names = [f"model-{number + 1:05}-of-{len(groups):05}{SUFFIX}" for number in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        _write(folder / name, group, coming)
    places = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    total = sum(map(_size, kinds.values()))
    write_text_atomically(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")


def require_writable(kinds: Mapping[str, Kind]) -> None:
    """SoapError in one line if the format has no such type."""
    for name, kind in kinds.items():
        if kind.dtype not in _WORDS:
            raise SoapError(f"weights: {name!r} has type {kind.dtype}, which safetensors files cannot have; expected {', '.join(DTYPES)}")


def _grouped(kinds: Mapping[str, Kind], file_bytes: int) -> list[dict[str, Kind]]:
    groups: list[dict[str, Kind]] = [{}]
    room = file_bytes
    for name, kind in kinds.items():
        if groups[-1] and _size(kind) > room:
            groups.append({})
            room = file_bytes
        groups[-1][name] = kind
        room -= _size(kind)
    return groups


def _size(kind: Kind) -> int:
    return prod(kind.shape) * kind.dtype.itemsize


def _write(path: Path, kinds: Mapping[str, Kind], tensors: Iterator[torch.Tensor]) -> None:
    write_parts_atomically(path, _parts(kinds, tensors))


def _parts(kinds: Mapping[str, Kind], tensors: Iterator[torch.Tensor]) -> Iterator[bytes | memoryview]:
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, kind in kinds.items():
        entry = {"dtype": _WORDS[kind.dtype], "shape": [*kind.shape], "data_offsets": [place, place + _size(kind)]}
        header[name] = entry  # type: ignore[assignment]
        place += _size(kind)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for kind in kinds.values():
        tensor = next(tensors).detach().cpu()
        assert (tuple(tensor.shape), tensor.dtype) == kind
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
