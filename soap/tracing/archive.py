"""Makes a ``.pt2`` archive safe and plain before torch reads it.

Files come from outside. ``torch.export.load`` unpickles some parts of an archive, evaluates symbolic shapes and looks functions up by
name. So every pickled part is first read with torch's weights-only unpickler, which runs no code. An archive is not opened at all if it
has custom objects, code, symbolic shapes that are more than sums and products, calls of anything but operators, or entries that do not
belong there.

Torch also knows output classes (such as those of ``transformers``) only if the package that defines them was imported. They are
rewritten to plain dictionaries, so that a model loads without the library it came from. For the same reason known operators of
libraries become our own.
"""

from __future__ import annotations

import io
import json
import mmap
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch

from soap.errors import ModelError
from soap.files import check_archive
from soap.tracing.operators import unknown_operator
from soap.tracing.record import NAME, ExportRecord, loads
from soap.tracing.rules.experts import LIBRARY_OPERATORS

_KNOWN_TYPES = {
    None,
    "builtins.tuple",
    "builtins.list",
    "builtins.dict",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
}
_LAYOUT = re.compile(
    r"[^/]+/(data/(weights|constants|sample_inputs|extra)/.+|extra/.+|models/model\.json|archive_format|archive_version|byteorder|\.data/\w+"
    r"|\.format_version|\.storage_alignment)"
)
"""The entries that ``torch.export.save`` puts into an archive."""
_TARGET = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\.sym_\w+|_operator\.(getitem|add|sub|mul|floordiv|mod|neg|eq|ne|lt|le|gt|ge)"
)
"""The only functions that a program may call: registered operators, picking one of several outputs, and arithmetic on sizes."""
_HEADS = "Symbol|Integer|Add|Mul|Mod|FloorDiv|CleanDiv|PythonMod|Max|Min|Rational|Equality|Unequality|(?:Strict)?(?:Less|Greater)Than"
_EXPRESSION = re.compile(
    rf"(?:(?:{_HEADS})\(|'[su]\d{{1,9}}'|-?\d{{1,18}}+|(?:positive|nonnegative|integer)=True|true|false|\)|, ?)*+", re.ASCII
)
"""A symbolic size as torch.export writes it. Torch evaluates it, so nothing else is allowed: names of functions that are not listed
could run code, powers could fill the memory."""
MAX_EXPRESSION_LENGTH = 10_000
MAX_ARCHIVE_ENTRIES = 1_000_000


def plain_archive(path: Path) -> tuple[io.BytesIO, MappedWeights]:
    """The archive's content, checked and rewritten, and the weights that it lacks therefore. ModelError if loading could run code."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise ModelError(f"model file {str(path)!r} is not a .pt2 archive; expected a file that torch.export.save wrote")
    try:
        check_archive(path)
    except ValueError as error:
        raise ModelError(f"model file {str(path)!r}: {error}, as torch.export.save writes it") from None
    result = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as plain:
        names = archive.namelist()
        _check_names(path, names)
        pickled, weights = _pickled_parts(path, archive), MappedWeights(path, archive)
        record = next((loads(archive.read(name)) for name in names if name.endswith(f"/extra/{NAME}")), ExportRecord())
        for name in names:
            leaf, content = name.rsplit("/", 1)[-1], b"" if name in weights.payloads else weights.without_values(name, archive.read(name))
            if content and (leaf in pickled or leaf.endswith(".pt")):
                _weights_only(path, leaf, content)
            if "/models/" in name:
                content = _plain_program(path, content, record)
            plain.writestr(name, content)
    result.seek(0)
    return result, weights


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Check that entries are under one name, in the expected layout, and none of them twice: readers differ in which of two they take."""
    if len(names) > MAX_ARCHIVE_ENTRIES:
        raise ModelError(f"model file {str(path)!r} has {len(names)} entries; expected at most {MAX_ARCHIVE_ENTRIES}")
    for name in names:
        leaf = name.rsplit("/", 1)[-1]
        if leaf.startswith(("custom_obj", "opaque_obj")) or leaf.endswith((".so", ".py")):
            raise ModelError(f"model file {str(path)!r} holds a custom object or code ({leaf}); expected tensors only")
        if not _LAYOUT.fullmatch(name) or ".." in name.split("/"):
            raise ModelError(f"model file {str(path)!r} has the entry {name!r}; expected an archive as torch.export.save writes it")
    if len({name.casefold() for name in names}) != len(names) or len({name.split("/")[0] for name in names}) > 1:
        raise ModelError(f"model file {str(path)!r} has entries of the same name; expected an archive as torch.export.save writes it")


