"""Writing a training model to a ``.pt2`` file.

Argument validation that depends on the values of tensors, which a traced program cannot have: it is taken as passed.

``if torch.any(var < 0): raise ValueError`` makes no decision for a program: if it does not raise, training goes on behind it. While a
module is traced, a tensor in a condition gives the truth value that does not raise, if the source shows that the condition only validates:
a statement ``if`` of which one side only raises, or only warns, or ``assert``. Everything else is a real decision.
"""

from __future__ import annotations

import ast
import dis
import inspect
import io
import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_buffer_registration_hook

from soap.errors import ModelError, SoapWarning, first_line
from soap.files import check_writable, write_bytes_atomically
from soap.outputs import MODEL, check
from soap.tracing.example import adapted, plain_arguments, plainly, which_loss
from soap.tracing.python_state import untouched
from soap.tracing.record import NAME, ExportRecord, dumps, import_all, refuse_custom_operators
from soap.tracing.torch_parts import chain, is_packed, quiet_torch, replaced, torchs_module, user_line
from soap.tracing.without_values import Room, tied_without_values

if TYPE_CHECKING:
    from soap.tracing.execute import TracedModel


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


@contextmanager
def assigned_buffers_followed(module: nn.Module) -> Iterator[None]:
    """Within this context each call of the module ends by copying what it has assigned to its submodules' buffers into these: a program
    has such copies, and without them it would read the first values in all steps. ModelError in one line, of any buffer, if what is
    assigned has another shape or type."""
    paths = {id(own._buffers): f"{path}." if path else "" for path, own in module.named_modules()}
    assigned: dict[tuple[int, str], tuple[nn.Module, str, torch.Tensor]] = {}
    calls = 0

    def note(own: nn.Module, name: str, value: Any) -> None:
        before = own._buffers.get(name)
        if not calls or id(own._buffers) not in paths or not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):
            return
        if (value.shape, value.dtype) != (before.shape, before.dtype):
            found, kept = (f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (value, before))
            buffer = f"{paths[id(own._buffers)]}{name}"
            raise ModelError(f"forward assigns buffer {buffer!r} a tensor {found}; expected {kept}, as it was: buffers keep their shape")
        if own._buffers is not module._buffers:
            assigned.setdefault((id(own._buffers), name), (own, name, before))

    def begin(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def end(*_: Any) -> None:
        nonlocal calls
        calls -= 1
        for own, name, before in assigned.values():
            value = own._buffers[name]
            own._buffers[name] = before
            if value is not None and value is not before:
                before.copy_(value.detach())
        assigned.clear()

    hooks = [register_module_buffer_registration_hook(note), module.register_forward_pre_hook(begin)]
    hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


DROPPING, KEPT = "dropouts that drop nothing", "normalisations whose statistics stay"
Judge = Callable[[ExportedProgram, "TracedModel"], ExportRecord]
"""Compares a program, as it is read back, with its module; raises ModelError if they do not train alike."""


def export_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | Path,
    loss: Callable[..., torch.Tensor] | None = None,
    dynamic_batch: bool | Mapping[str, int] = False,
    judge: Judge | None = None,
    unjudged: str = "",
    imports: Sequence[str] = (),
) -> str:
    """Export a training model with example inputs to ``path``, atomically.

    The model returns the scalar loss, or ``loss(output)`` does; names are the model's own either way. All shapes of the example inputs
    become fixed, except the number of samples with ``dynamic_batch``: dimension 0 of the inputs in which it has the most common size,
    or the given dimensions by input name. The model's mode (training or not) is exported as it is. ``judge``: compares program and
    module, which the file then records; ``unjudged``: why there is none. ``imports``: modules that define custom operators. Returns in
    words which output is the loss; empty if there is only one.

    Raises ModelError if torch.export cannot trace the model, the output is no scalar, an operator is custom and no module named, or the
    judge finds a difference.
    """
    from soap.tracing.importer import import_program

    check(path, MODEL)
    check_writable(path)
    import_all(imports, "imports")
    exported = exported_program(model, args, kwargs, loss=loss, dynamic_batch=dynamic_batch)
    refuse_custom_operators(exported, imports)
    told, unsure = which_loss(exported)
    for said in filter(None, (unsure, evaluation(model))):
        warnings.warn(said, SoapWarning, stacklevel=3)
    with warnings.catch_warnings(action="ignore"):  # rules that are missing are reported when the file is planned
        traced_model = import_program(exported, name=type(model).__name__, plan_only=judge is None)
    record = ExportRecord(False, unjudged) if judge is None else judge(exported, traced_model)
    record = replace(record, imports=tuple(imports), tied=tied_without_values(exported.state_dict))
    del traced_model
    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), quiet_torch():  # torch wonders about tensors without values
        torch.export.save(exported, buffer, extra_files={NAME: dumps(record)})
    write_bytes_atomically(path, buffer.getvalue())
    return told


