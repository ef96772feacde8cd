"""Sharding of input pipelines: each rank reads its own part of a dataset; and marks on parameters that shall have the same number of
partitions on servers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.data import Dataset, IterableDataset

from soap.errors import RuntimeFailure
from soap.runtime.comm.launched import own_rank, world_size


class Shard(Dataset[Any]):
    """The items of a dataset whose index, modulo ``count``, is ``number``."""

    def __init__(self, dataset: Dataset[Any], number: int, count: int) -> None:
        self.dataset, self.number, self.count = dataset, number, count

    def __len__(self) -> int:
        return len(range(self.number, len(cast(Sized, self.dataset)), self.count))

    def __getitem__(self, index: int) -> Any:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"item {index} of a shard of {size}")
        return self.dataset[index % size * self.count + self.number]


class IterableShard(IterableDataset[Any]):
    """The same for a dataset that can only be read from its beginning: every rank reads all of it and keeps its part."""

    def __init__(self, dataset: IterableDataset[Any], number: int, count: int) -> None:
        self.dataset, self.number, self.count = dataset, number, count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.number, None, self.count)


def shard(dataset: Dataset[Any], number: int | None = None, count: int | None = None) -> Shard | IterableShard:
    """This rank's part of a dataset, for its own DataLoader: the items whose index, modulo the number of ranks, is the rank's number.

    ``number``, ``count``: part ``number`` of ``count`` instead of by rank; RuntimeFailure if there is no such part. A single process has
    all items. Shuffle inside the parts, or before sharding with the same seed on all ranks. Without shuffling, a step of a runner sees the
    same items as a step in one process with a batch as large as all ranks' batches together.
    """
    own_number, own_count = rank_and_count()
    number, count = own_number if number is None else number, own_count if count is None else count
    if not 0 <= number < count:
        raise RuntimeFailure(f"shard {number} of {count}: expected a number from 0 to {max(0, count - 1)}")
    if isinstance(dataset, IterableDataset):
        return IterableShard(dataset, number, count)
    return Shard(dataset, number, count)


def rank_and_count() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return own_rank(os.environ), world_size(os.environ)


_MARK = "_soap_partitioner"
_numbers = count()


@contextmanager
def partitioner() -> Iterator[None]:
    """Parameters of modules that are made inside get the same number of partitions if they are on servers. The runner chooses the number.

    Use it for tables that are always read together: the runner then tries the same number for all of them at once.
    """
    number = next(_numbers)

    def mark(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, _MARK):
            setattr(parameter, _MARK, number)

    hook = register_module_parameter_registration_hook(mark)
    try:
        yield
    finally:
        hook.remove()


def groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of parameters that were made inside of the same ``partitioner``, by name."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, _MARK):
            found.setdefault(getattr(parameter, _MARK), []).append(name)
    return [tuple(names) for names in found.values()]
