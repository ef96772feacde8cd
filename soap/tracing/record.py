"""What ``soap.export`` writes into a file beside the program: whether it was compared with eager PyTorch, and what its operators need.

Files come from outside: a record informs people, and nothing is imported, run or trusted because it says so.

Operators outside of ATen: which of them every process knows, and who has defined the others.

Imports modules that a user names, also from the working folder.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram

from soap.errors import ModelError, first_line
from soap.tracing.rules.experts import LIBRARY_OPERATORS

NAME = "soap.json"
"""Name among the archive's extra files."""
MAX_LENGTH = 100_000
_MODULE = re.compile(r"[A-Za-z_]\w{0,99}(\.[A-Za-z_]\w{0,99}){0,20}", re.ASCII)
BY_TORCH = "exported by torch.export.save"
OF_THE_ZOO = "a program of the zoo, all of which the tests of this package compare with eager PyTorch"


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """``compared``: whether loss and gradients of one step were found equal to eager PyTorch's. ``reason``: why not, if they were not.
    ``imports``: the modules that define the program's custom operators, as named at export. ``tied``: of parameters without values, which
    torch's archives tell apart by nothing: name -> the first name of the same parameter. ``has_values``: of all parameters; it is seen in
    the file, which says nothing of it."""

    compared: bool = False
    reason: str = BY_TORCH
    imports: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    has_values: bool = True

    @property
    def text(self) -> str:
        """The record as the end of a line about a check."""
        if self.compared:
            return "the program was compared with eager PyTorch when it was exported"
        return f"the program was never compared with eager PyTorch: {self.reason}"


def dumps(record: ExportRecord) -> str:
    """The record as JSON."""
    eager = {"compared": record.compared, "reason": record.reason}
    tied = {"tied": dict(record.tied)} if record.tied else {}
    return json.dumps({"format": 1, "eager": eager, "imports": list(record.imports), **tied})


def loads(text: str | bytes) -> ExportRecord:
    """The record that a file claims; None if it has none that ``dumps`` wrote."""
    try:
        found = json.loads(text) if len(text) <= MAX_LENGTH else None
    except (ValueError, RecursionError):
        found = None
    eager = found.get("eager") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(eager, dict):
        return ExportRecord()
    imports, tied = module_names(found.get("imports")), _names(found.get("tied"))
    if eager.get("compared") is True:
        return ExportRecord(True, "", imports, tied)
    return ExportRecord(False, " ".join(str(eager.get("reason", "")).split())[:200] or BY_TORCH, imports, tied)


def _names(found: Any) -> dict[str, str]:
    """The entries of a mapping from text to text."""
    return {name: first for name, first in found.items() if isinstance(first, str)} if isinstance(found, dict) else {}


def module_names(found: Any) -> tuple[str, ...]:
    """The entries of a list that are dotted names of modules."""
    listed: Sequence[Any] = found if isinstance(found, list) else []
    return tuple(name for name in listed if isinstance(name, str) and _MODULE.fullmatch(name))


KNOWN_NAMESPACES = {"aten", "prims", "prim", "soap"}
"""Namespaces of the operators that a process knows if it has imported only torch and SOAP: torch's and our own."""
_TARGET = re.compile(r"torch\.ops\.(?P<library>\w+)\.(?P<name>\w+)(\.(?P<overload>\w+))?")


def custom_operators(exported: ExportedProgram) -> list[str]:
    """``library::name`` of the program's operators that only exist once their library is imported."""
    modules = [m for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    foreign = dict.fromkeys(t._schema.name for t in targets if t.namespace not in KNOWN_NAMESPACES)
    return [name for name in foreign if name.replace("::", ".") not in LIBRARY_OPERATORS]


def refuse_custom_operators(exported: ExportedProgram, imports: Collection[str]) -> None:
    """ModelError in one line for operators that no command will know, unless the modules that define them are named."""
    if imports:
        return
    for name in custom_operators(exported):
        module = _defining_module(name)
        if module is None:
            place, known = _registered_at(name), "MODULE"
        else:
            place, known = f" (defined in module {module})", module
        if module == "__main__":
            place, known = " (defined in the script itself)", "MODULE"
        moved = " move its definition into a module," if module == "__main__" else ""
        raise ModelError(
            f"the program calls the operator {name}{place}, which commands do not know;{moved} pass imports=({known!r},) to soap.export "
            f"and --import {known} to the commands, or write it with PyTorch's own operators"
        )


def _defining_module(name: str) -> str | None:
    """The module of a ``torch.library.custom_op``."""
    from torch._library.custom_ops import OPDEFS

    definition: Any = OPDEFS.get(name)
    module = inspect.getmodule(definition._init_fn) if definition is not None else None
    return None if definition is None else module.__name__ if module is not None else str(definition._init_fn.__module__)


def _registered_at(name: str) -> str:
    """Where an operator of ``torch.library.Library``, or of an extension, was registered."""
    found = re.search(r"^debug: registered at (.+)$", torch._C._dispatch_dump(name), re.MULTILINE)
    return f" (registered at {found[1].strip()})" if found else ""


def unknown_operator(target: str) -> str | None:
    """``library::name`` of an operator that a file's program calls, if this process does not know it."""
    match = _TARGET.fullmatch(target)
    return f"{match['library']}::{match['name']}" if match and not _is_known(**match.groupdict()) else None


def _is_known(library: str, name: str, overload: str | None) -> bool:
    found = getattr(getattr(torch.ops, library, None), name, None)
    return isinstance(found, torch._ops.HigherOrderOperator) or (
        isinstance(found, torch._ops.OpOverloadPacket) and (overload or "default") in found.overloads()  # type: ignore[no-untyped-call]
    )


def from_here(name: str) -> ModuleType:
    """The module of this name, which may be in the working folder. Raises what importing it raises."""
    if os.getcwd() not in sys.path:  # an installed command, unlike ``python``, does not search the working folder
        sys.path.insert(0, os.getcwd())
    return import_module(name)


def import_all(names: Iterable[str], option: str) -> None:
    """Import modules that define custom operators. ``option``: the option that named them. ModelError if one cannot be imported."""
    for name in names:
        try:
            from_here(name)
        except Exception as cause:
            raise ModelError(f"{option} {name}: {first_line(cause)}; expected a module that can be imported from here") from cause
