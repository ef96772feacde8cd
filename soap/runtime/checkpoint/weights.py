"""A trainer's parameters and buffers in full, gathered on rank 0, and written as safetensors for other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from soap.errors import CheckpointError, ModelError, RuntimeFailure, SoapError
from soap.model.regions import whole
from soap.runtime.checkpoint.folder import resolve
from soap.runtime.checkpoint.manifest import model_name, read_manifest
from soap.runtime.checkpoint.storage import CheckpointReader, Region, RegionLoadPlanner
from soap.runtime.sync.shards import gather_regions
from soap.weights.places import check_place_of_weights
from soap.weights.seam import Kind
from soap.weights.writing import require_writable, write_weights

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


class CheckpointWeights:
    """See ``Weights``: those of a checkpoint, or of the latest in a folder. ModelError in one line if it is damaged."""

    is_mapped = False

    def __init__(self, path: str | Path) -> None:
        try:
            checkpoint = resolve(path)
            manifest = read_manifest(checkpoint)
        except CheckpointError as error:
            raise ModelError(f"weights {str(path)!r}: {error}") from None
        self.said = str(path)
        self._manifest, self._reader = manifest, CheckpointReader(checkpoint, manifest)
        prefix = model_name("")
        stored = {name.removeprefix(prefix): own for name, own in manifest.tensors.items() if name.startswith(prefix)}
        self.kinds: Mapping[str, Kind] = {name: Kind(own.shape, getattr(torch, own.dtype)) for name, own in stored.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """See ``Weights``; read from the disk each time."""
        shape, dtype = self.kinds[name]
        found = torch.empty(shape, dtype=dtype)
        planner = RegionLoadPlanner([Region(model_name(name), shape, whole(shape), found)], self._manifest)
        self._reader.read_data(planner.create_local_plan(), planner)
        return found


def save_weights(trainer: Trainer, folder: Path, names: Mapping[str, str]) -> Path:
    """See ``Trainer.save_weights``. A parameter of several names is written under one of them."""
    model = trainer.model
    kinds = {name: Kind(tuple(tensor.shape), trainer.dtype_of(name)) for name, tensor in model.parameters.items()}
    saved = [name for name in model.buffers if name not in model.transient]
    kinds |= {name: Kind(tuple(trainer.buffers[name].shape), trainer.buffers[name].dtype) for name in saved}
    places = {names.get(name, name): name for name in model.unchanged}  # of two names of one buffer, files may have one
    others = {name: model.unchanged[name] for name in places.values() if not model.unchanged[name].is_meta}
    kinds |= {name: Kind(tuple(tensor.shape), trainer.place(tensor).dtype) for name, tensor in others.items()}
    require_writable(kinds)
    buffers, parameters = whole_buffers(trainer), whole_parameters(trainer)

    def tensors() -> Iterator[torch.Tensor]:
        for _, value in parameters:
            assert value is not None
            yield value
        yield from (buffers[name] for name in saved)
        yield from map(trainer.place, others.values())

    failure = ""
    if trainer.rank == 0:
        try:
            check_place_of_weights(folder)
            write_weights(folder, {names.get(name, name): kind for name, kind in kinds.items()}, tensors())
        except SoapError as error:
            failure = str(error)
    for _ in parameters:  # others send theirs, whether they can be written or not
        pass
    if failure := next(filter(None, trainer.comm.gather_late(failure)), ""):
        raise RuntimeFailure(failure)
    return folder


def whole_parameters(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each parameter in full, one after the other, on rank 0 (None elsewhere); gone through on all ranks at once."""
    shards: dict[str, list[int]] = {}
    for number, shard in enumerate(trainer.plan.shards):
        shards.setdefault(shard.parameter, []).append(number)
    for name, tensor in trainer.model.parameters.items():
        full: dict[str, torch.Tensor] = {}
        if trainer.rank == 0 and tensor.is_meta:
            full[name] = torch.empty(tensor.shape, dtype=trainer.dtype_of(name), device=home_of(trainer, name))
        elif trainer.rank == 0:  # files of weights may have another type
            full[name] = trainer.own_copy(tensor.detach()).to(tensor.device, trainer.dtype_of(name))
        gather_regions(trainer.comm, trainer.plan, trainer.shards.tensors, shards.get(name, ()), full)
        yield name, full.get(name)


def whole_buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full buffers by name, on rank 0: each element from a rank whose tiles have changed it. State is the same on all ranks."""
    full: dict[str, torch.Tensor] = {}
    kept = set(trainer.model.state.values())
    for tag, (name, own) in enumerate(trainer.buffers.items()):
        if name in kept:
            full[name] = own.clone()
            continue
        if trainer.rank != 0:
            trainer.comm.send(own, 0, tag)
            continue
        merged, first = own.clone(), trainer.first_buffers[name]
        for source in range(1, trainer.world.size):
            other = trainer.comm.receive(torch.empty_like(own), source, tag).wait()
            merged = torch.where(merged == first, other, merged)
        full[name] = merged
    trainer.comm.finish_sends()
    return full


def home_of(trainer: Trainer, name: str) -> torch.device:
    """Where a parameter in full is put together: where the model has it."""
    own = trainer.model.parameters[name]
    return torch.device("cpu") if own.is_meta else own.device
