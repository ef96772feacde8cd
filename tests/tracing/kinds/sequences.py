"""Sequences: ragged, packed, aligned, scanned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight


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


@kind()
def packed_documents() -> Built:
    """Several documents in a row: attention within each alone, positions begin anew, the last token of each predicts nothing."""

    def run(m: Lossy, ids: Tensor, document: Tensor) -> Tensor:
        n = ids.shape[1]
        first = document != F.pad(document, (1, -1), value=-1)
        place = torch.arange(n) - torch.where(first, torch.arange(n), 0).cummax(1).values
        x = m.words(ids) + m.places(place)
        q, k, v = m.qkv(x)[:, None].chunk(3, -1)
        seen = (document[:, :, None] == document[:, None]) & torch.ones(n, n, dtype=torch.bool).tril()
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])[:, 0]
        y = torch.where(document[:, 1:] == document[:, :-1], ids[:, 1:], -100)
        return F.cross_entropy(m.head(x)[:, :-1].transpose(1, 2), y)

    parts = {"words": nn.Embedding(9, 6), "places": nn.Embedding(8, 6), "qkv": nn.Linear(6, 18), "head": nn.Linear(6, 9)}
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2, 3, 3], [0] * 8, [0, 0, 0, 0, 0, 0, 0, 1]])
    return Built(Lossy(run, **parts), (labels(9, 4, 8), document))


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
def ssm() -> Built:
    """A selective state space (Mamba's recurrence), step by step."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        step = F.softplus(m.step(x))
        decay = torch.exp(step[..., None] * -m.rates.exp())
        drive = step[..., None] * m.into(x)[:, :, None] * x[..., None]
        state, told = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            told.append((state * m.out(x[:, t])[:, None]).sum(-1))
        return F.mse_loss(m.head(torch.stack(told, 1) * F.silu(m.gate(x))), y)

    parts = {"step": nn.Linear(6, 6), "into": nn.Linear(6, 3), "out": nn.Linear(6, 3), "gate": nn.Linear(6, 6), "head": nn.Linear(6, 2)}
    return Built(Lossy(run, rates=weight(6, 3), **parts), (torch.randn(4, 7, 6), torch.randn(4, 7, 2)))


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


@kind()
def linear_attention() -> Built:
    """Causal attention without softmax, by cumulated outer products."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bti,btj->btij", k, v).cumsum(1)
        told = torch.einsum("bti,btij->btj", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        return F.mse_loss(told, y)

    return Built(Lossy(run, qkv=nn.Linear(5, 12)), (torch.randn(4, 6, 5), torch.randn(4, 6, 4)))


@kind()
def crf() -> Built:
    """A linear-chain conditional random field over padded tags."""

    def run(m: Lossy, ids: Tensor, tags: Tensor, there: Tensor) -> Tensor:
        told, counted = m.head(m.net(m.words(ids))[0]), there.to(m.moves.dtype)
        own = told.gather(-1, tags[..., None]).squeeze(-1) * counted
        moved = m.moves[tags[:, :-1], tags[:, 1:]] * counted[:, 1:]
        total = told[:, 0]
        for t in range(1, ids.shape[1]):
            after = torch.logsumexp(total[:, :, None] + m.moves, 1) + told[:, t]
            total = torch.where(there[:, t, None], after, total)
        return (total.logsumexp(-1) - own.sum(1) - moved.sum(1)).mean()

    parts = {"words": nn.Embedding(9, 5), "net": nn.LSTM(5, 4, batch_first=True, bidirectional=True), "head": nn.Linear(8, 4)}
    there = torch.arange(6) < torch.tensor([6, 2, 4, 5])[:, None]
    return Built(Lossy(run, moves=weight(4, 4), **parts), (labels(9, 4, 6), labels(4, 4, 6), there))


@kind()
def spans() -> Built:
    """Question answering: a start and an end per passage."""

    def run(m: Lossy, ids: Tensor, start: Tensor, end: Tensor) -> Tensor:
        told = m.head(m.net(m.words(ids)))
        return (F.cross_entropy(told[..., 0], start) + F.cross_entropy(told[..., 1], end)) / 2

    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Built(Lossy(run, words=nn.Embedding(9, 8), net=net, head=nn.Linear(8, 2)), (labels(9, 4, 6), labels(6, 4), labels(6, 4)))


@kind()
def dilated_causal() -> Built:
    """WaveNet: gated causal convolutions of growing dilation, skips added."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        h, skipped = m.first(x), 0
        for i, (gate, out) in enumerate(zip(m.gates, m.outs, strict=True)):
            a, b = gate(F.pad(h, (2**i, 0))).chunk(2, 1)
            z = out(torch.tanh(a) * torch.sigmoid(b))
            h, skipped = h + z, skipped + z
        return F.cross_entropy(m.head(F.relu(skipped)), y)

    gates = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(3))
    outs = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
    module = Lossy(run, first=nn.Conv1d(1, 4, 1), gates=gates, outs=outs, head=nn.Conv1d(4, 5, 1))
    return Built(module, (torch.randn(4, 1, 9), labels(5, 4, 9)))


@kind()
def several_tokens_ahead() -> Built:
    """Heads that predict one, two, three tokens ahead through one tied table."""

    def run(m: Lossy, ids: Tensor) -> Tensor:
        h = m.net(m.words(ids))[0]
        told = [F.linear(head(h[:, : -1 - k]), m.words.weight) for k, head in enumerate(m.heads)]
        return sum(F.cross_entropy(t.transpose(1, 2), ids[:, 1 + k :]) for k, t in enumerate(told)) / len(told)

    heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    return Built(Lossy(run, words=nn.Embedding(11, 6), net=nn.GRU(6, 6, batch_first=True), heads=heads), (labels(11, 6, 8),))
