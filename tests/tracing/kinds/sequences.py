"""Sequences: ragged, packed, aligned, scanned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels


@kind()
def ragged_tokens() -> Built:
    """Samples have very unequal numbers of counted tokens; the mean is over all of them."""

    def run(m: Lossy, ids: Tensor, y: Tensor) -> Tensor:
        told = m.head(torch.tanh(m.mix(m.words(ids))))[:, :-1]
        return F.cross_entropy(told.flatten(0, 1), y[:, 1:].flatten(), ignore_index=-100, label_smoothing=0.1)

    y = labels(11, 8, 9)
    for row, kept in enumerate([9, 1, 2, 3, 9, 2, 2, 5]):
        y[row, kept:] = -100
    parts = {"words": nn.Embedding(11, 6), "mix": nn.Linear(6, 8), "head": nn.Linear(8, 11)}
    return Built(Lossy(run, **parts), (labels(11, 8, 9), y))


class Aligned(nn.Module):
    """A recurrent recogniser of speech; lengths as numbers, or as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor, frames: Tensor | list[int], letters: Tensor | list[int]) -> Tensor:
        told = self.head(self.net(x)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(told, y, frames, letters, zero_infinity=True)


FRAMES, LETTERS = [10, 8, 9, 10], [3, 2, 1, 3]


@kind(refused="_ctc_loss")
def ctc() -> Built:
    """Connectionist temporal classification of padded targets, whose alignments torch.export gives no size."""
    return Built(Aligned(), (torch.randn(4, 10, 5), torch.randint(1, 6, (4, 3)), FRAMES, LETTERS))


@kind(refused="_ctc_loss")
def ctc_of_given_lengths() -> Built:
    """The same with lengths as tensors."""
    return Built(Aligned(), (torch.randn(4, 10, 5), torch.randint(1, 6, (4, 3)), torch.tensor(FRAMES), torch.tensor(LETTERS)))


@kind()
def chunked_scan() -> Built:
    """A linear recurrence by cumulated sums of logarithms, in chunks (Mamba 2's form)."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        batch, length, _ = x.shape
        decay = F.logsigmoid(m.decay(x)).view(batch, length // 4, 4)
        total = decay.cumsum(-1)
        apart = (total[..., :, None] - total[..., None, :]).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), float("-inf"))
        value = m.value(x).view(batch, length // 4, 4, -1)
        inside = apart.exp() @ value
        ends = ((total[..., -1:] - total).exp()[..., None] * value).sum(2)
        carried = F.pad(ends.cumsum(1), (0, 0, 1, -1))
        return F.mse_loss((inside + total.exp()[..., None] * carried[:, :, None]).reshape(batch, length, -1), y)

    return Built(Lossy(run, decay=nn.Linear(5, 1), value=nn.Linear(5, 3)), (torch.randn(4, 8, 5), torch.randn(4, 8, 3)))
