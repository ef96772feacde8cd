"""Recurrent layers that ATen runs as one call."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE
from soap.tracing.calls import is_random
from soap.tracing.rules.notation import Local, Scope, Tiled, View, einsum, rule
from soap.tracing.rules.random import dropped, keep_mask


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(view: View) -> Tiled:
    """A whole stack over a whole sequence: samples are independent, everything else is tied together by the recurrence."""
    x = view.shapes[0]
    if len(x) != 3:
        raise NotImplementedError("unbatched sequence")
    batch_dim = 0 if view.get("batch_first") else 1
    scope = Scope()
    b = scope.factor("b", x[batch_dim])
    states = 2 if view.call.kind == "lstm" else 1
    sequence = (b, WHOLE, WHOLE) if batch_dim == 0 else (WHOLE, b, WHOLE)
    state = (WHOLE, b, WHOLE)
    parameters = view.shapes[1 + states :]
    operands = (sequence, *(state,) * states, *((WHOLE,) * len(p) for p in parameters))
    steps = x[1 - batch_dim] * x[batch_dim]
    flops = 2 * steps * sum(prod(p) for p in parameters if len(p) == 2)
    # Gates, cell states and layer outputs of every step stay for the backward pass: 2.1 to 2.3 times the gates' size for 64 to 1024
    # units on a CPU, more for fewer units.
    saved = 5 * view.itemsize * steps * sum(p[0] for p in parameters if len(p) == 2) // 2
    if view.call.kind == "lstm":
        saved = max(saved, _lstm_workspace_bytes(view, x[1 - batch_dim], x[batch_dim]))
    if batch_dim == 0:
        saved += 2 * view.itemsize * prod(view.output_shapes[0])  # input and output in the other order
    if is_random(view.call):  # dropout masks between layers, and the layers' outputs, which are kept one by one
        saved = 2 * saved + 6 * view.itemsize * prod(view.output_shapes[0]) * int(view.get("num_layers"))
    outputs = (sequence, *(state,) * states)
    run, drawn = None, 0
    if is_random(view.call):
        run, drawn = _layers, prod(view.output_shapes[0]) * (int(view.get("num_layers")) - 1)
    return Tiled(tuple(scope.factors), operands, outputs, run=run, flops=flops, saved_bytes=saved, drawn=drawn)


def _layers(local: Local) -> tuple[torch.Tensor, ...]:
    """Layer by layer, with dropout in between whose mask is the same for every tiling."""
    layers, batch_dim = int(local.get("num_layers")), 0 if local.get("batch_first") else 1
    x, hidden, parameters = local.tensors[0], local.get("hx"), local.get("params")
    ways, each = 2 if local.get("bidirectional") else 1, len(parameters) // layers
    states = list(hidden) if isinstance(hidden, (list, tuple)) else [hidden]
    kept: list[list[torch.Tensor]] = []
    for layer in range(layers):
        own = [state[layer * ways : (layer + 1) * ways] for state in states]
        hx = own if local.call.kind == "lstm" else own[0]
        some = parameters[layer * each : (layer + 1) * each]
        x, *new = local.call.target(
            x, hx, some, local.get("has_biases"), 1, 0.0, local.get("train"), local.get("bidirectional"), local.get("batch_first")
        )
        kept.append(list(new))
        if layer < layers - 1:
            shape, box = list(x.shape), [(0, size) for size in x.shape]
            shape[batch_dim], box[batch_dim] = local.shapes[0][batch_dim], local.boxes[0][batch_dim]
            drawn = replace(local, call=replace(local.call, name=f"{local.call.name}:{layer}"))
            probability = float(local.get("dropout"))
            x = dropped(x, keep_mask(drawn, shape, tuple(box), probability, x.device), probability)
    return (x, *(torch.cat(parts) for parts in zip(*kept, strict=True)))


@rule("aten.lstm_cell", "aten.gru_cell")
def gated_cell(view: View) -> Tiled:
    """One step of samples: units of all gates are needed, which are not adjacent."""
    return _cell(view, "[h]")


def _run_plain_cell(local: Local) -> torch.Tensor:
    x, state, from_x, from_state, *biases = local.tensors
    first, second = biases or (None, None)
    gate = F.linear(x, from_x, first) + F.linear(state, from_state, second)
    return gate.tanh() if local.call.kind == "rnn_tanh_cell" else gate.relu()


@rule("aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def plain_cell(view: View) -> Tiled:
    """One step of samples; h parameter (hidden units)."""
    return replace(_cell(view, "h"), run=_run_plain_cell)


def _cell(view: View, unit: str) -> Tiled:
    states = 2 if view.call.kind == "lstm_cell" else 1
    weights = [shape for shape in view.shapes if len(shape) == 2][1 + states :]
    if len(view.shapes[0]) != 2:
        raise NotImplementedError("no batch")
    biases = len(view.shapes) - 3 - states
    others = [f"b {unit}"] * (states - 1)
    sides = ["b [k]", "b [m]", *others, f"{unit} [k]", f"{unit} [m]", *[unit] * biases]
    rows = view.shapes[0][0]
    saved = 8 * view.itemsize * rows * weights[0][0]  # gates before and after their functions, from both sides
    flops = 2 * rows * sum(map(prod, weights))
    return einsum(view, f"{', '.join(sides)} -> {', '.join([f'b {unit}'] * states)}", flops=flops, saved_bytes=saved)


def _lstm_workspace_bytes(view: View, steps: int, batch: int) -> int:
    """Upper bound of the workspace of oneDNN's LSTM, fitted to torch 2.13: widths are rounded up, and there is one step more."""
    weights = [p for p in view.shapes[3:] if len(p) == 2]
    group = 3 if weights[-1][0] != weights[0][0] else 2  # a projection comes with a third matrix
    width = sum((8 if i % group == 0 else 12) * (-(-p[1] // 16) * 16) for i, p in enumerate(weights))
    return (steps + 2) * batch * width * view.itemsize + 5 * 4096 * len(weights)
