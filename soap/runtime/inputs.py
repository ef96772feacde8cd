"""What a step is given: micro-batches, in full or the rank's part of them; whether they fit the model, and are the same on all ranks.

Of batches the first is compared byte by byte, later ones by a hash in a small message that is under way while ranks compute: of dtypes,
shapes and up to ``WORDS`` numbers, evenly spread over each tensor, so that its cost has a bound.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.plan.samples import Samples, pieces_read
from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator

if TYPE_CHECKING:
    from soap.runtime.sizes import BatchSizes


@dataclass(frozen=True)
class PartBatch:
    """What a rank is given of a batch of ``size`` samples, in place of the whole: for each input, in order, the samples that
    ``Trainer.samples`` names, ascending; inputs without samples in full."""

    tensors: Sequence[torch.Tensor]
    size: int

    @classmethod
    def cut(cls, inputs: Sequence[torch.Tensor], samples: Mapping[str, Samples]) -> PartBatch:
        """Copies of the part of a whole batch that is at hand. ``samples``: what ``Trainer.samples`` gives for its size."""
        own = tuple(taken(tensor, read) for tensor, read in zip(inputs, samples.values(), strict=True))
        return cls(own, next((read.size for read in samples.values() if read.dim is not None), 0))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartBatch:
        """The same part with each tensor changed: moved, or converted."""
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))


Given = torch.Tensor | PartBatch
"""What a step is given: the tensors of whole batches, or a part of each batch."""


def mapped(items: Sequence[Given], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Given]:
    """What a step is given, with each tensor changed."""
    return [own.map(change) if isinstance(own, PartBatch) else change(own) for own in items]


def taken(tensor: torch.Tensor, read: Samples) -> torch.Tensor:
    """The samples of an input that a rank reads, as a copy; an input without samples in full."""
    if read.dim is None:
        return tensor
    if not read.intervals:
        return tensor.narrow(read.dim, 0, 0).clone()
    return torch.cat([tensor.narrow(read.dim, start, stop - start) for start, stop in read.intervals], read.dim)


Tensors = Sequence[torch.Tensor]
Shapes = tuple[tuple[int, ...], ...]
BySamples = Mapping[str, Samples]
"""Input -> what one rank reads of it."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch as this rank has it: in full, or its part of ``size`` samples. ``dims``: by input, its dimension of samples or None."""

    tensors: Tensors
    size: int | None
    dims: tuple[int | None, ...]

    @property
    def shapes(self) -> Shapes:
        """The shapes of the whole batch: they tell batches of different sizes apart."""
        given = [tuple(tensor.shape) for tensor in self.tensors]
        if self.size is None:
            return tuple(given)
        sized = zip(given, self.dims, strict=True)
        return tuple(own if d is None or d >= len(own) else (*own[:d], self.size, *own[d + 1 :]) for own, d in sized)


def micro_batches(inputs: Sequence[Given], names: Sequence[str], most: int, divided: Mapping[str, int]) -> list[Batch]:
    """Cut what a step is given into 1 to ``most`` micro-batches. RuntimeFailure if that fails. ``divided``: inputs -> sample dimension."""
    dims = tuple(divided.get(name) for name in names)
    each = "" if most == 1 else f" for each of 1 to {most} micro-batches, one after the other"
    if any(isinstance(own, PartBatch) for own in inputs):
        return [_part(own, names, dims, each) for own in _parts_alone(inputs, most, each)]
    whole: list[torch.Tensor] = [own for own in inputs if not isinstance(own, PartBatch)]
    if not names:
        return [Batch(whole, None, dims)] * most
    count, rest = divmod(len(whole), len(names))
    if rest or not 1 <= count <= most:
        raise RuntimeFailure(f"{len(whole)} tensors given to a step: expected {len(names)} ({', '.join(names)}){each}")
    return [Batch(whole[i * len(names) : (i + 1) * len(names)], None, dims) for i in range(count)]


def _parts_alone(inputs: Sequence[Given], most: int, each: str) -> list[PartBatch]:
    parts = [own for own in inputs if isinstance(own, PartBatch)]
    if len(parts) < len(inputs):
        other = next(own for own in inputs if not isinstance(own, PartBatch))
        raise RuntimeFailure(f"a {type(other).__name__} given to a step beside parts of batches: expected parts alone, or tensors alone")
    if len(parts) > most:
        raise RuntimeFailure(f"{len(parts)} parts of batches given to a step: expected one{each}")
    return parts


def _part(part: PartBatch, names: Sequence[str], dims: tuple[int | None, ...], each: str) -> Batch:
    if len(part.tensors) != len(names):
        raise RuntimeFailure(f"{len(part.tensors)} tensors in a part of a batch: expected {len(names)} ({', '.join(names)}){each}")
    return Batch(part.tensors, part.size, dims)


