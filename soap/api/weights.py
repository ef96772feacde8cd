"""Weights by what they are called: an initializer, a checkpoint of ours, or safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soap.tracing.execute import TracedModel
    from soap.weights.fitting import Weights


def open_weights(spec: str | Path, model: TracedModel) -> Weights:
    """The weights of ``init:…`` (``soap.weights.initializer``), of a checkpoint or a folder of such, of a safetensors file or of a folder
    with such files. ModelError in one line."""
    from soap.runtime.checkpoint.manifest import MANIFEST, complete
    from soap.weights.fitting import Kind
    from soap.weights.initializer import PREFIX, Initializer
    from soap.weights.safetensors_files import SafetensorsFiles

    if str(spec).startswith(PREFIX):
        return Initializer(str(spec), {name: Kind(tuple(own.shape), own.dtype) for name, own in model.parameters.items()})
    path = Path(spec)
    if (path / MANIFEST).is_file() or (path.is_dir() and complete(path)):
        from soap.runtime.checkpoint.storage import CheckpointWeights

        return CheckpointWeights(path)
    return SafetensorsFiles(path)
