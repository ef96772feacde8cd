"""``python -m tests.machine_code`` compiles the simulator, the search and passes over gradients once, for all processes of the tests.

On a fresh checkout that takes two minutes of a core; tests that need it at the same time would each do all of it.
"""

from __future__ import annotations

import torch

from soap.runtime.compression.selection import Surveyed
from soap.simulator.compiled.machine_code import ENGINE


def compile_all() -> None:
    """Make or load all of it."""
    ENGINE.load()
    for dtype in (torch.float32, torch.float64):
        surveyed = Surveyed.of(torch.arange(10, dtype=dtype))
        surveyed.above(surveyed.threshold(0.5))


if __name__ == "__main__":
    if not ENGINE.is_made:
        print("compiling the simulator, the search and passes over gradients", flush=True)
    compile_all()
