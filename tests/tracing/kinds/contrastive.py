"""Losses that compare the samples of a batch with each other, and models with two or more towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight


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
def two_views() -> Built:
    """SimCLR: both views through one encoder with batch norm, a sample's own similarity masked out."""

    def run(m: Lossy, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(m.encoder(torch.cat([a, b])), dim=1)
        similar = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(a)))

    encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return Built(Lossy(run, encoder=encoder).train(), (torch.randn(6, 6), torch.randn(6, 6)))


@kind()
def two_tower() -> Built:
    """Retrieval: towers of tables, in-batch sampled softmax corrected by how often items are drawn."""

    def run(m: Lossy, user: Tensor, history: Tensor, item: Tensor, often: Tensor) -> Tensor:
        query = m.up(torch.cat([m.users(user), m.items(history).mean(1)], 1))
        logits = query @ m.items(item).t() - often.log()
        hits = item[:, None] == item[None, :]
        logits = logits.masked_fill(hits & ~torch.eye(len(item), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(item)))

    parts = {"users": nn.Embedding(12, 4), "items": nn.Embedding(10, 6), "up": nn.Linear(10, 6)}
    args = (labels(12, 8), labels(10, 8, 3), labels(10, 8), torch.rand(8) + 0.1)
    return Built(Lossy(run, **parts), args)


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
def preferences() -> Built:
    """DPO: chosen and rejected answers under a policy and a frozen copy of it."""

    def score(net: nn.Module, ids: Tensor) -> Tensor:
        told = net(ids[:, :-1]).log_softmax(-1)
        return told.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    def run(m: Lossy, chosen: Tensor, rejected: Tensor) -> Tensor:
        with torch.no_grad():
            before = score(m.before, chosen) - score(m.before, rejected)
        return -F.logsigmoid(0.3 * (score(m.policy, chosen) - score(m.policy, rejected) - before)).mean()

    policy, before = (nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)) for _ in range(2))
    return Built(Lossy(run, policy=policy, before=before.requires_grad_(False)), (labels(9, 6, 5), labels(9, 6, 5)))


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


@kind()
def attention_pooling_of_bags() -> Built:
    """Multiple instances: attention over a bag's padded members."""

    def run(m: Lossy, x: Tensor, count: Tensor, y: Tensor) -> Tensor:
        there = torch.arange(x.shape[1]) < count[:, None]
        wanted = (torch.tanh(m.key(x)) @ m.query).masked_fill(~there, float("-inf")).softmax(-1)
        return F.binary_cross_entropy_with_logits(m.head((wanted[..., None] * x).sum(1)).squeeze(-1), y)

    parts = {"key": nn.Linear(5, 6), "query": weight(6), "head": nn.Linear(5, 1)}
    return Built(Lossy(run, **parts), (torch.randn(6, 4, 5), torch.tensor([4, 1, 2, 3, 4, 2]), torch.rand(6).round()))
