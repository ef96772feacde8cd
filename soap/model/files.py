"""Files of models, before torch is needed to read them."""

from __future__ import annotations

from pathlib import Path

from soap.errors import ModelError


def check_exists(path: Path) -> None:
    """ModelError in one line if there is no such file."""
    if not path.exists():
        raise ModelError(
            f"model file {str(path)!r} does not exist; expected a .pt2 file made by soap.export or torch.export.save, or zoo:NAME"
        )
