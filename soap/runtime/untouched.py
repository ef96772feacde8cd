"""Running a user's module without changing it: its values, gradients, plain attributes and all generators are afterwards what they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are dictionaries of their own."""


@contextmanager
def untouched(module: nn.Module, changed: Collection[str] = ()) -> Iterator[None]:
    """Inside, the module has no gradients; afterwards it is as it was, whatever a step has done to it.

    ``changed``: parameters that the step changes itself. Those whose gradients are given to hooks at once, which may be an optimizer's,
    count as changed, too. Others are not copied. What hooks do elsewhere stays.
    """
    attributes = [(one, _attributes(one)) for one in module.modules()]
    parameters = dict(module.named_parameters())
    copied = [p for name, p in parameters.items() if name in changed or getattr(p, "_post_accumulate_grad_hooks", None)]
    kept = [(t, t.detach().clone()) for t in (*module.buffers(), *copied)]
    gradients = [(p, p.grad) for p in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for one, before in attributes:
            _set_attributes(one, before)
        with torch.no_grad():
            for tensor, value in kept:  # batch norm changes its statistics without counting it as a version
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: dict(value) if name in _TABLES else value for name, value in module.__dict__.items()}


def _set_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    own = module.__dict__
    for name in [name for name in own if name not in before]:
        del own[name]
    for name, value in before.items():
        if name in _TABLES:
            if list(own[name].items()) != list(value.items()):
                own[name].clear()
                own[name].update(value)
        elif own.get(name) is not value:
            own[name] = value


@contextmanager
def same_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Torch's, Python's and NumPy's generators go on afterwards as if nothing had been drawn. ``devices``: GPUs that draw."""
    numpy = sys.modules.get("numpy")
    own, foreign = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(foreign)
