"""A model that this machine need not hold is exported and planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import llama
from soap.cli import simulate

LAYER, NORM, TABLE = 218_112_000, 4096, 128_256 * 4096
"""Parameters of a layer of Llama 3 8B, of the last norm, and of each of the two tables."""
COUNTS_BYTES = 12 * 4
"""Adam counts the steps of each parameter: nine of the layer, the norm's, and the two tables."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the program is not compared")
def test_a_layer_of_it_has_metas_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.main([str(tmp_path / "llama.pt2"), "--layers", "1", "--samples", "1"])
    assert simulate.main([str(tmp_path / "llama.pt2"), "--cluster", "h200-8", "--builtin", "single_device", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["peak_memory_bytes"][0]
    assert memory["values"] == 2 * (LAYER + NORM + 2 * TABLE)
    assert memory["states"] == 2 * memory["values"] + COUNTS_BYTES
