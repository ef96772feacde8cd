"""The quickstart notebook runs from its first to its last cell, shows its pictures, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
SECONDS_PER_CELL = 240
"""Far more than needed; a cell takes seconds on an idle machine."""


def texts(cell: nbformat.NotebookNode) -> str:
    """What the cell printed, and its value as text."""
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", []))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this soap, installed or not
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
    printed = "".join(texts(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert "as in one process: True" in printed
    assert "speed-up over data parallelism: predicted" in printed
    assert not [output for output in shown if output.get("name") == "stderr"]
    (folder,) = tmp_path.glob("soap-quickstart-*")
    assert {path.name for path in folder.iterdir()} == {"model.pt2", "strategy.json", "timeline.json"}


def test_no_outputs_are_committed() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None
