"""What ``soap.export`` writes into a file beside the program: whether it was compared with eager PyTorch, and what its operators need.

Files come from outside: a record informs people, and nothing is imported, run or trusted because it says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
