from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.pool import Pool


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of architectures, which ``SOAP_MODELS_TABLE=FILE`` writes as well."""
    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            rows += [(value, outcome) for key, value in report.user_properties if key == "architecture" and report.when == "call"]
    if not rows:
        return
    table = models_table(rows)
    terminalreporter.section("architectures")
    terminalreporter.write_line(table)
    if "SOAP_MODELS_TABLE" in os.environ:
        Path(os.environ["SOAP_MODELS_TABLE"]).write_text(f"{_HEAD}\n{_versions()}\n\n{table}\n")


_HEAD = """# Architectures of `transformers`

Small models with random weights, exported by `torch.export.save` and by `soap.export` in one process, read in others, which never import
`transformers`. Loss and all gradients of both programs are compared with eager PyTorch's in float64; then four ranks train two steps under
data parallelism and under a random strategy and are compared with one process. Figures are largest relative errors. *Whole*: operators
that have no rule and run on one device. Written by
`SOAP_MODELS_TABLE=docs/models.md python -m pytest tests/runtime/test_architectures.py`.
"""
_COLUMNS = {
    "operators": "operators", "whole": "whole", "torch.export.save": "`torch.export.save`", "soap.export": "`soap.export`",
    "data_parallel": "data parallelism", "random": "random plan",
}  # fmt: skip


def _versions() -> str:
    from importlib.metadata import version

    return f"{date.today():%Y-%m-%d}, torch {torch.__version__.split('+')[0]}, transformers {version('transformers')}."


def models_table(rows: list[tuple[dict[str, Any], str]]) -> str:
    """A line for each model: its figures, or why it was refused."""
    lines = ["| model | result | " + " | ".join(_COLUMNS.values()) + " |", "|---" * (len(_COLUMNS) + 2) + "|"]
    for row, outcome in rows:
        result = f"refused: {row['refused']}".replace("|", "\\|") if row.get("refused") else "right" if outcome == "passed" else "WRONG"
        figures = [f"{n:.0e}" if isinstance(n, float) else "" if n is None else str(n) for n in map(row.get, _COLUMNS)]
        lines.append(f"| {row['name']} | {result} | " + " | ".join(figures) + " |")
    right = sum(outcome == "passed" and not row.get("refused") for row, outcome in rows)
    return "\n".join([*lines, "", f"{right} of {len(rows)} are right, {sum(bool(row.get('refused')) for row, _ in rows)} refused."])
