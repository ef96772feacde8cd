"""``--weights SPEC``: which weights are meant."""

from __future__ import annotations

from pathlib import Path

from soap.weights.safetensors_files import SafetensorsFiles
from soap.weights.seam import Weights


def open_weights(spec: str | Path) -> Weights:
    """The weights of a safetensors file, or of a folder with such files. ModelError in one line."""
    return SafetensorsFiles(Path(spec))
