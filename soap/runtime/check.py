"""Checking a distributed run against one process: loss, every gradient, every parameter after the update, every buffer.

Rank 0 runs the whole exported program from the same parameters and buffers as each step (docs/internals/runtime.md, *Checks*). Compressed
gradients are compared before they are compressed; what the ranks make of them, to the bit, with an emulation of the same compression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from soap.errors import RuntimeFailure
from soap.model.dtypes import part_of, replaced
from soap.model.regions import lengths, whole
from soap.plan.syncs.amounts import reading_groups
from soap.plan.syncs.compressed import compressed_names, compressed_shards
from soap.runtime.comm import signs
from soap.runtime.comm.packing import cut
from soap.runtime.compression.dgc import DecayMomentum
from soap.runtime.compression.peer import Peer, copied, in_order, synchronized
from soap.runtime.compression.seam import State
from soap.runtime.inputs import Given, PartBatch
from soap.runtime.sync.compressed import hosts_sum, peer_of
from soap.runtime.sync.row_update import Updater
from soap.runtime.sync.shards import run_dtype
from soap.runtime.trainer import Trainer
from soap.runtime.updates.optimizers import Optimizers, Schedule
from soap.runtime.updates.parts import trainable_shapes
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel

ByShard = Mapping[int, torch.Tensor]


class LocalGradients:
    """On each rank: the local gradients of the compressed shards that it reads, step by step."""

    def __init__(self, trainer: Trainer) -> None:
        self._method = trainer.sizes.gradients.compressed
        self.states: Mapping[int, State] = {}
        if self._method is not None:
            self.states = {shard: copied(state, "cpu") for shard, state in self._method.states.items()}
            self._method.local = {}

    def taken(self) -> dict[int, torch.Tensor]:
        """Those of the last step."""
        return {} if self._method is None or self._method.local is None else {i: own.cpu() for i, own in self._method.local.items()}

    def close(self) -> None:
        """Keep no more of them."""
        if self._method is not None:
            self._method.local = None


class EmulatedSums:
    """All ranks in one process. ``states``: by rank, what it keeps of its shards before the first step."""

    def __init__(self, trainer: Trainer, states: Sequence[Mapping[int, State]]) -> None:
        self._trainer, self._peers = trainer, dict[int, list[Peer]]()
        self._syncs = compressed_shards(trainer.plan)
        for shard, sync in self._syncs.items():
            own, dtype, shape = [], trainer.dtype_of(sync.parameter), lengths(trainer.plan.shards[shard].box)
            for rank in sync.peers:
                peer = peer_of(sync, rank, shape, dtype, trainer.compressing)
                peer.state = copied(states[rank][shard], trainer.device)
                own.append(peer)
            self._peers[shard] = own

    def wrong(self, local: Sequence[ByShard], gradients: Mapping[str, torch.Tensor]) -> dict[str, bool]:
        """Name of a shard -> whether its sum has other bits than that of the emulation. ``local``: by rank."""
        found = {}
        for shard, peers in self._peers.items():
            name, box = self._trainer.plan.shards[shard].parameter, self._trainer.plan.shards[shard].box
            totals = synchronized(peers, self._of_hosts(local, shard))
            mine = cut(gradients[name], whole(gradients[name].shape), box).cpu()
            found[f"{name}{list(box)}"] = not all(torch.equal(total.cpu().to(mine.dtype), mine) for total in totals)
        return found

    def uncompressed(self, local: Sequence[ByShard], gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients with those of compressed shards replaced by the sums of the local ones."""
        found = dict(gradients)
        for shard in self._peers:
            name, box = self._trainer.plan.shards[shard].parameter, self._trainer.plan.shards[shard].box
            if found[name] is gradients[name]:
                found[name] = gradients[name].clone()
            cut(found[name], whole(found[name].shape), box).copy_(in_order(self._given(local, shard)))
        return found

    def _given(self, local: Sequence[ByShard], shard: int) -> list[torch.Tensor]:
        return [local[rank][shard] for rank in self._syncs[shard].readers]

    def _of_hosts(self, local: Sequence[ByShard], shard: int) -> list[torch.Tensor]:
        """What each peer compresses, on the device of the ranks: others may round otherwise."""
        sync, given = self._syncs[shard], [own.to(self._trainer.device) for own in self._given(local, shard)]
        if not sync.aggregated:
            return given
        of_reader = dict(zip(sync.readers, given, strict=True))
        return [hosts_sum([of_reader[reader] for reader in group]) for group in reading_groups(sync)]


