"""Names that a person recognises: operators by their module, tensors by their operator, and the values that each group passes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from soap.tracing.calls import Program
from soap.tracing.fuse import Group, Step


def anchor(group: Group) -> Step:
    """The call after which a group is named: its first that is not light, else its last."""
    return next((step for step in group.steps if not step.rule.light), group.steps[-1])


def operator_names(program: Program, groups: Sequence[Group]) -> list[str]:
    """Module path of the anchor, with the kind where a module holds several operators, numbered where that is not unique."""
    anchors = [anchor(group).call for group in groups]
    paths = Counter(call.path for call in anchors)
    taken = {*program.inputs, *program.constants, *program.state, *program.parameters.values(), *program.buffers}
    names: list[str] = []
    for call in anchors:
        name = call.path if call.path and paths[call.path] == 1 else f"{call.path}.{call.origin or call.kind}".lstrip(".")
        candidate, number = name, 1
        while candidate in taken:
            candidate, number = f"{name}_{number}", number + 1
        taken.add(candidate)
        names.append(candidate)
    return names


def group_outputs(program: Program, groups: Sequence[Group]) -> list[list[str]]:
    """For each group, the values that other groups need of it; not derived ones, which each reader computes for itself."""
    makers = Counter(value for group in groups for value in group.made)
    needed = {name for group in groups for name in group.reads()} | {program.loss, *program.kept}
    return [[value for value in group.made if value in needed and makers[value] == 1] for group in groups]


def tensor_names(program: Program, names: Sequence[str], outputs: Sequence[Sequence[str]]) -> dict[str, str]:
    """Value -> tensor name: parameters by state-dict name, activations by their operator."""
    result = {value: value for value in (*program.inputs, *program.constants, *program.state)}
    result.update(program.parameters)
    for name, made in zip(names, outputs, strict=True):
        result.update({value: name if len(made) == 1 else f"{name}:{i}" for i, value in enumerate(made)})
    return result


def canonical_names(state: Mapping[str, Any]) -> dict[str, str]:
    """State-dict name -> the first name with the same storage (tied weights have one canonical name)."""
    first: dict[Any, str] = {}
    result: dict[str, str] = {}
    for name, tensor in state.items():
        key: Any = name
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
                key = id(tensor)
            elif tensor.numel():
                key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        result[name] = first.setdefault(key, name)
    return result
