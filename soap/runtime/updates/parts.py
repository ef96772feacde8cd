"""What a rank's optimizer updates: its shards, or whole parameters if the update is not elementwise.

A rank may own all shards of a parameter (several, because operators read parts of it). For such an optimizer they are then views of one
tensor, which is updated as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.model.regions import Box, whole
from soap.plan.plan import Plan, Shard
from soap.runtime.comm.packing import cut
from soap.runtime.sync.row_update import RowGradient
from soap.runtime.sync.shards import ShardStore
from soap.runtime.updates.optimizers import Layout, Shapes
from soap.runtime.updates.trial import Scope, Tried


@dataclass(frozen=True)
class Part:
    """A region ``box`` of a parameter of this whole ``shape`` that is updated at once. ``shards``: its shards (positions in the plan)."""

    parameter: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    shards: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its parameter."""
        return self.box == whole(self.shape)


def trainable_shapes(graph: OperatorGraph) -> dict[str, tuple[int, ...]]:
    """Trainable parameter -> its whole shape, in the graph's order."""
    return {tensor.name: tensor.shape for tensor in graph.parameters if tensor.requires_grad}


def require_possible(plan: Plan, tried: Tried, lazy_sparse: bool) -> None:
    """RuntimeFailure in one line, the same on all ranks, if the plan cuts a parameter that this optimizer needs whole."""
    if tried.coupled:
        _require_together(plan, tried)
    for name in tried.whole:
        shards = [shard for shard in plan.shards if shard.parameter == name and shard.trainable]
        _require_whole(plan, f"optimizer {tried.name} updates {name!r} as a whole (its update is not elementwise)", shards)
        if lazy_sparse and name in plan.graph.sparse:
            raise RuntimeFailure(
                f"optimizer {tried.name} updates {name!r} as a whole (its update is not elementwise), so its rows cannot be updated alone; "
                "leave lazy_sparse out, or use an elementwise optimizer"
            )


def _require_whole(plan: Plan, said: str, shards: Sequence[Shard]) -> None:
    """RuntimeFailure unless a parameter's shards are on the same devices, on servers in one partition, owned by no reader in part."""
    served = {plan.shards[number].parameter for number in plan.on_servers}
    if len(shards) > 1 and shards[0].parameter in served:
        raise RuntimeFailure(
            f"{said}, but servers keep it in {len(shards)} partitions; keep it in one (parameter_server:1), or use an elementwise optimizer"
        )
    if len(shards) > 1 and shards[0].parameter in {plan.shards[number].parameter for number in plan.dealt_out}:
        raise RuntimeFailure(
            f"{said}, but its readers own parts of it (zero, fsdp, hsdp); synchronize it by allreduce, or use an elementwise optimizer"
        )
    if len({shard.devices for shard in shards}) > 1:
        shape = list(plan.graph.tensors[shards[0].parameter].shape)
        unread = next((shard.box for shard in shards if not shard.uses), None)
        if unread is not None:
            raise RuntimeFailure(
                f"{said}, but no operator reads {_shown(unread)} of {shape}, which one device keeps; use an elementwise optimizer"
            )
        raise RuntimeFailure(
            f"{said}, but the plan keeps parts of it, such as {_shown(shards[0].box)} of {shape}, on different devices; search with "
            "soap-search --optimizer, which keeps such parameters whole, or use data_parallel or an elementwise optimizer"
        )


def _require_together(plan: Plan, tried: Tried) -> None:
    """RuntimeFailure if a device owns some of the coupled parameters but not all of every one."""
    shards = [(shard.parameter, shard.devices) for shard in plan.shards if shard.trainable and shard.parameter in tried.coupled]
    for device in range(plan.device_count):
        apart = [name for name, devices in shards if device not in devices]
        if apart and len(apart) < len(shards):
            raise RuntimeFailure(
                f"optimizer {tried.name} couples the updates of parameters with each other, but the plan does not keep all of "
                f"{apart[0]!r} where it keeps others; use data_parallel, or an optimizer that updates each element by itself"
            )


def joined_names(plan: Plan, tried: Tried) -> tuple[str, ...]:
    """Parameters that are updated as a whole but consist of several shards."""
    counts: dict[str, int] = {}
    for shard in plan.shards:
        if shard.trainable:
            counts[shard.parameter] = counts.get(shard.parameter, 0) + 1
    return tuple(name for name in tried.whole if tried.scopes[name] is not Scope.ELEMENT and counts.get(name, 0) > 1)


def parts_of(store: ShardStore) -> dict[int, Part]:
    """Number of the first shard -> part that this rank's optimizer updates, in the order of the graph's parameters."""
    plan, found = store.plan, dict[int, Part]()
    for number, tensor in store.tensors.items():
        shard = plan.shards[number]
        if not shard.trainable:
            continue
        shape = plan.graph.tensors[shard.parameter].shape
        if shard.parameter not in store.joined:
            found[number] = Part(shard.parameter, shape, shard.box, tensor, (number,))
        elif all(part.parameter != shard.parameter for part in found.values()):
            shards = tuple(other for other in store.tensors if plan.shards[other].parameter == shard.parameter)
            found[number] = Part(shard.parameter, shape, whole(shape), store.joined[shard.parameter], shards)
    return found


