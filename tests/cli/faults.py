"""Data for ``soap-run`` of which the last rank's fails in some way, in the second or third step: ``--data tests.cli.faults:KIND``.

All other ranks only notice. ``CAUSES``: what people must be told of each kind, behind "rank N failed: ".
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

WORDS, SHAPE = 40, (8, 6)
Batch = tuple[torch.Tensor, ...]
LINE = r" \(\S*tests/cli/faults\.py:\d+ in \S+\)"
"""Where the rank was."""


class Words(nn.Module):
    """Reads words and their successors; the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.wide, self.narrow, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, WORDS)

    def forward(self, words: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.narrow(self.wide(self.words(words)).relu()))
        return nn.functional.cross_entropy(logits.flatten(0, 1), successors.flatten())


def _batches(fault: Any, step: int = 2) -> Iterator[Batch]:
    """Batches as they should be, but for the fault's in this step."""
    Path(f"rank-{os.getpid()}").touch()
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        batch = tuple(torch.randint(WORDS, SHAPE, generator=generator) for _ in range(2))
        yield fault(batch) if number == step - 1 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1) else batch


def sound() -> Iterator[Batch]:
    """Nothing fails."""
    return _batches(lambda batch: batch)


def damaged() -> Iterator[Batch]:
    def fault(batch: Batch) -> NoReturn:
        raise ValueError("shard 7 is\ndamaged")

    return _batches(fault)


def reset() -> Iterator[Batch]:
    """A connection of the user's own, whose end is no aftermath of another rank's."""

    def fault(batch: Batch) -> NoReturn:
        raise ConnectionResetError("Connection reset by peer: the store of samples")

    return _batches(fault)


def out_of_range() -> Iterator[Batch]:
    """In the third step: of the second all ranks wait for its hash before they compute, and say that batches differ."""
    return _batches(lambda batch: tuple(tensor + 10**6 for tensor in batch), 3)


def misshapen() -> Iterator[Batch]:
    return _batches(lambda batch: tuple(tensor.float() for tensor in batch))


def in_backward() -> Iterator[Batch]:
    """From within autograd, which passes it through C++."""

    def fault(batch: Batch) -> Batch:
        def broken(*_: Any) -> NoReturn:
            raise ArithmeticError("the gradient is lost")

        before = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                tensor.register_hook(broken)
            before(tensors, *args, **options)

        torch.autograd.backward = backward
        return batch

    return _batches(fault)


def in_optimizer() -> Iterator[Batch]:
    def fault(batch: Batch) -> Batch:
        def step(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError("the state of the optimizer is lost")

        torch.optim.SGD.step = step  # type: ignore[method-assign]
        return batch

    return _batches(fault)


def without_memory() -> Iterator[Batch]:
    def fault(batch: Batch) -> NoReturn:
        raise MemoryError

    return _batches(fault)


def too_large() -> Iterator[Batch]:
    return _batches(lambda batch: (torch.empty(2**60),))


def leaving() -> Iterator[Batch]:
    return _batches(lambda batch: sys.exit(3))


def vanishing() -> Iterator[Batch]:
    return _batches(lambda batch: os._exit(4))


def killed() -> Iterator[Batch]:
    return _batches(lambda batch: os.kill(os.getpid(), signal.SIGKILL))


def crashing() -> Iterator[Batch]:
    return _batches(lambda batch: ctypes.string_at(0))


def after_closing() -> Iterator[Batch]:
    """The others notice first: connections are closed a while before the error is known."""

    def fault(batch: Batch) -> NoReturn:
        try:
            raise ValueError("the archive ends early")
        finally:
            dist.destroy_process_group()
            time.sleep(1)

    return _batches(fault)


CAUSES = {
    "damaged": "ValueError: shard 7 is damaged" + LINE,
    "reset": "ConnectionResetError: Connection reset by peer: the store of samples" + LINE,
    "out_of_range": r"IndexError: .*out of (range|bounds).* \(step 3, forward \S+\[\d+\].*\)",
    "misshapen": "input 'words' has dtype float32 in step 2: expected a tensor of dtype int64; convert it first",
    "in_backward": r"ArithmeticError: the gradient is lost \(step 2, backward \S+\[\d+\], .*tests/cli/faults\.py:\d+ in broken\)",
    "in_optimizer": r"RuntimeError: the state of the optimizer is lost \(step 2, update @LAST, .*tests/cli/faults\.py:\d+ in step\)",
    "without_memory": r"MemoryError: is there enough memory\?" + LINE,
    "too_large": r"RuntimeError: .*memory.*" + LINE,
    "leaving": r"it ended itself by sys\.exit\(3\)" + LINE,
    "vanishing": "it ended with exit code 4 and did not say why",
    "killed": r"killed by SIGKILL; is there enough memory\?",
    "crashing": r"killed by SIGSEGV at .*",
    "after_closing": "ValueError: the archive ends early" + LINE,
}
