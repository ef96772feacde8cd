"""Bags of embeddings that all hold equally many rows become calls of our own. Torch writes them with offsets even if their indices had
two dimensions."""

from __future__ import annotations

from dataclasses import replace

from soap.tracing.calls import Call, Program, Ref, argument, parameters_of
from soap.tracing.rules.bags import MODES, equal_bags


def find_equal_bags(program: Program) -> None:
    """Replace ``embedding_bag(table, ids.flatten(), arange(0, bags * each, each))`` by ``equal_bags(table, ids)``, in place. If the
    other results of ``embedding_bag`` are read, the call stays. Padding indices are made to count from the front in all of them."""
    makers = {name: call for call in program.calls for name in call.outputs}
    read = {name for call in program.calls for name in call.operands}
    for position, call in enumerate(program.calls):
        if call.kind == "embedding_bag":
            call = _padded_from_the_front(program, call)
            equal = None if read.intersection(call.outputs[1:]) else _equal(program, makers, call)
            program.calls[position] = equal or call


def _padded_from_the_front(program: Program, call: Call) -> Call:
    padding, rows = argument(call, "padding_idx"), program.values[argument(call, "weight").name].shape[0]
    if padding is None or padding >= 0:
        return call
    place, _ = parameters_of(call.target)["padding_idx"]
    if place < len(call.args):
        return replace(call, args=(*call.args[:place], padding + rows, *call.args[place + 1 :]))
    return replace(call, kwargs={**call.kwargs, "padding_idx": padding + rows})


def _equal(program: Program, makers: dict[str, Call], call: Call) -> Call | None:
    table, bags = argument(call, "weight"), program.values[call.outputs[0]].shape[0]
    indices = _rows(program, makers, argument(call, "indices"), bags)
    scale, given = None, argument(call, "per_sample_weights")
    if isinstance(given, Ref):
        scale = _rows(program, makers, given, bags)
    if indices is None or (given is not None and scale is None) or argument(call, "scale_grad_by_freq"):
        return None
    offsets = makers.get(argument(call, "offsets").name)
    count, each = program.values[indices].shape
    evenly = offsets is not None and offsets.kind == "arange" and list(offsets.args[:3]) == [0, count * each, each]
    if not evenly or argument(call, "include_last_offset"):
        return None
    options = {"mode": MODES[int(argument(call, "mode") or 0)], "padding_idx": argument(call, "padding_idx")}
    operands = (table, Ref(indices), *([] if scale is None else [Ref(scale)]))
    return Call(call.name, equal_bags, operands, options, call.outputs[:1], call.path, call.origin)


def _rows(program: Program, makers: dict[str, Call], flat: Ref, bags: int) -> str | None:
    """The value (bags, each) that this one flattens; None if it is something else."""
    maker = makers.get(flat.name)
    if maker is None or maker.kind not in ("reshape", "view", "flatten") or len(program.values[flat.name].shape) != 1:
        return None
    shape = program.values[maker.operands[0]].shape
    return maker.operands[0] if len(shape) == 2 and shape[0] == bags else None
