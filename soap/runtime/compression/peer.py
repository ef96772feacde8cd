"""One rank's part in the compressed synchronization of one parameter, step after step: momentum, warm-up, compressor and state.

A step is a *course*: it gives what to exchange and takes what came, until it has the sum. Whoever drives it exchanges: real ranks do
(``soap.runtime.sync.compressed``), or all of them in one process (``synchronized``), with the same bits.
Several shards may be one course (``joined``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from soap.plan.compression.seam import ExchangeKind, Layout
from soap.plan.compression.training import PlannedTraining
from soap.runtime.compression.dgc import FALL, Momentum, WarmUp
from soap.runtime.compression.seam import Compressor, Selected, State, compressor_of, sizes_of
from soap.strategy.compression import Compression

Course = Generator[tuple[ExchangeKind, torch.Tensor], torch.Tensor, torch.Tensor]
MOMENTUM, STEPS = "momentum", "steps"
"""Names in ``State``: u of momentum correction, one of its summed tensors; and how many steps were taken."""


@dataclass(frozen=True, slots=True)
class CompressedTraining:
    """What training by a plan that compresses has beside the optimizer. ``momentum``: momentum correction; their optimizer then has no
    momentum of its own, and that of all other parameters has this one. ``warm_up``: by dense steps, or by density.
    ``clip_norm``: each rank clips its own gradients, of all parameters together, at N^(-1/2) of this; trainers take it from their options.
    """

    momentum: Momentum | None = None
    warm_up: WarmUp = WarmUp()  # noqa: RUF009 - it cannot be changed
    clip_norm: float | None = None

    @property
    def planned(self) -> PlannedTraining:
        """What memory and time depend on."""
        rule, warm_up = self.momentum, self.warm_up
        densest = FALL if warm_up.stage_steps else 0.0
        made = int(rule is not None and rule.nesterov)
        return PlannedTraining(int(rule is not None), made, densest, warm_up.dense_steps > 0, self.clip_norm is not None)


AS_IT_IS = CompressedTraining()


class Peer:
    """The peer number ``place`` of ``peers``. ``state``: what it keeps from step to step."""

    def __init__(
        self,
        compression: Compression,
        shape: Sequence[int],
        dtype: torch.dtype,
        place: int,
        peers: int,
        training: CompressedTraining = AS_IT_IS,
        device: torch.device | str = "cpu",
    ) -> None:
        self.compression, self.training = compression, training
        self._shape, self._dtype, self._place, self._peers = tuple(shape), dtype, place, peers
        self._compressors: dict[float, Compressor[Compression, Layout]] = {}
        self._sent: Selected | None = None
        own = self.compressor()
        self.state = own.fresh(device)
        if training.momentum is not None:
            self.state.summed[MOMENTUM] = torch.zeros(own.layout.elements, dtype=own.kept_dtype, device=device)

    def course(self, gradient: torch.Tensor) -> Course:
        """A step with this rank's gradient, which stays as it is. Returns the sum.

        Everything up to the sum is in the type that is kept. RuntimeFailure in one line, with the state untouched, for a gradient that
        cannot be compressed (see ``Compressor.compress``), in dense steps as well: they would leave it in u.
        """
        rule, state = self.training.momentum, self.state
        density = self.training.warm_up.density(self.steps, self.compression.share)
        own = self.compressor(density)
        self._sent = None
        if density is None:
            total = own.shaped((yield "sum", self._corrected(own, gradient)))
        else:
            first, *others = own.layout.exchanges
            received = yield first.kind, own.message(state, self._corrected(own, gradient))
            for exchange in others:
                received = yield exchange.kind, own.answer(state, received)
            total = own.total(state, received)
            self._sent = own.sent(state)
            if rule is not None:
                rule.mask(state.summed[MOMENTUM], self._sent)
        state.numbers[STEPS] = self.steps + 1
        return total

    def _corrected(self, own: Compressor[Compression, Layout], gradient: torch.Tensor) -> torch.Tensor:
        """What is compressed: the gradient, flat, with corrected momentum. It is in no variable of a course, so it is gone once there is a
        message: a bucket has many courses."""
        flat, rule = own.checked(gradient), self.training.momentum
        return flat if rule is None else rule.corrected(self.state.summed[MOMENTUM], flat)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self.state.numbers.get(STEPS, 0)

    @property
    def sent(self) -> Selected | None:
        """What the last message carried; None if it had a bit of every element (see ``Compressor.sent``), as in a dense step."""
        return self._sent

    def compressor(self, density: float | None = None) -> Compressor[Compression, Layout]:
        """For a step at this density. None: the settings' own."""
        density = self.compression.share if density is None else density
        if density not in self._compressors:
            chosen = self.compression.at(density)
            self._compressors[density] = compressor_of(chosen, self._shape, self._dtype, self._place, self._peers)
        return self._compressors[density]


