"""Normalisation, attention, recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

from soap.tracing.rules.attention import in_band, scaled_dot_product_attention
from soap.tracing.rules.norm import batch_norm_apply, batch_norm_local, batch_norm_statistics
from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 4)
    inner = [max(2, n) for n in shape[-d.some(1, min(2, len(shape))) :]]
    shape = (*shape[: len(shape) - len(inner)], *inner)
    weight = d.floats(*inner) if d.yes() else None
    if name == "aten.rms_norm":
        return call(name, d.floats(*shape), inner, weight, 1e-6)
    return call(name, d.floats(*shape), inner, weight, d.floats(*inner) if d.yes() else None, 1e-5)


@draws("group_norm", "native_group_norm")
def group_norm(d: Draw, name: str) -> Drawn:
    groups, b, space = d.size(), d.size(), [max(2, n) for n in d.shape(1, 2)]
    c = groups * d.some(1, 2)
    affine = (d.floats(c), d.floats(c)) if d.yes() else (None, None)
    x = d.floats(b, c, *space)
    if name == "aten.group_norm":
        return call(name, x, groups, *affine)
    return call(name, x, *affine, b, c, x[0, 0].numel(), groups, 1e-5)


@draws("instance_norm", "batch_norm")
def channel_norm(d: Draw, name: str) -> Drawn:
    b, c = d.size(), d.size()
    affine = (d.floats(c), d.floats(c)) if d.yes() else (None, None)
    if name == "aten.instance_norm":
        return call(name, d.floats(b, c, *d.some((3,), (2, 3))), *affine, None, None, True, 0.1, 1e-5, False)
    running = (d.floats(c), d.positive(c))
    return call(name, d.floats(b, c, *d.shape(0, 2)), *affine, *running, False, 0.1, 1e-5, False, fixed=running)


@draws("soap.batch_norm_statistics")
def statistics(d: Draw, name: str) -> Drawn:
    return Drawn(batch_norm_statistics, (d.floats(d.size(), d.size(), *d.shape(0, 3)),))


@draws("soap.batch_norm_apply")
def apply(d: Draw, name: str) -> Drawn:
    b, c = d.size(3, 6), d.size()
    x, (scaled, shifted) = d.floats(b, c, *d.shape(0, 2)), (d.yes(), d.yes())
    affine = [d.floats(c) for present in (scaled, shifted) if present]
    options: dict[str, Any] = {"affine": (scaled, shifted), "count": x.numel() // c, "eps": 1e-5, "buffers": (None, None), "momentum": 0.1}

    def whole(x: torch.Tensor, sums: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        mean, rest = sums[0] / options["count"], iter(affine)
        weight, bias = (next(rest) if present else None for present in (scaled, shifted))
        return batch_norm_apply(x, mean, sums[1] / options["count"] - mean**2, weight, bias, 1e-5)

    return Drawn(batch_norm_apply, (x, batch_norm_statistics(x), *affine), options, whole=whole)


@draws("soap.batch_norm_local")
def local_norm(d: Draw, name: str) -> Drawn:
    """Each tile by its own statistics: only a split of the channels gives what the whole gives."""
    b, c = d.size(2), d.size(2)
    x, (scaled, shifted) = d.floats(b, c, *d.shape(0, 2)), (d.yes(), d.yes())
    affine = [d.floats(c) for present in (scaled, shifted) if present]
    options: dict[str, Any] = {"affine": (scaled, shifted), "eps": 1e-5, "buffers": (None, None), "momentum": 0.1}

    def whole(x: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        rest = iter(affine)
        weight, bias = (next(rest) if present else None for present in (scaled, shifted))
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)

    return Drawn(batch_norm_local, (x, *affine), options, whole=whole, kept=("b", "h", "w"))


@draws("_weight_norm")
def weight_norm(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 3)
    dim = d.some(0, len(shape) - 1)
    return call(name, d.floats(*shape), d.floats(*[n if i == dim else 1 for i, n in enumerate(shape)]), dim)


@draws("scaled_dot_product_attention")
def attention(d: Draw, name: str) -> Drawn:
    lead, rows, columns, k = d.shape(1, 2), d.size(), d.size(), d.size(2, 4)
    groups = d.some(1, 2) if len(lead) == 2 else 1
    causal = d.yes(0.4)
    columns = rows if causal and d.yes() else columns
    q = d.floats(*lead[:-1], lead[-1] * groups, rows, k)
    key, value = d.floats(*lead, columns, k), d.floats(*lead, columns, k if groups > 1 else d.size(2, 4))
    mask: Any = None
    if not causal and d.yes():
        shape = [1 if d.yes(0.3) else n for n in (*q.shape[:-1], columns)]
        mask = d.floats(*shape) if d.yes() else d.mask(*shape) | (torch.arange(shape[-1]) == 0)
    dropout = d.some(0.0, 0.0, 0.4)
    return call(name, q, key, value, mask, dropout, causal, scale=d.some(None, 0.3), enable_gqa=groups > 1, random=dropout > 0)


@draws("soap.scaled_dot_product_attention")
def attention_to_a_band(d: Draw, name: str) -> Drawn:
    lead, rows, k = d.shape(1, 2), d.size(), d.size(2, 4)
    groups = d.some(1, 2) if len(lead) == 2 else 1
    band = (d.some(None, 0, 1, 3), d.some(None, 0, 1))
    q = d.floats(*lead[:-1], lead[-1] * groups, rows, k)
    options = {"dropout_p": d.some(0.0, 0.0, 0.4), "scale": d.some(None, 0.3), "enable_gqa": groups > 1}

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, in_band(band, (0, rows), (0, rows)), **options)

    keyed = (d.floats(*lead, rows, k), d.floats(*lead, rows, k))
    random = options["dropout_p"] > 0
    return Drawn(scaled_dot_product_attention, (q, *keyed), {**options, "band": band}, whole=None if random else whole, random=random)


@draws("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(d: Draw, name: str) -> Drawn:
    gates = {"lstm.input": 4, "gru.input": 3}.get(name.removeprefix("aten."), 1)
    inner, hidden, layers, ways, biased, first = d.size(), d.size(), d.some(1, 2, 3), d.some(1, 2), d.yes(), d.yes()
    project = d.some(0, 2) if gates == 4 and hidden > 2 else 0
    b, steps, out = d.size(2, 5), d.size(2, 4), project or hidden
    parameters = []
    for layer in range(layers):
        for _ in range(ways):
            parameters += [d.floats(gates * hidden, out * ways if layer else inner), d.floats(gates * hidden, out)]
            parameters += [d.floats(gates * hidden), d.floats(gates * hidden)] if biased else []
            parameters += [d.floats(project, hidden)] if project else []
    state: Any = d.floats(layers * ways, b, out)
    state = [state, d.floats(layers * ways, b, hidden)] if gates == 4 else state
    dropout = d.some(0.0, 0.4)
    x = d.floats(*((b, steps) if first else (steps, b)), inner)
    return call(name, x, state, parameters, biased, layers, dropout, True, ways == 2, first, random=dropout > 0)


@draws("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(d: Draw, name: str) -> Drawn:
    gates = {"aten.lstm_cell": 4, "aten.gru_cell": 3}.get(name, 1)
    b, inner, hidden = d.size(), d.size(), d.size()
    state: Any = d.floats(b, hidden)
    state = [state, d.floats(b, hidden)] if gates == 4 else state
    biases = (d.floats(gates * hidden), d.floats(gates * hidden)) if d.yes() else ()
    return call(name, d.floats(b, inner), state, d.floats(gates * hidden, inner), d.floats(gates * hidden, hidden), *biases)
