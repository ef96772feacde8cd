"""What the computation of tiles depends on besides their operands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from soap.model.regions import Interval
from soap.plan.tiling import Tile


@dataclass
class TileContext:
    """What a tile's computation may depend on besides its operands; one per rank and training step.

    ``seed`` and ``step`` make random numbers (dropout) a function of the global element position, equal on every tiling. ``buffers``:
    this rank's full-size copies by state-dict name. Tiles note what they found in ``statistics``, by call: (channels, mean, unbiased
    variance). ``end_step`` updates the buffers from it, each channel once however many tiles have met it. ``update_buffers`` False
    leaves buffers alone. ``unread``: the answer of ``TracedModel.unread`` for the plan. ``tiles``: the plan's tiles, for the reference:
    local batch norm normalises by tile; None at all: by the whole batch. ``state``: the buffers' values at the end of the step, by
    name, as the forward pass has found them. ``drawn_by_torch``: ``reference_loss`` draws random numbers from torch's own generators,
    as eager PyTorch does, to be compared with it. ``counts``: if tiles of a mean over labels are given their own labels alone
    (``Operator.own_inputs``), by call the number that it divides by, in float64; None for other calls: they are given all labels, and
    count.
    """

    seed: int = 0
    step: int = 0
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    update_buffers: bool = True
    unread: frozenset[str] = frozenset()
    tiles: Sequence[Tile] = ()
    drawn_by_torch: bool = False
    statistics: dict[str, list[tuple[Interval, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: Callable[[str], torch.Tensor | None] | None = None

    def random_seed(self, call: str) -> int:
        """63 bits from (seed, step, call): random numbers do not depend on how the operator is split."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{call}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def note_statistics(self, call: str, channels: Interval, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Keep what a tile found for some channels, unless another tile of this rank has found the same."""
        found = self.statistics.setdefault(call, [])
        if self.update_buffers and all(known != channels for known, _, _ in found):
            found.append((channels, mean, variance))

    def note_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the buffers' values at the end of the step, by name."""
        if self.update_buffers:
            self.state.update(values)
