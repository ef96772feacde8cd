"""Training data for ``soap-run``: batches drawn like the model's example inputs, or the user's own. They depend on the step alone and
are the same on all ranks, of which each reads only its samples where it can ask for them (``parts``).

Training data of workers without state: the batches that the ranks of an exact run get, in their order, each worker its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from soap import api, zoo
from soap.cli.command import UsageError
from soap.cli.inputs import folder_of
from soap.cli.updating import imported
from soap.data import Preprocessed
from soap.elastic.worker import OfDataset
from soap.errors import SoapError
from soap.model.batch import sample_dims
from soap.model.regions import Interval
from soap.plan.samples import Samples, joined
from soap.runtime.inputs import Given, PartBatch, taken
from soap.tracing.execute import TracedModel

if TYPE_CHECKING:
    from soap.runtime.trainer import Evaluation, Trainer


SEED_STRIDE = 1_000_003
"""Keeps the batches of neighbouring seeds apart."""
AT_ONCE = 2**18
"""About so many elements are drawn at once where only some of them are kept."""


class DrawnBatches:
    """Batches drawn from the example inputs: each element is one of the values at the same place in any sample. So all values are in
    range: probabilities, and indices into tables of different sizes.

    Whole numbers are drawn only if each stands for itself (``model.element_inputs``: indices of lookups, class labels) and none is
    negative. All others (offsets, lengths, masks) are the examples'. SoapError if the model has no example inputs with values.
    """

    def __init__(self, model: TracedModel, seed: int) -> None:
        examples = list(model.example_inputs)
        if len(examples) < len(model.input_names) or any(tensor.is_meta for tensor in examples):
            raise SoapError(
                "the model has no example inputs to draw batches like: give --data PKG.MOD:CALLABLE, "
                "which yields one sequence of tensors per step"
            )
        self._examples = [example.detach().cpu() for example in examples]
        self._drawn = [
            tensor.is_floating_point() or tensor.is_complex() or (name in model.element_inputs and bool((tensor >= 0).all()))
            for name, tensor in zip(model.input_names, self._examples, strict=True)
        ]
        self._seed = seed

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step."""
        generator = self._generator(step)
        return [_drawn(example, generator) if drawn else example for example, drawn in zip(self._examples, self._drawn, strict=True)]

    def parts(self, step: int, samples: Mapping[str, Samples]) -> list[PartBatch]:
        """What a rank reads of the batch of a step. The others' numbers are drawn, too, a few at a time, and nothing is made of them."""
        generator = self._generator(step)
        given = zip(self._examples, self._drawn, samples.values(), strict=True)
        size = max((read.size for read in samples.values()), default=0)
        return [PartBatch([_drawn_part(own, generator, read) if drawn else taken(own, read) for own, drawn, read in given], size)]

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed * SEED_STRIDE + step)


def user_batches(spec: str, size: int) -> Batches:
    """The batches of ``--data``, of ``size`` samples where samples have numbers (``preprocessed:OUT``, a torch dataset)."""
    folder = folder_of(spec)
    if folder is not None:
        from soap.data import Preprocessed

        return chronological(spec, Preprocessed(folder), size)
    make = _callable(spec)
    made = make()
    found: NumberedBatches | None = numbered(spec, made, size)
    return UserBatches(spec, make, made) if found is None else found


