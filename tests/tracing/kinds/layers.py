"""Layers beyond the usual: normalised weights, solvers, splines, sampling, rendering."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind()
def uneven_batch_norm() -> Built:
    """Batch norms over a batch that no number of devices divides, of one, two and three dimensions."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(m.norm2(m.conv(x)))
        h = m.norm1(m.flat(h.flatten(1)))
        return F.cross_entropy(m.head(h), y)

    parts = {"conv": nn.Conv2d(2, 4, 3, padding=1), "norm2": nn.BatchNorm2d(4), "flat": nn.Linear(100, 6), "norm1": nn.BatchNorm1d(6)}
    return Built(Lossy(run, head=nn.Linear(6, 3), **parts).train(), (torch.randn(7, 2, 5, 5), labels(3, 7)))


@kind()
def weight_normed() -> Built:
    """Weight norm of a linear, a convolution and a transposed one."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m.up(torch.tanh(m.conv(torch.relu(m.first(x)).view(-1, 4, 4, 4)))), y)

    first, conv = weight_norm(nn.Linear(5, 64)), weight_norm(nn.Conv2d(4, 6, 3, padding=1))
    module = Lossy(run, first=first, conv=conv, up=weight_norm(nn.ConvTranspose2d(6, 3, 4, stride=2, padding=1)))
    return Built(module, (torch.randn(6, 5), torch.randn(6, 3, 8, 8)))


@kind()
def orthogonal_weights() -> Built:
    """A weight kept orthogonal by the Cayley map: a linear system is solved in the forward pass."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(torch.tanh(m.turn(x))), y)

    turn = orthogonal(nn.Linear(5, 5), orthogonal_map="cayley")
    return Built(Lossy(run, turn=turn, head=nn.Linear(5, 3)), (torch.randn(8, 5), labels(3, 8)))


@kind()
def spatial_transformer() -> Built:
    """An image is sampled on a grid that the model makes."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        theta = (m.where(x.flatten(1)) * 0.1 + torch.tensor([1.0, 0, 0, 0, 1, 0]).to(x.dtype)).view(-1, 2, 3)
        seen = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        return F.cross_entropy(m.head(m.conv(seen).mean((2, 3))), y)

    parts = {"where": nn.Linear(72, 6), "conv": nn.Conv2d(2, 4, 3), "head": nn.Linear(4, 3)}
    return Built(Lossy(run, **parts), (torch.randn(5, 2, 6, 6), labels(3, 5)))


@kind(draws=True)
def dropped_layers() -> Built:
    """Dropout of elements, of channels, of attention, and of whole residual branches per sample (stochastic depth)."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout2d(F.relu(m.conv(x)), 0.3).flatten(2).transpose(1, 2)
        q, k, v = m.qkv(h)[:, None].chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)[:, 0]
        kept = torch.bernoulli(torch.full((len(x), 1, 1), 0.8)).to(h.dtype)
        h = h + F.dropout(torch.tanh(m.deep(h)), 0.1) * kept / 0.8
        return F.cross_entropy(m.head(h.mean(1)), y)

    parts = {"conv": nn.Conv2d(2, 4, 3), "qkv": nn.Linear(4, 12), "deep": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    return Built(Lossy(run, **parts).train(), (torch.randn(5, 2, 5, 5), labels(3, 5)))
