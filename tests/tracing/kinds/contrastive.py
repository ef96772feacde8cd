"""Losses that compare the samples of a batch with each other, and models with two or more towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind()
def in_batch_negatives() -> Built:
    """CLIP's symmetric loss with a learned temperature: each sample's negatives are the batch's others."""

    def run(m: Lossy, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(m.left(a), dim=-1), F.normalize(m.right(b), dim=-1)
        logits = left @ right.t() * m.scale.exp()
        own = torch.arange(len(a))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2

    parts = {"left": nn.Linear(6, 8), "right": nn.Linear(5, 8), "scale": nn.Parameter(torch.tensor(0.7))}
    return Built(Lossy(run, **parts), (torch.randn(8, 6), torch.randn(8, 5)))


@kind()
def hardest_triplets() -> Built:
    """The furthest sample of the same class and the nearest of another, found in the batch."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        z = m.net(x)
        distance = (z[:, None] - z[None]).pow(2).sum(-1)
        same = y[:, None] == y[None]
        furthest = distance.masked_fill(~same, -1.0).amax(1)
        nearest = distance.masked_fill(same, 1e6).amin(1)
        return F.relu(furthest - nearest + 0.5).mean()

    return Built(Lossy(run, net=nn.Linear(5, 4)), (torch.randn(8, 5), torch.arange(8) % 3))


@kind()
def distillation() -> Built:
    """A student follows a frozen teacher's softened outputs, and the labels."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (m.teacher(x) / 2).softmax(-1)
        told = m.student(x)
        return F.kl_div((told / 2).log_softmax(-1), soft, reduction="batchmean") * 4 + F.cross_entropy(told, y)

    teacher = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)).requires_grad_(False)
    return Built(Lossy(run, teacher=teacher, student=nn.Linear(6, 5)), (torch.randn(8, 6), labels(5, 8)))


@kind()
def redundancy() -> Built:
    """Barlow Twins: the correlation matrix of two views, standardised over the batch, is to be the identity."""

    def run(m: Lossy, a: Tensor, b: Tensor) -> Tensor:
        first, second = ((z - z.mean(0)) / z.std(0) for z in (m.net(a), m.net(b)))
        matrix = first.t() @ second / len(a)
        on = (matrix.diagonal() - 1).pow(2).sum()
        return on + 0.1 * (matrix - torch.diag_embed(matrix.diagonal())).pow(2).sum()

    return Built(Lossy(run, net=nn.Linear(5, 4)), (torch.randn(8, 5), torch.randn(8, 5)))


@kind()
def pairwise_ranking() -> Built:
    """All pairs of documents of a query, by how relevant they are (RankNet, LambdaLoss's gain)."""

    def run(m: Lossy, x: Tensor, gain: Tensor) -> Tensor:
        score = m.net(x).squeeze(-1)
        apart = score[:, :, None] - score[:, None]
        better = (gain[:, :, None] > gain[:, None]).to(score.dtype)
        return (F.softplus(-apart) * better).sum() / better.sum().clamp(min=1)

    return Built(Lossy(run, net=nn.Linear(5, 1)), (torch.randn(6, 4, 5), labels(3, 6, 4)))
