"""Constant folding and dead-call removal on a ``Program``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.errors import ModelError, first_line
from soap.model.graph import KEEP_STATE, NEXT_STATE
from soap.tracing.calls import Call, Program, Ref, is_random, on_whole, substitute
from soap.tracing.without_values import REMEDY


def fold(program: Program, *, plan_only: bool) -> None:
    """Evaluate calls that depend on nothing but constants (masks, position ids); drop calls that neither loss nor state needs. With
    ``plan_only`` the values are not computed: a plan needs their shapes only."""
    known = set(program.constants)
    kept: list[Call] = []
    for call in program.calls:
        if not is_computable(call) or not all(name in known for name in call.operands):
            kept.append(call)
            continue
        known.update(call.outputs)
        if not plan_only:
            results = evaluate(call, program)
            program.constants.update(zip(call.outputs, results, strict=True))
        else:
            for name in call.outputs:
                value = program.values[name]
                program.constants[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    program.calls = needed(kept, {program.loss, *program.kept})
    used = {name for call in program.calls for name in call.operands} | {program.loss}
    program.constants = {name: tensor for name, tensor in program.constants.items() if name in used}


def is_computable(call: Call) -> bool:
    """Whether a call is the same in every step if its operands are."""
    return not is_random(call) and call.kind not in (NEXT_STATE, KEEP_STATE)


def results_of(call: Call, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a call by the values of its operands."""

    def change(leaf: object) -> object:
        return values[leaf.name] if isinstance(leaf, Ref) else leaf

    with torch.no_grad():
        result = on_whole(call, substitute(call.args, change), substitute(dict(call.kwargs), change))
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    return [t for t in outputs if isinstance(t, torch.Tensor)]


def evaluate(call: Call, program: Program) -> list[torch.Tensor]:
    """The outputs of a call whose operands are constants."""
    if lacking := next((name for name in call.operands if program.constants[name].is_meta), None):
        raise ModelError(f"the program was exported without the values of {lacking!r}, a constant; {REMEDY}")
    try:
        return [t.clone() for t in results_of(call, program.constants)]
    except RuntimeError as error:  # the constant has no input behind it: in most cases it is a number that its type cannot hold
        dtype = str(program.values[call.outputs[0]].dtype).removeprefix("torch.")
        said = first_line(error).removesuffix(".")
        message = f"call {call.name!r} of {call.kind} cannot be computed in {dtype}: {said}: expected another constant or type"
        raise ModelError(message) from None


def needed(calls: list[Call], wanted: set[str]) -> list[Call]:
    """The calls that these values depend on."""
    wanted = set(wanted)
    kept: list[Call] = []
    for call in reversed(calls):
        if wanted & set(call.outputs):
            kept.append(call)
            wanted.update(call.operands)
    return kept[::-1]
