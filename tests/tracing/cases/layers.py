"""Attention, recurrent layers, normalisation, and what needs some dimensions whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.cases.probe import case, floats

aten = torch.ops.aten


def _attention() -> None:
    q, sdpa = (2, 4, 5, 3), F.scaled_dot_product_attention
    case("attention", sdpa, q, (2, 4, 6, 3), (2, 4, 6, 2))
    case("attention, 3-d", sdpa, (4, 5, 3), (4, 6, 3), (4, 6, 3))
    case("attention, 2-d", sdpa, (5, 3), (6, 3), (6, 3))
    case("attention, causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), q, q, q)
    case("attention, causal, 3-d", lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3), (4, 5, 3), (4, 5, 3), (4, 5, 3))
    case("attention, causal, more keys", lambda q, k, v: sdpa(q, k, v, is_causal=True), q, (2, 4, 7, 3), (2, 4, 7, 3))
    for shape in ((5, 6), (2, 1, 5, 6), (2, 4, 5, 6), (1, 4, 1, 6), (2, 1, 1, 6)):
        mask = floats(*shape) > 0.3
        mask[..., 0] = True
        case(f"attention, mask {list(shape)}", lambda q, k, v, m: sdpa(q, k, v, m), q, (2, 4, 6, 3), (2, 4, 6, 3), extra=(mask,))
    case("attention, added mask", lambda q, k, v, m: sdpa(q, k, v, m), q, (2, 4, 6, 3), (2, 4, 6, 3), (2, 4, 5, 6))
    case("attention, grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, (2, 2, 6, 3), (2, 2, 6, 3))
    case(
        "attention, grouped, causal",
        lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        (2, 6, 5, 3),
        (2, 3, 5, 3),
        (2, 3, 5, 3),
    )
    case("attention, dropout", lambda q, k, v: sdpa(q, k, v, dropout_p=0.4), q, (2, 4, 6, 3), (2, 4, 6, 3), random=True)
    case("attention, dropout, causal", lambda q, k, v: sdpa(q, k, v, dropout_p=0.4, is_causal=True), q, q, q, random=True)
    dropped = lambda q, k, v, m: sdpa(q, k, v, m, dropout_p=0.4, enable_gqa=True)  # noqa: E731
    case("attention, dropout, mask, grouped", dropped, q, (2, 2, 6, 3), (2, 2, 6, 3), extra=(floats(5, 6) > 0.5,), random=True)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = kind(3, 4, **options).double()

    def forward(self, x: Tensor) -> Any:
        out, state = self.inner(x.cumsum(-1) * 0.5)
        return [out, *(state if isinstance(state, tuple) else (state,))]


class _Cell(nn.Module):
    """Three steps, unrolled."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = kind(3, 4, **options).double()

    def forward(self, x: Tensor) -> Any:
        state: Any = None
        for step in (x.cumsum(-1) * 0.5)[:3]:
            state = self.inner(step, state)
        return state if isinstance(state, tuple) else (state,)