def _pickled_parts(path: Path, archive: zipfile.ZipFile) -> set[str]:
    """Names of the weights and constants that the archive stores as pickles."""
    found: set[str] = set()
    for name in archive.namelist():
        if name.endswith("_config.json"):
            for entry in json.loads(archive.read(name)).get("config", {}).values():
                part = str(entry.get("path_name", ""))
                if part.startswith(("custom_obj", "opaque_obj")):
                    raise ModelError(f"model file {str(path)!r} holds a custom object ({part}); expected tensors only")
                if entry.get("use_pickle"):
                    found.add(part.rsplit("/", 1)[-1])
    return found


def _weights_only(path: Path, leaf: str, content: bytes) -> None:
    try:
        check_archive(content)
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ModelError(
            f"model file {str(path)!r}: part {leaf} is not plain tensors; expected an archive without pickled objects"
        ) from error


def _plain_program(path: Path, content: bytes, record: ExportRecord) -> bytes:
    program = json.loads(content)
    _check_program(path, program)
    unknown = next(filter(None, (unknown_operator(target) for item in _items(program) if (target := _target(item)))), None)
    if unknown is not None:
        named = f" (the file says {', '.join(record.imports)})" if record.imports else ""
        raise ModelError(
            f"model file {str(path)!r} calls the operator {unknown}, which nothing here defines; expected --import MODULE (imports= of "
            f"soap.load) with the module that does{named}: SOAP imports nothing that a file names by itself"
        )
    program["guards_code"] = []  # Python text; sizes are checked against the ranges instead
    for entry in program["graph_module"]["module_call_graph"]:
        signature = entry.get("signature") or {}
        for key in ("in_spec", "out_spec"):
            if isinstance(signature.get(key), str) and signature[key]:
                protocol, spec = json.loads(signature[key])
                signature[key] = json.dumps([protocol, _plain_spec(spec)])
    return json.dumps(program).encode()


def _own_operator(target: str) -> str:
    """Our operator in place of another library's; all others stay."""
    library, _, rest = target.removeprefix("torch.ops.").partition(".")
    name, _, overload = rest.partition(".")
    own = LIBRARY_OPERATORS.get(f"{library}.{name}")
    return target if own is None else f"torch.ops.{own}.{overload or 'default'}"


def _check_program(path: Path, program: Any) -> None:
    """Raise ModelError for symbolic shapes that torch must not evaluate, and for calls of anything but operators; known operators of other
    libraries are replaced by our own."""
    for item in _items(program):
        text = str(item.get("expr_str", ""))
        if len(text) > MAX_EXPRESSION_LENGTH or not _EXPRESSION.fullmatch(text):
            raise ModelError(f"model file {str(path)!r} has the size {text[:80]!r}; expected sums and products of symbols and numbers")
        target = _target(item)
        if target is not None and not _TARGET.fullmatch(target):
            raise ModelError(f"model file {str(path)!r} calls {target!r}; expected ATen operators only")
        if target is not None and target == item.get("target"):
            item["target"] = _own_operator(target)


def _items(program: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries of a program, outer ones first."""
    waiting = [program]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            yield item
            waiting += item.values()


def _target(item: Mapping[str, Any]) -> str | None:
    """The target, if the dictionary describes a call."""
    target = item.get("as_operator", item.get("target") if "metadata" in item else None)
    return None if target is None else str(target)


def _plain_spec(spec: Any) -> Any:
    """A serialized pytree in which dictionaries (or tuples) replace the classes that only their own package knows."""
    children = [_plain_spec(child) for child in spec.get("children_spec", [])]
    result = {**spec, "children_spec": children}
    if spec.get("type") not in _KNOWN_TYPES:
        keys = _keys(spec.get("context"))
        if keys is not None and len(keys) == len(children):
            result.update(type="builtins.dict", context=json.dumps(keys))
        else:
            result.update(type="builtins.tuple", context="null")
    return result


def _keys(context: Any) -> list[str] | None:
    try:
        keys = json.loads(context)
    except (TypeError, ValueError):
        return None
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else None


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
