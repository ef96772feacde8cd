from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transformers_models import ARCHITECTURES


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """``SOAP_MODELS_TABLE=FILE`` writes the table of architectures; what a run does not try stays as it was tried before."""
    rows = [value for key, value in report.user_properties if key == "architecture"]
    if report.when == "call" and rows and "SOAP_MODELS_TABLE" in os.environ:
        write_row(Path(os.environ["SOAP_MODELS_TABLE"]), rows[0])


_HEAD = """# Architectures of `transformers`

Small models with random weights. Each is exported by `torch.export.save` and by `soap.export` in one process, and read in others, which
never import `transformers`. Loss and all gradients of both programs are compared with eager PyTorch's in float64. Then four ranks train
two steps under data parallelism and under a random strategy, and are compared with one process.

Figures are largest relative errors; a dash means that it was not tried. *Whole* counts operators that have no rule and run on one device.
`SOAP_MODELS_TABLE=docs/models.md python -m pytest tests/runtime/test_architectures.py` writes this page line by line: a part may be tried
again.
"""
_COLUMNS = {
    "name": "model", "result": "result", "operators": "operators", "whole": "whole",
    "torch.export.save": "`torch.export.save`", "soap.export": "`soap.export`",
    "data_parallel": "data parallelism", "random": "random plan", "date": "tried", "torch": "torch", "transformers": "transformers",
}  # fmt: skip


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Put what is known of a model into its line of the table: figures, or why it was refused."""
    before = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")] if path.exists() else []
    lines = {cells[0]: dict(zip(_COLUMNS, [cell.strip() for cell in cells], strict=False)) for cells in before[1:]}
    known = {} if "refused" in row else lines.get(row["name"], {})
    figures = {key: f"{value:.0e}" if isinstance(value, float) else str(value) for key, value in row.items() if key in _COLUMNS}
    own = lines[row["name"]] = {**known, **figures, "date": f"{date.today():%Y-%m-%d}"}
    own |= {"torch": torch.__version__.split("+")[0], "transformers": version("transformers")}
    refused = "refused: " + str(row.get("refused")).replace("|", "\\|")
    own["result"] = refused if "refused" in row else "WRONG" if "failed" in own.values() else "right"
    ordered = [lines[name] for name in ARCHITECTURES if name in lines]
    said = ", ".join(f"{count} {what}" for what, count in Counter(line["result"].split(":")[0] for line in ordered).most_common())
    head = ["| " + " | ".join(_COLUMNS.values()) + " |", "|---" * len(_COLUMNS) + "|"]
    table = ["| " + " | ".join(line.get(key) or "-" for key in _COLUMNS) + " |" for line in ordered]
    path.write_text("\n".join([_HEAD, f"{len(ordered)} architectures: {said}.", "", *head, *table]) + "\n")