def copied(state: State, device: torch.device | str) -> State:
    """A state with tensors of its own, there."""
    parts = (state.summed, state.common, state.own)
    summed, common, own = ({name: tensor.to(device, copy=True) for name, tensor in part.items()} for part in parts)
    return State(summed, common, own, dict(state.numbers))


def synchronized(peers: Sequence[Peer], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum on each rank; all of them go through their exchanges in step."""
    courses = [peer.course(gradient) for peer, gradient in zip(peers, gradients, strict=True)]
    given = [next(course) for course in courses]
    while True:
        received = exchanged(given[0][0], [message for _, message in given])
        given, totals = [], []
        for course, got in zip(courses, received, strict=True):
            try:
                given.append(course.send(got))
            except StopIteration as end:
                totals.append(end.value)
        if totals:
            return totals


def exchanged(kind: ExchangeKind, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets from a collective."""
    if kind == "all_to_all":
        return [torch.stack([message[rank] for message in messages]) for rank in range(len(messages))]
    if kind == "ragged":
        return [torch.cat(list(messages))] * len(messages)
    if kind == "all_gather":
        return [torch.stack(list(messages))] * len(messages)
    return [in_order(messages)] * len(messages)


def in_order(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, made in the order of the ranks."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


Joint = Generator[tuple[ExchangeKind, torch.Tensor, Sequence[int]], torch.Tensor, list[torch.Tensor]]
"""What to exchange, and for a ragged exchange the bytes of all ranks' messages; takes what came, and returns the sum of each shard."""


def joined(courses: Sequence[Course]) -> Joint:
    """The courses as one, with messages one behind the other: each shard has the sums and states that it would have alone. Those that
    exchange in unlike ways at a time, as in a warm-up of some, take turns, the same on all ranks."""
    totals: list[torch.Tensor] = [torch.empty(0)] * len(courses)
    waiting = {place: next(course) for place, course in enumerate(courses)}
    told: dict[int, list[int]] = {}
    while waiting:
        kind = next(iter(waiting.values()))[0]
        places = [place for place, (other, _) in waiting.items() if other == kind]
        messages = [waiting.pop(place)[1].detach() for place in places]
        widths = [message.shape[-1] for message in messages]
        message = messages[0] if len(messages) == 1 else torch.cat(messages, -1)
        del messages  # the joined ones are a copy
        if kind == "ragged":
            sizes = [told.pop(place) for place in places]
            received = yield kind, message, [sum(own) for own in zip(*sizes, strict=True)]
            parts = _apart(received, sizes)
        else:
            received = yield kind, message, ()
            parts = list(torch.split(received, widths, -1))
        del message, received
        for place in places:
            try:
                part = parts.pop(0)
                waiting[place] = courses[place].send(part)
                if waiting[place][0] == "ragged":
                    told[place] = sizes_of(part)
            except StopIteration as end:
                totals[place] = end.value
    return totals


def _apart(received: torch.Tensor, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Ragged messages as for each shard alone. ``sizes``: by shard and rank; ``received``: rank by rank, and of each shard by shard."""
    if len(sizes) == 1:
        return [received]
    parts = torch.split(received, [size for rank in zip(*sizes, strict=True) for size in rank])
    return [torch.cat(parts[shard :: len(sizes)]) for shard in range(len(sizes))]
