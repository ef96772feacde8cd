"""Modules without weights: how they are made, and how they are traced.

A module that is too large for this machine has its parameters on the meta device. To be traced they need a device that computes: for that
time each has memory of the processor that nobody touches, and which the system therefore never gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from soap.tracing.naming import canonical_names


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules that are made here have no values of their parameters, which take no memory; buffers have theirs. ``soap.export`` writes them
    to small files, and ``soap.load(..., weights=...)`` gives the values later.

    Each parameter takes its memory while the module makes it. Not for several threads at once."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, None if param is None else _meta(param))

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def tied_without_values(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of tensors without values that a program's state has under several names: name -> the first one."""
    names = {name: tensor for name, tensor in state.items() if tensor.device.type == "meta"}
    return {name: first for name, first in canonical_names(names).items() if name != first}


def tie_again(state: dict[str, Any], tied: Mapping[str, str]) -> None:
    """Make them one tensor, where a file says so of such as may be."""
    for name, first in tied.items():
        own, other = state.get(name), state.get(first)
        if own is not None and other is not None and own.is_meta and other.is_meta and (own.shape, own.dtype) == (other.shape, other.dtype):
            state[name] = other


def _meta(param: nn.Parameter) -> nn.Parameter:
    """The parameter itself if it has no values, as a tied one that was registered before: so it stays one parameter."""
    if param.device.type == "meta" or isinstance(param, nn.parameter.UninitializedParameter):
        return param
    return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)


class Room:
    """Memory in place of a module's tensors without values. ``module``: has it within the context, and its own tensors again behind it.

    A tensor that the module has under several names has one piece of memory."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._rooms: dict[int, torch.Tensor] = {}
        self._replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def __enter__(self) -> Room:
        for owner in self._module.modules():
            known: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for own in known:
                for name, tensor in own.items():
                    if tensor is not None and tensor.device.type == "meta":
                        self._replaced.append((own, name, tensor))
                        own[name] = self._room(tensor)
        return self

    def __exit__(self, *_: object) -> None:
        for own, name, tensor in self._replaced:
            own[name] = tensor

    def of(self, leaf: Any) -> Any:
        """An argument with values: zeros in place of a tensor without, anything else as it is."""
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
            return torch.zeros_like(leaf, device="cpu")
        return leaf

    def leave(self, exported: ExportedProgram) -> None:
        """Give a program that was traced within the context the tensors without values."""
        if not self._replaced:
            return
        empty = {id(self._rooms[id(tensor)]): tensor for _, _, tensor in self._replaced}
        for known in (exported.state_dict, exported.constants):
            for name, tensor in known.items():
                if id(tensor) in empty:
                    known[name] = empty[id(tensor)]

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._rooms:
            room = torch.empty_like(tensor, device="cpu")
            own = nn.Parameter(room, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else room
            self._rooms[id(tensor)] = own
        return self._rooms[id(tensor)]
