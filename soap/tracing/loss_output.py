"""Which of a program's outputs is the loss: the one that is called so, else the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from soap.errors import ModelError

LOSS = "loss"
_LEAVES = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
"""Calls that end gradients."""


@dataclass(frozen=True)
class Output:
    """Something that a program returns. ``path``: the keys and numbers that lead to it, with dots between them; empty if it is all.
    ``node``: what makes it; None if it is no tensor. ``trains``: whether it may have a gradient by a parameter."""

    path: str
    node: fx.Node | None
    trains: bool

    @property
    def value(self) -> torch.Tensor | None:
        """A tensor like it, of which only shape and type count; None if it is no tensor."""
        found = None if self.node is None else self.node.meta.get("val")
        return found if isinstance(found, torch.Tensor) else None

    @property
    def may_be_loss(self) -> bool:
        """Whether it is a floating-point number that parameters have a part in."""
        return self.trains and self.value is not None and tuple(self.value.shape) in ((), (1,)) and self.value.dtype.is_floating_point

    def __str__(self) -> str:
        shape = "no tensor" if self.value is None else f"{str(self.value.dtype).removeprefix('torch.')}{list(self.value.shape)}"
        return f"{self.path} {shape}"


def outputs_of(exported: ExportedProgram) -> list[Output]:
    """All outputs, in order."""
    leaves = pytree.tree_leaves(next(node for node in exported.graph.nodes if node.op == "output").args)
    leaves = leaves[len(leaves) - _count(exported, len(leaves)) :]
    signature = exported.module_call_graph[0].signature
    paths = _paths(signature.out_spec, len(leaves)) if signature is not None else [str(number) for number in range(len(leaves))]
    trained = _trained(exported)
    return [Output(path, leaf if isinstance(leaf, fx.Node) else None, leaf in trained) for path, leaf in zip(paths, leaves, strict=True)]


def _count(exported: ExportedProgram, most: int) -> int:
    return min(most, len(exported.graph_signature.user_outputs))


def _paths(spec: Any, count: int) -> list[str]:
    try:
        found, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), spec))
        paths = [".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path) for path, _ in found]
    except Exception:  # of a class that is not known here
        paths = []
    return paths if len(paths) == count else [str(number) for number in range(count)]


def _trained(exported: ExportedProgram) -> set[fx.Node]:
    """Nodes that depend on parameters through floating-point values, without those that are detached."""
    parameters, found = exported.graph_signature.inputs_to_parameters, set[fx.Node]()
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if node.name in parameters:
                found.add(node)
        elif node.target not in _LEAVES and not found.isdisjoint(node.all_input_nodes) and _has_floats(node.meta.get("val")):
            found.add(node)
    return found


def _has_floats(value: Any) -> bool:
    """Whether a value may have a gradient; also if nothing is known of it."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(own.is_floating_point() or own.is_complex() for own in tensors)


def loss_position(exported: ExportedProgram) -> int:
    """The number of the output that is the loss: the one called so, else the first. ModelError, with other candidates, if it cannot be."""
    outputs = outputs_of(exported)
    if not outputs:
        raise ModelError("the program returns no tensor; expected the scalar training loss as output")
    position = next((number for number, own in enumerate(outputs) if own.path.split(".")[0] == LOSS), 0)
    chosen = outputs[position]
    others = [own for own in outputs if own.may_be_loss and own is not chosen]
    if len(outputs) > 1 and not chosen.may_be_loss and others:
        wrong = "no parameter has a part in it" if not chosen.trains else "a loss is one floating-point number"
        raise ModelError(f"output {chosen} is no loss: {wrong}; expected output {others[0]}: {_way(others[0].path)}")
    return position


def which_loss(exported: ExportedProgram) -> tuple[str, str]:
    """In words which of several outputs is the loss; if that is not certain, what else it may be. ModelError if it cannot be trained."""
    outputs, position = outputs_of(exported), loss_position(exported)
    names = exported.graph_signature.parameters
    if not outputs[position].trains and any(exported.state_dict[name].requires_grad for name in names):
        raise ModelError("no parameter has a part in the loss: nothing could be trained; expected another output, or one not detached")
    if len(outputs) == 1:
        return "", ""
    chosen = outputs[position]
    others = [own for own in outputs if own.may_be_loss and own is not chosen]
    told = f"output {chosen.path}, of {', '.join(map(str, outputs))}"
    if not others or chosen.path.split(".")[0] == LOSS:
        return told, ""
    return told, f"output {chosen.path} is taken for the loss, and output {others[0].path} may be one, too: {_way(others[0].path)}"


def _way(path: str) -> str:
    steps = "".join(f"[{step}]" if step.isdigit() else f"[{step!r}]" for step in path.split("."))
    return f"choose it by soap-export --loss {path}, or by loss=lambda output: output{steps} of soap.export"
