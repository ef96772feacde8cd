"""Whether all ranks are given the same batches, by a hash in a small message that is under way while they compute.

The first batch is compared byte by byte (``inputs``). Later ones differ if a data source is seeded by rank, or skips a sample on one: the
loss would be nobody's. A hash is of dtypes, shapes and up to ``WORDS`` numbers, evenly spread over each tensor, so its cost has a bound.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from soap.errors import RuntimeFailure
from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.inputs import Batch, BySamples, compare_ranks, compare_samples, pieces

if TYPE_CHECKING:
    from soap.runtime.sizes import BatchSizes

EACH, EVERY = 8, 8
"""So many batches are compared one by one, then every so many-th: who has drawn other ones once goes on so."""
WORDS = 2**16
PIECE = 2**11
"""So many numbers are hashed at once: what a rank holds is predicted without them."""
RANK_BITS = 20
HASHES = 2**42
"""How many there are: with a rank's number one fits into 62 bits."""


@dataclass(frozen=True)
class _Asked:
    """A message under way: by place in it, what was hashed. Twice as many numbers: the largest hash and whose it is, the smallest."""

    work: Any
    numbers: torch.Tensor
    what: Sequence[str]


class Alike:
    """Compares what ranks are given; ``begin`` and ``require`` are called on all ranks, for each batch."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._wire = comm.device if dist.get_backend() == "nccl" else torch.device("cpu")
        self._asked: list[_Asked] = []
        self._given: Counter[str] = Counter()
        self._shapes: object = None

    def begin(self, batches: Sequence[Batch], sizes: BatchSizes, purpose: str) -> None:
        """Compare the first batch for this purpose, and send hashes of later ones (``EACH``, ``EVERY``). Of parts of batches each piece is
        compared that several ranks read. RuntimeFailure if a first batch does not fit or differs, or ranks go on to batches of unlike
        sizes."""

        def read() -> list[list[BySamples]]:
            return [sizes.of(batch.shapes).samples_by_rank for batch in batches]

        parts, self._asked = any(batch.size is not None for batch in batches), []
        number = self._given[purpose]
        if number:
            self._given[purpose] += 1
            if number < EACH or number % EVERY == 0:
                self._begin(batches, read, parts)
            return
        compare_ranks(self._comm, batches, lambda: sizes.check(batches))
        if parts:
            compare_samples(self._comm, batches, read())
        self._given[purpose] = 1

    def _begin(self, batches: Sequence[Batch], read: Callable[[], Sequence[Sequence[BySamples]]], parts: bool) -> None:
        if self._comm.world_size == 1:
            return
        shapes = parts, [batch.shapes for batch in batches]
        whole = [] if parts else [tensor for batch in batches for tensor in batch.tensors]
        named = _named(repr((shapes, [tensor.dtype for tensor in whole])))
        self._send([hashed(whole, named)], ["parts of batches" if parts else "batches"])
        if shapes != self._shapes:
            self.require()  # otherwise ranks would be in programs of unlike sizes, and not come out of them
            self._shapes = shapes
        if parts:
            found = pieces(self._comm.rank, batches, read())
            hashes = [None if piece is None else hashed([piece], 0) for piece in found.values()]
            self._send(hashes, [f"{f'samples {start} to {stop - 1} of ' if stop else ''}input {name!r}" for _, name, start, stop in found])

    def require(self) -> None:
        """RuntimeFailure in one line if two ranks were given unlike batches."""
        asked, self._asked = self._asked, []
        for own in asked:
            own.work.wait()
            for what, (high, low) in zip(own.what, own.numbers.view(-1, 2).tolist(), strict=True):
                if high >> RANK_BITS == HASHES - 1 - (low >> RANK_BITS):
                    continue
                first, second = sorted((high % 2**RANK_BITS, low % 2**RANK_BITS))
                raise RuntimeFailure(
                    f"ranks {first} and {second} were given other {what}{f' in step {HERE.step}' if HERE.step else ''}; expected the same "
                    "whole batch on every rank, or the same samples where ranks read parts of it: seed the data source equally"
                )

    def _send(self, hashes: Sequence[torch.Tensor | None], what: Sequence[str]) -> None:
        rank, none = self._comm.rank, torch.tensor([-1, -1], device=self._wire)
        signed = [
            none if own is None else torch.stack([own, HASHES - 1 - own]).mul(2**RANK_BITS).add(rank).to(self._wire) for own in hashes
        ]
        numbers = torch.cat(signed)
        self._asked.append(_Asked(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, async_op=True), numbers, what))


def hashed(tensors: Sequence[torch.Tensor], begin: int) -> torch.Tensor:
    """A hash of numbers in tensors, from 0 to ``HASHES`` - 1, on the device of the first."""
    total = torch.tensor(begin, device=tensors[0].device if tensors else None)
    for place, tensor in enumerate(tensors, 1):
        for words in _words(tensor.detach()):
            words ^= words >> 32  # as ``_folded``, in place
            words *= _weights(words.device)[: len(words)]
            total = total * 31 + _folded(words.sum()).to(total.device)
            del words  # before the next ones are made
        total = total * 31 + place
    return total % HASHES


def _folded(numbers: torch.Tensor) -> torch.Tensor:
    """The upper halves in the lower ones, too: those of round floating point numbers are 0, and products keep that."""
    return numbers ^ (numbers >> 32)


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Up to ``WORDS`` numbers of a tensor, as whole ones in memory of their own, ``PIECE`` at a time."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    chosen, size = flat[:: -(-len(flat) // WORDS) or 1], flat.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    for part in torch.split(chosen, PIECE * 8 // max(size, 8)):
        yield part.contiguous().view(kind).to(torch.int64, copy=True)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, of no order: numbers in other places make another hash."""
    drawing = torch.Generator().manual_seed(1)
    return (torch.randint(2**62, (PIECE,), generator=drawing) | 1).to(device)


@cache
def _named(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest())
