"""State that the forward pass updates: from weights, from sums over the batch, by counting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind()
def moving_codebook() -> Built:
    """VQ-VAE whose codebook moves with the mean of what it is nearest to; a step counter, a running range."""

    def run(m: Lossy, x: Tensor) -> Tensor:
        z = m.encoder(x)
        hot = F.one_hot(torch.cdist(z.detach(), m.book).argmin(1), len(m.book)).to(z.dtype)
        with torch.no_grad():
            m.steps.add_(1)
            m.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            m.total.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
            m.low.copy_(torch.minimum(m.low, z.amin(0)))
            m.book.copy_(m.total / (m.size + 1e-5)[:, None])
        q = hot @ m.book
        return F.mse_loss(m.decoder(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q.detach())

    state = {"book": torch.randn(5, 4), "size": torch.ones(5), "total": torch.randn(5, 4), "steps": torch.tensor(0), "low": torch.zeros(4)}
    return Built(Lossy(run, encoder=nn.Linear(6, 4), decoder=nn.Linear(4, 6), **state).train(), (torch.randn(8, 6),))


@kind()
def warm_up_by_counter() -> Built:
    """A weight of the loss that grows with a counter of steps."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        m.steps.add_(1)
        told = m.net(x)
        return F.cross_entropy(told, y) + (m.steps / 10).clamp(max=1) * told.pow(2).mean()

    return Built(Lossy(run, net=nn.Linear(5, 4), steps=torch.tensor(0.0)), (torch.randn(8, 5), labels(4, 8)))


@kind()
def balanced_by_running_losses() -> Built:
    """Two losses divided by their own running means."""

    def run(m: Lossy, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        h = torch.tanh(m.trunk(x))
        both = torch.stack([F.cross_entropy(m.first(h), y), F.mse_loss(m.second(h).squeeze(-1), z)])
        with torch.no_grad():
            m.mean.mul_(0.9).add_(both, alpha=0.1)
        return (both / m.mean).sum()

    parts = {"trunk": nn.Linear(5, 6), "first": nn.Linear(6, 4), "second": nn.Linear(6, 1)}
    return Built(Lossy(run, mean=torch.ones(2), **parts), (torch.randn(8, 5), labels(4, 8), torch.randn(8)))
