"""Programs that were exported with symbolic sizes, at given sizes. Afterwards they look as if they had been exported with these sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from soap.errors import ModelError, first_line
from soap.logs import TRIALS, silenced
from soap.tracing.tracebacks import node_line

Shapes = Sequence[Sequence[int]]
"""One shape per tensor input, in the order of the program's inputs."""


def is_dynamic(exported: ExportedProgram) -> bool:
    """Whether any size of the program is symbolic."""
    return bool(exported.range_constraints)


def at_sizes(exported: ExportedProgram, shapes: Shapes | None = None) -> ExportedProgram:
    """The program for inputs of these shapes (of the example inputs if None): the same calls under the same names, with whole numbers.

    Shares all tensors with ``exported``. Raises ModelError if the program was not exported for such shapes.
    """
    unknown = next((symbol for symbol in exported.range_constraints if not str(symbol).startswith("s")), None)
    if unknown is not None:
        raise ModelError(
            f"the program has a dynamic shape that depends on data ({unknown}{_made_at(exported, unknown)}); expected shapes that follow "
            "from the inputs': keep all rows and mask those that do not count (for experts: grouped products)"
        )
    inputs = _inputs(exported)
    if shapes is None:
        shapes = [[_hint(size) for size in fake.shape] for fake in inputs.values()]
    _check(exported, inputs, shapes)
    result = copy.copy(exported)
    result._graph_module = copy.deepcopy(exported.graph_module)
    for node, original in zip(result._graph_module.graph.nodes, exported.graph.nodes, strict=True):
        node.name = original.name  # fx numbers names that Python has, such as "input", when it copies a graph
    result._range_constraints = {}
    if [list(t.shape) for t in _example_tensors(exported)] != [list(shape) for shape in shapes]:
        result._example_inputs = None
    given = dict(zip(inputs, shapes, strict=True))
    with silenced(*TRIALS), FakeTensorMode() as mode, torch.no_grad():
        values = [_fake(node, given.get(node.name), mode) for node in result._graph_module.graph.nodes if node.op == "placeholder"]
        try:
            _Evaluation(result._graph_module).run(*values)
        except Exception as error:
            raise ModelError(f"the program does not work for inputs of shapes {[list(s) for s in shapes]}: {first_line(error)}") from error
    return result


def _made_at(exported: ExportedProgram, symbol: Any) -> str:
    """Where a size that depends on data is made: the user's code if the program knows it, else the call and its module."""
    for node in exported.graph.nodes:
        leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
        sizes: list[Any] = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape if not isinstance(size, int)]
        if any(symbol in size.node.expr.free_symbols for size in sizes):
            if (place := node_line(node)) is not None:
                return f", at {place}"
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            return f" in call {node.name!r}{f' of module {stack[-1][0]!r}' if stack and stack[-1][0] else ''}"
    return ""


class _Evaluation(torch.fx.Interpreter):
    """Runs a graph on fake tensors of known sizes and writes each result where torch.export keeps the symbolic one."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """One node, nested graphs included."""
        result = super().run_node(n)
        if n.op != "get_attr":
            n.meta = {**n.meta, "val": result}
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block (under ``no_grad``, for example) is evaluated in place."""
        if isinstance(target, torch._ops.HigherOrderOperator):
            place = next((i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule)), None)
            if place is not None:
                return _Evaluation(args[place]).run(*args[place + 1 :])
        return super().call_function(target, args, kwargs)


def _inputs(exported: ExportedProgram) -> dict[str, torch.Tensor]:
    """Placeholder name -> fake tensor of the user's tensor inputs, in order."""
    fakes = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {name: fakes[name] for name in names if isinstance(fakes.get(name), torch.Tensor)}


def _example_tensors(exported: ExportedProgram) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(exported.example_inputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _check(exported: ExportedProgram, inputs: Mapping[str, torch.Tensor], shapes: Shapes) -> None:
    """Raise ModelError unless each symbol gets one value in its range, and all other sizes are those of the export."""
    known: dict[Any, int] = {}
    for (name, fake), shape in zip(inputs.items(), shapes, strict=True):
        sizes: Sequence[Any] = fake.shape
        wrong = f"input {name!r} has shape {list(shape)}: expected {_written(fake.shape)} as the program was exported"
        if len(shape) != fake.dim():
            raise ModelError(wrong)
        for size, value in zip(sizes, shape, strict=True):
            if isinstance(size, int):
                fits = value == size
            else:
                expr = size.node.expr
                if expr.is_Symbol:
                    known.setdefault(expr, value)
                fits = expr.free_symbols <= known.keys() and int(expr.subs(known)) == value and value > 0
            if not fits:
                raise ModelError(wrong)
    for symbol, value in known.items():
        allowed = exported.range_constraints.get(symbol)
        if allowed is not None and not allowed.lower <= value <= allowed.upper:
            raise ModelError(f"size {value}: expected {allowed.lower} to {allowed.upper}, as the program was exported; export it anew")


def _written(shape: Sequence[Any]) -> str:
    """A shape with symbols as people write them."""
    return f"[{', '.join(str(size) for size in shape)}]"


def _hint(size: Any) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    if hint is None:
        raise ModelError("the program has symbolic sizes without an example; expected a program with its example inputs: export it again")
    return int(hint)


def _fake(node: torch.fx.Node, shape: Sequence[int] | None, mode: FakeTensorMode) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    sizes = list(value.shape) if shape is None else list(shape)
    return torch.empty(sizes, dtype=value.dtype, device=value.device)
