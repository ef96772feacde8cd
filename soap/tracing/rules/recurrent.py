"""Recurrent layers that ATen runs as one call."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from soap.graph import WHOLE
from soap.tracing.calls import is_random
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import rule, unsplit


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
    if is_random(view.call):  # dropout between layers draws its numbers inside the call
        return replace(unsplit(view), flops=flops, saved_bytes=2 * saved)
    outputs = (sequence, *(state,) * states)
    return Tiled(tuple(scope.factors), operands, outputs, run=_run_recurrent, flops=flops, saved_bytes=saved)


def _run_recurrent(local: Local) -> tuple[torch.Tensor, ...]:
    # With batch_first the output is a view in the other order, which every reader would copy for itself.
    out, *states = local.plain()
    return (out.contiguous(), *states)


def _lstm_workspace_bytes(view: View, steps: int, batch: int) -> int:
    """Upper bound of the workspace of oneDNN's LSTM, fitted to torch 2.13: widths are rounded up, and there is one step more than steps."""
    weights = [p for p in view.shapes[3:] if len(p) == 2]
    group = 3 if weights[-1][0] != weights[0][0] else 2  # a projection comes with a third matrix
    width = sum((8 if i % group == 0 else 12) * (-(-p[1] // 16) * 16) for i, p in enumerate(weights))
    return (steps + 2) * batch * width * view.itemsize + 5 * 4096 * len(weights)
