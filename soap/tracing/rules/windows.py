"""Windows over the attribute dimensions: which inputs an output sees, and padding them tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, View
from soap.tracing.trial_device import is_on_gpu

SPACE = {1: ("l",), 2: ("h", "w"), 3: ("d", "h", "w")}
"""Names of the dimensions of space, by their number."""


@dataclass(frozen=True, slots=True)
class Window:
    """One dimension of a window: step from one output to the next, padding before the first, and how many inputs it spans. ``slack``:
    inputs behind the last window that no output sees. They are read as well, so that a tile of all outputs reads all inputs, as they
    are in memory."""

    stride: int
    padding: int
    extent: int
    slack: int = 0

    def over(self, out: DimMap) -> DimMap:
        """The inputs that outputs ``[a, b)`` see: ``[a*stride - padding, (b-1)*stride - padding + extent)``, and the slack."""
        return DimMap(out.factor, self.stride, -self.padding, self.extent - self.padding + self.slack) if out.factor is not None else WHOLE

    def fitted(self, size: int, outputs: int) -> Window:
        """The same window with its slack for so many inputs."""
        slack = size - ((outputs - 1) * self.stride - self.padding + self.extent)
        return replace(self, slack=slack if 0 < slack < self.stride else 0)


def each(value: Any, rank: int) -> list[int]:
    """An int, or a list of one or ``rank`` ints, as ``rank`` ints."""
    items = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (items * rank if len(items) == 1 else items)]


def pad_windows(local: Local, windows: Sequence[Window], value: float, *, by_hand: bool = False) -> tuple[torch.Tensor, list[int]]:
    """The local input as its windows need it, and the padding that is left to the call itself.

    The call does all padding in a tile that has all of space, and if each dimension lacks as much before as after: nothing is copied
    then. Otherwise, or if it must be done ``by_hand``, the input is padded with ``value`` by what it lacks at the tensor's borders.
    """
    x, rank = local.tensors[0], len(windows)
    if not by_hand and all(_is_all(local, win, i - rank) for i, win in enumerate(windows)):
        return x, [win.padding for win in windows]
    lacking: list[tuple[int, int]] = []
    for i, (win, out, inside) in enumerate(zip(windows, local.output_boxes[0][-rank:], local.boxes[0][-rank:], strict=True)):
        first, last = out[0] * win.stride - win.padding, (out[1] - 1) * win.stride - win.padding + win.extent
        low, high = max(first, inside[0]), min(last, inside[1])
        if low >= high:  # only padding is seen
            x = x.narrow(x.dim() - rank + i, 0, 0)
            lacking.append((last - first, 0))
            continue
        if inside[1] - high >= win.stride or low > inside[0]:  # a dimension that was kept whole: cut what no output sees
            x = x.narrow(x.dim() - rank + i, low - inside[0], high - low)
        lacking.append((low - first, last - high))
    if not by_hand and all(before == after <= win.padding for (before, after), win in zip(lacking, windows, strict=True)):
        return x, [before for before, _ in lacking]
    return F.pad(x, [n for pair in reversed(lacking) for n in pair], value=value), [0] * rank


def _is_all(local: Local, window: Window, dim: int) -> bool:
    """Whether a tile has all of a dimension, and the call's own padding gives just its outputs."""
    size, outputs = local.shapes[0][dim], local.output_shapes[0][dim]
    given = (size + 2 * window.padding - window.extent) // window.stride + 1
    return local.boxes[0][dim] == (0, size) and local.output_boxes[0][dim] == (0, outputs) and given == outputs


def apart_bytes(view: View) -> int:
    """Upper bound of what torch keeps of a complex convolution, which it computes as three real ones of parts and sums of parts."""
    touched = [view.values[name] for name in (*view.call.operands, *view.call.outputs)]
    return sum(2 * prod(value.shape) * value.dtype.itemsize for value in touched if value.dtype.is_complex)


def padded_bytes(view: View, windows: Sequence[Window]) -> int:
    """Upper bound of the copies for padding the input by hand, whatever tiles there are; 0 if there is no padding."""
    x, out, rank = view.shapes[0], view.output_shapes[0], len(windows)
    seen = [(n - 1) * win.stride + win.extent for n, win in zip(out[-rank:], windows, strict=True)]
    if all(size <= n for size, n in zip(seen, x[-rank:], strict=True)):
        return 0
    padded = [max(size, n + 2 * win.padding) for size, n, win in zip(seen, x[-rank:], windows, strict=True)]
    return view.itemsize * prod(x[:-rank]) * prod(padded)


def convolve(
    local: Local, function: Callable[..., torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int], *rest: Any
) -> torch.Tensor:
    """The library's convolution of a tile with the tile's weight. ``rest``: the arguments after the stride.

    On CPUs, strided convolutions of shapes that the model itself does not have run in float32 if the type is a narrower one: for some,
    such as all with one column of outputs, oneDNN for bfloat16 leaves outputs and gradients of weights unwritten (torch 2.13, AMX).
    """
    weight = local.tensors[1]
    rank = weight.dim() - 2
    own = local.tensors[0].shape[-rank - 1 :] == torch.Size(local.shapes[0][-rank - 1 :]) and weight.shape == torch.Size(local.shapes[1])
    if own or max(stride) == 1 or x.dtype.itemsize >= 4 or is_on_gpu(x):
        return function(x, weight, bias, stride, *rest)
    return function(x.float(), weight.float(), None if bias is None else bias.float(), stride, *rest).to(x.dtype)
