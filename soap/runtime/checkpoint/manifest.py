"""The manifest of a checkpoint, ``soap.json``: what it holds, and where. Plain JSON that is checked on reading.

Torch's own index of a checkpoint is a pickle, which could run code. It is written for other tools and never read here. No torch in this
module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from soap.errors import CheckpointError
from soap.files import read_text
from soap.model.regions import Box, contains, volume, whole
from soap.runtime.checkpoint.folder import MANIFEST

FORMAT = "soap-checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of a tensor, and the part of a file that holds it."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor. Its ``chunks`` are disjoint and cover it. ``dtype``: torch's name without the prefix ``torch.``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer's state of a parameter. ``options``: of its parameter group. ``regions``: names of tensors that are split like the
    parameter. ``scalars``: names of tensors with a single number. ``values``: name -> plain number. ``others``: names of tensors of other
    shapes, for parameters that are kept whole."""

    options: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankStates:
    """What ranks keep of a compressed parameter, each for itself. ``names``: of tensors of the parameter's shape, each with a part for each
    of ``peers`` places, which is the most that a region has. ``method``: of compression, with its settings as in strategy files.
    ``common``: names of tensors that ranks share. ``entries``: for each region (``box``) and ``place`` of its ``peers``, ``numbers`` by
    name, and ``own``: name -> (dtype, number)."""

    names: tuple[str, ...]
    peers: int
    method: Mapping[str, Any] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    entries: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents. ``aliases``: further names of tied parameters. ``optimizer``: name of its class; None if nothing is trained.
    ``schedule``: see ``runtime.updates.schedules``. ``sync_states``: parameter -> names of the state of its method of synchronization.
    ``rank_states``: compressed parameter -> what each rank keeps of it. ``compressing``: momentum correction and warm-up that they were
    trained with. ``loss_scaling``: see ``runtime.updates.loss_scaling``."""

    save_id: str
    step: int
    seed: int
    model: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    aliases: Mapping[str, str]
    optimizer: str | None
    states: Mapping[str, ParameterState]
    tensors: Mapping[str, StoredTensor]
    schedule: Mapping[str, Any] | None = None
    sync_states: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rank_states: Mapping[str, RankStates] = field(default_factory=dict)
    compressing: Mapping[str, Any] | None = None
    loss_scaling: Mapping[str, Any] | None = None

    @property
    def files(self) -> dict[str, int]:
        """Data file -> its size in bytes."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
        return sizes

    def text(self) -> str:
        """The file's content. Rare entries are left out if they are empty, so that older programs can read the file."""
        content = asdict(self)
        for state in content["states"].values():
            if not state["others"]:
                del state["others"]
        for name in ("schedule", "sync_states", "rank_states", "compressing", "loss_scaling"):
            if not content[name]:
                del content[name]
        return json.dumps({"format": FORMAT, "version": VERSION, **content}) + "\n"


def require_optimizer(checkpoint: Path, manifest: Manifest, name: str | None) -> None:
    """CheckpointError in one line if a checkpoint was saved with another optimizer than the one of this name."""
    if None not in (name, manifest.optimizer) and name != manifest.optimizer:
        raise CheckpointError(
            f"checkpoint {str(checkpoint)!r} was saved with optimizer {manifest.optimizer}, this run has {name}; use the same optimizer"
        )


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. CheckpointError in one line if it is invalid, or if a data file is missing or has another size."""
    path = checkpoint / MANIFEST
    try:
        document = json.loads(read_text(path, what="checkpoint", error=CheckpointError))
    except (ValueError, RecursionError):
        raise damaged(path, "it is no valid JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise damaged(path, f"expected {FORMAT!r} as its format")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(f"checkpoint {str(checkpoint)!r} has version {str(version)[:40]!r}; this program reads version {VERSION}")
    _check_schema(path, document)
    manifest = _manifest(path, document)
    for name, size in manifest.files.items():
        _check_file(checkpoint / name, size)
    return manifest


def model_name(name: str) -> str:
    """The name of a parameter or buffer among a checkpoint's tensors."""
    return f"model.{name}"


def state_name(parameter: str, key: str) -> str:
    """The name of a part of the optimizer's state among a checkpoint's tensors."""
    return f"optim.state.{parameter}.{key}"


