"""Checking the inputs of a step: the right number of micro-batches, the right dtypes, and the same tensors on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.runtime.comm.redistribute import Communicator

Tensors = Sequence[torch.Tensor]


def micro_batches(inputs: Tensors, names: Sequence[str], most: int) -> list[Tensors]:
    """Cut a step's tensors into its micro-batches: 1 to ``most``, one after the other. RuntimeFailure if the number does not fit."""
    if not names:
        return [inputs] * most
    count, rest = divmod(len(inputs), len(names))
    if rest or not 1 <= count <= most:
        each = "" if most == 1 else f" for each of 1 to {most} micro-batches, one after the other"
        raise RuntimeFailure(f"{len(inputs)} tensors given to a step: expected {len(names)} ({', '.join(names)}){each}")
    return [inputs[i * len(names) : (i + 1) * len(names)] for i in range(count)]


def shapes_of(inputs: Tensors) -> tuple[tuple[int, ...], ...]:
    """The shapes of the inputs: they tell batches of different sizes apart."""
    return tuple(tuple(tensor.shape) for tensor in inputs)


def check_types(graph: OperatorGraph, names: Sequence[str], inputs: Tensors, dtype_of: Callable[[str], torch.dtype]) -> None:
    """RuntimeFailure unless the tensors have the dtypes that the model was exported with, or those that replace them."""
    for name, tensor in zip(names, inputs, strict=True):
        allowed = dict.fromkeys((graph.tensors[name].dtype, _name(dtype_of(name))))
        found = _name(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        if found not in allowed:
            what = f"is a {type(tensor).__name__}" if found is None else f"has dtype {found}"
            raise RuntimeFailure(f"input {name!r} {what}: expected a tensor of dtype {' or '.join(allowed)}; convert it first")


def other_shape(graph: OperatorGraph, names: Sequence[str], inputs: Tensors) -> str:
    """One line about the first input whose shape is not the one that the model was traced with; empty if there is none."""
    for name, tensor in zip(names, inputs, strict=True):
        expected = graph.tensors[name].shape
        if tuple(tensor.shape) != expected:
            return f"input {name!r} has shape {tuple(tensor.shape)}: expected {expected}, the whole batch, on every rank"
    return ""


def compare_ranks(comm: Communicator, inputs: Tensors, check: Callable[[], None]) -> None:
    """Raise RuntimeFailure on all ranks if one of them has another batch, or one that ``check`` refuses: otherwise they would train on
    different data in silence."""
    try:
        check()
        outcome = ("", _digest(inputs))
    except RuntimeFailure as error:
        outcome = (str(error), "")
    outcomes = comm.gather(outcome)
    if outcome[0]:
        raise RuntimeFailure(outcome[0])
    for rank, (failure, digest) in enumerate(outcomes):
        if failure:
            raise RuntimeFailure(f"rank {rank}: {failure}")
        if digest != outcomes[0][1]:
            raise RuntimeFailure(
                f"rank {rank} was given another batch than rank 0: every rank gets the whole global batch; seed the loader equally"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(tensors: Tensors) -> str:
    """A hash of dtype, shape and bytes of each tensor."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
