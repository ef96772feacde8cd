"""The largest elements of each chunk of 4,096, as many from each: positions of twelve bits, values of two or sixteen, no length.

Two bits are a sign and one of two magnitudes. A chunk's selected magnitudes are parted at the middle between the smallest and the largest;
either part is sent as its mean, in bfloat16. What values lose on the way stays in the residual, which decays from step to step.
"""

from __future__ import annotations

import torch

from soap.plan.compression.chunked import CHUNK, LEVELS_BYTES, ChunkedLayout
from soap.runtime.compression import seam
from soap.runtime.compression.seam import Compressor, Selected, State
from soap.strategy.compression import Chunked

NARROW = torch.bfloat16


class LargestOfChunks(Compressor[Chunked, ChunkedLayout]):
    """See the module. State: ``residual``. Elements that are not sent are kept as they are, bit for bit; sent + kept == decay * kept
    before + gradient: bit for bit with bf16 codes in float32, else to within rounding of the larger."""

    def message(self, state: State, gradient: torch.Tensor) -> torch.Tensor:
        """Adds the gradient to the decayed residual, and sends a narrow copy of its largest elements."""
        residual = state.residual
        if self.compression.decay != 1:
            residual.mul_(self.compression.decay)
        residual.add_(gradient)
        places = self._largest(residual)
        positions = places + torch.arange(self.layout.chunks, device=places.device)[:, None] * CHUNK
        real = positions < self.layout.elements
        positions = torch.where(real, positions, 0)
        values = torch.where(real, residual[positions], 0)
        codes, sent = self._coded(values, real)
        own = positions[real]
        residual[own] = values[real] - sent[real]
        state.step = {"positions": own, "values": sent[real]}
        return torch.cat([_packed_positions(places), codes], 1).flatten()

    def total(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """Messages are added one after the other in the order of the ranks; within one no position occurs twice."""
        layout = self.layout
        total = torch.zeros(layout.chunks * CHUNK, dtype=self.kept_dtype, device=received.device)
        starts = torch.arange(layout.chunks, device=received.device)[:, None] * CHUNK
        for row in received:
            parts = row.view(layout.chunks, layout.index_bytes + layout.code_bytes)
            places = _unpacked_positions(parts[:, : layout.index_bytes], layout.kept)
            total.index_add_(0, (places + starts).flatten(), self._decoded(parts[:, layout.index_bytes :]).flatten())
        return self.shaped(total[: layout.elements])

    def sent(self, state: State) -> Selected:
        """What the last message carried."""
        return Selected(state.step["positions"], state.step["values"])

    def _largest(self, residual: torch.Tensor) -> torch.Tensor:
        """Places in their chunks of the largest magnitudes, in order, first of equal ones; short chunks are padded behind their end."""
        layout = self.layout
        padding = layout.chunks * CHUNK - layout.elements
        keys = torch.nn.functional.pad(residual.abs(), (0, padding), value=-1).view(layout.chunks, CHUNK)
        last = torch.topk(keys, layout.kept, sorted=False).values.amin(1, keepdim=True)
        larger, equal = keys > last, keys == last
        taken = larger | (equal & (equal.cumsum(1) <= layout.kept - larger.sum(1, keepdim=True)))
        return torch.nonzero_static(taken, size=layout.chunks * layout.kept)[:, 1].view(layout.chunks, layout.kept)

    def _coded(self, values: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of chunks' values, and what will be read from them."""
        if self.compression.codes == "bf16":
            narrow = values.to(NARROW)
            return seam.as_bytes(narrow), narrow.to(self.kept_dtype)
        magnitudes = values.abs()
        smallest = torch.where(real, magnitudes, torch.inf).amin(1, keepdim=True)
        middle = smallest + (magnitudes.amax(1, keepdim=True) - smallest) / 2
        high = magnitudes >= middle
        levels = torch.cat([_means(magnitudes, real & ~high), _means(magnitudes, high)], 1).to(NARROW)
        bits = (values < 0).to(torch.uint8) + 2 * high.to(torch.uint8)
        return torch.cat([seam.as_bytes(levels), _packed_pairs(bits)], 1), self._from_bits(levels, bits)

    def _decoded(self, codes: torch.Tensor) -> torch.Tensor:
        if self.compression.codes == "bf16":
            return seam.from_bytes(codes, NARROW).to(self.kept_dtype)
        levels = seam.from_bytes(codes[:, :LEVELS_BYTES], NARROW)
        return self._from_bits(levels, _unpacked_pairs(codes[:, LEVELS_BYTES:], self.layout.kept)) * self._real(codes.device)

    def _from_bits(self, levels: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        magnitudes = torch.where(bits >= 2, levels[:, 1:], levels[:, :1]).to(self.kept_dtype)
        return torch.where(bits % 2 == 1, -magnitudes, magnitudes)

    def _real(self, device: torch.device) -> torch.Tensor:
        """1 where a chunk's value is one, 0 where it is padding: a short last chunk's values come first."""
        layout = self.layout
        count = torch.full((layout.chunks, 1), layout.kept, device=device)
        count[-1:] = min(layout.kept, layout.elements - (layout.chunks - 1) * CHUNK)
        return (torch.arange(layout.kept, device=device) < count).to(self.kept_dtype)


def _means(magnitudes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    total = (magnitudes * chosen).sum(1, keepdim=True, dtype=torch.float64)  # large numbers may not add up in float32
    return (total / chosen.sum(1, keepdim=True).clamp_min(1)).to(magnitudes.dtype)


def _packed_positions(places: torch.Tensor) -> torch.Tensor:
    """Two positions of twelve bits in three bytes."""
    pairs = torch.nn.functional.pad(places, (0, places.shape[1] % 2)).reshape(len(places), (places.shape[1] + 1) // 2, 2)
    first, second = pairs.unbind(2)
    return torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2).to(torch.uint8).flatten(1)


def _unpacked_positions(packed: torch.Tensor, count: int) -> torch.Tensor:
    low, middle, high = packed.long().reshape(len(packed), packed.shape[1] // 3, 3).unbind(2)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 2).flatten(1)[:, :count]


def _packed_pairs(bits: torch.Tensor) -> torch.Tensor:
    """Four codes of two bits in a byte."""
    fours = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 4)).reshape(len(bits), (bits.shape[1] + 3) // 4, 4)
    one, two, three, four = fours.unbind(2)
    packed: torch.Tensor = one | two << 2 | three << 4 | four << 6
    return packed


def _unpacked_pairs(packed: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)[:, :count]


COMPRESSOR = LargestOfChunks
