"""What methods that send some elements have in common: the residual, the buffer that travels, and how it is added up."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch

from soap.plan.compression.rgc import LENGTH_BYTES, SparseLayout
from soap.runtime.compression import device_selection, seam
from soap.runtime.compression.seam import Compressor, Selected, State, sizes_of
from soap.runtime.compression.selection import Surveyed, exact, search, trimmed
from soap.strategy.compression import Compression, Selection

Settings = TypeVar("Settings", bound=Compression)


class SparseCompressor(Compressor[Settings, SparseLayout], Generic[Settings]):
    """Adds gradients to a residual and sends its largest elements."""

    def message(self, state: State, gradient: torch.Tensor) -> torch.Tensor:
        """Adds the gradient to the residual, and moves what is selected into a message."""
        residual = state.residual.add_(gradient)
        positions, count = self.chosen(state, residual)
        selected = Selected(positions, residual[positions], count)
        if count is not None:
            selected = Selected(positions, torch.where(selected.real, selected.values, 0), count)
        selected.clear(residual)
        row = self._row(selected)
        self.write(state, row, selected)
        state.step = {"positions": positions, "values": selected.values} | ({} if count is None else {"count": count})
        if not self.layout.ragged:
            return row
        state.step["short"] = short = self.shortened(row)
        return torch.tensor([short.nbytes], device=row.device).view(torch.uint8)

    def answer(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """Ragged: this rank's message without padding, once the sizes of all are here."""
        state.step["sizes"] = received
        return state.step["short"]

    @abstractmethod
    def chosen(self, state: State, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions of what is sent, and, if they are padded, how many they are."""

    @abstractmethod
    def write(self, state: State, row: torch.Tensor, selected: Selected) -> None:
        """Put values into a message that has length and positions. What they lose may go back into the residual."""

    @abstractmethod
    def values(self, row: torch.Tensor, count: int) -> torch.Tensor:
        """The first ``count`` values of a message."""

    def total(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """Messages are added one after the other in the order of the ranks; within one no position occurs twice, but for padding."""
        total = torch.zeros(self.layout.elements, dtype=self.kept_dtype, device=received.device)
        rows = received.unbind()
        if self.layout.ragged:
            rows = tuple(self.padded(part) for part in torch.split(received, sizes_of(state.step["sizes"])))
        for row in rows:
            count = self.length(row) if seam.on_host(row) else self.layout.capacity  # a GPU is not asked: padding adds zeros
            total.index_add_(0, self.positions(row)[:count].long(), self.values(row, count))
        return self.shaped(total)

    def sent(self, state: State) -> Selected:
        """What the last message carried."""
        return Selected(state.step["positions"], state.step["values"], state.step.get("count"))

    def length(self, message: torch.Tensor) -> int:
        """How many elements a message has."""
        return int(message[:LENGTH_BYTES].view(torch.int64))

    def positions(self, row: torch.Tensor) -> torch.Tensor:
        """The part of a message for positions."""
        layout = self.layout
        kind = torch.int32 if layout.index_bytes == 4 else torch.int64
        return row[layout.header_bytes :][: layout.capacity * layout.index_bytes].view(kind)

    def real_bytes(self, message: torch.Tensor) -> int:
        """What of it is no padding."""
        return message.nbytes if self.layout.ragged else self.layout.real_bytes(self.length(message))

    def shortened(self, message: torch.Tensor) -> torch.Tensor:
        """A message without its padding, for a ragged all-gather: of so many bytes as one whose capacity is its length."""
        count = self.length(message)
        return _moved(message, self.layout, self.layout.holding(count), count)

    def padded(self, message: torch.Tensor) -> torch.Tensor:
        """The message that was shortened, as ``total`` takes it."""
        count = self.length(message)
        return _moved(message, self.layout.holding(count), self.layout, count)

    def _row(self, selected: Selected) -> torch.Tensor:
        row = torch.zeros(self.layout.row_bytes, dtype=torch.uint8, device=selected.positions.device)
        own = len(selected.positions)
        row[:LENGTH_BYTES].view(torch.int64).copy_(torch.tensor(own) if selected.count is None else selected.count)
        self.positions(row)[:own] = selected.positions
        return row


def _moved(message: torch.Tensor, source: SparseLayout, target: SparseLayout, count: int) -> torch.Tensor:
    row = torch.zeros(target.row_bytes, dtype=torch.uint8, device=message.device)
    head, values = target.header_bytes + count * target.index_bytes, count * target.sent_value_bytes
    row[:head] = message[:head]
    row[target.values_at :][:values] = message[source.values_at :][:values]
    return row


def selected_by(
    selection: Selection, residual: torch.Tensor, count: int, sign: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Positions of the largest elements, their number if they are padded, and the threshold if one was found by ``search``.

    On GPUs trimmed top-k is the exact one in few elements, which blocks of fixed shapes are for.
    """
    if not seam.on_host(residual):
        if selection in ("exact", "trimmed"):
            return *device_selection.exact(residual, count, sign), None
        (positions, number), threshold = device_selection.search(residual, count, sign)
        return positions, number, threshold
    tensor = Surveyed.of(residual, sign, mean=selection != "exact")
    if selection in ("exact", "trimmed"):
        return torch.from_numpy((exact if selection == "exact" else trimmed)(tensor, count)), None, None
    found, limit = search(tensor, count)
    return torch.from_numpy(found), None, None if limit is None else torch.tensor(limit, dtype=torch.float64)
