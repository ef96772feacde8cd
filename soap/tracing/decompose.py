"""Decomposes calls without a rule, one at a time, into the simpler ATen calls of which torch says they consist. This is done only if
all of these have a rule, if need be after being decomposed themselves; otherwise the call stays as it is, and is kept whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, global_decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from soap.errors import ModelError
from soap.tracing.calls import BufferRef, Call, Program, Ref, Value, is_random, renamed, substitute, walk
from soap.tracing.nodes import NodeReader, plain
from soap.tracing.rules import tiled
from soap.tracing.rules.notation import target_name

OWN_GRADIENTS = {"embedding", "embedding_bag", "_embedding_bag"}
"""Calls whose gradient depends on options that their parts do not have (``scale_grad_by_freq``, ``padding_idx``)."""
DEEPEST = 6
"""How often a part of a part may be decomposed; torch's own tables end after three."""


class _Stuck(Exception):
    """Some part has no rule and cannot be decomposed; the message names it."""


def decompose(program: Program) -> None:
    """Replace the calls without a rule by their parts, in place. For calls that stay, ``program.stuck`` gets the reason."""
    calls: list[Call] = []
    for call in program.calls:
        values = dict(program.values)
        try:
            parts = _parts(call, values, set(program.constants), DEEPEST)
        except _Stuck as stuck:
            program.stuck[call.name] = str(stuck)
            calls.append(call)
            continue
        if parts != [call]:
            program.values.update({name: values[name] for part in parts for name in part.outputs})
        calls += parts
    program.calls = calls


def _parts(call: Call, values: dict[str, Value], constants: set[str], deepest: int) -> list[Call]:
    """The call itself if it has a rule, or is constant; else calls of which that is true. Their values are added to ``values``."""
    if constants.issuperset(call.operands) and not is_random(call):
        constants.update(call.outputs)
        return [call]
    if tiled(call, values).known:
        return [call]
    whole = call.kind in OWN_GRADIENTS or is_random(call)
    if deepest == 0 or whole or any(isinstance(leaf, BufferRef) for leaf in walk((call.args, dict(call.kwargs)))):
        raise _Stuck(target_name(call.target))
    graph = _traced(call, values)
    if graph is None:
        raise _Stuck(target_name(call.target))
    try:
        pieces = _Pieces(call, values).read(graph)
    except (ModelError, NotImplementedError):
        raise _Stuck(target_name(call.target)) from None
    return [part for piece in pieces for part in _parts(piece, values, constants, deepest - 1)]


@cache
def _tables() -> tuple[dict[Any, Callable[..., Any]], ...]:
    """From overloads to functions in terms of other overloads: core ATen's first, then torch's further ones."""
    return dict(core_aten_decompositions()), dict(global_decomposition_table["post_autograd"])


def _traced(call: Call, values: dict[str, Value]) -> torch.fx.Graph | None:
    """One step of decomposition, of whole tensors; None if torch knows none."""
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(_qualified(target), "CompositeImplicitAutograd")
    found = target if composite else next((table[target] for table in _tables() if target in table), None)
    if found is None:
        return None
    mode = FakeTensorMode()
    with mode:
        operands = [torch.empty(values[name].shape, dtype=values[name].dtype) for name in call.operands]

    def function(*tensors: torch.Tensor) -> Any:
        following = iter(tensors)
        fill = lambda leaf: next(following) if isinstance(leaf, Ref) else leaf  # noqa: E731
        return found(*substitute(call.args, fill), **substitute(dict(call.kwargs), fill))

    try:
        with mode:  # composite calls come apart below autograd; functions of the tables are written as they are, above it
            return make_fx(function, pre_dispatch=not composite)(*operands).graph
    except Exception:  # a function of torch's that does not accept these arguments: as if there were none
        return None


def _qualified(target: torch._ops.OpOverload) -> str:
    """The overload's name as the dispatcher knows it."""
    name, overload = str(target._schema.name), target._overloadname
    return name if overload == "default" else f"{name}.{overload}"


class _Pieces(NodeReader):
    """Reads the graph of a decomposed call into calls of its module, named after it."""

    def __init__(self, call: Call, values: dict[str, Value]) -> None:
        super().__init__(Program([], values, [], {}, {}, {}, ""), None)
        self._whole = call

    def unique(self, name: str) -> str:
        """The name behind that of the whole call."""
        return super().unique(f"{self._whole.name}/{name}")

    def path(self, node: torch.fx.Node) -> str:
        """The module of the whole call."""
        return self._whole.path

    def read(self, graph: torch.fx.Graph) -> list[Call]:
        """The calls; the last ones' results have the names of the whole call's results."""
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.at.update(zip(placeholders, self._whole.operands, strict=True))
        results = _results(graph)
        if len(results) != len(self._whole.outputs) or any(node.op == "get_attr" for node in graph.nodes):
            raise ModelError(f"{self._whole.name!r} has other results in parts, or needs tensors that only torch has")
        self.nodes(graph, gradients=True)
        made = [self.now(node) for node in results]
        names: dict[str, str] = {}
        for wanted, name in zip(self._whole.outputs, made, strict=True):
            self._check(wanted, name)
            inside = any(name in call.outputs for call in self.program.calls)
            if not inside or name in names:  # an operand, or twice the same: a copy
                self.program.calls.append(Call(wanted, torch.ops.aten.clone.default, (Ref(name),), {}, (wanted,), self._whole.path))
            else:
                names[name] = wanted
        origin = self._whole.origin or self._whole.kind
        return [replace(_outputs_renamed(renamed(call, names), names), origin=origin) for call in self._needed(made)]

    def _check(self, wanted: str, name: str) -> None:
        values = self.program.values
        if (values[wanted].shape, values[wanted].dtype) != (values[name].shape, values[name].dtype):
            raise ModelError(f"{name!r} is not what {wanted!r} was")

    def _needed(self, made: Sequence[str]) -> list[Call]:
        """The calls without those on which no result depends."""
        wanted = {*made, *self._whole.outputs}
        kept: list[Call] = []
        for call in reversed(self.program.calls):
            if wanted & set(call.outputs):
                kept.append(call)
                wanted.update(call.operands)
        return kept[::-1]


def _outputs_renamed(call: Call, names: dict[str, str]) -> Call:
    return replace(call, outputs=tuple(names.get(name, name) for name in call.outputs))


def _results(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that the graph returns; torch's named tuples are taken apart."""
    output = next(node for node in graph.nodes if node.op == "output")
    returned = plain(output.args[0])
    if isinstance(returned, torch.fx.Node) and isinstance(returned.target, type):
        named, returned = returned, plain(returned.args)
        output.args = (returned,)
        graph.erase_node(named)
    return [leaf for leaf in walk(returned) if isinstance(leaf, torch.fx.Node)]
