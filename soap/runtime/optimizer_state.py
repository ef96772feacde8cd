"""What an optimizer knows, by parameter name: apart from how parameters are split, so that other plans can go on with it.

Every rank's optimizer has the state of its own shards. State shaped like the shard is a region of a tensor shaped like the
parameter. Numbers, such as Adam's step, must be the same for all shards and are kept once per parameter. Anything else (a factor,
a matrix) depends on how the parameter is split, and so cannot be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from soap.errors import CheckpointError
from soap.runtime.checkpoint_manifest import ParameterState
from soap.simulator.plan import Plan

_LOCAL_OPTIONS = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Entries of a parameter group that say how the update is computed here, not what it is."""


@dataclass
class Known:
    """The state of some parameters. ``dtypes``: of regions and scalars, by (parameter, key); ``scalars``: values by (parameter, key)."""

    optimizer: str | None = None
    states: dict[str, ParameterState] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    scalars: dict[tuple[str, str], Any] = field(default_factory=dict)


def known_here(plan: Plan, tensors: Mapping[int, torch.Tensor], optimizer: torch.optim.Optimizer | None) -> Known:
    """What this rank's optimizer knows; CheckpointError if some of it cannot be kept."""
    if optimizer is None:
        return Known()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts = []
    for number, tensor in tensors.items():
        if id(tensor) in groups:
            parts.append(_known_of(plan, number, tensor, groups[id(tensor)], optimizer.state.get(tensor, {})))
    return join([Known(type(optimizer).__name__), *parts])


def join(parts: Iterable[Known]) -> Known:
    """One of all parts, which must agree; CheckpointError if they do not."""
    result = Known()
    for part in parts:
        if part.optimizer is not None and result.optimizer not in (None, part.optimizer):
            raise CheckpointError(f"optimizers {result.optimizer} and {part.optimizer} on different ranks; expected the same on all ranks")
        result.optimizer = result.optimizer or part.optimizer
        different = [name for name, state in part.states.items() if result.states.setdefault(name, state) != state]
        different += [key[0] for key, dtype in part.dtypes.items() if result.dtypes.setdefault(key, dtype) is not dtype]
        different += [key[0] for key, value in part.scalars.items() if repr(result.scalars.setdefault(key, value)) != repr(value)]
        if different:
            raise CheckpointError(
                f"the optimizer's state or options differ among the shards of {different[0]!r}; "
                "expected the same numbers for a whole parameter: checkpoints need an optimizer whose update is elementwise"
            )
    return result


def _known_of(plan: Plan, number: int, tensor: torch.Tensor, group: Mapping[str, Any], state: Mapping[Any, Any]) -> Known:
    """What is known of one shard."""
    name = plan.shards[number].parameter
    whole_is_scalar = plan.graph.tensors[name].shape == ()
    regions: list[str] = []
    result = Known()
    values: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and isinstance(key, str):
            result.dtypes[name, key] = value.dtype
            if value.dim() == 0 and not whole_is_scalar:
                result.scalars[name, key] = value.item()
                continue
            if value.shape == tensor.shape and value.layout is torch.strided:
                regions.append(key)
                continue
        elif isinstance(key, str) and (value is None or isinstance(value, (bool, int, float, str))):
            values[key] = value
            continue
        what = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__}"
        raise CheckpointError(
            f"optimizer state {key!r} of {name!r} {what}; expected a number or a tensor of its shard's shape {tuple(tensor.shape)}: "
            "checkpoints need an optimizer whose update is elementwise"
        )
    scalars = tuple(sorted(key for _, key in result.scalars))
    result.states[name] = ParameterState(_options(name, group), tuple(sorted(regions)), scalars, values)
    return result


def _options(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as JSON has them."""
    result = {}
    for key, value in group.items():
        if key not in _LOCAL_OPTIONS:
            result[key] = _plain(value)
            if result[key] is _UNKNOWN:
                raise CheckpointError(
                    f"optimizer option {key!r} of {name!r} is a {type(value).__name__}; "
                    "expected numbers and texts: leave it out of the group"
                )
    return result


_UNKNOWN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN


def restore(
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    tensors: Mapping[int, torch.Tensor],
    states: Mapping[str, ParameterState],
    found: Mapping[tuple[int, str], torch.Tensor],
) -> None:
    """Give an optimizer its state. ``found``: the tensors read for it, by (shard, key). Other parameters are as if never updated."""
    if optimizer is None:
        return
    number_of = {id(tensor): number for number, tensor in tensors.items()}
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, description in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        options: dict[str, Any] = {}
        for parameter, index in zip(group["params"], description["params"], strict=True):
            number = number_of.get(id(parameter))
            known = states.get(plan.shards[number].parameter) if number is not None else None
            if number is None or known is None:
                continue
            read = {key: found[number, key] for key in (*known.regions, *known.scalars)}
            if read or known.values:
                state[index] = {**known.values, **read}
            _agree(options, known.options, plan.shards[number].parameter)
        for key, value in options.items():
            description[key] = _like(group.get(key), value)
    optimizer.load_state_dict({"state": state, "param_groups": packed["param_groups"]})


def _agree(options: dict[str, Any], own: Mapping[str, Any], name: str) -> None:
    for key, value in own.items():
        if options.setdefault(key, value) != value:
            raise CheckpointError(
                f"parameter {name!r} was saved with {key} {value}, another of its group with {options[key]}; "
                "expected the groups that the checkpoint was saved with"
            )


def _like(current: Any, value: Any) -> Any:
    """A saved option in the type that the optimizer has it in."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(value, list) and (current is None or isinstance(current, tuple)) else value
