"""State: buffers that the forward pass itself changes. ``next_state`` takes the values that they have at the end of the step, whole and in
one place; ``keep_state`` puts them where the next step finds them, on every device (docs/internals/tracing.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soap.model.graph import WHOLE
from soap.tracing.calls import BufferRef
from soap.tracing.rules.notation import Local, Maps, Tiled, View, rule


def next_state(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies of the values, without gradients."""
    return tuple(value.detach().clone(memory_format=torch.contiguous_format) for value in values)


def keep_state(*values: torch.Tensor, buffers: Sequence[BufferRef]) -> torch.Tensor:
    """The values of ``buffers`` from the end of the step on. They go into the tile's context; the result has no meaning."""
    return torch.zeros((), dtype=torch.int32, device=values[0].device)


@rule("soap.next_state")
def next_values(view: View) -> Tiled:
    """Not split."""
    return Tiled((), _whole(view.shapes), _whole(view.output_shapes), run=lambda local: next_state(*local.tensors))


@rule("soap.keep_state")
def kept(view: View) -> Tiled:
    """Not split; on each device."""
    return Tiled((), _whole(view.shapes), _whole(view.output_shapes), run=_run_keep)


def _run_keep(local: Local) -> torch.Tensor:
    buffers = local.call.kwargs["buffers"]
    local.context.note_state({buffer.name: value for buffer, value in zip(buffers, local.tensors, strict=True)})
    return keep_state(*local.tensors, buffers=buffers)


def _whole(shapes: Sequence[tuple[int, ...]]) -> tuple[Maps, ...]:
    return tuple((WHOLE,) * len(shape) for shape in shapes)
