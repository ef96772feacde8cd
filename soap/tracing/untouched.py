"""Running a user's module without changing it: values, gradients, Python's state and random generators are restored afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from soap.tracing.python_state import Memory, has_values, put


@contextmanager
def untouched(module: nn.Module, changed: Collection[str] = (), beside: Mapping[str, Any] | None = None) -> Iterator[Callable[[], None]]:
    """Inside, the module has no gradients. Afterwards it is as it was, whatever a step has done to it. Gives a function that puts back
    buffers alone, and parameters that the step changes itself.

    ``changed``: names of such parameters. Those with hooks on accumulated gradients count as changed too: such a hook may be an optimizer.
    Only these, and buffers, are copied. ``beside``: what else to put back (``Memory``). What hooks change elsewhere is not restored.
    """
    memory = Memory({"module": module, **(beside or {})})
    tables = [(one._buffers, dict(one._buffers)) for one in module.modules()]
    parameters = dict(module.named_parameters())
    copied = [p for name, p in parameters.items() if name in changed or getattr(p, "_post_accumulate_grad_hooks", None)]
    kept = [(t, t.detach().clone()) for t in (*module.buffers(), *copied) if has_values(t)]
    gradients = [(p, p.grad) for p in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None

    def put_state_back() -> None:
        for own, table in tables:
            own.update(table)
        for tensor, value in kept:  # compare values: batch norm changes its statistics without a new version
            put(tensor, value)

    try:
        yield put_state_back
    finally:
        memory.restore()
        put_state_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient


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
