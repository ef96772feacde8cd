"""What a file says of how it was exported."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from soap.tracing.load import load_model
from soap.tracing.record import NAME, ExportRecord, dumps, loads
from tests.tracing.exporting import Exports, X, around
from tests.tracing.programs import Lambda


def test_what_a_file_records(export: Exports, tmp_path: Path) -> None:
    export(around(nn.ReLU()), X)
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        name = next(name for name in archive.namelist() if name.endswith(f"/extra/{NAME}"))
        assert json.loads(archive.read(name)) == {"format": 1, "eager": {"compared": True, "reason": ""}, "imports": []}


def test_a_file_of_torch_has_no_record(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Lambda(lambda _, x: x.sin().sum()), (X,)), tmp_path / "m.pt2")
    record = load_model(tmp_path / "m.pt2").record
    assert record is not None
    assert record == ExportRecord() and record.text.endswith("never compared with eager PyTorch: exported by torch.export.save")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"eager": 3}', '{"format": 1}', "9" * 200_000, '{"eager": {"compared": "yes"}}'])
def test_records_that_are_none(text: str) -> None:
    assert loads(text) == ExportRecord()


def test_a_record_is_text_for_people() -> None:
    record = ExportRecord(False, "a\nb", ("shop.ops",))
    assert loads(dumps(record)) == ExportRecord(False, "a b", ("shop.ops",))
    assert loads('{"eager": {}, "imports": ["os; x", "a.b", 3, "..", "é"]}').imports == ("a.b",)
