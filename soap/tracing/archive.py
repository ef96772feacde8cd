"""A ``.pt2`` archive made safe and plain before torch reads it.

Files come from outside. ``torch.export.load`` unpickles some parts of an archive and evaluates symbolic shapes, so every pickled part is first read with
torch's weights-only unpickler, which runs no code, and an archive with custom objects, code or symbolic shapes is not opened at all. It also knows output classes
(such as those of ``transformers``) only if the package that defines them was imported; they are rewritten to plain dictionaries, so that
a model loads without the library it came from.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from soap.errors import ModelError

_KNOWN_TYPES = {
    None,
    "builtins.tuple",
    "builtins.list",
    "builtins.dict",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
}
MAX_ARCHIVE_ENTRIES = 1_000_000


def plain_archive(path: Path) -> io.BytesIO:
    """The archive's content, checked and rewritten; raises ModelError in one line if loading it could run code."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise ModelError(f"model file {str(path)!r} is not a .pt2 archive; expected a file that torch.export.save wrote")
    result = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as plain:
        names = archive.namelist()
        if len(names) > MAX_ARCHIVE_ENTRIES:
            raise ModelError(f"model file {str(path)!r} has {len(names)} entries; expected at most {MAX_ARCHIVE_ENTRIES}")
        pickled = _pickled_parts(path, archive)
        for name in names:
            leaf, content = name.rsplit("/", 1)[-1], archive.read(name)
            if leaf.startswith(("custom_obj", "opaque_obj")) or leaf.endswith((".so", ".py")):
                raise ModelError(f"model file {str(path)!r} holds a custom object or code ({leaf}); expected tensors only")
            if content and (leaf in pickled or leaf.endswith(".pt")):
                _weights_only(path, leaf, content)
            if "/models/" in name and leaf.endswith(".json"):
                content = _plain_program(path, content)
            plain.writestr(name, content)
    result.seek(0)
    return result


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
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ModelError(f"model file {str(path)!r}: part {leaf} is not plain tensors; expected an archive without pickled objects") from error


def _plain_program(path: Path, content: bytes) -> bytes:
    text = content.decode()
    if re.search(r'"expr_str"\s*:', text):
        raise ModelError(f"model file {str(path)!r} has dynamic shapes; expected static shapes: export without dynamic_shapes")
    program = json.loads(text)
    for entry in program["graph_module"]["module_call_graph"]:
        signature = entry.get("signature") or {}
        for key in ("in_spec", "out_spec"):
            if isinstance(signature.get(key), str) and signature[key]:
                protocol, spec = json.loads(signature[key])
                signature[key] = json.dumps([protocol, _plain_spec(spec)])
    return json.dumps(program).encode()


def _plain_spec(spec: Any) -> Any:
    """A serialized pytree with classes that only their own package knows replaced by dictionaries (or tuples)."""
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
