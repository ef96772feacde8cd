"""Small training models whose forward pass moves buffers that it also reads, and their batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from soap.cluster.presets import local_topology
from soap.runtime.check import CheckResult, check
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy
from soap.tracing.load import load_model
from tests.runtime.exact_modules import Example, Trained, converted, sgd


class Critic(nn.Module):
    """Spectral norm, whose power iteration moves ``u`` and ``v`` from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = spectral_norm(nn.Conv2d(3, 6, 3, padding=1)), spectral_norm(nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.leaky_relu(self.conv(x), 0.2).mean((2, 3)))


class Gan(nn.Module):
    """A critic that is called twice in a step, and a generator with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.make = weight_norm(nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1))
        self.first = weight_norm(nn.Linear(5, 4 * 4 * 4))
        self.critic = Critic()

    def forward(self, z: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        fake = torch.tanh(self.make(torch.relu(self.first(z)).view(-1, 4, 4, 4)))
        return self.critic(fake).mean() - self.critic(real).square().mean()


class Hooked(nn.Module):
    """Spectral norm by a hook of the module, with batch norm and a counter of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = hooked_spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.layer(x)))).square().mean()


class Codebook(nn.Module):
    """A codebook kept by moving averages of sums over the batch: read before and after it moves."""

    def __init__(self, count: int = 6, width: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, width), nn.Linear(width, 6)
        self.register_buffer("book", torch.randn(count, width))
        self.register_buffer("size", torch.ones(count))
        self.register_buffer("total", torch.randn(count, width))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("low", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        hot = F.one_hot(torch.cdist(z.detach(), self.book).argmin(1), self.book.shape[0]).to(z.dtype)
        with torch.no_grad():
            self.steps.add_(1)
            self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
            self.low.copy_(torch.minimum(self.low, z.amin(0)))
            self.book.copy_(self.total / (self.size + 1e-5)[:, None])
        q = hot @ self.book
        q = z + (q - z).detach()
        return F.mse_loss(self.decode(q), x) + 0.25 * F.mse_loss(z, (hot @ self.book).detach())


class Observed(nn.Module):
    """Activations rounded to a range that follows them, as training for quantization does, straight through for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        low, high = torch.aminmax(y.detach())
        self.low.lerp_(low, 0.2)
        self.high.lerp_(high, 0.2)
        scale = (self.high - self.low).clamp_min(1e-4) / 255
        rounded = (torch.clamp(torch.round((y - self.low) / scale), 0, 255) * scale + self.low).detach()
        return self.head(y + (rounded - y).detach()).square().mean()


class Queue(nn.Module):
    """Keys of earlier batches as negatives, in a ring, as MoCo keeps them; the place is a buffer, too."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 5), nn.Linear(6, 5)
        self.register_buffer("queue", F.normalize(torch.randn(5, length), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(y), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        with torch.no_grad():
            where = (self.place + torch.arange(k.shape[0])) % self.queue.shape[1]
            self.queue[:, where] = k.t()
            self.place.copy_((self.place + k.shape[0]) % self.queue.shape[1])
        return F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.long))


class WarmUp(nn.Module):
    """A factor that grows with a counter of steps, and a part of a table that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(3, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        factor = torch.clamp(self.steps / 4, max=1.0)
        y = self.layer(x)
        with torch.no_grad():
            self.seen[1].copy_(y.mean(0))
            self.seen[0] += self.seen[1].abs()
        return (y - self.seen[0]).square().mean() + factor * self.head(x).square().mean()


class Balanced(nn.Module):
    """Two losses divided by their moving averages, which are assigned, not written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.layer(x))
        losses = torch.stack([self.one(z).square().mean(), (self.two(z) - y[:, :3]).abs().mean()])
        self.scale = 0.9 * self.scale + 0.1 * losses.detach()
        return (losses / self.scale).sum()