@dataclass(frozen=True)
class Alone:
    """What one process computed: the mean loss, gradients (clipped, if the trainer clips) and buffers by name."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def step_alone(
    trainer: Trainer, step: int, inputs: Sequence[torch.Tensor], before: Mapping[str, torch.Tensor], *, wide: bool = False
) -> Alone | None:
    """Run one step's forward and backward pass in this process, from the state ``before``. Called after the ranks' own step; needs no other
    rank.

    ``wide``: compute in float64, whatever the trainer computes in. Returns None if the model cannot be traced again for that.
    """
    parts = trainer.sizes.batches(inputs)
    sized = [trainer.sizes.of(part.shapes) for part in parts]
    models: list[TracedModel | None] = [s.model.widened() if wide else s.model for s in sized]
    graph = trainer.model.graph

    def own(tensor: torch.Tensor) -> torch.Tensor:
        placed = trainer.place(tensor)
        return placed.to(replaced(placed.dtype, torch.float64)) if wide else placed

    parameters = {n: own(before[n]).clone().requires_grad_(graph.tensors[n].requires_grad) for n in trainer.model.parameters}
    trainable = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    buffers = {name: own(before[name]).clone() for name in trainer.model.buffers}
    losses, scale = [], 1.0 if trainer.scaler is None else trainer.scaler.used
    for number, (part, size, model) in enumerate(zip(parts, sized, models, strict=True)):
        if model is None:
            return None
        context = TileContext(trainer.seed, step * trainer.accumulate + number, buffers, tiles=size.all_tiles)
        loss = model.reference_loss([own(tensor) for tensor in part.tensors], parameters, context)
        model.end_step(context)
        if loss.requires_grad:
            (loss / len(parts) * scale).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    for tensor in trainable.values():
        if tensor.grad is not None and tensor.grad.is_sparse:  # of an embedding with sparse=True; the ranks' gradients are dense
            tensor.grad = tensor.grad.to_dense()
    for tensor in trainable.values():
        if trainer.scaler is not None and tensor.grad is not None:
            tensor.grad.mul_(1.0 / scale)
    if trainer.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trainable.values(), trainer.clip_norm)
    gradients = {name: tensor.grad for name, tensor in trainable.items() if tensor.grad is not None}
    return Alone(torch.stack(losses).double().mean(), gradients, buffers)


TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""dtype -> the largest allowed difference of a tensor, relative to its largest element: rounding, amplified by a deep model's backward
pass."""
SMALL: Mapping[torch.dtype, float] = {torch.float64: 1e-4, torch.float32: 1e-2}
"""dtype -> share s. A tensor whose largest element is below s times the largest element of its kind (loss, gradients, …) is compared
relative to that product instead. An example is the gradient of a bias in front of a normalization: it is zero but for rounding, and the
rounding has the size of the terms that cancel."""
SMALL_ELSE = 1e-1
"""That share for all other dtypes."""


COMPRESSED_SUM = "compressed sum of"
"""The kind of differences between a compressed sum and its emulation, which has the same bits."""

