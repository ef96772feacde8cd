"""Graphs and sets: messages along edges, segments, points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight

NODES, EDGES = 7, 15


def _edges() -> tuple[Tensor, Tensor]:
    return labels(NODES, EDGES), labels(NODES, EDGES)


@kind()
def gnn() -> Built:
    """Graph convolutions, normalised by degrees that are counted in the forward pass."""

    def run(m: Lossy, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        for layer in m.layers:
            sent = layer(x)[source] / degree[source, None].sqrt()
            x = torch.relu(torch.zeros(len(x), sent.shape[1]).index_add(0, target, sent) / degree[:, None].sqrt() + x)
        return F.cross_entropy(m.head(x), y)

    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    return Built(Lossy(run, layers=layers, head=nn.Linear(5, 3)), (torch.randn(NODES, 5), *_edges(), labels(3, NODES)))


@kind()
def graph_attention() -> Built:
    """A softmax over each node's incoming edges, by scattered maxima and sums."""

    def run(m: Lossy, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        h = m.value(x)
        score = F.leaky_relu((h[source] * m.left).sum(-1) + (h[target] * m.right).sum(-1), 0.2)
        top = torch.full((len(x),), float("-inf")).to(score.dtype).scatter_reduce(0, target, score.detach(), "amax")
        part = (score - top[target]).exp()
        whole = torch.zeros_like(top).scatter_add(0, target, part)
        sent = h[source] * (part / whole[target])[:, None]
        return F.mse_loss(torch.zeros_like(h).index_add(0, target, sent), y)

    parts = {"value": nn.Linear(5, 4), "left": weight(4), "right": weight(4)}
    return Built(Lossy(run, **parts), (torch.randn(NODES, 5), *_edges(), torch.randn(NODES, 4)))


@kind()
def points() -> Built:
    """PointNet: shared layers, a maximum over points, nearest neighbours by distance."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(3, largest=False).indices
        around = torch.gather(x[:, None].expand(-1, x.shape[1], -1, -1), 2, near[..., None].expand(-1, -1, -1, 3))
        h = m.edge(torch.cat([x[:, :, None].expand_as(around), around - x[:, :, None]], -1)).amax(2)
        return F.cross_entropy(m.head(h.amax(1)), y)

    return Built(Lossy(run, edge=nn.Sequential(nn.Linear(6, 8), nn.ReLU()), head=nn.Linear(8, 4)), (torch.randn(5, 6, 3), labels(4, 5)))


@kind()
def knowledge_graph() -> Built:
    """Triples against random others, given as an input (ComplEx written with real halves)."""

    def score(m: Lossy, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        (a, b), (c, d), (e, f) = m.entities(head).chunk(2, -1), m.relations(relation).chunk(2, -1), m.entities(tail).chunk(2, -1)
        return (a * c * e + b * c * f + a * d * f - b * d * e).sum(-1)

    def run(m: Lossy, head: Tensor, relation: Tensor, tail: Tensor, other: Tensor) -> Tensor:
        own = F.softplus(-score(m, head, relation, tail)).mean()
        return own + F.softplus(score(m, head[:, None], relation[:, None], other)).mean()

    module = Lossy(run, entities=nn.Embedding(9, 6), relations=nn.Embedding(3, 6))
    return Built(module, (labels(9, 8), labels(3, 8), labels(9, 8), labels(9, 8, 4)))
