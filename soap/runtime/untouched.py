"""Running a user's module without changing it: values, gradients, plain attributes and random generators are restored afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are dictionaries; their entries are restored one by one."""


@contextmanager
def untouched(module: nn.Module, changed: Collection[str] = ()) -> Iterator[None]:
    """Inside, the module has no gradients. Afterwards it is as it was, whatever a step has done to it.

    ``changed``: names of parameters that the step changes itself. Parameters with hooks on accumulated gradients count as changed too: such
    a hook may be an optimizer. Only these, and buffers, are copied. What hooks change elsewhere is not restored.
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
            for tensor, value in kept:  # compare values: batch norm changes its statistics without a new version
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
    """Restore torch's, Python's and NumPy's generators afterwards, as if nothing had been drawn. ``devices``: GPUs that draw."""
    numpy = sys.modules.get("numpy")
    own, foreign = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(foreign)
