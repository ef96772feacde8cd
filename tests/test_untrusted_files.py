"""Files from outside that are small and hold very much, or are nested very deeply: refused in one line, before they are read."""

from __future__ import annotations

import ast
import gzip
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import soap
from soap.data.preprocessed import Preprocessed
from soap.files import ARCHIVE_SPARE_BYTES, check_archive
from soap.mixed.run.training import Checkpoint, server_values
from soap.preprocessing import steps
from soap.tracing import record
from soap.weights.safetensors_files import INDEX, SafetensorsFiles
from soap.yaml_text import parse_yaml

PACKAGE = Path(__file__).parent.parent / "soap"
DEEP = "[" * 100_000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def inflate(path: Path, suffix: str) -> None:
    """Write an archive anew, with its first entry of this name a long row of zeros, compressed."""
    kept = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(kept)) as old, zipfile.ZipFile(path, "w") as new:
        long = next(name for name in old.namelist() if name.endswith(suffix))
        for name in old.namelist():
            if name == long:
                new.writestr(name, bytes(ARCHIVE_SPARE_BYTES + 2**20), zipfile.ZIP_DEFLATED)
            else:
                new.writestr(name, old.read(name))


def test_an_archive_that_holds_very_much_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.pt2"
    soap.export(Small(), (torch.ones(3),), path=path, verify=False)
    check_archive(path)
    soap.load(str(path))
    inflate(path, ".json")
    assert path.stat().st_size < 2**18
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(soap.ModelError, match=r"m\.pt2': its .* KiB hold 65\.\d MiB; expected an archive that is not compressed"):
        soap.load(str(path))


def test_a_part_of_an_archive_that_is_one_itself_is_not_read_either(tmp_path: Path) -> None:
    part = tmp_path / "part.pt"
    torch.save({"w": torch.ones(3)}, part)
    inflate(part, "data/0")
    path = tmp_path / "m.pt2"
    soap.export(Small(), (torch.ones(3),), path=path, verify=False)
    kept = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(kept)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, part.read_bytes() if name.endswith(".pt") else old.read(name))
    with pytest.raises(soap.ModelError, match="is not plain tensors") as refused:
        soap.load(str(path))
    assert "expected an archive that is not compressed" in str(refused.value.__cause__)


def test_overlapping_entries_count_each(tmp_path: Path) -> None:
    """Many names may share the same bytes of a file, without any compression."""
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", bytes(2**20))
        archive.infolist().extend([archive.infolist()[0]] * 100)
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"its 1\.00 MiB hold 101 MiB"):
        check_archive(path)


def test_checkpoints_that_hold_very_much_are_not_read(tmp_path: Path) -> None:
    at = Checkpoint(str(tmp_path), 1, 0)
    place = at.server(0)
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"values": [torch.ones(3)]}, place)
    assert server_values(at, 0)[0].tolist() == [1, 1, 1]
    inflate(place, "data/0")
    with pytest.raises(soap.SoapError, match=r"hold 65\.\d MiB; expected an archive that is not compressed"):
        server_values(at, 0)


def test_an_input_that_becomes_very_long_is_not_uncompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "INFLATED_SPARE_BYTES", 2**20)
    path, spec = tmp_path / "day.gz", tmp_path / "spec.yaml"
    path.write_bytes(gzip.compress(b"1\ta\n" * 2**22))
    spec.write_text("columns: [{name: label, kind: label}, {name: c, kind: string}]\n")
    with pytest.raises(soap.SoapError, match=r"day\.gz' is no data: its \d+ bytes became more than"):
        soap.preprocess(spec, [path], tmp_path / "out", modes={"index": "serial", "convert": "serial"})
    left = [one.name for one in (tmp_path / "out").rglob("*") if one.is_file() and one.stat().st_size > 2**16]
    assert not left


@pytest.mark.parametrize("text", [LAUGHS, "a: &a [*a]\n", "a: &a {x: 1, y: 2}\n" + LAUGHS.replace("[", "[{<<: *a}, ")])
def test_aliases_that_stand_for_very_much_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than 1000000 values by its aliases"):
        parse_yaml(text)
    assert parse_yaml("a: &a {x: [1]}\nb: *a\nc: {<<: *a, y: 2}\n") == {"a": {"x": [1]}, "b": {"x": [1]}, "c": {"x": [1], "y": 2}}


def test_a_cluster_file_of_aliases_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(soap.TopologyError, match=r"c\.yaml.*values by its aliases"):
        soap.load_cluster(str(path))


def _weights(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ' + DEEP)
    SafetensorsFiles(folder)


def _preprocessed(folder: Path) -> None:
    (folder / "meta.json").write_text(DEEP)
    Preprocessed(folder)


def _cluster(folder: Path) -> None:
    (folder / "c.yaml").write_text(DEEP)
    soap.load_cluster(str(folder / "c.yaml"))


@pytest.mark.parametrize("read", [_weights, _preprocessed, _cluster])
def test_deeply_nested_texts_are_one_line(read: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(soap.SoapError) as refused:
        read(tmp_path)
    assert ("\n" not in str(refused.value) and ".yaml" in str(refused.value)) or str(tmp_path) in str(refused.value)


def test_a_deeply_nested_record_is_none() -> None:
    assert record.loads(DEEP[: record.MAX_LENGTH]) == record.ExportRecord()


OWN = {
    "profiles/efficiency.py", "profiles/shipped.py", "profiles/spreads.py", "cluster/interconnects.py", "cluster/presets.py",
    "profiles/store.py", "elastic/snapshots.py", "cli/trials.py", "runtime/comm/failures.py",  # of this user's own runs
    "elastic/session.py", "measure/neighbours.py", "measure/link_probe.py", "emulation/network.py",  # of processes that were started
    "tracing/load.py", "strategy/json_text.py", "api/kept_graphs.py",  # caught by their callers: load.read_pt2; here below
}  # fmt: skip
"""Files that read JSON that was not given by a user."""
READERS = ("json.loads", "json.load", "yaml.load", "parse_json")


def _unguarded() -> Iterator[str]:
    """Calls that read nested texts where no handler is for too deep ones."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        if name in OWN or not any(f"{reader}(" in text for reader in READERS):
            continue
        tree = ast.parse(text)
        guarded = {
            inside
            for node in ast.walk(tree)
            if isinstance(node, ast.Try | ast.With) and any("RecursionError" in said or said == "Exception" for said in _caught(node))
            for part in node.body
            for inside in ast.walk(part)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS and node not in guarded:
                yield f"{name}:{node.lineno}"


def _caught(node: ast.Try | ast.With) -> list[str]:
    """The errors that handlers catch, or that ``suppress`` does."""
    if isinstance(node, ast.Try):
        return [ast.unparse(handler.type) if handler.type else "Exception" for handler in node.handlers]
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return [ast.unparse(error) for call in calls if ast.unparse(call.func) == "suppress" for error in call.args]


def test_whatever_reads_nested_texts_expects_too_deep_ones() -> None:
    found = [place for place in _unguarded() if not place.startswith("tracing/load.py")]  # whose caller does
    assert not found
