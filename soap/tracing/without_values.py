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

REMEDY = "make the module under soap.without_weights(), where buffers have values, and export it again"
"""For a program that lacks values of other tensors than parameters."""


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
    """Memory in place of the tensors without values of a module and its arguments. ``module``: has it within the context, and its own
    tensors again behind it; ``arguments`` are those with memory. What the module makes while it is traced is on the processor as well.

    A tensor that the module has under several names has one piece of memory."""

    def __init__(self, module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._module, self._own_arguments = module, arguments
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map(_with_values, arguments)
        self._lacks_arguments = any(map(_has_no_values, torch.utils._pytree.tree_leaves(arguments)))
        self._rooms: dict[int, torch.Tensor] = {}
        self._replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def __enter__(self) -> Room:
        for owner in self._module.modules():
            known: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for own in known:
                for name, tensor in own.items():
                    if _has_no_values(tensor):
                        self._replaced.append((own, name, tensor))
                        own[name] = self._room(tensor)
        if self._is_needed:
            self._device = torch.device("cpu")
            self._device.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_needed:
            self._device.__exit__(None, None, None)
        for own, name, tensor in self._replaced:
            own[name] = tensor

    @property
    def _is_needed(self) -> bool:
        return bool(self._replaced) or self._lacks_arguments

    def leave(self, exported: ExportedProgram) -> None:
        """Give a program that was traced within the context the tensors without values, its example inputs included."""
        if self._lacks_arguments:
            exported.example_inputs = self._own_arguments
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


def _has_no_values(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def _with_values(leaf: Any) -> Any:
    """Zeros in place of a tensor without values, anything else as it is."""
    return torch.zeros_like(leaf, device="cpu") if _has_no_values(leaf) else leaf
