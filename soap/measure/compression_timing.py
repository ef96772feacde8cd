"""How long a device takes to compress a gradient and to decompress what its peers send."""

from __future__ import annotations

from collections.abc import Callable

import torch

from soap.measure.timing import Sample, clock_for, repeat, sample
from soap.measure.upkeep_timing import EVICTED_BYTES, SECONDS, timed
from soap.plan.compression.seam import Work
from soap.runtime.compression.seam import compressor_of
from soap.runtime.compression.together import exchanged
from soap.strategy.compression import Compression

SPREAD = 1e-2
"""Standard deviation of the elements of the gradients that are compressed, which are normal."""


def matrix_of(elements: int) -> tuple[int, int]:
    """Sides of the matrix that stands for parameters of so many elements, a power of two."""
    power = elements.bit_length() - 1
    return 2 ** (power // 2), 2 ** (power - power // 2)


def time_compression(
    how: Compression, work: Work, elements: int, peers: int, device: torch.device, threads: int = 1, share: float = 1.0
) -> Sample:
    """Time of one work on a gradient of so many elements (a power of two), as one of so many peers. On a processor the caches are cold, as
    behind a backward pass."""
    step = _step(how, work, matrix_of(elements), peers, device)
    step()
    if device.type == "cuda":
        return timed(step, device, threads, share, 1)
    clock, others = clock_for(device, threads, share), torch.zeros(EVICTED_BYTES // 4)
    return sample(repeat(lambda: clock.times_ns([lambda: others.add_(1.0), step])[1:], SECONDS)[0], 1)


def _step(how: Compression, work: Work, shape: tuple[int, int], peers: int, device: torch.device) -> Callable[[], object]:
    """What is timed, on the first peer. The others' messages are made once, one after the other."""
    ranks = [compressor_of(how, shape, torch.float32, place, peers) for place in range(peers)]
    states = [own.fresh(device) for own in ranks]
    gradients = [SPREAD * torch.randn(shape, device=device) for _ in range(min(peers, 2))]
    if work == "select":
        return lambda: ranks[0].compress(states[0], gradients[0])
    messages = [own.compress(states[place], gradients[place % len(gradients)]) for place, own in enumerate(ranks)]
    first, *others = ranks[0].layout.exchanges
    received = exchanged(first.kind, messages)
    if work == "combine":
        return lambda: ranks[0].answer(states[0], received[0])
    for exchange in others:
        messages = [own.answer(state, got) for own, state, got in zip(ranks, states, received, strict=True)]
        received = exchanged(exchange.kind, messages)
    handed_on = dict(states[0].step)

    def restore() -> torch.Tensor:
        states[0].step = dict(handed_on)
        return ranks[0].total(states[0], received[0])

    return restore
