"""All ranks of a compressed synchronization in one process: what a check compares distributed runs with, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from soap.plan.compression.seam import ExchangeKind, Layout
from soap.runtime.compression.seam import Compressor, Selected, State, compressor_of
from soap.strategy.compression import Chunked, Compression, Rgc, RgcAsq


class Peers:
    """The compressors and states of all ranks, for one parameter."""

    def __init__(self, compression: Compression, shape: Sequence[int], dtype: torch.dtype, peers: int) -> None:
        self._compression, self._shape, self._dtype, self._peers = compression, tuple(shape), dtype, peers
        self._made: dict[Compression, list[Compressor[Compression, Layout]]] = {}
        self.states = [compressor.fresh() for compressor in self.compressors()]

    def compressors(self, density: float | None = None) -> list[Compressor[Compression, Layout]]:
        """One for each rank. ``density``: another one than the settings' (in a warm-up); methods without one have none."""
        chosen = self._compression
        if density is not None and isinstance(chosen, Rgc | RgcAsq | Chunked):
            chosen = replace(chosen, density=density)
        if chosen not in self._made:
            ranks = range(self._peers)
            self._made[chosen] = [compressor_of(chosen, self._shape, self._dtype, rank, self._peers) for rank in ranks]
        return self._made[chosen]

    def synchronize(self, gradients: Sequence[torch.Tensor], density: float | None = None) -> list[torch.Tensor]:
        """The total that each rank gets for the ranks' gradients."""
        return synchronized(self.compressors(density), self.states, gradients)

    def sent(self, rank: int, density: float | None = None) -> Selected | None:
        """What a rank's last message carried, see ``Compressor.sent``."""
        return self.compressors(density)[rank].sent(self.states[rank])


def synchronized(
    compressors: Sequence[Compressor[Compression, Layout]], states: Sequence[State], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The total on each rank; all of them go through their exchanges in step."""
    ranks = list(zip(compressors, states, strict=True))
    first, *others = compressors[0].layout.exchanges
    messages = [own.compress(state, gradient) for (own, state), gradient in zip(ranks, gradients, strict=True)]
    received = exchanged(first.kind, messages)
    for exchange in others:
        messages = [own.answer(state, got) for (own, state), got in zip(ranks, received, strict=True)]
        received = exchanged(exchange.kind, messages)
    return [own.total(state, got) for (own, state), got in zip(ranks, received, strict=True)]


def exchanged(kind: ExchangeKind, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets from a collective."""
    if kind == "all_to_all":
        return [torch.stack([message[rank] for message in messages]) for rank in range(len(messages))]
    if kind == "all_gather":
        return [torch.stack(list(messages))] * len(messages)
    return [in_order(messages)] * len(messages)


def in_order(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, made in the order of the ranks."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total
