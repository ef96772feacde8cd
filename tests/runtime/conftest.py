from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.pool import Pool
from tests.transformers_models import ARCHITECTURES


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three ranks."""
    pool = Pool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four ranks, which keep the models that they have traced."""
    pool = Pool(4)
    yield pool
    pool.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """``SOAP_MODELS_TABLE=FILE`` writes the table of architectures; what a run does not try stays as it was tried before."""
    rows = [value for key, value in report.user_properties if key == "architecture"]
    if report.when == "call" and rows and "SOAP_MODELS_TABLE" in os.environ:
        write_row(Path(os.environ["SOAP_MODELS_TABLE"]), dict(rows[0]), report.passed)


_HEAD = """# Architectures of `transformers`

Small models with random weights, exported by `torch.export.save` and by `soap.export` in one process, read in others, which never import
`transformers`. Loss and all gradients of both programs are compared with eager PyTorch's in float64; then four ranks train two steps under
data parallelism and under a random strategy and are compared with one process. Figures are largest relative errors. *Whole*: operators
that have no rule and run on one device. Written by
`SOAP_MODELS_TABLE=docs/models.md python -m pytest tests/runtime/test_architectures.py`.
"""
_COLUMNS = {
    "operators": "operators", "whole": "whole", "torch.export.save": "`torch.export.save`", "soap.export": "`soap.export`",
    "data_parallel": "data parallelism", "random": "random plan", "date": "tried", "torch": "torch", "transformers": "transformers",
}  # fmt: skip


def write_row(path: Path, row: dict[str, Any], passed: bool) -> None:
    """Put a model's line into the table: its figures, or why it was refused."""
    row |= {"date": f"{date.today():%Y-%m-%d}", "torch": torch.__version__.split("+")[0], "transformers": version("transformers")}
    result = f"refused: {row['refused']}".replace("|", "\\|") if row.get("refused") else "right" if passed else "WRONG"
    figures = [f"{n:.0e}" if isinstance(n, float) else "" if n is None else str(n) for n in map(row.get, _COLUMNS)]
    before = path.read_text().splitlines() if path.exists() else []
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in before if line.startswith("| ") and not line.startswith("| model")}
    lines[row["name"]] = f"| {row['name']} | {result} | " + " | ".join(figures) + " |"
    ordered = [lines[name] for name in ARCHITECTURES if name in lines]
    counted = Counter(line.split(" | ")[1].split(":")[0] for line in ordered)
    said = ", ".join(f"{count} {what}" for what, count in counted.most_common())
    head = ["| model | result | " + " | ".join(_COLUMNS.values()) + " |", "|---" * (len(_COLUMNS) + 2) + "|"]
    path.write_text("\n".join([_HEAD, f"{len(ordered)} architectures: {said}.", "", *head, *ordered]) + "\n")