class Flags(nn.Module):
    """Buffers of bool, of bytes and of complex numbers, assigned and written; the flags are read by half of the width."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("live", torch.zeros(8, dtype=torch.bool))
        self.register_buffer("often", torch.zeros(8, dtype=torch.uint8), persistent=False)
        self.register_buffer("turn", torch.ones(8, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.layer(x)
        y = z.masked_fill(~self.live, 0.5) * (1 + self.often) * self.turn.real
        hit = (z.detach() > 0.2).any(0)
        self.live = self.live | hit
        self.often.add_(hit)
        self.turn = self.turn * torch.exp(0.1j * z.detach().mean(0))
        return self.head(y).square().mean()


class Teacher(nn.Module):
    """A teacher whose weights, which are no buffers but frozen parameters, follow the student's in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        self.teacher.requires_grad_(False)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
            target = self.teacher(y)
            wanted = torch.softmax((target - self.center) / 0.5, 1)
            self.center.mul_(0.9).add_(target.mean(0), alpha=0.1)
        return -(wanted * torch.log_softmax(self.fixed(self.student(x)), 1)).sum(1).mean()


class Noisy(nn.Module):
    """A buffer drawn anew in each step, and an average of what is drawn: the same on all ranks, but not what eager PyTorch draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("noise", torch.zeros(4))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise.normal_()
        self.average.lerp_(torch.rand_like(self.noise) + self.noise, 0.5)
        return (self.layer(x) - self.noise - self.average).square().mean()


def _vectors(samples: int, step: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(samples, 6, generator=torch.Generator().manual_seed(step)),)


def _pairs(samples: int, step: int) -> tuple[torch.Tensor, ...]:
    return (*_vectors(samples, step), *_vectors(samples, step + 100))


def _noise_and_images(samples: int, step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 5, generator=generator), torch.randn(samples, 3, 8, 8, generator=generator)


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gan": (Gan, _noise_and_images),
    "hooked": (Hooked, _vectors),
    "codebook": (Codebook, _vectors),
    "observed": (Observed, _vectors),
    "queue": (Queue, _pairs),
    "warm-up": (WarmUp, _vectors),
    "balanced": (Balanced, _pairs),
    "teacher": (Teacher, _pairs),
    "flags": (Flags, _vectors),
}
EXAMPLES = {name: Example(make, batch) for name, (make, batch) in MODULES.items()}


def module_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return EXAMPLES[name].make().train().double()


def batches_of(name: str, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    return [converted(EXAMPLES[name].batch(samples, step), torch.float64) for step, samples in enumerate(sizes)]


@dataclass
class Copies:
    """What a rank found: the training, and its own copies of all buffers."""

    trained: Trained
    buffers: dict[str, torch.Tensor]


def train(
    path: str, strategy: Strategy, ranks: int, steps: Sequence[Sequence[Sequence[torch.Tensor]]], options: Mapping[str, Any] | None = None
) -> Copies:
    """What a rank does: each step's micro-batches at once; the last step is traced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(path)
    with Trainer(model, (strategy, local_topology(ranks)), optimizer=sgd, **(options or {})) as trainer:
        losses = [trainer.step(*(t for part in parts for t in part)) for parts in steps[:-1]]
        assert trainer.trace(*(t for part in steps[-1] for t in part))
        return Copies(Trained(losses, trainer.state_dict()), {name: tensor.clone() for name, tensor in trainer.buffers.items()})


def checked(path: str, strategy: Strategy, ranks: int, sizes: Sequence[int], name: str, dtype: str) -> CheckResult:
    """What ``soap-run --check`` does, on batches of these sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(path, dtype=dtype)
    batches = [converted(batch, getattr(torch, dtype)) for batch in batches_of(name, sizes)]
    with Trainer(model, (strategy, local_topology(ranks)), optimizer=sgd) as trainer:
        return check(trainer, batches.__getitem__, sgd, len(sizes))


def go_on(path: str, strategy: Strategy, ranks: int, name: str, steps: range, folder: str) -> Trained:
    """Load what was saved, if anything was, train these steps, and save."""
    model = load_model(path)
    with Trainer(model, (strategy, local_topology(ranks)), optimizer=sgd) as trainer:
        if steps.start:
            trainer.load(folder)
        losses = [trainer.step(*batches_of(name, [SAMPLES] * (step + 1))[-1]) for step in steps]
        trainer.save(folder)
        return Trained(losses, trainer.state_dict())


SAMPLES = 6
"""Of a batch."""
