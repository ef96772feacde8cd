"""Buffers that forward assigns. torch.export follows those of the module that it is given; we follow those of its submodules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from soap.errors import ModelError


@contextmanager
def assigned_buffers_followed(module: nn.Module) -> Iterator[None]:
    """Within this context each call of the module ends by copying what it has assigned to its submodules' buffers into these: a program
    has such copies, and without them it would read the first values in all steps. ModelError in one line, of any buffer, if what is
    assigned has another shape or type."""
    paths = {id(own._buffers): f"{path}." if path else "" for path, own in module.named_modules()}
    assigned: dict[tuple[int, str], tuple[nn.Module, str, torch.Tensor]] = {}
    calls = 0

    def note(own: nn.Module, name: str, value: Any) -> None:
        before = own._buffers.get(name)
        if not calls or id(own._buffers) not in paths or not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):
            return
        if (value.shape, value.dtype) != (before.shape, before.dtype):
            found, kept = (f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (value, before))
            buffer = f"{paths[id(own._buffers)]}{name}"
            raise ModelError(f"forward assigns buffer {buffer!r} a tensor {found}; expected {kept}, as it was: buffers keep their shape")
        if own._buffers is not module._buffers:
            assigned.setdefault((id(own._buffers), name), (own, name, before))

    def begin(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def end(*_: Any) -> None:
        nonlocal calls
        calls -= 1
        for own, name, before in assigned.values():
            value = own._buffers[name]
            own._buffers[name] = before
            if value is not None and value is not before:
                before.copy_(value.detach())
        assigned.clear()

    hooks = [register_module_buffer_registration_hook(note), module.register_forward_pre_hook(begin)]
    hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