ROUNDING_FACTOR = 2.0
"""If a difference exceeds the tolerance, both results are compared with float64: ours may be at most this many times as far from it as
one process's."""
WORST_ROUNDING = 0.1
"""If one process is farther than this from its own float64 result, that comparison cannot excuse a difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is off: ``error`` is max|a-b| / max(max|b|, small).

    If that exceeds the tolerance, ``from_float64`` and ``alone_from_float64`` are the distances of the ranks' and of one process's result
    from one process in float64; None if not known.
    """

    step: int
    kind: str
    name: str
    error: float
    from_float64: float | None = None
    alone_from_float64: float | None = None

    def agrees(self, tolerance: float) -> bool:
        """Whether it is within the tolerance, or one process is off float64 by about as much."""
        if self.error <= tolerance:
            return True
        if self.from_float64 is None or self.alone_from_float64 is None or self.alone_from_float64 > WORST_ROUNDING:
            return False
        return self.from_float64 <= max(tolerance, ROUNDING_FACTOR * self.alone_from_float64)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found. ``compared``: tensors over all steps. ``worst``: the largest difference, of those that do not agree if any."""

    steps: int
    compared: int
    tolerance: float
    worst: Difference

    @property
    def passed(self) -> bool:
        """Whether everything agrees, see ``Difference.agrees``."""
        return self.worst.agrees(self.tolerance)

    def require(self) -> None:
        """Raise RuntimeFailure if something does not agree."""
        if not self.passed:
            worst = self.worst
            raise RuntimeFailure(
                f"check failed at step {worst.step}: {worst.kind} {worst.name!r} differs from one process by {worst.error:.2e} relative, "
                f"expected at most {self.tolerance:.0e}{in_float64(worst)}; please report it with model and strategy"
            )


UNCHECKED = "a check of clipped gradients, some of them compressed: ranks clip their own, one process the sum; check without clip_norm"


def in_float64(found: Difference) -> str:
    """The distances from float64, as a supplement to a line about a difference; empty if they are not known."""
    if found.from_float64 is None or found.alone_from_float64 is None:
        return ""
    return f" (from float64: {found.from_float64:.1e}, one process {found.alone_from_float64:.1e})"


def check(
    trainer: Trainer,
    batch: Callable[[int], Sequence[Given]],
    optimizer: Optimizers,
    steps: int = 1,
    tolerance: float | None = None,
    whole: Callable[[int], Sequence[torch.Tensor]] | None = None,
) -> CheckResult:
    """Train ``steps`` steps on ``batch(0)``, … on all ranks, and compare each with one process. The result is the same on all ranks.
    ``whole``: the same batches in full, if ``batch`` gives parts.

    ``optimizer``: the one that the trainer was made with; groups and schedule are the trainer's. ``tolerance``: by default by dtype
    (``TOLERANCES``).
    """
    if trainer.compressing.clip_norm is not None:
        raise RuntimeFailure(UNCHECKED)
    reference = _Reference(trainer, optimizer, tolerance) if trainer.rank == 0 else None
    differences: list[Difference] = []
    lossy = any(sync.compression is not None for sync in trainer.plan.syncs)
    local = LocalGradients(trainer)
    states = trainer.comm.gather(local.states) if lossy else []
    emulated = EmulatedSums(trainer, states) if lossy and trainer.rank == 0 else None
    for step in range(steps):
        before = trainer.whole_state()
        number = trainer.steps
        loss = trainer.step(*batch(step))
        gradients, after = trainer.gradients(), trainer.whole_state()
        given = trainer.comm.gather(local.taken()) if lossy else []
        if reference is not None:
            summed = gradients if emulated is None else emulated.uncompressed(given, gradients)
            differences += reference.compare(number, _whole((whole or batch)(step)), before, loss, gradients, after, summed)
        if emulated is not None:
            wrong = emulated.wrong(given, gradients)
            differences += [Difference(number, COMPRESSED_SUM, name, inf if other else 0.0) for name, other in wrong.items()]
        signs.meet()  # one process takes as long as it takes
    local.close()
    found = None
    if reference is not None:
        allowed = reference.tolerance
        found = CheckResult(steps, len(differences), allowed, max(differences, key=lambda d: (not d.agrees(allowed), d.error)))
    result = trainer.comm.gather(found)[0]
    assert isinstance(result, CheckResult)
    return result


def _whole(batch: Sequence[Given]) -> list[torch.Tensor]:
    """A whole batch. RuntimeFailure if it is a part."""
    found = [own for own in batch if not isinstance(own, PartBatch)]
    if len(found) < len(batch):
        raise RuntimeFailure("a check on parts of batches; expected the whole batches, too: one process computes them")
    return found


class _Reference:
    """Training in one process on rank 0, set to the distributed state before each step."""

    def __init__(self, trainer: Trainer, optimizer: Optimizers, tolerance: float | None) -> None:
        self.trainer, self.model = trainer, trainer.model
        graph = self.model.graph
        shapes = {name: graph.tensors[name].shape for name in self.model.parameters}  # values come with each step
        state = {n: torch.empty(shape, dtype=trainer.dtype_of(n), device=trainer.device) for n, shape in shapes.items()}
        self.parameters = {name: tensor.requires_grad_(graph.tensors[name].requires_grad) for name, tensor in state.items()}
        self.trainable = {name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad}
        numbered = dict(enumerate(self.trainable))
        self._numbers = {name: number for number, name in numbered.items()}
        recipe = replace(trainer.recipe, optimizer=optimizer)
        own = recipe.layout(trainable_shapes(trainer.model.graph)).optimizer({name: [tensor] for name, tensor in self.trainable.items()})
        self._schedule = Schedule.of(recipe.schedule, own)
        self._updater = Updater(
            own,
            {number: self.trainable[name] for number, name in numbered.items()},
            {number: (name, whole(self.trainable[name].shape)) for number, name in numbered.items()},
            trainer.lazy_sparse,
        )
        rule, compressed = trainer.compressing.momentum, compressed_names(trainer.plan)
        kept = {number: self.trainable[name] for number, name in numbered.items() if name in compressed}
        self._decay = None if rule is None else DecayMomentum(rule, own, kept)
        self.dtype = coarsest(trainer)
        self.tolerance = TOLERANCES[self.dtype] if tolerance is None else tolerance

    def compare(
        self,
        step: int,
        inputs: Sequence[torch.Tensor],
        before: Mapping[str, torch.Tensor],
        loss: float,
        gradients: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
        summed: Mapping[str, torch.Tensor],
    ) -> list[Difference]:
        """Run one step in one process from ``before``. Returns each tensor's difference. ``summed``: gradients before compression."""
        expected = step_alone(self.trainer, step, inputs, before)
        assert expected is not None
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(before[name])
        scaler = self.trainer.scaler
        if scaler is not None and not scaler.finite:  # no update, and gradients that are no numbers cannot be compared
            finite = all(bool(gradient.isfinite().all()) for gradient in expected.gradients.values())
            ours, alone = Alone(torch.tensor(loss, dtype=torch.float64), {}, after), replace(expected, gradients={})
            overflow = Difference(step, "overflow", "gradients", inf if finite else 0.0)
            return [overflow, *self._computed(step, ours, alone), *self._updated(step, after)]
        self._update(loss, gradients, self.trainer.rows_looked_up(step, *inputs) if self.trainer.lazy_sparse else {})
        ours = Alone(torch.tensor(loss, dtype=torch.float64), summed, after)
        found = [*self._computed(step, ours, expected), *self._updated(step, after)]
        if self.dtype is torch.float64 or all(difference.error <= self.tolerance for difference in found):
            return found
        return self._judged(step, found, ours, expected, step_alone(self.trainer, step, inputs, before, wide=True))

    def _computed(self, step: int, found: Alone, expected: Alone) -> list[Difference]:
        """The differences of loss, gradients and buffers."""
        return [
            Difference(step, "loss", self.model.graph.loss, _error(found.loss, expected.loss.cpu(), 0.0)),
            *_differences(step, "gradient of", found.gradients, expected.gradients, self.dtype),
            *_differences(step, "buffer", found.buffers, expected.buffers, self.dtype),
        ]

    def _updated(self, step: int, after: Mapping[str, torch.Tensor]) -> list[Difference]:
        return _differences(step, "updated parameter", after, {n: t.detach() for n, t in self.parameters.items()}, self.dtype)

    def _judged(self, step: int, found: Sequence[Difference], ours: Alone, alone: Alone, truth: Alone | None) -> list[Difference]:
        """The differences, with distances from float64 where they exceed the tolerance. ``truth``: one process in float64, or None."""
        if truth is None:
            return list(found)
        distances = [
            {(d.kind, d.name): d.error for d in self._computed(step, computed, truth)} for computed in (ours, alone)
        ]
        return [
            d if d.error <= self.tolerance else replace(d, from_float64=distances[0].get(key), alone_from_float64=distances[1].get(key))
            for d in found
            for key in [(d.kind, d.name)]
        ]

    def _update(self, loss: float, gradients: Mapping[str, torch.Tensor], looked_up: Mapping[str, torch.Tensor]) -> None:
        """Update whole parameters with the ranks' own gradients: Adam may divide rounding by rounding, and both sides must then agree."""
        found = {number: self.trainer.place(gradients[name]) for name, number in self._numbers.items() if name in gradients}
        self._updater.update(found if self._decay is None else self._decay.added(found), {}, looked_up)
        self._schedule.step(loss)


