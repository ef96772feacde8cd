"""Calls that are one kernel on a GPU, as ``torch.compile`` makes of them, or as hand-written kernels are (Apex, Megatron, Transformer
Engine): an operator whose calls are joined reads and writes what goes in and out of the group, is one launch besides its product's, and
keeps what crosses the group's edge, also if it makes a part of a sum. ``soap-run`` executes models call by call (``eager``), which is the
default.

A joined operator may keep its inputs instead of what its calls pass to each other, as both kinds of kernels compute that again in the
backward pass (a norm, an activation, a softmax, a loss). Kernels do not reach over the borders of operators here.

With ``+overlap`` a product or an attention and the collectives of its edges run in parts: a device begins with its own part of what it
gathers, and computes on each other part while the next one travels; so do the parts of what it sums and scatters (Megatron's
``--tp-comm-overlap``, asynchronous tensor parallelism of torchtitan, attention over a ring). The collective then takes what is left of its
time after all but one part of the computation. Sums that are not scattered do not overlap. With ``+flash2`` attention on Hopper is that of
FlashAttention-2, as torch took it before it took cuDNN's, and as libraries call it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from soap.errors import ProfileError
from soap.model.dtypes import is_differentiable
from soap.model.graph import Footprint, Operator, OperatorGraph
from soap.strategy.recomputation import PRODUCTS

Kernels = str
"""One of ``KERNELS``, with any of ``ADDED`` after it, each behind a plus sign."""
KERNELS = ("eager", "compiled", "fused")
OVERLAP, FLASH2 = ADDED = ("overlap", "flash2")

FUSED = frozenset(
    {"linear", "scaled_dot_product_attention", "softmax", "layer_norm", "rms_norm", "cross_entropy_loss", "add", "mul", "dropout"}
    | {"expert_mm", "expert_product"}
)
"""Kinds of operators for whose calls there are hand-written kernels: activations with a bias or a gate before a product, rotary embeddings
before attention, scaled masked softmax without dropout, norms, bias with dropout and addition, the loss. Experts' grouped products as
others. Those for lookups read rows where they are, and update them so: they find no rows first (``profiles.work``)."""


def check_kernels(kernels: str) -> None:
    """Raise ProfileError in one line if there are no such kernels."""
    kind, *added = kernels.split("+")
    if kind not in KERNELS or not set(added) <= set(ADDED):
        raise ProfileError(f"kernels {kernels!r}: expected one of {', '.join(KERNELS)}, to which may be added +{' or +'.join(ADDED)}")


def joined(graph: OperatorGraph, kernels: Kernels) -> OperatorGraph:
    """The graph with operators and footprints as these kernels have them on GPUs; itself if they are eager."""
    check_kernels(kernels)
    own, (kind, *added) = graph, kernels.split("+")
    if kind != "eager":
        apart = [0 if kind == "compiled" else _apart_bytes(graph, op) for op in graph.operators]
        chosen = (kind == "compiled" or op.kind in FUSED for op in graph.operators)
        joined_ones = (_joined(op, own) if is_chosen else op for op, own, is_chosen in zip(graph.operators, apart, chosen, strict=True))
        own = replace(graph, operators=tuple(joined_ones))
        known = _Joined(graph, own)
        own = replace(own, footprints=known, part_footprints=_JoinedParts(graph.part_footprints, known))
    if OVERLAP not in added:
        return own
    return replace(own, operators=tuple(replace(op, overlaps=True) if op.kind in PRODUCTS else op for op in own.operators))


def _joined(op: Operator, apart_bytes: int) -> Operator:
    launches = min(len(op.calls) - op.views, 2 if op.kind in PRODUCTS or apart_bytes else 1)
    fused_bytes = op.fused_bytes + max(0, op.joined_bytes - apart_bytes)
    return replace(op, fused_bytes=fused_bytes, joined_bytes=0, views=len(op.calls) - launches)


def _apart_bytes(graph: OperatorGraph, op: Operator) -> int:
    """What a hand-written softmax passes to the dropout behind it, which is a kernel of its own (Megatron-LM, ``CoreAttention``), and the
    dropout's mask, a byte for each number."""
    if op.kind != "softmax" or not op.drawn:
        return 0
    tensors = [graph.tensors[operand.tensor] for operand in op.outputs]
    return sum(tensor.bytes + tensor.bytes // tensor.itemsize for tensor in tensors)


class _Joined(Mapping[str, tuple[Footprint, ...]]):
    """Footprints of a graph, with those of joined operators changed when they are asked for."""

    def __init__(self, eager: OperatorGraph, own: OperatorGraph) -> None:
        self._known, self._graph = eager.footprints, own
        self._changed = {op.name: op for op, before in zip(own.operators, eager.operators, strict=True) if op is not before}

    def __getitem__(self, key: str) -> tuple[Footprint, ...]:
        found, op = self._known[key], self._changed.get(key)
        return found if op is None else tuple(self._footprint(op, own) for own in found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def part(self, name: str, own: Footprint) -> Footprint:
        """The footprint of a tile that takes a sum of terms: it keeps the same share of what eager calls keep as the whole operator."""
        if name not in self._changed or name not in self._known:
            return own
        before, after = self._known[name][0], self[name][0]
        if before == after or not before.kept_bytes:
            return own
        kept, fixed = (-(-size * after.kept_bytes // before.kept_bytes) for size in (own.kept_bytes, own.fixed_bytes[0]))
        return replace(own, kept_bytes=kept, keeps=own.keeps | (after.keeps - before.keeps), fixed_bytes=(fixed, *own.fixed_bytes[1:]))

    def _footprint(self, op: Operator, own: Footprint) -> Footprint:
        """Inputs in place of what eager calls keep of their own, beyond the group's edge, if that is no more."""
        tensors = [self._graph.tensors[operand.tensor] for operand in op.inputs]
        more = {i for i, tensor in enumerate(tensors) if is_differentiable(tensor.dtype) and i not in own.keeps}
        kept_bytes = min(own.kept_bytes, op.saved_bytes - op.fused_bytes)
        if kept_bytes + sum(tensors[i].bytes for i in more) > own.kept_bytes:
            return own
        fixed = own.fixed_bytes
        return replace(own, kept_bytes=kept_bytes, keeps=own.keeps | more, fixed_bytes=(min(fixed[0], kept_bytes), *fixed[1:]))


class _JoinedParts(Mapping[str, Mapping[tuple[int, ...], Footprint]]):
    """Part footprints of a graph, changed as ``known`` are when they are asked for."""

    def __init__(self, eager: Mapping[str, Mapping[tuple[int, ...], Footprint]], known: _Joined) -> None:
        self._eager, self._known = eager, known

    def __getitem__(self, key: str) -> Mapping[tuple[int, ...], Footprint]:
        return {lengths: self._known.part(key, own) for lengths, own in self._eager[key].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._eager)

    def __len__(self) -> int:
        return len(self._eager)

    def __contains__(self, key: object) -> bool:
        return key in self._eager