def _norms() -> None:
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (3, 4, 6), weights=((6,), (6,)))
    case("layer_norm, two dimensions", lambda x, w: F.layer_norm(x, (4, 6), w), (3, 4, 6), weights=((4, 6),))
    case("layer_norm, plain", lambda x: F.layer_norm(x, (6,)), (3, 4, 6))
    case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (3, 4, 6), weights=((6,),))
    case("rms_norm, in pieces", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, (3, 4, 6), weights=((6,),))
    case("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), (3, 6, 5), weights=((6,), (6,)))
    case("group_norm, 2-d", lambda x: F.group_norm(x, 2), (3, 6, 2, 2))
    case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (3, 4, 5, 2), weights=((4,), (4,)))
    running = (floats(4), floats(4, seed=9) + 0.5)
    case("batch_norm, inference", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), (3, 4, 5), weights=((4,), (4,)), extra=running)
    case("batch_norm, inference, vectors", lambda x, m, v: F.batch_norm(x, m, v), (3, 4), extra=running)
    train = lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)  # noqa: E731
    for shape in ((5, 4), (3, 4, 5), (3, 4, 5, 2), (2, 3, 4, 2, 3)):
        case(f"batch_norm, training {list(shape)}", train, shape, weights=((shape[1],), (shape[1],)))
    case("batch_norm, training, plain", lambda x: F.batch_norm(x, None, None, training=True), (3, 4, 5))
    for dim in (0, 1, -1):
        case(f"softmax {dim}", lambda x, d=dim: F.softmax(x, d), (3, 4, 5))
        case(f"log_softmax {dim}", lambda x, d=dim: F.log_softmax(x, d), (3, 4, 5))
        case(f"cumsum {dim}", lambda x, d=dim: x.cumsum(d), (3, 4, 5))
    case("softmax, cast", lambda x: F.softmax(x, -1, dtype=torch.float64), (3, 4))
    case("_softmax", lambda x: aten._softmax.default(x, 1, False), (3, 4))
    case("_log_softmax", lambda x: aten._log_softmax.default(x, 1, False), (3, 4))
    case("cummax", lambda x: x.cummax(1), (3, 4))
    case("native_layer_norm", lambda x, w, b: torch.native_layer_norm(x, (4,), w, b, 1e-5)[0], (5, 4), weights=((4,), (4,)))
    case("native_group_norm", lambda x, w, b: torch.native_group_norm(x, w, b, 2, 4, 9, 2, 1e-5)[0], (2, 4, 3, 3), weights=((4,), (4,)))
    case("_weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (5, 4), (5, 1))
    case("linalg_cross", torch.linalg.cross, (5, 3), (5, 3))
    case("cumprod", lambda x: x.cumprod(1), (3, 4))
    case("logcumsumexp", lambda x: x.logcumsumexp(0), (3, 4))
    case("sort", lambda x: x.sort(1), (3, 4))
    case("argsort", lambda x: [x, x.argsort(0)], (3, 4))
    case("topk", lambda x: x.topk(2), (3, 4))
    case("topk, first dimension", lambda x: x.topk(2, 0)[0], (5, 4))
    case("glu", F.glu, (3, 6))
    case("glu, dimension", lambda x: F.glu(x, 1), (3, 4, 5))
    case("flip", lambda x: x.flip(1), (3, 4, 5))
    case("roll", lambda x: x.roll(2, 1), (3, 4, 5))
    case("roll, all", lambda x: x.roll(2), (3, 4))


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: _Recurrent(nn.LSTM),
    "lstm, batch first, two ways, two layers": lambda: _Recurrent(nn.LSTM, batch_first=True, bidirectional=True, num_layers=2),
    "lstm, projection": lambda: _Recurrent(nn.LSTM, proj_size=2, bias=False),
    "lstm, dropout": lambda: _Recurrent(nn.LSTM, num_layers=2, dropout=0.5),
    "gru": lambda: _Recurrent(nn.GRU, bidirectional=True),
    "gru, batch first": lambda: _Recurrent(nn.GRU, batch_first=True, num_layers=2),
    "lstm, dropout, batch first, two ways": lambda: _Recurrent(nn.LSTM, num_layers=3, dropout=0.5, batch_first=True, bidirectional=True),
    "gru, dropout": lambda: _Recurrent(nn.GRU, num_layers=2, dropout=0.5),
    "lstm cell": lambda: _Cell(nn.LSTMCell),
    "gru cell": lambda: _Cell(nn.GRUCell),
    "rnn cell": lambda: _Cell(nn.RNNCell),
    "rnn cell, relu": lambda: _Cell(nn.RNNCell, nonlinearity="relu"),
    "rnn": lambda: _Recurrent(nn.RNN),
    "rnn, relu": lambda: _Recurrent(nn.RNN, nonlinearity="relu", batch_first=True),
}


_attention()
_norms()
