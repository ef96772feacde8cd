"""The GPUs of this machine as torch sees them: which, with how much memory, and which of them reach each other's memory directly.

Torch does not say by what they are joined (NVLink, a PCIe switch, the processors). So GPUs that reach each other form an island, and how
long copies take inside an island and between islands is measured (``this_machine``).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's driver, of Windows' for Linux inside it, and of AMD's."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """``kinds``: of each GPU its name and its memory in bytes. ``islands``: numbers of GPUs, ascending, in groups within which each
    reaches every other's memory."""

    kinds: tuple[tuple[str, int], ...]
    islands: tuple[tuple[int, ...], ...]

    @property
    def are_joined_alike(self) -> bool:
        """Whether one figure holds for the links of all: they are in one island, or each is alone."""
        return len(self.islands) in (1, len(self.kinds))

    @property
    def neighbours(self) -> tuple[int, int] | None:
        """Two GPUs of the first island that has two; the first two GPUs if there is none; None if there is one GPU."""
        together = next((island[:2] for island in self.islands if len(island) > 1), tuple(range(len(self.kinds)))[:2])
        return (together[0], together[1]) if len(together) == 2 else None

    @property
    def strangers(self) -> tuple[int, int]:
        """The first GPUs of the first two islands; there must be two."""
        return self.islands[0][0], self.islands[1][0]


def gpu_count() -> int:
    """Number of GPUs that torch can use. Does not import torch where there can be none, so that planning starts quickly."""
    if not any(os.path.exists(node) for node in GPU_NODES) and platform.system() != "Windows":
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def first_gpus(count: int) -> Gpus:
    """The first ``count`` GPUs."""
    import torch

    seen = [torch.cuda.get_device_properties(number) for number in range(count)]
    kinds = tuple((str(one.name), int(one.total_memory)) for one in seen)
    return Gpus(kinds, islands(count, torch.cuda.can_device_access_peer))


def islands(count: int, reaches: Callable[[int, int], bool]) -> tuple[tuple[int, ...], ...]:
    """The GPUs in groups: each joins the first group all of whose members it reaches, and which all reach it."""
    found: list[list[int]] = []
    for gpu in range(count):
        home = next((own for own in found if all(reaches(gpu, other) and reaches(other, gpu) for other in own)), None)
        if home is None:
            found.append([gpu])
        else:
            home.append(gpu)
    return tuple(map(tuple, found))
