"""Losses, each behind a small model: what they divide by and whom they compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import KINDS, Built, Kind, Lossy, kind, labels, weight

Loss = Callable[..., Tensor]
CLASSES = 4


def _dice(told: Tensor, y: Tensor) -> Tensor:
    p, hot = told.softmax(-1), F.one_hot(y, CLASSES).to(told.dtype)
    return 1 - ((2 * (p * hot).sum(0) + 1) / (p.sum(0) + hot.sum(0) + 1)).mean()


def _focal(told: Tensor, y: Tensor) -> Tensor:
    log_p = told.log_softmax(-1).gather(1, y[:, None]).squeeze(1)
    return -((1 - log_p.exp()).pow(2) * log_p).mean()


def _quantiles(told: Tensor, y: Tensor) -> Tensor:
    levels = torch.tensor([0.1, 0.4, 0.6, 0.9])
    apart = y[:, None] - told
    return torch.maximum(levels * apart, (levels - 1) * apart).mean()


def _lovasz(told: Tensor, y: Tensor) -> Tensor:
    """Lovász hinge: errors in falling order, weighed by how the Jaccard index changes."""
    truth = (y > 1).to(told.dtype)
    error = 1 - told[:, 0] * (2 * truth - 1)
    sorted_error, order = error.sort(descending=True)
    found = truth[order]
    index = 1 - (found.sum() - found.cumsum(0)) / (found.sum() + (1 - found).cumsum(0))
    return (F.relu(sorted_error) * torch.cat([index[:1], index[1:] - index[:-1]]).detach()).sum()


def _cox(told: Tensor, time: Tensor) -> Tensor:
    """Partial likelihood of survival times: each sample against all that live longer."""
    risk = told[:, 0][time.argsort(descending=True)]
    return (risk.logcumsumexp(0) - risk).mean()


def _mixture(told: Tensor, y: Tensor) -> Tensor:
    log_weight, mean = told.chunk(2, -1)
    return -torch.logsumexp(log_weight.log_softmax(-1) - 0.5 * (y[:, None] - mean).pow(2), -1).mean()


def _ordinal(told: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(told[:, :3], (y[:, None] > torch.arange(3)).to(told.dtype))


def _correlation(told: Tensor, y: Tensor) -> Tensor:
    a, b = told[:, 0] - told[:, 0].mean(), y - y.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-8)


def _evidence(told: Tensor, y: Tensor) -> Tensor:
    alpha = F.softplus(told) + 1
    return (torch.digamma(alpha.sum(-1)) - torch.digamma(alpha.gather(1, y[:, None]).squeeze(1))).mean()


def _sinkhorn(told: Tensor, y: Tensor) -> Tensor:
    """Optimal transport between the batch's outputs and targets, five rounds in logarithms."""
    cost = (told[:, None, 0] - y[None]).pow(2)
    kernel = -cost / 0.5
    for _ in range(5):
        kernel = kernel - kernel.logsumexp(1, keepdim=True)
        kernel = kernel - kernel.logsumexp(0, keepdim=True)
    return (kernel.exp() * cost).sum() / len(y)


def _class_weighted(told: Tensor, y: Tensor) -> Tensor:
    """Weights by how often the batch has a class, counted in the forward pass."""
    often = F.one_hot(y, CLASSES).sum(0).to(told.dtype)
    return F.cross_entropy(told, y, weight=len(y) / (CLASSES * often.clamp(min=1)))


def _arc(told: Tensor, y: Tensor) -> Tensor:
    cosine = F.normalize(told, dim=1)
    angle = torch.acos(cosine.clamp(-0.999, 0.999))
    return F.cross_entropy(torch.where(F.one_hot(y, CLASSES).bool(), torch.cos(angle + 0.3), cosine) * 8, y)


