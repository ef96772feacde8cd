"""Arguments and outputs in classes of their own (named tuples, dataclasses, batches of libraries) as plain dictionaries and tuples.

``torch.export`` accepts some of these classes and can write fewer into a file, which then needs their library. The exported module has
plain containers with the same names, and makes the model's own classes of them as it begins.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
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
