"""Parts of a model chosen by the data: experts, memories, routes, exits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight

EXPERTS = 4


@kind()
def moe_top_2() -> Built:
    """Two experts a token, weights renormalised, with the balance loss and the router's z-loss."""

    def run(m: Lossy, ids: Tensor, y: Tensor) -> Tensor:
        x = m.words(ids).flatten(0, 1)
        logits = m.router(x)
        told = logits.softmax(-1)
        top, chosen = told.topk(2, -1)
        top = top / top.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            share = torch.where(chosen == e, top, 0.0).sum(-1, keepdim=True)
            out = out + share * expert(x)
        used = F.one_hot(chosen, EXPERTS).sum(1).to(x.dtype).mean(0)
        balance = EXPERTS * (used * told.mean(0)).sum()
        return F.cross_entropy(m.head(x + out), y.flatten()) + 0.01 * balance + 0.001 * logits.logsumexp(-1).pow(2).mean()

    experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(EXPERTS))
    module = Lossy(run, words=nn.Embedding(9, 6), router=nn.Linear(6, EXPERTS, bias=False), experts=experts, head=nn.Linear(6, 9))
    return Built(module, (labels(9, 4, 5), labels(9, 4, 5)))


@kind()
def moe_with_capacity() -> Built:
    """A switch layer: one expert a token, tokens beyond its capacity dropped, dispatched by products of one-hot masks."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        told = m.router(x).softmax(-1)
        gate, chosen = told.max(-1)
        hot = F.one_hot(chosen, EXPERTS)
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        sent = (hot.to(x.dtype)[..., None] * F.one_hot(place.clamp(max=3), 4).to(x.dtype)[:, None]) * (place < 4)[:, None, None]
        inside = torch.einsum("tec,ti->eci", sent, x)
        made = torch.einsum("eco,eoi->eci", F.relu(torch.einsum("eci,eio->eco", inside, m.up)), m.down)
        out = torch.einsum("tec,eci->ti", sent * gate[:, None, None], made)
        return F.mse_loss(x + out, y) + 0.01 * EXPERTS * (hot.to(x.dtype).mean(0) * told.mean(0)).sum()

    parts = {"router": nn.Linear(5, EXPERTS), "up": weight(EXPERTS, 5, 7), "down": weight(EXPERTS, 7, 5)}
    return Built(Lossy(run, **parts), (torch.randn(12, 5), torch.randn(12, 5)))


@kind()
def product_keys() -> Built:
    """A memory of which each query reads the best slots of two halves' keys."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        a, b = m.query(x).chunk(2, -1)
        (s, i), (t, j) = (a @ m.left.t()).topk(2, -1), (b @ m.right.t()).topk(2, -1)
        score = (s[:, :, None] + t[:, None]).flatten(1)
        slot = (i[:, :, None] * 5 + j[:, None]).flatten(1)
        best, where = score.topk(3, -1)
        values = m.memory(slot.gather(1, where))
        return F.mse_loss((best.softmax(-1)[..., None] * values).sum(1), y)

    module = Lossy(run, query=nn.Linear(6, 8), left=weight(5, 4), right=weight(5, 4), memory=nn.Embedding(25, 3))
    return Built(module, (torch.randn(8, 6), torch.randn(8, 3)))


@kind()
def capsules() -> Built:
    """Three rounds of routing by agreement."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        votes = torch.einsum("bni,nkio->bnko", x, m.weight)
        logits = torch.zeros(votes.shape[:3]).to(x.dtype)
        for step in range(3):
            out = (logits.softmax(2)[..., None] * votes).sum(1)
            size = out.pow(2).sum(-1, keepdim=True)
            out = size / (1 + size) * out / (size + 1e-8).sqrt()
            if step < 2:
                logits = logits + (votes.detach() * out[:, None].detach()).sum(-1)
        length = (out.pow(2).sum(-1) + 1e-8).sqrt()
        wanted = F.one_hot(y, 3).to(x.dtype)
        return (wanted * F.relu(0.9 - length).pow(2) + 0.5 * (1 - wanted) * F.relu(length - 0.1).pow(2)).sum(-1).mean()

    return Built(Lossy(run, weight=weight(4, 3, 5, 6)), (torch.randn(6, 4, 5), labels(3, 6)))


@kind()
def early_exits() -> Built:
    """A classifier behind each layer; the halting probabilities weigh their losses (PonderNet)."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        left, total = x.new_ones(len(x)), 0.0
        for layer, exit, halt in zip(m.layers, m.exits, m.halts, strict=True):
            x = torch.tanh(layer(x))
            stop = left * halt(x).squeeze(-1).sigmoid()
            total = total + (stop * F.cross_entropy(exit(x), y, reduction="none")).mean()
            left = left - stop
        return total + left.mean()

    layers, exits, halts = (nn.ModuleList(nn.Linear(6, out) for _ in range(3)) for out in (6, 4, 1))
    return Built(Lossy(run, layers=layers, exits=exits, halts=halts), (torch.randn(8, 6), labels(4, 8)))


@kind()
def made_weights() -> Built:
    """A hypernetwork makes each sample's own layer; FiLM scales and shifts another."""

    def run(m: Lossy, x: Tensor, task: Tensor, y: Tensor) -> Tensor:
        made = m.hyper(m.tasks(task)).view(len(x), 5, 4)
        scale, shift = m.film(m.tasks(task)).chunk(2, -1)
        h = torch.bmm(x[:, None], made).squeeze(1) * (1 + scale) + shift
        return F.mse_loss(m.head(torch.relu(h)), y)

    module = Lossy(run, tasks=nn.Embedding(3, 4), hyper=nn.Linear(4, 20), film=nn.Linear(4, 8), head=nn.Linear(4, 2))
    return Built(module, (torch.randn(8, 5), labels(3, 8), torch.randn(8, 2)))


@kind()
def low_rank_adapters() -> Built:
    """LoRA beside frozen weights; DoRA's magnitudes."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(m.base(x) + 2.0 * F.linear(F.linear(x, m.down), m.up))
        full = m.head.weight + m.head_up @ m.head_down
        return F.cross_entropy(F.linear(h, m.magnitude[:, None] * F.normalize(full, dim=1), m.head.bias), y)

    base, head = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 4).requires_grad_(False)
    small = {"down": weight(2, 6), "up": weight(8, 2), "head_up": weight(4, 2), "head_down": weight(2, 8), "magnitude": weight(4)}
    return Built(Lossy(run, base=base, head=head, **small), (torch.randn(8, 6), labels(4, 8)))
