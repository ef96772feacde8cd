"""Layers beyond the usual: normalised weights, solvers, splines, sampling, rendering."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight


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
def neural_ode() -> Built:
    """Four Runge-Kutta steps through one net."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        step = 0.25
        for _ in range(2):
            k1 = m.net(x)
            k2 = m.net(x + step / 2 * k1)
            k3 = m.net(x + step / 2 * k2)
            x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + m.net(x + step * k3))
        return F.mse_loss(x, y)

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return Built(Lossy(run, net=net), (torch.randn(8, 4), torch.randn(8, 4)))


@kind()
def splines() -> Built:
    """A Kolmogorov-Arnold layer: piecewise linear functions on a grid, one for each edge."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        for knots, base in ((m.first, m.first_base), (m.second, m.second_base)):
            near = F.relu(1 - (x[..., None] - torch.linspace(-2, 2, 5)).abs())
            x = torch.einsum("big,oig->bo", near, knots) + F.silu(x) @ base.t()
        return F.mse_loss(x, y)

    parts = {"first": weight(6, 4, 5), "first_base": weight(6, 4), "second": weight(2, 6, 5), "second_base": weight(2, 6)}
    return Built(Lossy(run, **parts), (torch.randn(8, 4), torch.randn(8, 2)))


@kind()
def spatial_transformer() -> Built:
    """An image is sampled on a grid that the model makes."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        theta = (m.where(x.flatten(1)) * 0.1 + torch.tensor([1.0, 0, 0, 0, 1, 0]).to(x.dtype)).view(-1, 2, 3)
        seen = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        return F.cross_entropy(m.head(m.conv(seen).mean((2, 3))), y)

    parts = {"where": nn.Linear(72, 6), "conv": nn.Conv2d(2, 4, 3), "head": nn.Linear(4, 3)}
    return Built(Lossy(run, **parts), (torch.randn(5, 2, 6, 6), labels(3, 5)))


@kind()
def radiance() -> Built:
    """Volume rendering along rays: products of what is left, sines of positions."""

    def run(m: Lossy, where: Tensor, y: Tensor) -> Tensor:
        waves = torch.cat([(where * 2.0**k).sin() for k in range(3)] + [(where * 2.0**k).cos() for k in range(3)], -1)
        density, colour = m.net(waves).split([1, 3], -1)
        alpha = 1 - torch.exp(-F.softplus(density.squeeze(-1)) * 0.2)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return F.mse_loss(((alpha * left)[..., None] * colour.sigmoid()).sum(1), y)

    net = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 4))
    return Built(Lossy(run, net=net), (torch.randn(6, 5, 3), torch.rand(6, 3)))


@kind()
def tensor_train() -> Built:
    """A table factorised into cores, contracted at each look-up."""

    def run(m: Lossy, ids: Tensor, y: Tensor) -> Tensor:
        a, b = ids // 4, ids % 4
        row = torch.einsum("tir,trj->tij", m.left[a], m.right[b]).flatten(1)
        return F.cross_entropy(m.head(row), y)

    return Built(Lossy(run, left=weight(3, 2, 2), right=weight(4, 2, 3), head=nn.Linear(6, 4)), (labels(12, 8), labels(4, 8)))


@kind()
def factorisation_machine() -> Built:
    """All pairs of features by the square of their sum, and crosses of a deep-and-cross network."""

    def run(m: Lossy, ids: Tensor, dense: Tensor, y: Tensor) -> Tensor:
        rows = torch.stack([table(ids[:, i]) for i, table in enumerate(m.tables)], 1)
        pairs = 0.5 * (rows.sum(1).pow(2) - rows.pow(2).sum(1)).sum(-1)
        x0 = x = torch.cat([dense, rows.flatten(1)], 1)
        for cross in m.crosses:
            x = x0 * cross(x) + x
        return F.binary_cross_entropy_with_logits(m.head(x).squeeze(-1) + pairs, y)

    tables = nn.ModuleList(nn.Embedding(n, 3) for n in (5, 9, 4))
    crosses = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
    ids = torch.stack([labels(n, 8) for n in (5, 9, 4)], 1)
    return Built(Lossy(run, tables=tables, crosses=crosses, head=nn.Linear(12, 1)), (ids, torch.randn(8, 3), torch.rand(8).round()))


@kind()
def shared_siamese() -> Built:
    """One encoder three times, its first layer frozen, its last one tied to a table."""

    def run(m: Lossy, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        near, also, far = (m.encoder(m.words(ids).mean(1)) for ids in (a, b, c))
        pulled = F.triplet_margin_loss(near, also, far, margin=0.4)
        return pulled + F.cross_entropy(F.linear(near, m.words.weight[:, :4]), a[:, 0])

    encoder = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 4))
    return Built(Lossy(run, words=nn.Embedding(9, 6), encoder=encoder), tuple(labels(9, 6, 4) for _ in range(3)))


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