def other_options(layout: Layout, shapes: Shapes, parts: Mapping[int, Part], optimizer: torch.optim.Optimizer | None) -> str:
    """One line about a part of a parameter that gets other options than the whole parameter would, because the factory chooses by size or
    position. Empty if there is none, or if that cannot be found out."""
    if optimizer is None:
        return ""
    like = next(iter(parts.values())).tensor
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):  # whole parameters without memory
            whole_ones = {
                name: [torch.empty(shape, dtype=like.dtype, device=like.device, requires_grad=True)] for name, shape in shapes.items()
            }
            expected = _options_of(layout.optimizer(whole_ones))
    except Exception:  # the factory may look at values, for example
        return ""
    found = _options_of(optimizer)
    for part in parts.values():
        wanted, own = expected.get(id(whole_ones[part.parameter][0])), found.get(id(part.tensor))
        if wanted != own:
            return (
                f"the optimizer's factory gives {_shown(part.box)} of {part.parameter!r} other options than the whole parameter "
                f"{list(part.shape)}; make groups by names and whole shapes: groups=lambda name, shape: {{...}}"
            )
    return ""


def _options_of(optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """id of a tensor -> its options as text. Options that are tensors are left out."""
    found = {}
    for group in optimizer.param_groups if optimizer is not None else ():
        options = {key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)}
        found.update({id(tensor): repr(options) for tensor in group["params"]})
    return found


def merged(
    plan: Plan, parts: Mapping[int, Part], dense: Mapping[int, torch.Tensor], rows: Mapping[int, RowGradient]
) -> tuple[dict[int, torch.Tensor], dict[int, RowGradient]]:
    """Gradients of parts, (dense, rows), made from gradients of shards. Both are by number of the first shard."""
    dense, rows = dict(dense), dict(rows)
    for number, part in parts.items():
        if part.shards == (number,):
            continue
        full, there = torch.zeros_like(part.tensor, requires_grad=False), False
        for shard in part.shards:
            box = plan.shards[shard].box
            own, some = dense.pop(shard, None), rows.pop(shard, None)
            if some is not None:
                first, stop = box[0]
                own = some.dense(first, stop - first)
            if own is not None:
                cut(full, part.box, box).copy_(own)
                there = True
        if there:
            dense[number] = full
    return dense, rows


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"


def require_offloadable(plan: Plan, tried: Tried, *, lazy_sparse: bool) -> None:
    """RuntimeFailure in one line, the same on all ranks, if hosts cannot update what the plan offloads with this optimizer."""
    names = {plan.shards[number].parameter for number in plan.offloaded}
    if lazy_sparse and (tables := sorted(names & plan.graph.sparse.keys())):
        raise RuntimeFailure(
            f"lazy_sparse updates rows of {tables[0]!r} alone, which the plan offloads; leave lazy_sparse out, or do not offload the table"
        )
    apart = sorted(set(tried.coupled) - names)
    if apart and not names.isdisjoint(tried.coupled):
        raise RuntimeFailure(
            f"optimizer {tried.name} couples the updates of parameters with each other, but the plan offloads some and not {apart[0]!r}; "
            "offload all, or use an optimizer that updates each element by itself"
        )


class Offloading:
    """A rank's offloaded parts. ``parts``: all of the rank's, by first shard, with offloaded tensors on the host. ``numbers``: these."""

    def __init__(self, plan: Plan, parts: Mapping[int, Part], device: torch.device) -> None:
        self._on_device = {number: part.tensor for number, part in parts.items() if number in plan.offloaded}
        self._pinned = device.type == "cuda"
        self._gradients: dict[int, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if self._pinned and self._on_device else None  # type: ignore[no-untyped-call]
        here = {number: replace(parts[number], tensor=self._room(own).requires_grad_()) for number, own in self._on_device.items()}
        self.parts: dict[int, Part] = {**parts, **here}
        self.numbers = frozenset(here)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the device's values, which were loaded."""
        for number, own in self._on_device.items():
            self.parts[number].tensor.copy_(own)

    @torch.no_grad()
    def to_host(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of the gradients of offloaded parts, complete when this returns. Parts without a gradient have none."""
        found = {}
        with self._copying():
            for number in self.numbers & gradients.keys():
                own = self._gradients.get(number)
                if own is None:
                    own = self._gradients[number] = self._room(gradients[number])
                own.copy_(gradients[number], non_blocking=self._pinned)
                found[number] = own
        if self._stream is not None:
            self._stream.synchronize()  # so the gradients may go as well
        return found

    @torch.no_grad()
    def from_host(self) -> None:
        """Copy updated values back. What the device computes next waits for it."""
        with self._copying():
            for number, own in self._on_device.items():
                own.copy_(self.parts[number].tensor, non_blocking=self._pinned)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Inside, copies are made on the stream for them, behind what the device has been given to do."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
