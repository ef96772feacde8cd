"""Small models with sparse layers, and how one process trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soap
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model


class Ragged(nn.Module):
    """Bags of unequal length, with values, of one table; means with a padding row of another; a table that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(20, 3, mode="sum")
        self.second = nn.EmbeddingBag(9, 3, mode="mean", padding_idx=2)
        self.shared = nn.Embedding(7, 3)
        self.top = nn.Linear(3, 1)

    def forward(self, ids: Tensor, offsets: Tensor, values: Tensor, others: Tensor, pairs: Tensor) -> Tensor:
        found = (
            self.first(ids, offsets, values) + self.second(others) * self.shared(pairs[:, 0]) + F.embedding_bag(pairs, self.shared.weight)
        )
        return torch.tanh(self.top(found)).square().mean()


def ragged_inputs(samples: int = 4) -> tuple[Tensor, ...]:
    offsets = torch.tensor([0, 3, 3, 4])  # the second bag is empty
    return torch.randint(20, (9,)), offsets, torch.rand(9), torch.randint(9, (samples, 4)), torch.randint(7, (samples, 2))


class Additive(nn.Module):
    """A loss that is linear in all parameters: each sample's gradient is the same whatever has been updated before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 4, mode="sum")
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return (self.bag(ids).sum(1) + x @ self.weight).mean()


def additive_samples(count: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(30, (count, 5), generator=draw), torch.rand(count, 3, generator=draw)


def exported(module: nn.Module, inputs: Sequence[Tensor], path: Path, *, dynamic: bool = False) -> Path:
    soap.export(module, inputs, path=path, dynamic_batch=dynamic, verify=False)
    return path


def in_float64(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [one.double() if one.is_floating_point() else one for one in inputs]


def whole_gradients(model: TracedModel, inputs: Sequence[Tensor], values: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model in one process."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    loss = model.reference_loss(inputs, leaves, TileContext())
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), found, strict=True)]
    return float(loss.detach()), dict(zip(leaves, zeros, strict=True))


def trained_alone(
    spec: str | Path, dtype: str, seed: int, batches: Sequence[Sequence[Tensor]], make: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values of one process that takes these batches in turn."""
    torch.manual_seed(seed)
    model = load_model(spec, dtype=dtype)
    values = {name: value.detach().clone() for name, value in model.parameters.items()}
    optimizer = make(list(values.values()))
    losses = []
    for inputs in batches:
        shapes = [tuple(one.shape) for one in inputs]
        same = shapes == [tuple(one.shape) for one in model.example_inputs]
        loss, gradients = whole_gradients(model if same else model.resized(shapes), inputs, values)
        for name, value in values.items():
            value.grad = gradients[name]
        optimizer.step()
        losses.append(loss)
    return losses, values