def coarsest(trainer: Trainer) -> torch.dtype:
    """The dtype with the largest rounding that the trainer computes in; float32 if it has no floating-point tensors."""
    kinds = {run_dtype(trainer.model.graph, name, trainer.dtype) for name in trainer.model.graph.tensors}
    known = [part_of(kind) for kind in kinds if part_of(kind) in TOLERANCES]
    return max(known, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def _differences(
    step: int, kind: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> list[Difference]:
    """One difference per expected tensor; a missing gradient counts as zero. ``dtype``: that of the computation."""
    scale = max((largest(tensor) for tensor in expected.values()), default=0.0)
    result = []
    for name, tensor in expected.items():
        mine = found.get(name)
        mine = torch.zeros_like(tensor) if mine is None else mine.to(tensor.device)
        result.append(difference(kind, name, mine, tensor, dtype, scale, step))
    return result


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, or complex128."""
    tensor = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def difference(
    kind: str, name: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float, step: int = 0
) -> Difference:
    """How far one tensor is off. ``dtype``: that of the computation. ``scale``: the largest element of all tensors of this kind."""
    if found.dtype == expected.dtype and torch.equal(found, expected):  # most are, to the last bit
        return Difference(step, kind, name, 0.0)
    return Difference(step, kind, name, _error(found, expected, SMALL.get(dtype, SMALL_ELSE) * scale))


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value of a tensor of any type; 0 if there are no elements."""
    if not tensor.numel():
        return 0.0
    arithmetic = tensor.is_complex() or tensor.dtype in TOLERANCES  # others lack abs or max, or have no room for the result
    return float((tensor.detach() if arithmetic else _wide(tensor)).abs().max())


def _error(mine: torch.Tensor, expected: torch.Tensor, small: float) -> float:
    """max|a-b| / max(max|b|, small); infinite if one is not finite where the other is."""
    if expected.numel() == 0:
        return 0.0
    mine, expected = _wide(mine), _wide(expected)
    same = (mine == expected) | (mine.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, (mine - expected).abs()).max())
    if difference != difference or difference == float("inf"):
        return float("inf")
    scale = max(largest(expected[expected.isfinite()]), small)
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
