"""Small training models in which something could be summed, shared or normalised wrongly, and their plain training in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from soap.model.regions import balanced

Batch = tuple[torch.Tensor, ...]


class ConvNorm(nn.Module):
    """Convolutions, batch norms with and without affine parameters, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=0.3)
        self.second, self.plain = nn.Conv2d(6, 4, 3, stride=2), nn.BatchNorm2d(4, affine=False)
        self.head = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(images)))
        x = torch.tanh(self.plain(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Weighted(nn.Module):
    """A mean over tokens that are not ignored, weighted by their class, with smoothed labels; and a mean over other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.register_buffer("weight", torch.linspace(0.2, 2.0, 9))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.head(self.embedding(tokens)).flatten(0, 1)
        flat = labels.flatten()
        smooth = F.cross_entropy(x, flat, self.weight, ignore_index=2, label_smoothing=0.1)
        return smooth + 0.5 * F.nll_loss(F.log_softmax(x, -1), flat, ignore_index=3)


class Shared(nn.Module):
    """A tied weight, a layer used twice, a frozen layer, a buffer that is only read, and calls in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift
        x = torch.relu_(self.layer(x))
        x = self.layer(self.frozen(x).mul_(0.5)).add_(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Example:
    """A module and batches for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """(number of samples, step) -> tensors."""


def _images(samples: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


def _tokens(samples: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(0, 8, (samples, 7), generator=generator) for _ in range(2))
    labels[-1] = 2  # the last sample of a batch counts little: means of parts are not the parts' means
    labels[-1, 0] = 4
    return tokens, labels


EXAMPLES = {"conv norm": Example(ConvNorm, _images), "weighted": Example(Weighted, _tokens), "shared": Example(Shared, _tokens)}


def module_of(name: str) -> nn.Module:
    torch.manual_seed(5)
    return EXAMPLES[name].make().train()


def batches(name: str, sizes: Sequence[int]) -> list[Batch]:
    return [EXAMPLES[name].batch(samples, step) for step, samples in enumerate(sizes)]


def converted(batch: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch]


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


@dataclass
class Trained:
    losses: list[float]
    state: dict[str, torch.Tensor]


def train_plainly(
    module: nn.Module, steps: Sequence[Sequence[Batch]], *, clip_norm: float | None = None, autocast: torch.dtype | None = None
) -> Trained:
    """What anybody would write for one process: each step is a list of micro-batches. The module is changed."""
    optimizer = sgd([p for p in module.parameters() if p.requires_grad])
    losses = []
    for parts in steps:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = module(*part) / len(parts)
            loss.backward()
            total += float(loss.detach())
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        losses.append(total)
    return Trained(losses, dict(module.state_dict()))


class LocalNorm(nn.BatchNorm2d):
    """What DistributedDataParallel without SyncBatchNorm computes on ``parts`` ranks; rank 0's statistics are kept."""

    parts = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = []
        for part, (start, stop) in enumerate(balanced(len(x), self.parts)):
            running = (None, None) if part else (self.running_mean, self.running_var)
            out.append(F.batch_norm(x[start:stop], *running, self.weight, self.bias, True, self.momentum, self.eps))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return torch.cat(out)


def with_local_norms(module: nn.Module, parts: int) -> nn.Module:
    """The module with every batch norm over each part of the samples."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = LocalNorm
            layer.parts = parts
    return module


def worst(found: Trained, expected: Trained) -> float:
    """Largest difference of any loss, parameter or buffer, relative to 1 or the tensor's largest element."""
    assert found.state.keys() == expected.state.keys()
    losses = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found.losses, expected.losses, strict=True))
    pairs = [(found.state[name].double(), tensor.double()) for name, tensor in expected.state.items()]
    return max(losses, *(float((mine - other).abs().max() / max(1.0, float(other.abs().max()))) for mine, other in pairs))