def evaluation(model: nn.Module) -> str:
    """One line about parts that do not train because they are in evaluation mode; empty if there are none."""
    dropping, kept = [], []
    for name, own in model.named_modules():
        rate = own.p if isinstance(own, nn.modules.dropout._DropoutNd) else getattr(own, "dropout", 0.0)
        if not own.training and isinstance(rate, float) and rate > 0:
            dropping.append(name or type(own).__name__)
        if not own.training and isinstance(own, nn.modules.batchnorm._NormBase) and own.track_running_stats and not model.training:
            kept.append(name or type(own).__name__)
    parts = [f"{what} ({own[0]}{', …' * (len(own) > 1)})" for own, what in ((dropping, DROPPING), (kept, KEPT)) if own]
    return f"evaluation mode is exported as it is: {' and '.join(parts)}; call train() first for a model to train" if parts else ""


def exported_program(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    dynamic_batch: bool | Mapping[str, int] = False,
) -> ExportedProgram:
    """The program that ``export_model`` writes. It shares its tensors with the model."""
    plain, rebuild = plain_arguments(args, kwargs or {})
    take = None if rebuild is None else lambda args, kwargs: rebuild((args, kwargs))
    module = model if loss is None and take is None else adapted(model, loss, take)
    try:
        with untouched(module, beside={"self": model, "loss": loss}), Room(module, _separate(*plain)) as room:
            separate, named = room.arguments
            sizes = _symbolic_batch(module, separate, named, dynamic_batch) if dynamic_batch else None
            exported = _writable(module, separate, named, sizes)
            if exported is None:  # its output is of a class that files do not hold
                exported = traced(adapted(model, lambda output: plainly(output, "the output")[0], take), separate, named, sizes)
            room.leave(exported)
        return exported
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(_untraceable(model, error, bool(dynamic_batch))) from error


def _writable(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any) -> ExportedProgram | None:
    """The program; None if it returns something that torch.export does not accept, or cannot write."""
    try:
        exported = traced(module, args, kwargs, sizes)
        torch.utils._pytree.treespec_dumps(exported.call_spec.out_spec)
        return exported
    except Exception as error:
        if any(words in str(error) for words in ("in output, which is not a known type", "serializ")):
            return None
        raise


PACKED = (
    "reads a packed sequence, of which a program cannot know the lengths; expected the padded batch instead (without pack_padded_sequence "
    "and its counterpart), with padding left out of the loss; with bidirectional=True sequences of one length"
)
CUMULATIVE = (
    "averages over all steps (momentum=None), by the value of its counter, which a program cannot; expected a number, such as momentum=0.1"
)


