"""Scripts of ``examples`` that pages include run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

import soap
from examples import quickstart


def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart.export()
    quickstart.search("p100-4x4")
    assert capsys.readouterr().out.startswith("predicted: ")
    assert soap.load_strategy("strategy.json", "model.pt2", "p100-4x4").operators.keys() == {*soap.load("model.pt2").graph.operators}
