"""Weights of a ``.pt2`` archive, by memory map: only what is read is ever in memory.

Torch copies every weight out of an archive. So the archive that it is given (``archive.plain_archive``) has them without values, and they
are put in their places afterwards, as tensors whose memory is the file's.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch

from soap.errors import ModelError

_FOLDER = "/data/weights/"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of an entry of a ZIP file: its mark, and the lengths of its name and of its extra field, behind which its bytes begin."""
_MARK = b"PK\x03\x04"


class MappedWeights:
    """The weights of an archive that lie in it as they are. Others (pickled, compressed, of other devices, parts of one another) are left
    to torch. ``payloads``: names of their entries."""

    def __init__(self, path: Path, archive: ZipFile) -> None:
        self._path = path
        self._entries: dict[str, ZipInfo] = {}
        known = {info.filename: info for info in archive.infolist()}
        self._configs = [name for name in known if _FOLDER in name and name.endswith("_config.json")]
        for name in self._configs:
            self._entries |= _plain(json.loads(archive.read(name)), name.rpartition("/")[0] + "/", known)
        self.payloads = {info.filename for info in self._entries.values()}

    def without_values(self, name: str, content: bytes) -> bytes:
        """An entry's content for torch: nothing of a weight, and a list of weights that lie nowhere."""
        if name in self.payloads:
            return b""
        if name not in self._configs:
            return content
        document = json.loads(content)
        for weight, entry in document["config"].items():
            if weight in self._entries:
                entry["tensor_meta"]["device"] = {"type": "meta", "index": None}
        return json.dumps(document).encode()

    def give(self, state: dict[str, Any]) -> None:
        """Put them in their places. ModelError in one line if the file has fewer bytes than they need."""
        if not self._entries:
            return
        with self._path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # who changes a tensor changes no file
        wholes: dict[str, torch.Tensor] = {}
        for name, entry in self._entries.items():
            own = state.get(name)
            if not isinstance(own, torch.Tensor) or not own.is_meta:
                continue
            if entry.filename not in wholes:
                wholes[entry.filename] = self._whole(mapped, entry, own.dtype)
            whole = wholes[entry.filename]
            reach = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
            needed = reach + 1 if own.numel() else 0
            if needed > whole.numel():
                found = f"{name!r} has {whole.numel()} of {needed} numbers"
                raise ModelError(f"model file {str(self._path)!r}: {found}; export the model again")
            values = whole.as_strided(own.shape, own.stride())
            state[name] = torch.nn.Parameter(values, own.requires_grad) if isinstance(own, torch.nn.Parameter) else values

    def _whole(self, mapped: mmap.mmap, entry: ZipInfo, dtype: torch.dtype) -> torch.Tensor:
        head = mapped[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
        mark, name, extra = _LOCAL_HEADER.unpack(head) if len(head) == _LOCAL_HEADER.size else (b"", 0, 0)
        begin = entry.header_offset + _LOCAL_HEADER.size + name + extra
        if mark != _MARK or begin + entry.file_size > len(mapped) or entry.file_size % dtype.itemsize:
            raise ModelError(f"model file {str(self._path)!r} is damaged at {entry.filename}; export the model again")
        if not entry.file_size:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mapped, dtype=dtype, count=entry.file_size // dtype.itemsize, offset=begin)


def _plain(document: Any, folder: str, known: Mapping[str, ZipInfo]) -> dict[str, ZipInfo]:
    """Weight -> the entry that has its bytes and nothing else."""
    config = document.get("config", {}) if isinstance(document, dict) else {}
    found: dict[str, ZipInfo] = {}
    sizes: dict[str, list[Any]] = {}
    for name, entry in config.items():
        told, info = entry.get("tensor_meta") or {}, known.get(folder + str(entry.get("path_name", "")))
        if info is None or entry.get("use_pickle") or info.compress_type != ZIP_STORED or not info.file_size:
            continue
        shape = [told.get("sizes"), told.get("strides"), told.get("dtype"), told.get("storage_offset")]
        sizes.setdefault(info.filename, shape)
        if told.get("device", {}).get("type") == "cpu" and told.get("storage_offset") == {"as_int": 0} and sizes[info.filename] == shape:
            found[name] = info
    others = {folder + str(entry.get("path_name", "")) for name, entry in config.items() if name not in found}
    return {name: info for name, info in found.items() if info.filename not in others}
