"""Writes in place, and constants that the forward pass makes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight


@kind()
def masked_in_place() -> Built:
    """Writes by masks, by rows, by slices, and through views."""

    def run(m: Lossy, x: Tensor, hidden: Tensor, y: Tensor) -> Tensor:
        h = m.up(x)
        h = torch.where(hidden[..., None], m.blank.expand_as(h), h)
        h.masked_fill_(hidden[..., None] & (h < 0), 0.5)
        h[:, 0] = m.first
        h[:, -2:].mul_(2.0)
        h.transpose(1, 2)[:, :2].add_(1.0)
        h[..., 3] = h[..., 2].exp()
        return F.mse_loss(h, y)

    parts = {"up": nn.Linear(5, 6), "blank": weight(6), "first": weight(6)}
    return Built(Lossy(run, **parts), (torch.randn(4, 7, 5), torch.rand(4, 7) < 0.4, torch.randn(4, 7, 6)))


@kind()
def filled_rows() -> Built:
    """A tensor made empty and written row by row; another written by index."""

    def run(m: Lossy, x: Tensor, where: Tensor, y: Tensor) -> Tensor:
        made = torch.zeros(len(x), 3, 4).to(x.dtype)
        for i, layer in enumerate(m.layers):
            made[:, i] = layer(x)
        spread = torch.zeros(len(x), 6).to(x.dtype)
        spread.scatter_(1, where, made.mean(1))
        spread.index_put_((torch.arange(len(x)), where[:, 0]), x[:, 0], accumulate=True)
        return F.mse_loss(spread, y) + made.pow(2).mean()

    where = torch.stack([torch.randperm(6)[:4] for _ in range(8)])
    layers = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
    return Built(Lossy(run, layers=layers), (torch.randn(8, 5), where, torch.randn(8, 6)))


@kind()
def counted_constants() -> Built:
    """Histograms, positions, grids and masks from factory calls that name no type."""

    def run(m: Lossy, x: Tensor, which: Tensor) -> Tensor:
        counts = torch.zeros(3).scatter_add(0, which, torch.ones(len(which)))
        place = torch.arange(x.shape[1]) / 8 + torch.linspace(0, 1, x.shape[1])
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        h = (x * place) @ (mask.softmax(-1) + torch.eye(x.shape[1])).t()
        return (m.net(h).softmax(-1).mean(0) * counts).sum() * torch.tensor(0.5)

    return Built(Lossy(run, net=nn.Linear(4, 3)), (torch.randn(8, 4), labels(3, 8)))


@kind()
def gradient_tricks() -> Built:
    """Reversal, straight-through rounding and clipping written with ``detach``, as they can be exported."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h = m.net(x)
        reversed_ = 1.5 * h.detach() - 0.5 * h
        rounded = h + (h.round() - h).detach()
        held = h.clamp(-1, 1) + (h - h.clamp(-1, 1)).detach()
        return F.cross_entropy(m.head(reversed_ + rounded * held), y)

    return Built(Lossy(run, net=nn.Linear(5, 6), head=nn.Linear(6, 3)), (torch.randn(8, 5), labels(3, 8)))


@kind()
def quantised_weights() -> Built:
    """Ternary weights with straight-through gradients, scaled by their mean (BitNet)."""

    def ternary(w: Tensor) -> Tensor:
        scale = w.abs().mean().clamp(min=1e-5)
        return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h = F.linear(F.rms_norm(x, (6,)), ternary(m.first))
        return F.cross_entropy(F.linear(F.relu(h).pow(2), ternary(m.second)), y)

    return Built(Lossy(run, first=weight(8, 6), second=weight(4, 8)), (torch.randn(8, 6), labels(4, 8)))
