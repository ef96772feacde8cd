"""Models that make something: variational, adversarial, by diffusion, by flows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind()
def gan() -> Built:
    """Generator and critic in one loss, each of which leaves the other alone (detached), with noise as an input."""

    def run(m: Lossy, z: Tensor, real: Tensor) -> Tensor:
        fake = m.make(z)
        judged = F.softplus(m.judge(fake.detach())).mean() + F.softplus(-m.judge(real)).mean()
        frozen = {name: p.detach() for name, p in m.judge.named_parameters()}
        fooled = F.softplus(-torch.func.functional_call(m.judge, frozen, (fake,))).mean()
        return judged + fooled

    make = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh())
    judge = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return Built(Lossy(run, make=make, judge=judge), (torch.randn(8, 3), torch.randn(8, 5)))


class Block(nn.Module):
    """A residual block of a diffusion model, told the time."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm, self.conv, self.time = nn.GroupNorm(2, channels), nn.Conv2d(channels, out, 3, padding=1), nn.Linear(8, out)
        self.skip = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.skip(x) + self.conv(F.silu(self.norm(x))) + self.time(time)[..., None, None]


@kind()
def masked_convolutions() -> Built:
    """PixelCNN: weights multiplied by a mask, a pixel's intensity from those before it."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(F.conv2d(x, m.first.weight * m.before, m.first.bias, padding=1))
        return F.cross_entropy(F.conv2d(h, m.second.weight * m.so_far, m.second.bias, padding=1), y)

    before = torch.ones(3, 3)
    before[1, 1:] = before[2:] = 0
    so_far = before.clone()
    so_far[1, 1] = 1
    parts = {"first": nn.Conv2d(1, 4, 3), "second": nn.Conv2d(4, 5, 3)}
    return Built(Lossy(run, **parts, before=before, so_far=so_far), (torch.randn(4, 1, 6, 6), labels(5, 4, 6, 6)))


@kind(draws=True)
def gumbel_softmax() -> Built:
    """Discrete choices drawn with gradients."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m.out(F.gumbel_softmax(m.choose(x), tau=0.7, hard=False)), y)

    return Built(Lossy(run, choose=nn.Linear(5, 4), out=nn.Linear(4, 2)), (torch.randn(8, 5), torch.randn(8, 2)))