class UserBatches:
    """Batches of the callable ``pkg.mod:name``: a sequence of tensors per step, in the order of the model's inputs.
    ``zoo:NAME[:SIZE][@BATCH]`` draws batches as the zoo does for this model. At its end the callable is called again. Every rank calls
    it and must get the same batches, so whatever is random needs a seed. ``first``: what the callable ``make`` has returned already."""

    def __init__(self, spec: str, make: Callable[[], Any], first: Any) -> None:
        self._spec, self._make = spec, make
        self._step = -1
        self._batch: list[torch.Tensor] = []
        self._source = self._checked(first)

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step. Asking again for the last one is free; going back starts from the beginning."""
        if step < self._step:
            self._step, self._source = -1, self._begin()
        while self._step < step:
            self._batch = self._next()
            self._step += 1
        return self._batch

    def _begin(self) -> Iterator[Any]:
        return self._checked(self._make())

    def _checked(self, made: Any) -> Iterator[Any]:
        if not isinstance(made, Iterable):
            raise SoapError(f"--data {self._spec}: the callable returned {type(made).__name__}; expected an iterable of batches")
        return iter(made)

    def _next(self) -> list[torch.Tensor]:
        end = object()
        batch = next(self._source, end)
        if batch is end:
            self._source = self._begin()
            batch = next(self._source, end)
        if batch is end:
            raise SoapError(f"--data {self._spec}: no batches; expected at least one")
        return tensors_of(self._spec, batch)


class ConvertedBatches:
    """Batches converted to the floating-point type that replaces the model's."""

    def __init__(self, batches: Batches, dtype: torch.dtype) -> None:
        self._batches, self._dtype = batches, dtype
        inner = parts_of(batches)
        self.parts = None if inner is None else lambda step, samples: [own.map(self._converted) for own in inner(step, samples)]

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step."""
        return [self._converted(tensor) for tensor in self._batches(step)]

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class JoinedBatches:
    """``count`` batches for each step, one after the other, for a trainer that accumulates gradients."""

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches, self._count = batches, count
        inner = parts_of(batches)
        self.parts = None if inner is None else lambda step, samples: [own for i in self._numbers(step) for own in inner(i, samples)]

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """All tensors of a step."""
        return [tensor for i in self._numbers(step) for tensor in self._batches(i)]

    def _numbers(self, step: int) -> range:
        return range(step * self._count, (step + 1) * self._count)


def _drawn(example: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if example.dim() == 0 or example.numel() == 0:
        return example
    return example.gather(0, torch.randint(len(example), example.shape, generator=generator))


def _drawn_part(example: torch.Tensor, generator: torch.Generator, read: Samples) -> torch.Tensor:
    """``taken(_drawn(example, generator), read)``, with no more at a time than about ``AT_ONCE`` elements that are not kept."""
    if read.dim != 0 or example.dim() == 0 or example.numel() == 0:
        return taken(_drawn(example, generator), read)
    step = max(1, AT_ONCE // max(1, example[0].numel()))
    kept = []
    for start in range(0, len(example), step):
        stop = min(start + step, len(example))
        numbers = torch.randint(len(example), (stop - start, *example.shape[1:]), generator=generator)
        kept += [example.gather(0, numbers[a - start : b - start]) for a, b in _within(read.intervals, start, stop)]
    return torch.cat(kept) if kept else example[:0].clone()


def _within(intervals: Sequence[Interval], start: int, stop: int) -> Iterator[Interval]:
    """The parts of the intervals between ``start`` and ``stop``."""
    own = ((max(a, start), min(b, stop)) for a, b in intervals)
    return ((a, b) for a, b in own if a < b)


def batch_size(model: TracedModel) -> int:
    """The samples in a model's batch; 1 if it says nothing of them."""
    shapes = [model.graph.tensors[name].shape for name in model.input_names]
    return next((shape[0] for shape in shapes if shape), 1)


def _callable(spec: str) -> Callable[[], Any]:
    module, _, name = spec.partition(":")
    if module == "zoo" and name:
        return partial(zoo.batches, spec)
    found: Callable[[], Any] = imported(spec, "--data", "yields one sequence of tensors per step")
    return found


Batches = Callable[[int], Sequence[torch.Tensor]]
Parts = Callable[[int, Mapping[str, Samples]], list[PartBatch]]
"""(step, what the rank reads of each input) -> its part of each of the step's batches."""


def by_rank(batches: Batches, trainer: Trainer | Evaluation) -> Callable[[int], Sequence[Given]]:
    """The batches as a trainer is given them: only what its rank reads, if single samples can be asked for (``parts``); else in full."""
    parts = parts_of(batches)
    return batches if parts is None else _Parts(parts, trainer.samples())


class _Parts:
    def __init__(self, parts: Parts, samples: Mapping[str, Samples]) -> None:
        self._parts, self._samples = parts, samples

    def __call__(self, step: int) -> list[PartBatch]:
        return self._parts(step, self._samples)


def parts_of(batches: Batches) -> Parts | None:
    """How parts of these batches are read; None if only whole batches can be."""
    found: Parts | None = getattr(batches, "parts", None)
    return found


class NumberedBatches:
    """Batches of ``size`` samples each, in their order, of a source of ``count`` samples; a smaller last one is left out, then it begins
    again. ``read``: the tensors of some samples by number, ascending, in the order of the model's inputs, samples in dimension 0."""

    def __init__(self, spec: str, read: Callable[[Sequence[int]], Any], count: int, size: int) -> None:
        if count < size:
            raise SoapError(f"--data {spec}: {count} samples; expected at least {size}, a batch")
        self._spec, self._read, self._size = spec, read, size
        self._batches = count // size

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step."""
        return self._at(step, ((0, self._size),))

    def parts(self, step: int, samples: Mapping[str, Samples]) -> list[PartBatch]:
        """What a rank reads of the batch of a step. Each sample is asked for once, whichever inputs the rank reads of it."""
        whole = Samples(0, self._size, ((0, self._size),))
        wanted = [whole if read.dim is None else read for read in samples.values()]
        together = joined(interval for read in wanted for interval in read.intervals) or ((0, 1),)  # which tells the shapes
        found = self._at(step, together)
        if len(found) != len(wanted):
            raise SoapError(f"--data {self._spec}: a batch of {len(found)} tensors; expected {len(wanted)}: {', '.join(samples)}")
        there = Samples(0, self._size, together)
        here = [Samples(0, there.count, tuple(map(there.place, read.intervals))) for read in wanted]
        return [PartBatch([taken(tensor, read) for tensor, read in zip(found, here, strict=True)], self._size)]

    def _at(self, step: int, intervals: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        first = step % self._batches * self._size
        return tensors_of(self._spec, self._read([first + i for start, stop in intervals for i in range(start, stop)]))


def numbered(spec: str, made: Any, size: int) -> NumberedBatches | None:
    """The batches of a torch dataset whose samples have numbers; None if it is none, or can only be read from its beginning."""
    if not isinstance(made, Dataset) or isinstance(made, IterableDataset):
        return None
    from soap.elastic.worker import OfDataset

    return NumberedBatches(spec, OfDataset(made).batch, len(made), size)  # type: ignore[arg-type]


def chronological(spec: str, data: Preprocessed, size: int) -> NumberedBatches:
    """The batches of what ``soap-preprocess`` wrote."""
    return NumberedBatches(spec, lambda numbers: data.at(np.asarray(numbers, np.int64)), data.rows, size)


def tensors_of(spec: str, batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch of a user's. SoapError if there is something else."""
    items = batch if isinstance(batch, Iterable) and not isinstance(batch, torch.Tensor) else [batch]
    tensors: list[torch.Tensor] = []
    for item in items:
        if not isinstance(item, torch.Tensor):
            raise SoapError(f"--data {spec}: a batch holds {type(item).__name__}; expected a sequence of tensors per step")
        tensors.append(item)
    return tensors


