"""Where weights are: the names of safetensors files in a folder, as Hugging Face writes them. No torch in this module."""

from __future__ import annotations

from pathlib import Path

from soap.errors import SoapError
from soap.files import check_writable, reason

SUFFIX = ".safetensors"
SINGLE = f"model{SUFFIX}"
INDEX = f"{SINGLE}.index.json"


def check_place_of_weights(folder: Path) -> None:
    """Make the folder. SoapError in one line if weights could not be written there, or some are there: two sets would be taken for one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = sorted(path.name for path in folder.iterdir() if path.name == INDEX or path.suffix == SUFFIX)
    except OSError as cause:
        raise SoapError(f"cannot write weights into {str(folder)!r}: {reason(cause)}; choose another folder") from None
    if known:
        raise SoapError(f"folder {str(folder)!r} has weights already ({known[0]}); choose another folder, or remove them")
    check_writable(folder / SINGLE)
