"""The notebooks run from their first to their last cells, show their pictures, and are committed without outputs."""

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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_single_device_script_runs_on_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "notebooks" / "distributed_script.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    script, trained, found, costs = [texts(cell) for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert script.strip() in (ROOT / "examples" / "tagger.py").read_text(encoding="utf-8")
    losses = [float(line.rpartition(" ")[2]) for line in trained.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True) and "words.weight" in trained
    assert "words.weight: a batch touches" in found and "(measured)" in found
    milliseconds = {line.split()[0]: float(line.split()[1]) for line in costs.splitlines() if line.endswith(" ms")}
    assert milliseconds["hybrid"] < milliseconds["data_parallel"] / 2


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_outputs_are_committed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None
