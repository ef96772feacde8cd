"""Argument validation that depends on the values of tensors, which a traced program cannot have: it is taken as passed.

``if torch.any(var < 0): raise ValueError`` makes no decision for a program: if it does not raise, training goes on behind it. While a
module is traced, a tensor in a condition gives the truth value that does not raise, if the source shows that the condition only validates:
a statement ``if`` of which one side only raises, or only warns, or ``assert``. Everything else is a real decision.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch.export import ExportedProgram

_TELLING = {"warn", "warning", "warning_once", "warn_once", "info", "debug", "error", "print", "log"}
"""Functions that only print or log."""
_ASSERTS = {"_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size"}
_BETWEEN = {"EXTENDED_ARG", "COPY", "TO_BOOL", "NOP"}
"""Instructions between a value and the jump that asks for its truth."""


@contextmanager
def passed_assertions() -> Iterator[None]:
    """Within this context conditions that only validate are taken as passed."""
    own = "__bool__" in torch.Tensor.__dict__
    of_tensors: Callable[[Any], bool] = torch.Tensor.__bool__
    of_symbols: Callable[[Any], bool] = torch.SymBool.__bool__

    def tensor_bool(self: torch.Tensor) -> bool:
        answer = _answer(sys._getframe(1)) if isinstance(self, torch._subclasses.FakeTensor) else None
        return of_tensors(self) if answer is None else answer

    def symbol_bool(self: torch.SymBool) -> bool:
        answer = _answer(sys._getframe(1)) if _depends_on_data(self) else None
        return of_symbols(self) if answer is None else answer

    torch.Tensor.__bool__ = tensor_bool  # type: ignore[assignment,method-assign]
    torch.SymBool.__bool__ = symbol_bool  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymBool.__bool__ = of_symbols  # type: ignore[method-assign]
        if own:
            torch.Tensor.__bool__ = of_tensors  # type: ignore[assignment,method-assign]
        else:
            del torch.Tensor.__bool__


def without_assertions(exported: ExportedProgram) -> ExportedProgram:
    """Remove numbers that depend on data from the program, if only assertions used them."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    symbols = {symbol for symbol in exported.range_constraints if not str(symbol).startswith("s")}
    if not symbols:
        return exported
    for node in reversed(exported.graph.nodes):
        number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
        if node.op == "call_function" and not node.users and (number or str(getattr(node.target, "_opname", "")) in _ASSERTS):
            exported.graph.erase_node(node)
    left = {symbol for node in exported.graph.nodes for symbol in free_unbacked_symbols(node.meta.get("val"))}
    for symbol in symbols - left:
        del exported._range_constraints[symbol]
    return exported


def _depends_on_data(symbol: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbol))


def _answer(frame: FrameType) -> bool | None:
    """The value that the condition of a frame must have so that nothing is raised; None if it decides more than that."""
    statements = _statements(frame.f_code.co_filename)
    answers = (_passing(statements, place) for place in _places(frame))
    return next((answer for answer in answers if answer is not None), None)


def _places(frame: FrameType) -> list[tuple[int, int]]:
    """Line and column of a frame's instruction, and of the one before, which asks for the truth: a jump has its statement's position."""
    code, number = frame.f_code, frame.f_lasti // 2
    before = number - 1
    while before > 0 and dis.opname[code.co_code[2 * before]] in _BETWEEN:
        before -= 1
    positions = list(code.co_positions())
    found = [positions[i] for i in (number, before) if 0 <= i < len(positions)]
    return [(line, column) for line, _, column, _ in found if line is not None and column is not None]


@lru_cache(maxsize=64)
def _statements(path: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The conditions in a file that only validate, with the values that they must have; not those whose exception may be caught."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    found: list[tuple[ast.expr, bool]] = []
    _collect(tree, found)
    return tuple(found)


def _collect(node: ast.AST, found: list[tuple[ast.expr, bool]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert):
            found.append((child.test, True))
        elif isinstance(child, ast.If):
            if _only_tells(child.body):
                found.append((child.test, False))
            elif child.orelse and _only_tells(child.orelse):
                found.append((child.test, True))
        if isinstance(child, ast.Try) and child.handlers:
            for part in (*child.handlers, *child.orelse, *child.finalbody):  # what is raised in its body is control flow
                _collect(part, found)
        else:
            _collect(child, found)


def _only_tells(body: list[ast.stmt]) -> bool:
    """Whether a block always raises, or does nothing but print or log."""
    return isinstance(body[-1], ast.Raise) or all(isinstance(one, ast.Expr) and _is_telling(one.value) for one in body)


def _is_telling(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return name in _TELLING


def _passing(statements: tuple[tuple[ast.expr, bool], ...], place: tuple[int, int]) -> bool | None:
    around = [(test, value) for test, value in statements if _covers(test, place)]
    if not around:
        return None
    part, value = around[-1]
    while True:
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
            part, value = part.operand, not value
        elif isinstance(part, ast.BoolOp):
            inner = [one for one in part.values if _covers(one, place)]
            if not inner:
                return None
            part = inner[0]
        else:
            return value


def _covers(node: ast.expr, place: tuple[int, int]) -> bool:
    return (node.lineno, node.col_offset) <= place < (node.end_lineno or 0, node.end_col_offset or 0)
