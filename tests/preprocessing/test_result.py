"""The files of a result: Parquet beside the arrays, and nothing of what other runs, ended before their end, had left in the folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soap.preprocessing import engine, local, result
from soap.preprocessing.container import PreprocessError
from soap.preprocessing.engine import Options
from soap.preprocessing.local import preprocess as preprocess_here
from soap.preprocessing.spec import Spec, from_document
from soap.preprocessing.work import Work
from tests.preprocessing.running import Cut, files_of, preprocess

ROWS_PER_PART = 40
SPEC = from_document({
    "columns": [
        {"name": "y", "kind": "label"}, {"name": "n", "kind": "integer"}, {"name": "id", "kind": "hex"}, {"name": "word", "kind": "string"},
    ]
})  # fmt: skip
OTHER = from_document({"columns": [{"name": f, "kind": "string"} for f in ("y", "number", "id", "last")]})


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet files of few rows."""
    monkeypatch.setattr(engine, "Work", partial(Work, rows_per_group=ROWS_PER_PART))


def _lines(folder: Path, rows: int) -> Path:
    path = folder / "day"
    path.write_bytes(b"".join(b"%d\t%d\t%x\tw%d\n" % (i % 2, i - 5, i * i % 17, i % 6) for i in range(rows)))
    return path


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_parquet_holds_the_arrays_whatever_the_chunks(tmp_path: Path, codec: str) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet is written by pyarrow")
    path, found = _lines(tmp_path, 100), []
    for seed, chunk in enumerate((10**6, 50)):
        out = tmp_path / f"out{seed}"
        preprocess(SPEC, [path], out, Options(chunk_bytes=chunk, codec=codec), seed=seed)
        parts = [pq.ParquetFile(part) for part in sorted((out / "parquet").iterdir())]
        assert [(part.num_row_groups, part.metadata.num_rows) for part in parts] == [(1, 40), (1, 40), (1, 20)]
        assert {part.metadata.row_group(0).column(3).compression for part in parts} == {"UNCOMPRESSED" if codec == "none" else "ZSTD"}
        tables = [part.read() for part in parts]
        columns = {name: np.concatenate([table.column(name).to_numpy() for table in tables]) for name in tables[0].column_names}
        arrays = [np.load(out / f"{name}.npy") for name in ("labels", "numbers", "categories")]
        assert [*columns] == ["y", "n", "id", "word"]
        assert np.array_equal(np.stack([*columns.values()], 1), np.concatenate(arrays, axis=1))
        found.append(columns)
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


def _cut(*_: Any, **__: Any) -> None:
    raise Cut


def _cut_while_moving(monkeypatch: pytest.MonkeyPatch, spec: Spec, path: Path, out: Path, options: Options) -> None:
    """All files are at their place, but ``meta.json`` is not written."""
    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(result, "write_text_atomically", _cut)
        preprocess(spec, [path], out, options)
    assert (out / "labels.npy").exists()
    assert result.read(out) is None


@pytest.mark.parametrize("parquet", [False, True])
def test_another_runs_files_are_not_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parquet: bool) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is written by pyarrow")
    _cut_while_moving(monkeypatch, SPEC, _lines(tmp_path, 100), tmp_path / "out", Options())
    path, options = _lines(tmp_path, 30), Options(parquet=parquet)
    preprocess(OTHER, [path], tmp_path / "out", options)
    preprocess(OTHER, [path], tmp_path / "fresh", options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert (tmp_path / "out" / "parquet").exists() == parquet


def test_parts_of_a_longer_input_are_not_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is written by pyarrow")
    path, options = _lines(tmp_path, 100), Options(chunk_bytes=10**6)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(result, "put", _cut)
        preprocess(SPEC, [path], tmp_path / "out", options)
    preprocess(SPEC, [_lines(tmp_path, 50)], tmp_path / "out", options)
    assert sorted(part.name for part in (tmp_path / "out" / "parquet").iterdir()) == ["part-000000.parquet", "part-000001.parquet"]


def test_a_finished_run_is_not_trusted_once_another_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out, options = _lines(tmp_path, 100), tmp_path / "out", Options(chunk_bytes=300, parquet=False)
    preprocess(SPEC, [path], tmp_path / "fresh", options)
    _cut_while_moving(monkeypatch, SPEC, path, out, options)
    with pytest.raises(Cut):
        preprocess(OTHER, [path], out, options, tasks=8)
    preprocess(SPEC, [path], out, options)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_moving_goes_on_and_lost_files_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out, options = _lines(tmp_path, 100), tmp_path / "out", Options(parquet=False)
    _cut_while_moving(monkeypatch, SPEC, path, out, options)
    assert preprocess(SPEC, [path], out, options, tasks=0).tasks == 0
    whole = files_of(out)
    _cut_while_moving(monkeypatch, SPEC, path, tmp_path / "other", options)
    (tmp_path / "other" / "numbers.npy").unlink()
    preprocess(SPEC, [path], tmp_path / "other", options)
    assert files_of(tmp_path / "other") == whole


def test_missing_pyarrow_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    path, out = _lines(tmp_path, 10), tmp_path / "out"
    with pytest.raises(PreprocessError, match=r"Parquet needs pyarrow: pip install .*--no-parquet"):
        preprocess_here(SPEC, [path], out)
    assert not out.exists()
    serial = {"index": "serial", "convert": "serial"}
    assert preprocess_here(SPEC, [path], out, parquet=False, modes=serial).rows == 10
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(PreprocessError, match="Parquet needs pyarrow"):
        preprocess_here(SPEC, [tmp_path / "in.parquet"], tmp_path / "other", parquet=False)
