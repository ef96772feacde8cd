"""Models that make something: variational, adversarial, by diffusion, by flows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind(draws=True)
def vae() -> Built:
    """A sample drawn by reparametrisation; the divergence in closed form."""

    def run(m: Lossy, x: Tensor) -> Tensor:
        mean, log_variance = m.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(m.decoder(z), x.sigmoid(), reduction="sum") / len(x) + kl

    return Built(Lossy(run, encoder=nn.Linear(6, 8), decoder=nn.Linear(4, 6)), (torch.randn(8, 6),))


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
def diffusion_unet() -> Built:
    """Noise is predicted from what was noised, by a U-Net with sinusoidal times, attention in the middle, and skips."""

    def run(m: Lossy, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        kept = torch.cos(time.to(x.dtype) / 100 * math.pi / 2)[:, None, None, None].pow(2)
        noised = kept.sqrt() * x + (1 - kept).sqrt() * noise
        angles = time[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4).to(x.dtype)
        told = torch.cat([angles.sin(), angles.cos()], 1)
        first = m.down(m.stem(noised), told)
        h = m.middle(F.avg_pool2d(first, 2), told)
        q, k, v = m.qkv(h).flatten(2).transpose(1, 2).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view_as(h)
        h = torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), first], 1)
        return F.mse_loss(m.head(m.up(h, told)), noise)

    parts = {"stem": nn.Conv2d(3, 4, 3, padding=1), "down": Block(4, 4), "middle": Block(4, 4), "qkv": nn.Conv2d(4, 12, 1)}
    module = Lossy(run, **parts, up=Block(8, 4), head=nn.Conv2d(4, 3, 3, padding=1))
    return Built(module, (torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.tensor([3, 40, 71, 99])))


@kind()
def flow() -> Built:
    """Affine couplings with their determinants, and an invertible 1×1 product by its LU factors."""

    def run(m: Lossy, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for net in m.nets:
            lower = torch.tril(m.lower, -1) + torch.eye(4)
            upper = torch.triu(m.upper, 1) + torch.diag(m.diagonal)
            x = x @ (lower @ upper).t()
            a, b = x.chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            x = torch.cat([b * torch.exp(torch.tanh(scale)) + shift, a], -1)
            logdet = logdet + torch.tanh(scale).sum(-1) + m.diagonal.abs().log().sum()
        return (0.5 * x.pow(2).sum(-1) - logdet).mean()

    nets = nn.ModuleList(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
    square = {name: nn.Parameter(torch.randn(4, 4) * 0.3) for name in ("lower", "upper")}
    return Built(Lossy(run, nets=nets, diagonal=nn.Parameter(torch.rand(4) + 0.5), **square), (torch.randn(8, 4),))


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


@kind()
def straight_through_codes() -> Built:
    """A VQ-VAE whose codebook is trained by gradients: the nearest code, passed straight through."""

    def run(m: Lossy, x: Tensor) -> Tensor:
        z = m.encoder(x)
        book = m.book.weight
        nearest = (z.pow(2).sum(1, keepdim=True) - 2 * z @ book.t() + book.pow(2).sum(1)).argmin(1)
        q = m.book(nearest)
        told = m.decoder(z + (q - z).detach())
        return F.mse_loss(told, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    return Built(Lossy(run, encoder=nn.Linear(6, 3), book=nn.Embedding(5, 3), decoder=nn.Linear(3, 6)), (torch.randn(8, 6),))


@kind(draws=True)
def gumbel_softmax() -> Built:
    """Discrete choices drawn with gradients."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m.out(F.gumbel_softmax(m.choose(x), tau=0.7, hard=False)), y)

    return Built(Lossy(run, choose=nn.Linear(5, 4), out=nn.Linear(4, 2)), (torch.randn(8, 5), torch.randn(8, 2)))


@kind(draws=True)
def masked_pixels() -> Built:
    """A masked autoencoder: patches are shuffled by random numbers, some are kept, all are told."""

    def run(m: Lossy, x: Tensor) -> Tensor:
        h = m.embed(x)
        order = torch.rand(h.shape[:2]).argsort(1)
        back = order.argsort(1)
        kept = h.gather(1, order[:, :3, None].expand(-1, -1, h.shape[-1]))
        full = torch.cat([m.encoder(kept), m.blank.expand(len(x), h.shape[1] - 3, -1)], 1)
        told = m.decoder(full.gather(1, back[..., None].expand(-1, -1, h.shape[-1])))
        hidden = (back >= 3).to(x.dtype)
        return ((told - x).pow(2).mean(-1) * hidden).sum() / hidden.sum()

    parts = {"embed": nn.Linear(5, 6), "encoder": nn.Linear(6, 6), "decoder": nn.Linear(6, 5)}
    return Built(Lossy(run, blank=nn.Parameter(torch.zeros(1, 1, 6)), **parts), (torch.randn(4, 7, 5),))
