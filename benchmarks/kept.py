"""Cells of a benchmark in one JSON file, which is written again, as a whole or not at all, behind each cell; so a run that was interrupted
goes on with what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from soap.errors import SoapError
from soap.files import read_text, write_text_atomically


def read(path: Path, cell: Mapping[str, Any], version: int, command: str) -> list[dict[str, Any]]:
    """The cells of a file, each as its JSON schema ``cell`` has it; none if there is no file. SoapError in one line if it is no file of
    this command."""
    if not path.exists():
        return []
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    try:
        document = json.loads(read_text(path, what="results"))
    except (ValueError, RecursionError) as error:
        raise SoapError(f"results {str(path)!r} are no JSON ({error}); expected a file of {command}") from None
    schema = {
        "type": "object",
        "properties": {"version": {"const": version}, "cells": {"type": "array", "items": cell}},
        "required": ["version", "cells"],
        "additionalProperties": False,
    }
    fault = best_match(Draft202012Validator(schema).iter_errors(document))
    if fault is not None:
        place = "/".join(map(str, fault.absolute_path)) or "the whole"
        said = fault.message if len(fault.message) < 200 else f"{fault.message[:200]}…"
        raise SoapError(f"results {str(path)!r}: {place}: {said}; expected a file of {command}")
    found: list[dict[str, Any]] = document["cells"]
    return found


def write(path: Path, cells: Iterable[Mapping[str, Any]], version: int) -> None:
    """Write them, a line for each cell; as a whole or not at all."""
    lines = ",\n".join(json.dumps(cell) for cell in cells)
    write_text_atomically(path, f'{{"version": {version}, "cells": [\n{lines}\n]}}\n')
