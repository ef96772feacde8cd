"""A training model with the arguments and the loss that it is exported with, as eager PyTorch runs it; and which output is the loss.

Arguments and outputs in classes of their own (named tuples, dataclasses, batches of libraries) as plain dictionaries and tuples.

``torch.export`` accepts some of these classes and can write fewer into a file, which then needs their library. The exported module has
plain containers with the same names, and makes the model's own classes of them as it begins.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from soap.errors import ModelError

Rebuild = Callable[[Any], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (tuple, list, dict, OrderedDict, defaultdict, deque)


def plainly(value: Any, name: str) -> tuple[Any, Rebuild | None]:
    """The value in plain containers, and a function that makes the original containers of them; None if nothing has to be changed.
    ``name``: what errors call the value. ModelError in one line for objects that hold tensors and are no container."""
    kind = type(value)
    if kind in _PLAIN:
        return _plain_container(value, name)
    if kind in pytree.SUPPORTED_NODES:
        return _registered(value, name)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _by_names(dict(zip(kind._fields, value, strict=True)), lambda parts: kind._make(parts.values()), name)
    if isinstance(value, Mapping):
        return _by_names(dict(value), lambda parts: _filled(value, parts), name)
    if is_dataclass(value) and not isinstance(value, type):
        return _by_names({f.name: getattr(value, f.name) for f in fields(value)}, lambda parts: _with_fields(value, parts), name)
    _refuse_holders(value, name)
    return value, None


def plain_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Arguments, Callable[[Arguments], Arguments] | None]:
    """The same for all arguments of a module."""
    by_place = [plainly(value, f"argument {number}") for number, value in enumerate(args)]
    by_name = {name: plainly(value, f"argument {name!r}") for name, value in kwargs.items()}
    plain = tuple(value for value, _ in by_place), {name: value for name, (value, _) in by_name.items()}
    if all(rebuild is None for _, rebuild in (*by_place, *by_name.values())):
        return plain, None

    def rebuild(given: Arguments) -> Arguments:
        args = tuple(_rebuilt(by_place[number][1], value) for number, value in enumerate(given[0]))
        return args, {name: _rebuilt(by_name[name][1], value) for name, value in given[1].items()}

    return plain, rebuild


def _plain_container(value: Any, name: str) -> tuple[Any, Rebuild | None]:
    named = isinstance(value, dict)
    items = list(value.items()) if named else list(enumerate(value))
    parts = {key: plainly(one, f"{name}[{key!r}]") for key, one in items}
    if all(rebuild is None for _, rebuild in parts.values()):
        return value, None
    rebuilds = [rebuild for _, rebuild in parts.values()]

    def rebuild(plain: Any) -> Any:
        made = [_rebuilt(one, part) for one, part in zip(rebuilds, plain.values() if named else plain, strict=True)]
        return _filled(value, dict(zip(parts, made, strict=True))) if named else type(value)(made)

    plain = [one for one, _ in parts.values()]
    return (dict(zip(parts, plain, strict=True)) if named else type(value)(plain)), rebuild


def _by_names(parts: Mapping[Any, Any], make: Callable[[dict[Any, Any]], Any], name: str) -> tuple[Any, Rebuild]:
    plain, inner = plainly(dict(parts), name)
    return plain, lambda given: make(_rebuilt(inner, given))


def _rebuilt(rebuild: Rebuild | None, plain: Any) -> Any:
    return plain if rebuild is None else rebuild(plain)


def _registered(value: Any, name: str) -> tuple[Any, Rebuild]:
    """A class that is registered with torch as a container, with its registered functions."""
    node = pytree.SUPPORTED_NODES[type(value)]
    children, context = node.flatten_fn(value)
    keys = _keys(node, value, len(children))
    return _by_names(dict(zip(keys, children, strict=True)), lambda parts: node.unflatten_fn(list(parts.values()), context), name)


def _keys(node: Any, value: Any, count: int) -> list[Any]:
    """The children's names, if the class tells them; else, or if not all differ, their numbers."""
    if node.flatten_with_keys_fn is None:
        return list(range(count))
    found = [getattr(key, "name", getattr(key, "key", None)) for key, _ in node.flatten_with_keys_fn(value)[0]]
    return found if len(found) == len(set(found)) == count and all(isinstance(key, str) for key in found) else list(range(count))


