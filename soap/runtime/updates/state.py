"""An optimizer's state by parameter name, whatever way parameters are split, so that other plans can go on with it.

Each rank's optimizer has the state of its own parts of parameters (``updates.parts``). State with the part's shape is a region of a tensor
with the parameter's shape. Numbers, such as Adam's step, must be the same for all parts and are saved once per parameter. Tensors of other
shapes (factors, matrices) are saved if the parameter is not cut. Anything else cannot be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from soap.errors import CheckpointError
from soap.runtime.checkpoint.manifest import ParameterState
from soap.runtime.updates.optimizers import recorded_name
from soap.runtime.updates.parts import Part

_LOCAL_OPTIONS = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Options of a parameter group that say how this rank computes the update, not what the update is. They are not saved."""


@dataclass
class Known:
    """The state of some parameters. ``optimizer``: its name. ``dtypes``: (parameter, key) -> dtype of a tensor. ``scalars``: (parameter,
    key) -> value."""

    optimizer: str | None = None
    states: dict[str, ParameterState] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    scalars: dict[tuple[str, str], Any] = field(default_factory=dict)


def known_here(parts: Mapping[int, Part], optimizer: torch.optim.Optimizer | None) -> Known:
    """The state of this rank's optimizer. CheckpointError if some of it cannot be saved."""
    if optimizer is None:
        return Known()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    there = [part for part in parts.values() if id(part.tensor) in groups]
    known = [_known_of(part, groups[id(part.tensor)], optimizer.state.get(part.tensor, {})) for part in there]
    return join([Known(recorded_name(optimizer)), *known])


def join(parts: Iterable[Known]) -> Known:
    """Join the states of all parts. CheckpointError if they do not agree."""
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


def _known_of(part: Part, group: Mapping[str, Any], state: Mapping[Any, Any]) -> Known:
    """The state of one part."""
    name, tensor = part.parameter, part.tensor
    regions, others = list[str](), list[str]()
    result = Known()
    values: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and isinstance(key, str):
            result.dtypes[name, key] = value.dtype
            if value.dim() == 0 and part.shape != ():
                result.scalars[name, key] = value.item()
                continue
            if value.shape == tensor.shape and value.layout is torch.strided:
                regions.append(key)
                continue
            if part.is_whole and value.layout is torch.strided:
                others.append(key)
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
    result.states[name] = ParameterState(_options(name, group), tuple(sorted(regions)), scalars, values, tuple(sorted(others)))
    return result


def _options(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as JSON values."""
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
    parts: Mapping[int, Part],
    states: Mapping[str, ParameterState],
    found: Mapping[tuple[int, str], torch.Tensor],
) -> None:
    """Load an optimizer's state. ``found``: (part, key) -> tensor from the checkpoint. Parameters without ``states`` start fresh."""
    if optimizer is None:
        return
    number_of = {id(part.tensor): number for number, part in parts.items()}
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, description in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        options: dict[str, Any] = {}
        for parameter, index in zip(group["params"], description["params"], strict=True):
            number = number_of.get(id(parameter))
            known = states.get(parts[number].parameter) if number is not None else None
            if number is None or known is None:
                continue
            read = {key: found[number, key] for key in (*known.regions, *known.scalars, *known.others)}
            if read or known.values:
                state[index] = {**known.values, **read}
            _agree(options, known.options, parts[number].parameter)
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
    """A saved option in the type that the optimizer uses for it."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(value, list) and (current is None or isinstance(current, tuple)) else value
