"""Grouped-query attention without copies: keys and values that a program repeats for the queries' heads are told ``enable_gqa`` instead.

``transformers`` repeats them only where attention has a mask; once a causal mask is known as such (``causal``), it has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from soap.tracing.calls import Call, Program, Ref, argument, needed, with_argument


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
