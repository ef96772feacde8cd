"""Writing weights as safetensors, one tensor after the other, so that only one is in memory; as Hugging Face names the files.

The format: eight bytes with the header's length, the header (JSON: type, shape and place of each tensor), then the tensors end to end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from soap.errors import SoapError
from soap.files import write_parts_atomically, write_text_atomically
from soap.weights.places import INDEX, SINGLE, SUFFIX
from soap.weights.safetensors_files import DTYPES
from soap.weights.seam import Kind

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