def _untraceable(model: nn.Module, error: Exception, dynamic: bool) -> str:
    """The error for a model that torch.export cannot trace, with the user's own line, and what to write instead."""
    first, name = first_line(error).rstrip(". "), type(model).__name__
    place, own = user_line(error), torchs_module(error)
    where = f" at {place}" if place else ""
    inner = "" if own is None else next((f"{path!r} " for path, one in model.named_modules() if one is own and path), "")
    if is_packed(error):
        return f"{name}: {f'module {inner}({type(own).__name__})' if own is not None else 'forward'}{where} {PACKED}"
    if isinstance(own, _BatchNorm) and own.momentum is None:
        return f"{name}: module {inner}({type(own).__name__}){where} {CUMULATIVE}"
    if any(type(one).__name__ == "GuardOnDataDependentSymNode" or "data-dependent" in str(one) for one in chain(error)):
        inside = "" if own is None else f" in {type(own).__name__}"
        return (
            f"{name} decides by the values of tensors{where}{inside}, which a program cannot: expected straight-line code (torch.where, "
            "masks, or the decision outside of forward)"
        )
    if dynamic:
        first = f"the number of samples cannot stay open ({first})"
    return f"torch.export cannot trace {name}: {first}{f'; at {place}' if place else ''}; see torch.export's documentation"


def traced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None) -> ExportedProgram:
    """``torch.export.export``, without its log, of a module whose argument validation passes."""
    with warnings.catch_warnings(), quiet_torch(), passed_assertions(), _mended_lstms(), assigned_buffers_followed(module):
        warnings.simplefilter("ignore")  # torch.export warns of harmless attributes that LSTMs assign
        return without_assertions(torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False))


def _mended_lstms() -> AbstractContextManager[None]:
    """Correct torch 2.11, which gives the states of a traced LSTM a dimension too many (``squeeze(1)``, later ``squeeze(0)``)."""

    def make(original: Any) -> Any:
        def mended(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            output, states = original(*args, **kwargs)
            return output, tuple(state.squeeze(0) if state.dim() > 2 else state for state in states)

        return mended

    return replaced("torch._decomp.decompositions", "one_layer_lstm", make)


def _symbolic_batch(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], chosen: bool | Mapping[str, int]
) -> dict[str, Any]:
    """The arguments by name with one symbol for the number of samples, as torch.export takes them."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    dims = _batch_dims(bound, chosen)
    sizes = {tensor.shape[dim] for tensor, dim in dims.values()}
    if len(sizes) != 1 or sizes == {1}:  # torch.export takes a size of 1 for a fixed property of the model
        raise ModelError(f"dynamic_batch: sizes {sorted(sizes)}; expected example inputs with one number of samples, at least 2")
    symbol = torch.export.Dim("batch", min=1)
    by_id = {id(tensor): {dim: symbol} for tensor, dim in dims.values()}
    return {name: torch.utils._pytree.tree_map(lambda leaf: by_id.get(id(leaf)), value) for name, value in bound.items()}


def _batch_dims(bound: Mapping[str, Any], chosen: bool | Mapping[str, int]) -> dict[str, tuple[torch.Tensor, int]]:
    """A name for each tensor with a batch dimension -> the tensor and that dimension."""
    tensors = {
        name + torch.utils._pytree.keystr(path): leaf
        for name, value in bound.items()
        for path, leaf in torch.utils._pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor)
    }
    if not isinstance(chosen, bool):
        for name, dim in chosen.items():
            if name not in tensors or not 0 <= dim < tensors[name].dim():
                raise ModelError(f"dynamic_batch: {name!r} has no dimension {dim}; expected one of {', '.join(tensors)} and its dimension")
        return {name: (tensors[name], dim) for name, dim in chosen.items()}
    counted = Counter(tensor.shape[0] for tensor in tensors.values() if tensor.dim())
    if not counted:
        raise ModelError("dynamic_batch: no input has a dimension; expected example inputs with samples")
    size = counted.most_common(1)[0][0]
    return {name: (tensor, 0) for name, tensor in tensors.items() if tensor.dim() and tensor.shape[0] == size}


def _separate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a copy of each tensor that occurs again: torch.export would take both for one input (ids and labels)."""
    seen: set[int] = set()

    def separate(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
            return leaf.clone()
        seen.add(id(leaf))
        return leaf

    changed: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map(separate, (args, kwargs))
    return changed
