"""The whole batch from the ranks' parts of it: every rank needs all of it, since it computes whatever tiles the strategy gives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from soap.errors import RuntimeFailure
from soap.runtime.comm.packing import plain


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The ranks' tensors put together along dimension 0, on all ranks; called on all of them. ``device``: what the ranks communicate by.

    Samples alternate between ranks, as ``soap.shard`` has dealt them out: all first ones in the order of the ranks, all second ones, …
    Ranks may have different numbers of samples, none included. Tensors that are not as long as most count as shared by all samples: rank
    0's are taken.
    """
    size = _samples(parts)
    layout = [(tensor.dtype, tuple(tensor.shape[1:]) if _counts(tensor, size) else tuple(tensor.shape)) for tensor in parts]
    found: list[tuple[int, object]] = [(0, None)] * dist.get_world_size()
    dist.all_gather_object(found, (size, layout))
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            raise RuntimeFailure(f"rank {rank} has a batch of {_written(other)}, rank 0 of {_written(found[0][1])}; expected equal samples")
    sizes = [number for number, _ in found]
    order = torch.tensor([offset for _, _, offset in sorted(_places(sizes))], dtype=torch.int64)
    return [_gathered(tensor, sizes, order, device) if _counts(tensor, size) else _first(tensor, device) for tensor in parts]


def _samples(parts: Sequence[torch.Tensor]) -> int:
    """How many samples the tensors hold: the most common length."""
    lengths = [tensor.shape[0] for tensor in parts if tensor.dim()]
    if not lengths:
        raise RuntimeFailure(f"a batch of {len(parts)} tensors, none with a dimension; expected tensors with the samples in dimension 0")
    return Counter(lengths).most_common(1)[0][0]


def _counts(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _places(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(number at its rank, rank, place among all parts one after another) of each sample."""
    found, start = [], 0
    for rank, size in enumerate(sizes):
        found += [(i, rank, start + i) for i in range(size)]
        start += size
    return found


def _gathered(tensor: torch.Tensor, sizes: Sequence[int], order: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Parts of different lengths travel as if they were as long as the longest."""
    padded = torch.zeros((max(sizes), *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    padded[: len(tensor)] = tensor.to(device)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather([plain(part) for part in received], plain(padded))
    together = torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)]).to(tensor.device)
    return together[order.to(tensor.device)]


def _first(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    shared = tensor.to(device).contiguous().clone()
    dist.broadcast(plain(shared), 0)
    return shared.to(tensor.device)


def _written(layout: object) -> str:
    items = layout if isinstance(layout, list) else []
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in items) or "nothing"