ENDLESS = 2**40
"""Steps of data that never end."""


@dataclass
class PartsOfSteps:
    """Batches of whole steps, each cut into equal parts, one a worker; as samples for a dealer they count by parts. ``make``: makes the
    batches, once in each process. ``dims``: by input, the dimension of its samples; None: all have it whole."""

    make: Callable[[], Batches]
    workers: int
    dims: tuple[int | None, ...]
    _made: list[Batches] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return ENDLESS * self.workers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": []}

    def batch(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        """See ``soap.elastic.worker.Batches``; one part is asked for."""
        (number,) = (int(index) for index in indices)
        if not self._made:
            self._made.append(self.make())
        step, part = divmod(number, self.workers)
        whole = self._made[0](step)
        if len(whole) != len(self.dims):
            raise UsageError(f"--data: a batch has {len(whole)} tensors; expected {len(self.dims)}, the model's inputs in their order")
        return [self._part(tensor, dim, part) for tensor, dim in zip(whole, self.dims, strict=True)]

    def _part(self, tensor: torch.Tensor, dim: int | None, part: int) -> torch.Tensor:
        if dim is None:
            return tensor
        if tensor.dim() <= dim or tensor.shape[dim] % self.workers:
            raise UsageError(
                f"--data: a batch of shape {[*tensor.shape]} for {self.workers} workers; expected samples in dimension {dim} to divide"
            )
        return tensor.chunk(self.workers, dim)[part].contiguous()


@dataclass
class Chronological:
    """The first ``samples`` of what ``soap-preprocess`` wrote, opened in each process. ``dtype``: replaces the numbers' own."""

    folder: str
    samples: int
    dtype: torch.dtype | None
    _opened: list[OfDataset] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return self.samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": []}

    def batch(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        """See ``soap.elastic.worker.Batches``."""
        if not self._opened:
            self._opened.append(OfDataset(Preprocessed(self.folder)))
        found = self._opened[0].batch(indices)
        return [own.to(self.dtype) if self.dtype is not None and own.is_floating_point() else own for own in found]


def lease_data(
    model: str,
    reading: Mapping[str, Any],
    planned: TracedModel,
    data: str | None,
    *,
    workers: int,
    batch: int,
    seed: int,
    dtype: str | None,
    dims: Mapping[str, int] | None = None,
) -> tuple[PartsOfSteps | Chronological, int]:
    """The data of ``--data``, and how many of its samples, as it counts them, a lease has. ``planned``: the model without values.
    ``dims``: by input, the dimension that is divided among workers, if not those that exact plans divide."""
    kept = None if dtype is None else getattr(torch, dtype)
    folder = folder_of(data)
    if folder is not None:
        rows, step = Preprocessed(folder).rows, workers * batch
        if rows < step:
            raise UsageError(f"--data {data}: {rows} samples; expected at least {step}, a step of {workers} workers with {batch} each")
        return Chronological(folder, rows - rows % step, kept), batch
    dims = sample_dims(planned.graph) if dims is None else dims
    cut = tuple(dims.get(name) for name in planned.input_names)
    make: Callable[[], Batches]
    if data is None:
        drawn = DrawnBatches(api.load(model, **reading), seed)
        make = partial(_same, drawn)
    else:
        make = partial(user_batches, data, batch_size(planned))
    return PartsOfSteps(make if kept is None else partial(_converted, make, kept), workers, cut), 1


def _same(batches: Batches) -> Batches:
    return batches


def _converted(make: Callable[[], Batches], dtype: torch.dtype) -> Batches:
    return ConvertedBatches(make(), dtype)
