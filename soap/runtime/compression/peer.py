"""One rank's part in the compressed synchronization of one parameter, step after step: momentum, warm-up, compressor and state.

A step is a *course*: it gives what to exchange and takes what came, until it has the sum. Whoever drives it exchanges: real ranks do
(``soap.runtime.sync.compressed``), or all of them in one process (``synchronized``), which has the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch

from soap.errors import RuntimeFailure
from soap.plan.compression.seam import ExchangeKind, Layout
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.seam import Compressor, State, compressor_of, kept_dtype
from soap.runtime.compression.together import exchanged
from soap.strategy.compression import Chunked, Compression, Rgc, RgcAsq

Course = Generator[tuple[ExchangeKind, torch.Tensor], torch.Tensor, torch.Tensor]
MOMENTUM, STEPS = "momentum", "steps"
"""Names in ``State``: u of momentum correction, one of its summed tensors; and how many steps were taken."""


@dataclass(frozen=True, slots=True)
class CompressedTraining:
    """What the training of compressed parameters has beside the optimizer. ``momentum``: momentum correction; their optimizer then has no
    momentum of its own. ``warm_up``: by dense steps, or by density."""

    momentum: Momentum | None = None
    warm_up: WarmUp = WarmUp()  # noqa: RUF009 - it cannot be changed


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
        self._compressors: dict[float | None, Compressor[Compression, Layout]] = {}
        self.state = self._compressor(None).fresh(device)
        if training.momentum is not None:
            size = self._compressor(None).layout.elements
            self.state.summed[MOMENTUM] = torch.zeros(size, dtype=kept_dtype(dtype), device=device)

    def course(self, gradient: torch.Tensor) -> Course:
        """A step with this rank's gradient, which stays as it is. Returns the sum."""
        rule, state = self.training.momentum, self.state
        step = state.numbers.get(STEPS, 0)
        density = self.training.warm_up.density(step, getattr(self.compression, "density", 1.0))
        if rule is not None:
            flat = gradient.detach().reshape(-1).to(kept_dtype(self._dtype))
            gradient = rule.corrected(state.summed[MOMENTUM], flat).to(self._dtype).reshape(self._shape)
        if density is None:
            total = (yield "sum", gradient.detach().reshape(-1)).reshape(self._shape)
        else:
            own = self._compressor(density)
            first, *others = own.layout.exchanges
            received = yield first.kind, own.compress(state, gradient)
            for exchange in others:
                received = yield exchange.kind, own.answer(state, received)
            total = own.total(state, received)
            if rule is not None:
                rule.mask(state.summed[MOMENTUM], own.sent(state))
        state.numbers[STEPS] = step + 1
        return total

    def _compressor(self, density: float | None) -> Compressor[Compression, Layout]:
        """For a step at this density. None: the settings' own."""
        if density not in self._compressors:
            chosen = self.compression
            if density is not None and isinstance(chosen, Rgc | RgcAsq | Chunked):
                chosen = replace(chosen, density=density)
            self._compressors[density] = compressor_of(chosen, self._shape, self._dtype, self._place, self._peers)
        return self._compressors[density]


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


def copied(state: State) -> State:
    """A state with tensors of its own."""
    summed, common, own = ({name: tensor.clone() for name, tensor in part.items()} for part in (state.summed, state.common, state.own))
    return State(summed, common, own, dict(state.numbers))


def require_no_momentum(optimizer: torch.optim.Optimizer | None, names: dict[int, str]) -> None:
    """RuntimeFailure in one line if an optimizer that has no momentum to turn off, or one of its own, updates a parameter whose momentum is
    corrected. ``names``: id of a tensor of such a parameter -> the parameter's name."""
    for group in optimizer.param_groups if optimizer is not None else ():
        for tensor in group["params"]:
            name = names.get(id(tensor))
            if name is not None and group.get("momentum", None) != 0:
                raise RuntimeFailure(
                    f"momentum correction of {name!r}, whose optimizer has {_own(group)}; expected SGD with momentum 0 for compressed "
                    "parameters: their momentum is applied before they are compressed"
                )


def _own(group: dict[str, object]) -> str:
    return f"momentum {group['momentum']}" if "momentum" in group else "no option 'momentum'"
