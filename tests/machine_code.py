"""``python -m tests.machine_code`` compiles the simulator, the search and passes over gradients once, for all processes of the tests.

On a fresh checkout that takes two minutes of a core, here divided between two processes; tests that need it at the same time would each do
all of it.
"""

from __future__ import annotations

import sys

import torch
from numba.core.registry import CPUDispatcher

from soap.api import ahead, every_function
from soap.runtime.compression import selection
from soap.runtime.compression.selection import Surveyed
from soap.simulator.compiled.jit import is_compiled, is_entry
from tests.graph_builder import mlp
from tests.strategies import CPU, cluster


def functions() -> dict[str, CPUDispatcher]:
    """All compiled functions of this package, by module and name."""
    return {**every_function.functions(), **_kernels()}


def _kernels() -> dict[str, CPUDispatcher]:
    found = [value for value in vars(selection).values() if isinstance(value, CPUDispatcher)]
    return {f"{value.py_func.__module__}.{value.py_func.__qualname__}": value for value in found}


def missing() -> list[str]:
    """Names of what Python calls and is not on disk."""
    return [name for name, function in functions().items() if is_entry(function) and not is_compiled(function)]


def compile_all() -> None:
    """Call all of it once. What is on disk is loaded."""
    every_function.call_every(mlp(), cluster([2, 2], CPU))
    for dtype in (torch.float32, torch.float64):
        surveyed = Surveyed.of(torch.arange(10, dtype=dtype))
        surveyed.above(surveyed.threshold(0.5))


if __name__ == "__main__":
    if missing():
        print("compiling the simulator, the search and passes over gradients", flush=True)
        with ahead.compiling():
            compile_all()
    if left := missing():
        sys.exit(f"not compiled: {', '.join(left)}")