def _filled(value: Any, parts: Mapping[Any, Any]) -> Any:
    """A copy of a mapping, including its other attributes, with these parts."""
    if type(value) in (dict, OrderedDict):
        return type(value)(parts)
    made = copy.copy(value)
    if not isinstance(made, MutableMapping):
        raise ModelError(f"a {type(value).__name__} cannot be made of its parts; expected a dictionary, a named tuple or a dataclass")
    for key, part in parts.items():
        made[key] = part
    return made


def _with_fields(value: Any, parts: Mapping[str, Any]) -> Any:
    """A copy of a dataclass instance, including its other attributes, with these parts."""
    made = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # frozen ones, too
    return made


def _refuse_holders(value: Any, name: str) -> None:
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or not hasattr(value, "__dict__"):
        return
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(dict(vars(value)))):
        kind = type(value)
        raise ModelError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which holds tensors in a way that torch.export cannot see; expected "
            "tuples, dictionaries, named tuples, dataclasses, or a class registered by torch.utils._pytree.register_pytree_node"
        )


def adapted(
    model: nn.Module,
    loss: Callable[..., Any] | None = None,
    take: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> nn.Module:
    """A shallow copy of the model whose forward ends in the loss. No module is wrapped, so all names stay the model's own. If the loss
    is a module, its state is exported as the submodule ``loss`` (``loss_`` if the model has that name). ``take``: applied first to the
    arguments of forward."""
    kind = type(model)
    copied = object.__new__(kind)
    copied.__dict__.update(model.__dict__)
    own_forward = copied.__dict__.pop("forward", None)

    @functools.wraps(own_forward or kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if take is not None:
            args, kwargs = take(args, kwargs)
        output = own_forward(*args, **kwargs) if own_forward else kind.forward(self, *args, **kwargs)
        return output if loss is None else loss(output)

    if own_forward:  # bound already: torch.export takes the names of the inputs from a signature that begins with self
        own = inspect.signature(own_forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    if isinstance(loss, nn.Module):
        name = "loss_" if hasattr(model, "loss") else "loss"
        copied.__dict__["_modules"] = {**model._modules, name: loss}
    copied.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return copied


Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Example:
    """``loss``: makes the scalar from the module's output; None if the module does."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None

    @cached_property
    def module(self) -> nn.Module:
        """The model with all its state by the program's names, including the state of a loss that is a module."""
        return self.model if self.loss is None else adapted(self.model, self.loss)

    @cached_property
    def _plain(self) -> tuple[Any, Any]:
        return plain_arguments(self.args, self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the arguments."""
        return [leaf for leaf in torch.utils._pytree.tree_leaves(self._plain[0]) if isinstance(leaf, torch.Tensor)]

    def _arguments(self, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each tensor changed."""
        plain, rebuild = self._plain
        changed: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map_only(torch.Tensor, change, plain)
        return changed if rebuild is None else rebuild(changed)

    def output(self) -> Any:
        """The model's output for copies of the arguments."""
        args, kwargs = self._arguments(_copied)
        return self.model(*args, **kwargs)

    def of_other_values(self) -> Example:
        """This example with other arguments that the model takes as well, unless it looks at what only these had in common."""
        args, kwargs = self._arguments(_others)
        return replace(self, args=args, kwargs=kwargs)

    def loss_of(self, output: Any, exported: ExportedProgram) -> torch.Tensor:
        """The scalar loss in what the model returns."""
        leaves = [self.loss(output)] if self.loss is not None else torch.utils._pytree.tree_leaves(plainly(output, "the output")[0])
        found = leaves[0 if self.loss is not None else loss_position(exported)]
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ModelError(f"the loss is a {type(found).__name__}; expected a scalar tensor")
        return found.reshape(())

    def widened(self) -> Example | None:
        """The same in float64, with copies of all values and hooks on parameters; None if hooks take gradients as soon as they come."""
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self.module.parameters()):
            return None
        model, loss = copy.deepcopy((self.model, self.loss if isinstance(self.loss, nn.Module) else None))
        wide = replace(self, model=model.double(), loss=self.loss if loss is None else loss.double())
        for own, other in zip(self.module.parameters(), wide.module.parameters(), strict=True):
            for hook in (getattr(own, "_backward_hooks", None) or {}).values():
                other.register_hook(hook)  # type: ignore[no-untyped-call]
        args, kwargs = self._arguments(_wide)
        return replace(wide, args=args, kwargs=kwargs)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _others(tensor: torch.Tensor) -> torch.Tensor:
    """Smaller numbers; whole ones in another order, as good indices, except in one dimension: lengths and borders have an order."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.detach() * 0.75
    return tensor.flip(-1) if tensor.dim() > 1 and tensor.dtype is not torch.bool else tensor.clone()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


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
