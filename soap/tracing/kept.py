"""What autograd keeps of each operator for the backward pass, found by running the operators whole on tensors without values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from soap.graph import RECURRENT_KINDS
from soap.regions import relative, whole
from soap.simulator.tiling import tiles_of
from soap.strategy import OpConfig
from soap.tracing.execute import ExecutableModel
from soap.tracing.model import TileContext


def kept_bytes(model: ExecutableModel) -> dict[str, int]:
    """Bytes per operator, beside the graph's own tensors; operators that cannot be run so, and recurrent ones, are left out.

    The operators run one after the other, so that each gets its inputs laid out in memory as they will be.
    """
    graph, kept = model.graph, _Kept()
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = {
            name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), requires_grad=t.requires_grad)
            for name, t in graph.tensors.items()
        }
        kept.pass_over(tensors.values())
        buffers = {name: torch.empty(buffer.shape, dtype=buffer.dtype) for name, buffer in model.buffers.items()}
        context = TileContext(0, 0, buffers, update_buffers=False)
        found: dict[str, int] = {}
        for position, op in enumerate(graph.operators):
            (tile,) = tiles_of(graph, position, OpConfig((1,) * len(op.factors), (0,)))
            regions = [
                tensors[o.tensor][relative(box, whole(graph.tensors[o.tensor].shape))]
                for o, box in zip((*op.inputs, *op.parameters), (*tile.inputs, *tile.parameters), strict=True)
            ]
            try:
                with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                    results = model.run_tile(tile, regions[: len(op.inputs)], regions[len(op.inputs) :], context)
            except Exception:  # whatever an operator wants to know of values
                kept.forget()
                continue
            beside = kept.pass_over(results)
            tensors.update(zip((o.tensor for o in op.outputs), results, strict=True))
            taken = kept.taken_bytes()
            if op.kind not in RECURRENT_KINDS:  # their kernels keep a workspace that shows only where they really run
                found[op.name] = taken + beside
    model.forget_tiles()
    return found


class _Kept:
    """Memory that autograd keeps: each piece counts once, and none of what the graph's tensors lie in."""

    def __init__(self) -> None:
        self._known: dict[int, torch.UntypedStorage] = {}
        self._new: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._new[storage._cdata] = storage
        return tensor

    def pass_over(self, tensors: Iterable[torch.Tensor]) -> int:
        """These are counted elsewhere; but not what they keep alive as parts of something larger: so many bytes."""
        room: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = storage
                room[storage._cdata] = storage.nbytes()
            if storage._cdata in room:
                room[storage._cdata] -= tensor.numel() * tensor.itemsize
        return sum(max(0, rest) for rest in room.values())

    def taken_bytes(self) -> int:
        """What has been kept since the last call."""
        new = {key: storage for key, storage in self._new.items() if key not in self._known}
        self.forget()
        self._known.update(new)
        return sum(storage.nbytes() for storage in new.values())

    def forget(self) -> None:
        """Leave out what has been kept since the last call."""
        self._new = {}
