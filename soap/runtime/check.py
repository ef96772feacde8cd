"""Checking a distributed run against one process: loss, every gradient, every parameter after the update, every buffer.

Rank 0 runs the whole exported program from the same parameters and buffers before each step. What does not agree is a defect of a
rule or of the runtime, or an optimizer whose update is not elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from soap.errors import RuntimeFailure
from soap.runtime.trainer import OptimizerFactory, Trainer
from soap.tracing.model import TileContext

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference per tensor, relative to its largest element: rounding, amplified by a deep model's backward pass."""
SMALL: Mapping[torch.dtype, float] = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Tensors whose largest element is below this share of the largest of their kind (loss, gradients, …) are compared with that share:
the gradient of a bias in front of a normalization, for example, is zero but for rounding, which has the size of what cancels."""
SMALL_ELSE = 1e-1
"""The same for all other types."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is off: ``error`` is max|a-b| / max(max|b|, small)."""

    step: int
    kind: str
    name: str
    error: float


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found. ``compared``: number of tensors over all steps."""

    steps: int
    compared: int
    tolerance: float
    worst: Difference

    @property
    def passed(self) -> bool:
        """Whether everything agrees within the tolerance."""
        return self.worst.error <= self.tolerance

    def require(self) -> None:
        """Raise RuntimeFailure if something does not agree."""
        if not self.passed:
            worst = self.worst
            raise RuntimeFailure(
                f"check failed at step {worst.step}: {worst.kind} {worst.name!r} differs from one process by {worst.error:.2e} relative, "
                f"expected at most {self.tolerance:.0e}; please report it with model and strategy"
            )


def check(
    trainer: Trainer,
    batch: Callable[[int], Sequence[torch.Tensor]],
    optimizer: OptimizerFactory,
    steps: int = 1,
    tolerance: float | None = None,
) -> CheckResult:
    """Train ``steps`` steps on ``batch(0)``, … on all ranks, comparing each with one process. Equal result on all ranks."""
    reference = _Reference(trainer, optimizer) if trainer.rank == 0 else None
    differences: list[Difference] = []
    for step in range(steps):
        before = trainer.state_dict()
        number = trainer.steps
        loss = trainer.step(*batch(step))
        gradients, after = trainer.gradients(), trainer.state_dict()
        if reference is not None:
            differences += reference.compare(number, batch(step), before, loss, gradients, after)
    found = None
    if reference is not None:
        allowed = TOLERANCES.get(reference.dtype, TOLERANCES[torch.bfloat16]) if tolerance is None else tolerance
        found = CheckResult(steps, len(differences), allowed, max(differences, key=lambda difference: difference.error))
    result = trainer.comm.gather(found)[0]
    assert isinstance(result, CheckResult)
    return result


class _Reference:
    """Rank 0's own training in one process, set to the distributed state before each step."""

    def __init__(self, trainer: Trainer, optimizer: OptimizerFactory) -> None:
        self.trainer, self.model = trainer, trainer.model
        graph = self.model.graph
        state = {name: trainer.place(tensor).clone() for name, tensor in self.model.parameters.items()}
        self.parameters = {name: tensor.requires_grad_(graph.tensors[name].requires_grad) for name, tensor in state.items()}
        self.trainable = {name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad}
        self.optimizer = optimizer(list(self.trainable.values())) if self.trainable else None
        floating = [tensor.dtype for tensor in self.parameters.values() if tensor.is_floating_point()]
        self.dtype = max(floating, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)

    def compare(
        self,
        step: int,
        inputs: Sequence[torch.Tensor],
        before: Mapping[str, torch.Tensor],
        loss: float,
        gradients: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
    ) -> list[Difference]:
        """One step in one process from the state ``before``; every tensor's difference from what the ranks made."""
        trainer = self.trainer
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(before[name])
        buffers = {name: trainer.place(before[name]).clone() for name in self.model.buffers}
        context = TileContext(trainer.seed, step, buffers)
        expected_loss = self.model.reference_loss([trainer.place(tensor) for tensor in inputs], self.parameters, context)
        own: Sequence[torch.Tensor | None] = ()
        if expected_loss.requires_grad:
            own = torch.autograd.grad(expected_loss, list(self.trainable.values()), allow_unused=True)
        self.model.end_step(context)
        expected = {name: gradient for name, gradient in zip(self.trainable, own, strict=False) if gradient is not None}
        self._update(gradients)
        found_loss = torch.tensor(loss, dtype=torch.float64)
        return [
            Difference(step, "loss", self.model.graph.loss, _error(found_loss, expected_loss.detach().cpu().double(), 0.0)),
            *_differences(step, "gradient of", gradients, expected),
            *_differences(step, "updated parameter", after, {n: t.detach() for n, t in self.parameters.items()}),
            *_differences(step, "buffer", after, buffers),
        ]

    def _update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """The optimizer on whole parameters, with the ranks' own gradients: where Adam divides rounding by rounding, both must agree."""
        for name, tensor in self.trainable.items():
            tensor.grad = self.trainer.place(gradients[name]) if name in gradients else None
        if self.optimizer is not None:
            self.optimizer.step()


def _differences(
    step: int, kind: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """One per expected tensor; a gradient that was not found counts as zero."""
    largest = max((_largest(tensor) for tensor in expected.values()), default=0.0)
    result = []
    for name, tensor in expected.items():
        mine = found.get(name)
        mine = torch.zeros_like(tensor) if mine is None else mine.to(tensor.device)
        result.append(Difference(step, kind, name, _error(mine, tensor, SMALL.get(tensor.dtype, SMALL_ELSE) * largest)))
    return result


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _error(mine: torch.Tensor, expected: torch.Tensor, small: float) -> float:
    """Infinite if one is not finite where the other is."""
    if expected.numel() == 0:
        return 0.0
    mine, expected = mine.detach().double(), expected.detach().double()
    same = (mine == expected) | (mine.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, (mine - expected).abs()).max())
    if difference != difference or difference == float("inf"):
        return float("inf")
    scale = max(_largest(expected[expected.isfinite()]), small)
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