def sync_state_name(parameter: str, name: str) -> str:
    """The name of a method of synchronization's state of a parameter among a checkpoint's tensors."""
    return f"sync.state.{parameter}.{name}"


def place_name(parameter: str, name: str, place: int) -> str:
    """The name of what one of a compressed parameter's readers keeps among a checkpoint's tensors."""
    return sync_state_name(parameter, f"{name}@{place}")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a damaged file."""
    return CheckpointError(f"checkpoint file {str(path)!r} is damaged: {what}; take another checkpoint")


def _check_file(path: Path, size: int) -> None:
    if not path.is_file():
        raise damaged(path, "it is missing")
    if path.stat().st_size != size:
        raise damaged(path, f"it has {path.stat().st_size} bytes, expected {size}")


def _record(properties: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    every = {**properties, **(optional or {})}
    return {"type": "object", "properties": every, "required": list(properties), "additionalProperties": False}


def _map(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


_NAMES = {"type": "array", "items": {"type": "string"}}
_NATURAL = {"type": "integer", "minimum": 0, "maximum": 2**62}
_PEERS = {"type": "integer", "minimum": 1, "maximum": 2**20}
_SCALE = {"type": "number", "minimum": 2.0**-24, "maximum": 2.0**127}
_INTERVAL = {"type": "array", "items": _NATURAL, "minItems": 2, "maxItems": 2}
_FILE = re.compile(r"__\d+_\d+\.distcp")
_CHUNK = _record(
    {
        "box": {"type": "array", "items": _INTERVAL},
        "file": {"type": "string", "pattern": f"^{_FILE.pattern}$"},
        "offset": _NATURAL,
        "length": _NATURAL,
    }
)
_ENTRY = _record(
    {
        "box": {"type": "array", "items": _INTERVAL},
        "place": _NATURAL,
        "peers": _PEERS,
        "numbers": _map({"type": "integer", "minimum": -(2**62), "maximum": 2**62}),
        "own": _map({"type": "array", "prefixItems": [{"enum": ["float32", "float64"]}, {"type": "number"}], "minItems": 2, "maxItems": 2}),
    }
)
SCHEMA: dict[str, Any] = _record(
    {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "save_id": {"type": "string"},
        "step": _NATURAL,
        "seed": {"type": "integer"},
        "model": {"type": "string"},
        "parameters": _NAMES,
        "buffers": _NAMES,
        "aliases": _map({"type": "string"}),
        "optimizer": {"type": ["string", "null"]},
        "states": _map(
            _record({"options": {"type": "object"}, "regions": _NAMES, "scalars": _NAMES, "values": {"type": "object"}}, {"others": _NAMES})
        ),
        "tensors": _map(
            _record(
                {
                    "dtype": {"type": "string", "pattern": "^[a-z0-9_]{1,40}$"},
                    "shape": {"type": "array", "items": _NATURAL},
                    "chunks": {"type": "array", "items": _CHUNK},
                }
            )
        ),
    },
    {
        "schedule": _record({"name": {"type": "string"}, "state": {"type": "object"}}),
        "sync_states": _map(_NAMES),
        "rank_states": _map(
            _record(
                {
                    "names": _NAMES,
                    "peers": _PEERS,
                    "method": {"type": "object"},
                    "common": _NAMES,
                    "entries": {"type": "array", "items": _ENTRY},
                }
            )
        ),
        "compressing": {"type": "object"},
        "loss_scaling": _record({"scale": _SCALE, "since": _NATURAL, "skipped": _NATURAL}),
    },
)


def _check_schema(path: Path, document: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator  # slow to import, and needed for files only
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(SCHEMA).iter_errors(document))
    if error is not None:
        place = "/".join(str(part)[:60] for part in error.absolute_path) or "top level"
        raise damaged(path, f"at {place}: {' '.join(error.message.split())[:120]}")


def _manifest(path: Path, document: Mapping[str, Any]) -> Manifest:
    """The manifest of a document that is valid by the schema. Checks what the schema cannot express."""
    tensors = {}
    for name, entry in document["tensors"].items():
        shape = tuple(int(size) for size in entry["shape"])
        chunks = tuple(
            Chunk(tuple((int(a), int(b)) for a, b in chunk["box"]), chunk["file"], int(chunk["offset"]), int(chunk["length"]))
            for chunk in entry["chunks"]
        )
        for chunk in chunks:
            if len(chunk.box) != len(shape) or any(a > b for a, b in chunk.box) or not contains(whole(shape), chunk.box):
                raise damaged(path, f"region {chunk.box} of {name!r} lies outside its shape {shape}")
        if sum(volume(chunk.box) for chunk in chunks) != prod(shape):
            raise damaged(path, f"the regions of {name!r} do not cover its shape {shape}")
        tensors[name] = StoredTensor(entry["dtype"], shape, chunks)
    states = {
        name: ParameterState(
            entry["options"], tuple(entry["regions"]), tuple(entry["scalars"]), entry["values"], tuple(entry.get("others", ()))
        )
        for name, entry in document["states"].items()
    }
    _check_complete(path, document, tensors, states)
    return Manifest(
        save_id=document["save_id"],
        step=int(document["step"]),
        seed=int(document["seed"]),
        model=document["model"],
        parameters=tuple(document["parameters"]),
        buffers=tuple(document["buffers"]),
        aliases=dict(document["aliases"]),
        optimizer=document["optimizer"],
        states=states,
        tensors=tensors,
        schedule=document.get("schedule"),
        sync_states={name: tuple(own) for name, own in document.get("sync_states", {}).items()},
        rank_states={
            name: RankStates(tuple(own["names"]), int(own["peers"]), own["method"], tuple(own["common"]), tuple(own["entries"]))
            for name, own in document.get("rank_states", {}).items()
        },
        compressing=document.get("compressing"),
        loss_scaling=document.get("loss_scaling"),
    )


def _check_complete(
    path: Path, document: Mapping[str, Any], tensors: Mapping[str, StoredTensor], states: Mapping[str, ParameterState]
) -> None:
    """CheckpointError unless every named parameter, buffer and state has its tensor, in the right shape."""
    for name in (*document["parameters"], *document["buffers"], *document["aliases"].values()):
        if model_name(name) not in tensors:
            raise damaged(path, f"it lacks {name!r}")
    for name, state in states.items():
        for key in (*state.regions, *state.scalars):
            found, parameter = tensors.get(state_name(name, key)), tensors.get(model_name(name))
            if found is None or parameter is None or found.shape != (parameter.shape if key in state.regions else ()):
                raise damaged(path, f"it lacks state {key!r} of {name!r}, or has it in another shape")
        for key in state.others:
            if state_name(name, key) not in tensors:
                raise damaged(path, f"it lacks state {key!r} of {name!r}")
    for name, keys in document.get("sync_states", {}).items():
        for key in keys:
            found, parameter = tensors.get(sync_state_name(name, key)), tensors.get(model_name(name))
            if found is None or parameter is None or found.shape != parameter.shape:
                raise damaged(path, f"it lacks the synchronization state {key!r} of {name!r}, or has it in another shape")
    if document.get("rank_states") and "compressing" not in document:
        raise damaged(path, "it lacks the momentum correction and warm-up of its compressed parameters")
    for name, own in document.get("rank_states", {}).items():
        _check_entries(path, name, own, tensors.get(model_name(name)))
        for key in (f"{key}@{place}" for key in own["names"] for place in range(own["peers"])):
            found, parameter = tensors.get(sync_state_name(name, key)), tensors.get(model_name(name))
            if found is None or parameter is None or found.shape != parameter.shape:
                raise damaged(path, f"it lacks {key!r} of compressed parameter {name!r}, or has it in another shape")


def _check_entries(path: Path, name: str, own: Mapping[str, Any], parameter: StoredTensor | None) -> None:
    """CheckpointError unless each entry's region lies in the parameter, its place is one of its peers', and its numbers can be floats."""
    for entry in own["entries"]:
        box = tuple((int(a), int(b)) for a, b in entry["box"])
        shape = () if parameter is None else parameter.shape
        if len(box) != len(shape) or any(a > b for a, b in box) or not contains(whole(shape), box):
            raise damaged(path, f"region {box} of compressed parameter {name!r} lies outside its shape {shape}")
        if not entry["place"] < entry["peers"] <= own["peers"]:
            place = f"place {entry['place']} of {entry['peers']}"
            raise damaged(path, f"{place} ranks of compressed parameter {name!r}, which has {own['peers']}")
        for key, (_, value) in entry["own"].items():
            if isinstance(value, int) and abs(value) > 2**62:
                raise damaged(path, f"{key!r} of compressed parameter {name!r} is too large")
