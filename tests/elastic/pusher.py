"""A server to be killed: a process that forks one for each folder it is told, so that torch is imported once.

Each child opens the store of the folder and pushes leases from the given one on to both partitions, saying each that is acknowledged.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from soap.elastic.layout import cut
from soap.elastic.snapshots import check_optimizer
from tests.elastic.stores import Store

ROWS = 200_000
"""800 KB a partition: a snapshot takes longer than a push."""
PARTITIONS = (*cut("a", (ROWS, 1), 1), *cut("b", (ROWS, 1), 1))
GRADIENT = torch.full((ROWS, 1), -1.0)


def opened(folder: str | Path) -> Store:
    """All values are the number of pushes."""
    initial = [torch.zeros(cell.cell) for cell in PARTITIONS]
    return Store(folder, PARTITIONS, initial, sgd, snapshot_every_pushes=3)


def sgd(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


def push(folder: str, lease: int) -> None:
    store = opened(folder)
    while True:
        for partition in range(len(PARTITIONS)):
            store.push(partition, lease, GRADIENT)
            os.write(1, f"{partition} {lease}\n".encode())
        lease += 1


def main() -> None:
    torch.set_num_threads(1)
    check_optimizer(sgd, PARTITIONS[0].cell)  # imports what a first step does
    for line in sys.stdin:
        folder, lease = line.split()
        child = os.fork()
        if child == 0:
            os.write(1, f"pid {os.getpid()}\n".encode())
            try:
                push(folder, int(lease))
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        os.write(1, b"gone\n")


if __name__ == "__main__":
    main()
