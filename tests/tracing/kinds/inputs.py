"""Batches as data loaders give them: nested, named, partly absent, ragged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind()
def nested_inputs() -> Built:
    """Dictionaries of lists of tuples, a number and an absent part among them."""

    def run(m: Lossy, batch: dict[str, Any], *, scale: float, extra: Tensor | None = None) -> Tensor:
        (left, right), places = batch["images"], batch["places"]
        h = m.net(left) + m.net(right) * scale + m.place(places[0]["x"]) - m.place(places[1]["x"])
        return F.cross_entropy(h if extra is None else h + extra, batch["labels"])

    batch = {
        "images": (torch.randn(6, 5), torch.randn(6, 5)),
        "places": [{"x": torch.randn(6, 2)}, {"x": torch.randn(6, 2)}],
        "labels": labels(4, 6),
    }
    return Built(Lossy(run, net=nn.Linear(5, 4), place=nn.Linear(2, 4)), (batch,), {"scale": 0.5, "extra": None})


class Pair(NamedTuple):
    """A batch as many loaders yield it."""

    x: Tensor
    y: Tensor


@dataclass
class Record:
    """Another."""

    pair: Pair
    weight: Tensor


@kind()
def named_tuples() -> Built:
    """A named tuple."""
    module = Lossy(lambda m, batch: F.cross_entropy(m.net(batch.x), batch.y), net=nn.Linear(5, 4))
    return Built(module, (Pair(torch.randn(6, 5), labels(4, 6)),))


@kind()
def data_classes() -> Built:
    """A data class that holds a named tuple."""

    def run(m: Lossy, batch: Record) -> Tensor:
        return (F.cross_entropy(m.net(batch.pair.x), batch.pair.y, reduction="none") * batch.weight).mean()

    return Built(Lossy(run, net=nn.Linear(5, 4)), (Record(Pair(torch.randn(6, 5), labels(4, 6)), torch.rand(6)),))


@kind()
def by_keyword() -> Built:
    """All inputs by keyword, and a loss outside of the module that reads one of several outputs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 4)

        def forward(self, *, x: Tensor, mask: Tensor, y: Tensor) -> dict[str, Tensor]:
            told = self.net(x)
            return {"told": told, "loss": (F.cross_entropy(told, y, reduction="none") * mask).sum() / mask.sum()}

    inputs = {"x": torch.randn(6, 5), "mask": (torch.rand(6) < 0.7).float(), "y": labels(4, 6)}
    return Built(Net(), (), inputs, lambda output: output["loss"])


@kind()
def bags() -> Built:
    """Pooled look-ups: mean, maximum, and a weighted sum of ragged bags by offsets, one of them empty."""

    def run(m: Lossy, ids: Tensor, flat: Tensor, offsets: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        pooled = [m.mean(ids), m.sum(flat, offsets, per_sample_weights=weights), m.max(ids)]
        return F.mse_loss(m.out(torch.cat(pooled, 1)).squeeze(1), y)

    tables = {mode: nn.EmbeddingBag(12, 4, mode=mode, include_last_offset=mode == "sum") for mode in ("mean", "sum", "max")}
    offsets = torch.tensor([0, 3, 3, 4, 9, 12, 20])
    args = (labels(12, 6, 4), labels(12, 20), offsets, torch.rand(20), torch.randn(6))
    return Built(Lossy(run, **tables, out=nn.Linear(12, 1)), args)


@kind()
def mixed_samples() -> Built:
    """Mixup: samples are mixed with others of the batch, whose order is an input."""

    def run(m: Lossy, x: Tensor, y: Tensor, order: Tensor, share: Tensor) -> Tensor:
        told = m.net(share[:, None] * x + (1 - share[:, None]) * x[order])
        both = [F.cross_entropy(told, one, reduction="none") for one in (y, y[order])]
        return (share * both[0] + (1 - share) * both[1]).mean()

    return Built(Lossy(run, net=nn.Linear(5, 4)), (torch.randn(8, 5), labels(4, 8), torch.randperm(8), torch.rand(8)))


@kind()
def kept_samples() -> Built:
    """Hard examples: the largest losses of a batch alone are trained on."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.net(x), y, reduction="none").topk(3).values.mean()

    return Built(Lossy(run, net=nn.Linear(5, 4)), (torch.randn(8, 5), labels(4, 8)))
