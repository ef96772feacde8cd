"""Writing the machine code that a wheel brings along (``shipped``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numba.core.registry import CPUDispatcher

from soap.errors import SoapError
from soap.files import write_bytes_atomically, write_text_atomically
from soap.simulator.compiled.jit import file_of
from soap.simulator.compiled.shipped import FEATURES, INDEX, PROCESSOR, maker, name_of, signature, told
from soap.simulator.compiled.stamps import stamp

ENVIRONMENT = {"NUMBA_CPU_NAME": PROCESSOR, "NUMBA_CPU_FEATURES": ""}
"""Of the process that compiles what is shipped: these, rather than this machine's processor."""


def ship(functions: Iterable[CPUDispatcher], folder: Path) -> None:
    """Write what these entries keep for ``PROCESSOR``, for which this process must compile (``ENVIRONMENT``), to a folder. SoapError if it
    compiles for another one, or an entry keeps nothing."""
    processor, features = told()
    if processor != PROCESSOR or features:
        wrong = f"processor {processor!r} with features {features!r}"
        raise SoapError(f"{wrong}: expected the environment NUMBA_CPU_NAME={PROCESSOR} and NUMBA_CPU_FEATURES empty")
    index: dict[str, Any] = {"processor": PROCESSOR, "features": list(FEATURES), "made_by": maker(), "functions": {}}
    folder.mkdir(parents=True, exist_ok=True)
    for function in functions:
        versions: dict[str, Any] = {}
        for key, path in sorted(file_of(function).versions.items(), key=lambda own: own[1]):
            if key[1][1] == PROCESSOR:
                data, name = Path(path).read_bytes(), f"{name_of(function)}-{len(versions)}.bin"
                write_bytes_atomically(folder / name, data)
                versions[signature(key[0])] = {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
        if not versions:
            raise SoapError(f"{name_of(function)} has no machine code on disk; expected that it is compiled first, where files can be kept")
        index["functions"][name_of(function)] = {"stamp": stamp(function), "versions": versions}
    write_text_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
