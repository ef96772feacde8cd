"""Calls told otherwise: bags of equally many rows, which torch writes with offsets even if their indices had two dimensions, as calls of
our own; and grouped-query attention by ``enable_gqa``, without copies of keys and values for the queries' heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from soap.tracing.calls import Call, Program, Ref, argument, needed, parameters_of, with_argument
from soap.tracing.rules.embedding import MODES, equal_bags


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


def find_grouped_queries(program: Program) -> None:
    """Let attention without a mask read keys and values as they were before each head of them was repeated, in place."""
    makers = {name: call for call in program.calls for name in call.outputs}
    changed = False
    for position, call in enumerate(program.calls):
        if call.kind != "scaled_dot_product_attention" or argument(call, "attn_mask") is not None or argument(call, "enable_gqa"):
            continue
        key, value = (_before_repeating(program, makers, argument(call, name).name) for name in ("key", "value"))
        if key is None or value is None or key[1] != value[1]:
            continue
        grouped = with_argument(with_argument(call, "key", Ref(key[0])), "value", Ref(value[0]))
        program.calls[position] = with_argument(grouped, "enable_gqa", True)
        changed = True
    if changed:
        program.calls = needed(program.calls, {program.loss, *program.kept})


def _before_repeating(program: Program, makers: Mapping[str, Call], name: str) -> tuple[str, int] | None:
    """(the value (samples, heads, words, size) of which this one has each head several times, one after another; how often)."""
    joined = _step(program, makers, name, ("reshape", "view", "flatten"))
    repeating = None if joined is None else _step(program, makers, joined.operands[0], ("expand",))
    wide = None if repeating is None else _step(program, makers, repeating.operands[0], ("unsqueeze",))
    if joined is None or repeating is None or wide is None or argument(wide, "dim") not in (2, -3):
        return None
    apart = wide.operands[0]
    before, repeated, after = (program.values[own].shape for own in (apart, repeating.outputs[0], name))
    if len(before) != 4:
        return None
    samples, heads, words, size = before
    times = repeated[2]
    fits = repeated == (samples, heads, times, words, size) and after == (samples, heads * times, words, size)
    return (apart, times) if fits and times > 1 else None


def _step(program: Program, makers: Mapping[str, Call], name: str, kinds: tuple[str, ...]) -> Call | None:
    """The call of one of these kinds that made this value, copies and slices of all of it aside."""
    while (maker := makers.get(name)) is not None:
        if maker.kind in kinds:
            return maker
        source = maker.operands[0] if maker.operands else ""
        same = maker.kind == "clone" or (maker.kind == "slice" and program.values[source].shape == program.values[name].shape)
        if not same:
            return None
        name = source
    return None
