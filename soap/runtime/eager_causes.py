"""Why a program does not train like its module: finds, by one more run, what the module has that ``torch.export`` does not record."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from soap.tracing.example import Example
from soap.tracing.python_state import MODES, Memory
from soap.tracing.untouched import untouched

FUNCTION = "write it as a torch.library.custom_op with register_autograd, or with detach (x.detach() * (1 + s) - x * s reverses a gradient)"
HOOK = "write what it does into forward (x.detach() * (1 - s) + x * s scales a gradient), or leave it to the optimizer and clip_norm"
UNKNOWN = "no autograd.Function, no hook and no moved state was found: look for what depends on Python values"
MOST_NAMED = 3


def find_causes(example: Example, names: Sequence[str] | None) -> str:
    """The likely causes in one line. ``names``: all names of the parameter whose gradient differs; None if something else differs."""
    try:
        hooks = _parameter_hooks(example.module, names or ())
        functions, tensor_hooks = _from_a_run(example, names)
        moved = _moved(example)
    except Exception:  # the cause only goes into a message: failing to find it must not hide that message
        return UNKNOWN
    hooks += tensor_hooks + _module_hooks(example.module)
    if not functions and not hooks:
        return f"likely cause: forward changed {', '.join(moved[:MOST_NAMED])}; {way_out(moved)}" if moved else UNKNOWN
    found = list(dict.fromkeys([*functions, *hooks]))
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    ways = [*([FUNCTION] if functions else []), *([HOOK] if hooks else [])]
    return f"likely cause: {', '.join(found[:MOST_NAMED])}{more}, whose backward code torch.export does not record: {'; '.join(ways)}"


def _parameter_hooks(module: nn.Module, names: Sequence[str]) -> list[str]:
    found = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in names:
            continue
        for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = (getattr(parameter, table, None) or {}).values()
            found += [f"a hook on parameter {name!r}{_defined(hook)}" for hook in hooks]
    return found


def _module_hooks(module: nn.Module) -> list[str]:
    found = []
    for name, one in module.named_modules():
        for hook in (*one._backward_hooks.values(), *one._backward_pre_hooks.values()):
            found.append(f"a backward hook on {_module(name, one)}{_defined(hook)}")
    for hook in (*nn_module._global_backward_hooks.values(), *nn_module._global_backward_pre_hooks.values()):
        found.append(f"a backward hook on all modules{_defined(hook)}")
    return found


def _from_a_run(example: Example, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """(autograd.Functions, hooks on tensors) of a forward pass. If the gradient of the parameter passes through some of these functions,
    only these are listed."""
    module = example.module
    with untouched(module), _noted_hooks() as hooks, torch.enable_grad():
        owners = _Owners(example)
        with owners.watching():
            output = example.output()
            owners.take(output)
            if example.loss is not None:
                output = example.loss(output)
        owners.take(output, "the loss")
        suspects = [node for node in owners.nodes.values() if _is_custom(node)]
        own = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in (names or ())}
        concerned = [node for node in suspects if own & _leaves(node)]
        found = [f"autograd.Function {node._forward_cls.__qualname__} in {owners.names[id(node)]}" for node in concerned or suspects]
    return list(dict.fromkeys(found)), hooks


def _moved(example: Example) -> list[str]:
    """Names of Python's state that a forward pass changes; first what decides whether something is trained."""
    roots = {"self": example.model, "loss": example.loss}
    with untouched(example.module, beside=roots), torch.enable_grad():
        before = Memory(roots)
        output = example.output()
        if example.loss is not None:
            example.loss(output)
        found = before.moved(Memory(roots))
    return sorted(found, key=lambda name: not name.endswith(MODES))


def way_out(moved: Sequence[str]) -> str:
    """The end of a message about state that forward changes: how to write it."""
    if any(name.endswith(MODES) for name in moved):
        return "expected train(), eval() and requires_grad_() between steps, not in forward"
    return "expected a buffer (register_buffer) that forward changes or assigns, or an argument of forward"


class _Owners:
    """The module that made each node of the autograd graph: the innermost one that was running when the node was first seen."""

    def __init__(self, example: Example) -> None:
        self.nodes: dict[int, Any] = {}  # keeps them alive, so that their ids stay unique
        self.names: dict[int, str] = {}
        self._paths = {id(one): name for name, one in example.model.named_modules()}
        self._running = [type(example.model).__name__]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, hooks follow the calls of all modules."""
        handles = [nn_module.register_module_forward_pre_hook(self._before), nn_module.register_module_forward_hook(self._after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        self.take(args)
        self._running.append(_module(self._paths.get(id(module), ""), module))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.take(output)
        self._running.pop()

    def take(self, values: Any, name: str = "") -> None:
        """Note that the new nodes behind these values were made by the running module, or by ``name`` if it is given."""
        roots = [t.grad_fn for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        for node in _new_nodes(roots, self.nodes):
            self.names[id(node)] = name or self._running[-1]


def _module(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path else type(module).__name__


def _is_custom(node: Any) -> bool:
    kind = getattr(node, "_forward_cls", None)
    return kind is not None and not str(kind.__module__).startswith("torch.")


def _new_nodes(roots: Sequence[Any], kept: dict[int, Any]) -> list[Any]:
    """Nodes of the autograd graph behind ``roots`` that are not in ``kept``; adds them to it."""
    found, waiting = [], [node for node in roots if node is not None]
    while waiting:
        node = waiting.pop()
        if id(node) in kept:
            continue
        kept[id(node)] = node
        found.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _leaves(node: Any) -> set[int]:
    """Ids of the leaf tensors that a node passes gradients to."""
    reached: dict[int, Any] = {}
    return {id(leaf.variable) for leaf in _new_nodes([node], reached) if hasattr(leaf, "variable")}


@contextmanager
def _noted_hooks() -> Iterator[list[str]]:
    """Descriptions of hooks that are registered on tensors inside, with the line that does so."""
    found: list[str] = []
    original: Callable[..., Any] = torch.Tensor.register_hook

    @functools.wraps(original)
    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if not isinstance(self, nn.Parameter):
            found.append(f"a hook on a tensor{_place(sys._getframe(1))}")
        return original(self, hook)

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


def _place(frame: FrameType) -> str:
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _defined(hook: Any) -> str:
    """Where a hook is defined, if it has code that tells."""
    code = getattr(hook, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if isinstance(code, CodeType) else ""
