"""A checkpoint as weights to begin with: the values of parameters and buffers, and nothing of the training that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from soap.errors import CheckpointError, ModelError
from soap.model.regions import whole
from soap.runtime.checkpoint.folder import resolve
from soap.runtime.checkpoint.manifest import model_name, read_manifest
from soap.runtime.checkpoint.storage import CheckpointReader, Region, RegionLoadPlanner
from soap.weights.seam import Kind


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