def check_types(graph: OperatorGraph, names: Sequence[str], inputs: Tensors, dtype_of: Callable[[str], torch.dtype]) -> None:
    """RuntimeFailure unless the tensors have the dtypes that the model was exported with, or those that replace them."""
    for name, tensor in zip(names, inputs, strict=True):
        allowed = dict.fromkeys((graph.tensors[name].dtype, _name(dtype_of(name))))
        found = _name(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        if found not in allowed:
            what = f"is a {type(tensor).__name__}" if found is None else f"has dtype {found}"
            step = f" in step {HERE.step}" if HERE.step else ""
            raise RuntimeFailure(f"input {name!r} {what}{step}: expected a tensor of dtype {' or '.join(allowed)}; convert it first")


def check_samples(batch: Batch, samples: BySamples) -> None:
    """RuntimeFailure unless a part of a batch has the samples that the rank reads. A whole batch has them."""
    if batch.size is None:
        return
    for (name, read), tensor in zip(samples.items(), batch.tensors, strict=True):
        found = tensor.shape[read.dim] if read.dim is not None and read.dim < tensor.dim() else read.count
        if read.dim is not None and found != read.count:
            said = f"expected {read.count}, those of a batch of {read.size} that this rank reads (Trainer.samples)"
            raise RuntimeFailure(f"input {name!r} has {found} samples in a part of a batch: {said}")


def other_shape(graph: OperatorGraph, names: Sequence[str], shapes: Shapes) -> str:
    """One line about the first input whose shape is not the one that the model was traced with; empty if there is none."""
    for name, shape in zip(names, shapes, strict=True):
        expected = graph.tensors[name].shape
        if shape != expected:
            return f"input {name!r} has shape {shape}: expected {expected}, the whole batch, on every rank"
    return ""


def compare_ranks(comm: Communicator, batches: Sequence[Batch], check: Callable[[], None]) -> None:
    """Raise RuntimeFailure on all ranks if one of them has another batch, or one that ``check`` refuses: otherwise they would train on
    different data in silence. Of parts only the shapes are compared: ``compare_samples``."""

    def own() -> tuple[bool, str]:
        check()
        parts = any(batch.size is not None for batch in batches)
        return parts, repr([own.shapes for own in batches]) if parts else _digest([t for own in batches for t in own.tensors])

    outcomes = _agreed(comm, own)
    for rank, (parts, digest) in enumerate(outcomes):
        if parts != outcomes[0][0]:
            said = [("the whole batch", "its part of the batch")[kind] for kind in (parts, outcomes[0][0])]
            raise RuntimeFailure(f"rank {rank} was given {said[0]}, rank 0 {said[1]}; expected the same on all ranks")
        if digest != outcomes[0][1]:
            raise RuntimeFailure(
                f"rank {rank} was given another batch than rank 0: every rank gets the whole global batch; seed the loader equally"
                if not parts
                else f"rank {rank} was given a part of a batch of another size than rank 0; expected the same batch on all ranks"
            )


def compare_samples(comm: Communicator, batches: Sequence[Batch], read: Sequence[Sequence[BySamples]]) -> None:
    """Raise RuntimeFailure on all ranks if a part of a batch lacks what its rank reads, or two ranks have other values for a sample that
    both read. ``read``: by micro-batch and rank, what ranks read."""

    def own() -> dict[tuple[int, str, int, int], str]:
        return {key: _digest([piece]) for key, piece in pieces(comm.rank, batches, read).items() if piece is not None}

    first: dict[tuple[int, str, int, int], tuple[int, str]] = {}
    for rank, digests in enumerate(_agreed(comm, own)):
        for key, digest in digests.items():
            before, known = first.setdefault(key, (rank, digest))
            if digest != known:
                _, name, start, stop = key
                what = f"input {name!r}" if stop == 0 else f"samples {start} to {stop - 1} of input {name!r}"
                said = "a sample is the same on all ranks that read it; seed the data source equally"
                raise RuntimeFailure(f"rank {rank} was given other {what} than rank {before}: {said}")


def pieces(
    rank: int, batches: Sequence[Batch], read: Sequence[Sequence[BySamples]]
) -> dict[tuple[int, str, int, int], torch.Tensor | None]:
    """(micro-batch, input, first sample, end) -> what a rank was given of it, None if it does not read that; the same keys on
    all ranks. Every rank has all of a piece or nothing; samples 0 to 0 are all of an input without samples. RuntimeFailure if a part lacks
    what its rank reads."""
    found: dict[tuple[int, str, int, int], torch.Tensor | None] = {}
    for number, (batch, by_rank) in enumerate(zip(batches, read, strict=True)):
        check_samples(batch, by_rank[rank])
        for (name, own), tensor in zip(by_rank[rank].items(), batch.tensors, strict=True):
            others = [other[name] for other in by_rank]
            if all(other.dim is None for other in others):
                found[number, name, 0, 0] = tensor
            for start, stop in pieces_read([other for other in others if other.dim is not None]):
                has = own.dim is not None and any(a <= start and stop <= b for a, b in own.intervals)
                here, there = own.place((start, stop)) if has else (0, 0)
                found[number, name, start, stop] = tensor.narrow(own.dim or 0, here, there - here) if has else None
    return found


def _agreed(comm: Communicator, ask: Callable[[], Any]) -> list[Any]:
    """Each rank's own answer; a RuntimeFailure of one of them on all ranks."""
    failure, answer = "", None
    try:
        answer = ask()
    except RuntimeFailure as error:
        failure = str(error)
    outcomes = comm.gather((failure, answer))
    if failure:
        raise RuntimeFailure(failure)
    for rank, (other, _) in enumerate(outcomes):
        if other:
            raise RuntimeFailure(f"rank {rank}: {other}")
    return [found for _, found in outcomes]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(tensors: Tensors) -> str:
    """A hash of dtype, shape and bytes of each tensor."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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
        compared that several ranks read. RuntimeFailure if a batch does not fit, a first one differs, or ranks go on to batches of unlike
        sizes."""

        def read() -> list[list[BySamples]]:
            return [sizes.of(batch.shapes).samples_by_rank for batch in batches]

        parts, self._asked = any(batch.size is not None for batch in batches), []
        number = self._given[purpose]
        if number:
            sizes.check(batches)  # first: who has a batch of no use says so, instead of that another rank has another one
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
