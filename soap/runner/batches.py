"""The ranks' parts of a batch, as their data loaders give them, brought to where the strategy needs them: on every rank the samples that it
reads, or all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from soap.errors import RuntimeFailure
from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.inputs import PartBatch
from soap.runtime.trainer import Trainer


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Join the ranks' tensors along dimension 0, on all ranks; called on all ranks at once. ``device``: where the backend communicates.

    Samples alternate between ranks, as ``soap.shard`` deals them out: the first one of each rank in the order of the ranks, then the second
    one of each, … Ranks may have different numbers of samples, or none. The most common length counts as the number of samples; a tensor of
    another length counts as shared by all samples, and rank 0's is taken. RuntimeFailure if the ranks' samples differ in dtype or shape.
    """
    size, sizes = _agreed(parts)
    order = torch.tensor([offset for _, _, offset in sorted(_places(sizes))], dtype=torch.int64)
    return [_gathered(tensor, sizes, order, device) if _counts(tensor, size) else _first(tensor, device) for tensor in parts]


def dealt(parts: Sequence[torch.Tensor], names: Sequence[str], device: torch.device, trainer: Trainer) -> PartBatch:
    """Send each sample to the ranks that read it; called on all ranks at once. The batch is that of ``joined``; what all samples share is
    rank 0's. ``names``: the model's inputs that the tensors are, in any order. RuntimeFailure as for ``joined``, or if the model cannot be
    trained on so many samples."""
    size, sizes = _agreed(parts)
    comm, total = trainer.comm, sum(sizes)
    read = trainer.sizes.of_samples(total).samples_by_rank
    order = [(rank, number) for number, rank, _ in sorted(_places(sizes))]
    found = {}
    for name, tensor in zip(names, parts, strict=True):
        if not _counts(tensor, size):
            found[name] = _first(tensor, device)
            continue
        wanted = [own[name].indices if own[name].dim == 0 else list(range(total)) for own in read]
        found[name] = _sent(tensor, order, wanted, comm)
    return PartBatch([found[name] for name in trainer.model.input_names], total)


def _sent(tensor: torch.Tensor, order: Sequence[tuple[int, int]], wanted: Sequence[Sequence[int]], comm: Communicator) -> torch.Tensor:
    """The samples that this rank wants, in the order of their numbers. ``order``: by number, (rank that has it, its place there).
    ``wanted``: by rank, the numbers that it wants."""
    leaving = [[order[number][1] for number in own if order[number][0] == comm.rank] for own in wanted]
    coming = [[number for number in wanted[comm.rank] if order[number][0] == rank] for rank in range(comm.world_size)]
    plainly = tensor.detach().resolve_conj().resolve_neg().to(comm.device).contiguous()
    each = prod(tensor.shape[1:])
    parcels = [[plainly[own].reshape(-1)] if own else [] for own in leaving]
    buffer = plainly.new_empty(each * len(wanted[comm.rank]))
    pending = comm.all_to_all(parcels, buffer, [each * len(own) for own in coming], tuple(range(comm.world_size)))
    places = {number: place for place, number in enumerate(number for own in coming for number in own)}
    rows = pending.wait().reshape(-1, *tensor.shape[1:]) if each else plainly.new_empty(len(places), *tensor.shape[1:])
    return rows[[places[number] for number in wanted[comm.rank]]]


def _agreed(parts: Sequence[torch.Tensor]) -> tuple[int, list[int]]:
    """This rank's number of samples, and every rank's. RuntimeFailure if the ranks' samples differ in dtype or shape."""
    size = _samples(parts)
    layout = [(tensor.dtype, tuple(tensor.shape[1:]) if _counts(tensor, size) else tuple(tensor.shape)) for tensor in parts]
    found: list[tuple[int, object]] = [(0, None)] * dist.get_world_size()
    dist.all_gather_object(found, (size, layout))
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            raise RuntimeFailure(f"rank {rank} has a batch of {_written(other)}, rank 0 of {_written(found[0][1])}; expected equal samples")
    return size, [number for number, _ in found]


def _samples(parts: Sequence[torch.Tensor]) -> int:
    """The number of samples: the most common length of the tensors."""
    lengths = [tensor.shape[0] for tensor in parts if tensor.dim()]
    if not lengths:
        raise RuntimeFailure(f"a batch of {len(parts)} tensors, none with a dimension; expected tensors with the samples in dimension 0")
    return Counter(lengths).most_common(1)[0][0]


def _counts(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _places(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(number on its rank, rank, place if the parts are concatenated) of each sample."""
    found, start = [], 0
    for rank, size in enumerate(sizes):
        found += [(i, rank, start + i) for i in range(size)]
        start += size
    return found


def _gathered(tensor: torch.Tensor, sizes: Sequence[int], order: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Gather a tensor's parts in the given order of samples. Shorter parts are padded to the longest for the exchange."""
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
