"""The interface between a rank's step and what it does for tiles with a mark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from soap.runtime.comm.redistribute import Communicator
from soap.runtime.program.program import Program
from soap.simulator.tasks import TaskKind

Timed = Callable[[str, TaskKind], AbstractContextManager[None]]
"""``StepState.task``."""


class OnRank:
    """What a rank does for tiles with marks of one field, by their numbers, in all its steps. Nothing by default."""

    def __init__(self, program: Program, comm: Communicator) -> None:
        """``comm``: counts the bytes."""

    def running(self, tile: int, stays: Iterable[torch.Tensor], timed: Timed) -> AbstractContextManager[None]:
        """What the tile's forward pass runs in. ``stays``: what it reads of parameters and of the batch."""
        return nullcontext()

    def has_run(self, tile: int, outputs: Sequence[torch.Tensor | None], timed: Timed) -> None:
        """The tile's forward pass has made this."""

    def goes_back(self, tile: int, timed: Timed) -> None:
        """The backward pass comes to the tile. Only of steps whose tasks are timed is each told by itself."""

    def is_back(self, tile: int) -> None:
        """The tile's backward pass is over."""
