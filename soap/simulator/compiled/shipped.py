"""Machine code that the package brings along, made by ``shipping`` for a kind of processor that most machines have.

A wheel of a platform has it (docs/releasing.md); a source tree and the wheel for all platforms have none, and compile on the first use. It
is read if this process could have made it: the same versions of Python and numba, a processor with all that its kind has, and the same
``stamp`` of everything that is compiled in. Else it is as if it was not there. The index is JSON. The files that it names are numba's,
which unpickles them: they are code, like the modules beside them, and each is compared with its hash first.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config
from numba.core.registry import CPUDispatcher

from soap.simulator.compiled.stamps import stamp

FOLDER = Path(__file__).parents[2] / "machine_code"
INDEX = "index.json"

PROCESSOR = "x86-64-v3"
"""What is shipped is for: Intel from Haswell (2013) on, AMD from Excavator (2015) on."""
FEATURES = (
    "avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave",
)  # fmt: skip
"""What such a processor has, by LLVM's names."""


def has(function: CPUDispatcher) -> bool:
    """Whether the package has valid machine code of an entry for this machine."""
    return bool(_versions(function))


def load(function: CPUDispatcher, arguments: Sequence[Any]) -> Any:
    """What numba makes an entry's version for arguments of these types of; None if the package has none that is valid here."""
    version = _versions(function).get(signature(arguments))
    if version is None:
        return None
    try:
        data = (FOLDER / version["file"]).read_bytes()
    except OSError:
        return None
    return pickle.loads(data) if hashlib.sha256(data).hexdigest() == version["sha256"] else None


def _versions(function: CPUDispatcher) -> Mapping[str, Mapping[str, str]]:
    """Digest of the arguments' types -> what is shipped for them; empty if nothing valid is."""
    found = _functions().get(name_of(function))
    return found["versions"] if found is not None and found["stamp"] == stamp(function) else {}


@cache
def _functions() -> Mapping[str, Mapping[str, Any]]:
    """What is shipped by function's name; empty if this process could not have made it."""
    try:
        index = json.loads((FOLDER / INDEX).read_text(encoding="utf-8"))
        fits = index["made_by"] == maker() and _is_like(index["processor"], index["features"])
        functions: Mapping[str, Mapping[str, Any]] = index["functions"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return functions if fits else {}


def _is_like(processor: str, features: Iterable[str]) -> bool:
    """Whether machine code for such a processor is what this process wants. Where numba was told a processor, it is by that name."""
    name, added = told()
    if name is not None or added is not None:
        return name == processor and not added
    own = llvm.get_host_cpu_features()
    return all(own.get(feature, False) for feature in features)


def told() -> tuple[str | None, str | None]:
    """The processor that numba was told to compile for, and its features; None if it was not."""
    return config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]  # numba makes them of its environment


def maker() -> dict[str, str]:
    """What machine code depends on beside the processor and the sources."""
    return {
        "python": f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}",
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "platform": llvm.get_process_triple(),
    }


def name_of(function: CPUDispatcher) -> str:
    """What the index calls an entry."""
    return f"{function.py_func.__module__}.{function.py_func.__qualname__}"


def signature(arguments: Sequence[Any]) -> str:
    """What the index calls arguments of these types."""
    return hashlib.sha256(repr([kind.key for kind in arguments]).encode()).hexdigest()
