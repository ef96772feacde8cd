"""What ranks do in the tests of the examples; at the top of a module, so that it can be pickled."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from examples import plain_loop as plain_loops
from examples.quickstart import Classifier


def plain_loop(folder: Path, values: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of four steps by the folder's plan, and the module's values behind them."""
    module = Classifier()
    module.load_state_dict(values)
    before = Path.cwd()
    os.chdir(folder)
    try:
        losses = plain_loops.planned(module, 4, "cluster.yaml")
    finally:
        os.chdir(before)
    return losses, module.state_dict()
