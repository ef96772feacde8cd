"""What ranks do in the tests of the runner; at the top of a module, so that it can be pickled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import soap
from soap.runner import tuning
from soap.runner.config import RunOption
from soap.runner.runner import joined
from soap.search.partition_tuning import choose
from tests.autograd_functions import Reverse

ROWS, WIDTH, ITEMS = 30, 4, 24
CPU = torch.device("cpu")


class Words(Dataset[Any]):
    """Ids and targets: 24 items."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(ROWS, (ITEMS, 3), generator=generator)
        self.targets = torch.rand(ITEMS, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.targets[index]


class Stream(IterableDataset[Any]):
    """Numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Model(nn.Module):
    """Two tables that share a number of partitions, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        with soap.partitioner():
            self.table, self.other = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows = (self.table(ids) * self.other(ids)).sum(1)
        return F.mse_loss(self.head(rows).squeeze(1), targets)


def plain_sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.1)


def sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.1, momentum=0.9)


def config(run_option: RunOption = "allreduce", **options: Any) -> soap.RunnerConfig:
    return soap.RunnerConfig(run_option=run_option, budget=20, costs="estimate", optimizer=sgd, **options)


def train(ranks: int, batch: int, steps: int, named: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The script of a user, on every rank: losses, and on rank 0 the trained values."""
    loader = DataLoader(soap.shard(Words()), batch_size=batch)
    with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", config(**options)) as runner:
        losses = []
        for _ in range(steps):
            batches = ({"targets": t, "ids": i} if named else (i, t) for i, t in loader)
            losses += list(runner.over(batches))
        return losses, runner.state_dict()


def tuned(ranks: int) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    """The script of a user who has partitions tuned, by a choice that is always three: losses, trained values, partitions."""
    real, tuning.choose = tuning.choose, lambda samples: replace(choose(samples), partitions=3)  # type: ignore[attr-defined]
    try:
        loader = DataLoader(soap.shard(Words()), batch_size=6)
        with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", config("ps", tuning_iterations=2)) as runner:
            losses = list(runner.over(loader))
            assert runner.strategy is not None
            return losses, runner.state_dict(), {name: sync.partitions for name, sync in runner.strategy.parameters.items()}
    finally:
        tuning.choose = real  # type: ignore[attr-defined]


def apart(ranks: int, consistency: str, steps: int) -> tuple[list[float], dict[str, Tensor], dict[int, int]]:
    """Ranks that are apart, one of which takes its time: losses of this rank, trained values, and what steps may have missed."""
    loader = DataLoader(soap.shard(Words()), batch_size=4)
    plain = soap.RunnerConfig(consistency=consistency, optimizer=plain_sgd, costs="estimate")
    with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", plain) as runner:
        losses = []
        for batch in islice(cycle(loader), steps):
            if runner.world.rank:
                time.sleep(0.05)
            losses.append(runner.run(batch))
        assert runner._stale is not None
        return losses, runner.state_dict(), dict(runner._stale.missing)


def reduced(ranks: int, dense: str, sparse: str) -> dict[str, Tensor]:
    """Values behind one step."""
    options: Any = {"reduce_dense": dense, "reduce_sparse": sparse, "optimizer": plain_sgd}
    chosen = soap.RunnerConfig(run_option="ps", costs="estimate", **options)
    with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", chosen) as runner:
        runner.run(next(iter(DataLoader(soap.shard(Words()), batch_size=6))))
        return runner.state_dict()


def whole_batches(ranks: int) -> list[float]:
    """Every rank gives the whole batch."""
    loader = DataLoader(Words(), batch_size=12)
    with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", config(sharded=False)) as runner:
        return [runner.run(batch) for batch in loader]


def resume(ranks: int, folder: Path) -> tuple[list[float], int]:
    """Two passes over the data as two jobs, of which the second goes on from the first."""
    loader, losses, steps = DataLoader(soap.shard(Words()), batch_size=4), [], 0
    for _ in range(2):
        with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", config(checkpoint=folder, save_every=2)) as runner:
            losses += [runner.run(batch) for batch in loader]
            assert runner.trainer is not None
            steps = runner.trainer.steps
    return losses, steps


def fail(ranks: int) -> str:
    """What every rank says if planning fails on rank 0."""
    try:
        with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", config(alpha={"head*": 0.1})) as runner:
            runner.run(next(iter(DataLoader(soap.shard(Words()), batch_size=4))))
    except soap.SoapError as error:
        return str(error)
    return ""


class Adversarial(Model):
    """With a gradient that is reversed between its tables and its dense layer."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows: Tensor = Reverse.apply((self.table(ids) * self.other(ids)).sum(1))  # type: ignore[no-untyped-call]
        return F.mse_loss(self.head(rows).squeeze(1), targets)


def judged(ranks: int, verify: bool) -> tuple[str, int]:
    """What every rank says to a module whose program has other gradients than it, and how many steps it took."""
    with soap.get_runner(Adversarial(), f"emulated:{ranks}x1@200Mbit/s", config(verify=verify)) as runner:
        try:
            runner.run(next(iter(DataLoader(soap.shard(Words()), batch_size=4))))
        except soap.SoapError as error:
            return str(error), 0
        assert runner.trainer is not None
        return "", runner.trainer.steps


def join(sizes: list[int]) -> list[list[int]]:
    """Numbers as ``soap.shard`` deals them out, some shared ones, and both back together."""
    import torch.distributed as dist

    rank, count = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([rank + count * i for i in range(sizes[rank])], dtype=torch.int64)
    marked = (own * (1 + 2j)).conj()  # of which the memory holds other numbers
    parts = [own, own.reshape(-1, 1).float(), torch.tensor(rank + 5), marked, torch.tensor(rank + 5j).conj()]
    return [part.tolist() for part in joined(parts, CPU)]


def given_bytes(ranks: int, batch: int) -> list[int]:
    """Bytes of the batch that this rank had in each step."""
    loader = DataLoader(soap.shard(Words()), batch_size=batch)
    with soap.get_runner(Model(), f"emulated:{ranks}x1@200Mbit/s", config("ps", dynamic_batch=True)) as runner:
        found = []
        for own in loader:
            before = runner.trainer.input_bytes if runner.trainer is not None else 0
            runner.run(own)
            assert runner.trainer is not None
            found.append(runner.trainer.input_bytes - before)
        return found


def mismatch() -> str:
    import torch.distributed as dist

    try:
        joined([torch.zeros(2, 3 + dist.get_rank())], CPU)
    except soap.RuntimeFailure as error:
        return str(error)
    return ""