OF_CLASSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "smoothed": lambda told, y: F.cross_entropy(told, y, label_smoothing=0.1),
    "nll": lambda told, y: F.nll_loss(told.log_softmax(-1), y),
    "multi_margin": F.multi_margin_loss,
    "dice": _dice,
    "focal": _focal,
    "lovasz": _lovasz,
    "ordinal": _ordinal,
    "evidence": _evidence,
    "class_weighted": _class_weighted,
    "arc_face": _arc,
}
OF_NUMBERS: dict[str, Loss] = {
    "mse": lambda told, y: F.mse_loss(told[:, 0], y),
    "huber": lambda told, y: F.huber_loss(told[:, 0], y, delta=0.3),
    "smooth_l1": lambda told, y: F.smooth_l1_loss(told[:, 0], y, beta=0.3),
    "log_cosh": lambda told, y: (told[:, 0] - y).cosh().log().mean(),
    "poisson": lambda told, y: F.poisson_nll_loss(told[:, 0], y.abs()),
    "gaussian": lambda told, y: F.gaussian_nll_loss(told[:, 0], y, F.softplus(told[:, 1])),
    "tweedie": lambda told, y: (-y.abs() * (-0.5 * told[:, 0]).exp() / 0.5 + (0.5 * told[:, 0]).exp() / 0.5).mean(),
    "quantiles": _quantiles,
    "cox": _cox,
    "mixture_density": _mixture,
    "correlation": _correlation,
    "sinkhorn": _sinkhorn,
    "root_mean_square": lambda told, y: F.mse_loss(told[:, 0], y).sqrt(),
    "sum_over_root": lambda told, y: F.mse_loss(told[:, 0], y, reduction="sum") / len(y) ** 0.5,
}


def _listed(name: str, loss: Loss, classes: bool) -> None:
    def build() -> Built:
        module = Lossy(lambda m, x, y: loss(m.net(x), y), net=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)))
        return Built(module, (torch.randn(8, 5), labels(CLASSES, 8) if classes else torch.randn(8)))

    KINDS[f"loss_{name}"] = Kind(build)


for _name, _loss in OF_CLASSES.items():
    _listed(_name, _loss, classes=True)
for _name, _loss in OF_NUMBERS.items():
    _listed(_name, _loss, classes=False)


@kind(refused="bincount")
def loss_counted_by_bincount() -> Built:
    """``bincount`` makes as many numbers as the data say, which no program of fixed sizes has."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        often = torch.bincount(y, minlength=CLASSES).to(x.dtype)
        return F.cross_entropy(m.net(x), y, weight=len(y) / (CLASSES * often.clamp(min=1)))

    return Built(Lossy(run, net=nn.Linear(5, CLASSES)), (torch.randn(8, 5), labels(CLASSES, 8)))


@kind()
def several_tasks() -> Built:
    """Two losses weighed by learned uncertainties, and a penalty on the weights."""

    def run(m: Lossy, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        h = torch.relu(m.trunk(x))
        first, second = F.cross_entropy(m.first(h), y), F.mse_loss(m.second(h).squeeze(-1), z)
        penalty = sum(p.pow(2).sum() for p in m.trunk.parameters())
        return (-m.logs[0]).exp() * first + 0.5 * (-m.logs[1]).exp() * second + m.logs.sum() + 1e-3 * penalty

    parts = {"trunk": nn.Linear(5, 6), "first": nn.Linear(6, 4), "second": nn.Linear(6, 1), "logs": weight(2)}
    return Built(Lossy(run, **parts), (torch.randn(8, 5), labels(4, 8), torch.randn(8)))


@kind()
def proximal_policy() -> Built:
    """PPO's clipped ratio, a value loss and entropy, with advantages standardised over the batch."""

    def run(m: Lossy, x: Tensor, action: Tensor, before: Tensor, gain: Tensor) -> Tensor:
        h = torch.tanh(m.trunk(x))
        told = m.policy(h).log_softmax(-1)
        value = m.value(h).squeeze(-1)
        advantage = (gain - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (told.gather(1, action[:, None]).squeeze(1) - before).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.mse_loss(value, gain) - clipped + 0.01 * (told.exp() * told).sum(-1).mean()

    parts = {"trunk": nn.Linear(5, 8), "policy": nn.Linear(8, 3), "value": nn.Linear(8, 1)}
    return Built(Lossy(run, **parts), (torch.randn(8, 5), labels(3, 8), -torch.rand(8) - 0.5, torch.randn(8)))
