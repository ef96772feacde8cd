"""Parts of a model chosen by the data: experts, memories, routes, exits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels

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
