"""Graphs that are kept: the same graph again, without torch; anything that does not fit is read anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soap
from soap import api
from soap.api import kept_graphs, models
from soap.cli import inputs, simulate
from soap.errors import ModelError, SoapWarning
from soap.model import json_text
from soap.model.graph import OperatorGraph
from soap.model.json_text import read_as
from soap.tracing.footprints import _Trials
from tests.kept_models import CACHE

SPEC = "zoo:rnnlm:tiny"
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rnnlm:tiny", {}),
    ("dlrm:tiny", {"autocast": "bfloat16", "autocast_device": "cuda"}),
    ("alexnet:tiny", {"batch_norm": "local"}),
)


def plain(graph: OperatorGraph) -> dict[str, Any]:
    """A graph's fields, with mappings that are found later as what they are."""
    return {field.name: dict(own) if isinstance(own := getattr(graph, field.name), Mapping) else own for field in fields(graph)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "soap"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The models that are read, as opposed to found."""
    done: list[str] = []
    load = models.load

    def noted(spec: Any, **options: Any) -> Any:
        done.append(spec)
        return load(spec, **options)

    monkeypatch.setattr(models, "load", noted)
    yield done


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reading"), CASES, ids=[name for name, _ in CASES])
def test_a_graph_survives_as_text(name: str, reading: dict[str, Any]) -> None:
    graph = soap.load(f"zoo:{name}", plan_only=True, **reading).graph
    again = read_as(OperatorGraph, json.loads(json.dumps(json_text.plain(graph, rows=True))))
    assert plain(again) == plain(graph)
    assert repr(plain(again)) == repr(plain(graph))  # types of numbers too
    assert again.hash == graph.hash


@pytest.mark.slow
def test_it_is_read_once(read: list[str]) -> None:
    first, second = api.planned_graph(SPEC), api.planned_graph(SPEC)
    assert read == [SPEC]
    assert plain(first) == plain(second)
    api.planned_graph(SPEC, autocast="bfloat16")
    api.planned_graph("zoo:rnnlm:tiny@16")
    assert len(read) == 3
    api.planned_graph("zoo:rnnlm:tiny@16", batch_norm="global", autocast=None, autocast_device="cpu", imports=(), batch_dims=None)
    assert len(read) == 4  # other arguments, if only in their words


@pytest.mark.slow
def test_searches_are_the_same(read: list[str]) -> None:
    options = soap.SearchOptions(budget=50)
    first, second = (soap.find(SPEC, "p100-4x4", options) for _ in range(2))
    assert len(read) == 1
    assert first.record == second.record and first.strategy == second.strategy


def change_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept_graphs, "_sources", lambda: "others")


def change_torch(patch: pytest.MonkeyPatch) -> None:
    version = kept_graphs._version
    patch.setattr(kept_graphs, "_version", lambda package: f"{version(package)}+other")


def change_settings(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(kept_graphs.OVERRIDE, "1")


@pytest.mark.parametrize("change", [change_sources, change_torch, change_settings])
def test_what_was_read_otherwise_is_read_anew(change: Any, read: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.planned_graph(SPEC)
    change(monkeypatch)
    api.planned_graph(SPEC)
    assert len(read) == 2
    api.planned_graph(SPEC)
    assert len(read) == 2 and len(list(cache.iterdir())) == 1  # what was kept before has gone


def damages(text: str) -> Iterator[str]:
    record = json.loads(text)
    yield ""
    yield text[: len(text) // 2]
    yield "[" * 100_000
    yield "{}"
    yield json.dumps([record])
    yield text.replace('"float32"', '"float33"', 1)
    yield json.dumps({**record, "graph": record["graph"][:-1]})
    yield json.dumps({**record, "told": ["nothing"]})
    yield json.dumps({**record, "key": {}})


def test_damaged_files_are_read_anew(read: list[str], cache: Path) -> None:
    api.planned_graph(SPEC)
    (path,) = cache.iterdir()
    text = path.read_text(encoding="utf-8")
    for count, damaged in enumerate(damages(text), 2):
        path.write_text(damaged, encoding="utf-8")
        api.planned_graph(SPEC)
        assert len(read) == count
        assert path.read_text(encoding="utf-8") == text


def test_values_of_something_else_are_refused() -> None:
    values = json_text.plain(soap.load(SPEC, plan_only=True).graph, rows=True)
    for place, wrong in ((0, 1), (1, {}), (1, [1]), (2, [["a"]]), (3, None), (10, [["a", True]])):
        with pytest.raises((ValueError, TypeError)):
            read_as(OperatorGraph, [*values[:place], wrong, *values[place + 1 :]])
    with pytest.raises(ModelError, match="loss 'none' is produced by no operator"):
        read_as(OperatorGraph, [*values[:3], "none", *values[4:]])


def test_what_depends_on_more_is_not_kept(read: list[str], cache: Path) -> None:
    for _ in range(2):
        api.planned_graph(SPEC, imports=["math"])
    assert len(read) == 2 and not cache.exists()


def test_the_precision_of_products_is_set_whether_a_graph_is_read_or_found(read: list[str], cache: Path) -> None:
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("high", "highest", "high", None):
            torch.set_float32_matmul_precision("highest")
            found.append(api.planned_graph(SPEC, matmul_precision=precision))
            assert torch.get_float32_matmul_precision() == (precision or "highest")
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(read) == 3 and plain(found[0]) == plain(found[2]) != plain(found[1]) == plain(found[3])


class Tables(nn.Module):
    """A table that is looked up by a buffer and by inputs, and a call without a rule."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(20, 4, generator=generator))
        self.register_buffer("places", torch.arange(4) % 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        own = (nn.functional.embedding(ids, self.table) + nn.functional.embedding(self.places, self.table) + x).square()
        return (torch.linalg.matrix_exp(own.transpose(0, 1) @ own) * 1e-3).mean()


def exported(path: Path, seed: int = 0, places: Tensor | None = None, ids: Tensor | None = None) -> Path:
    model = Tables(seed)
    if places is not None:
        model.places = places
    soap.export(model, (torch.zeros(4, 4), torch.arange(4) if ids is None else ids), path=path, verify=False)
    return path


@pytest.mark.filterwarnings("default::soap.errors.SoapWarning")
def test_a_file_is_read_once_and_warns_each_time(read: list[str], cache: Path, tmp_path: Path) -> None:
    graphs, told = [], []
    for _ in range(2):
        with pytest.warns(SoapWarning) as found:
            graphs.append(api.planned_graph(exported(tmp_path / "m.pt2")))
        told.append([str(one.message) for one in found if issubclass(one.category, SoapWarning)])
    assert len(read) == 1 and plain(graphs[0]) == plain(graphs[1])
    assert told[0] == told[1] and any("no rule for" in text for text in told[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::soap.errors.SoapWarning")
def test_a_file_is_what_it_holds_but_for_the_values_of_parameters(read: list[str], cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    api.planned_graph(exported(path))
    api.planned_graph(exported(path, seed=1))  # other values of the table
    (tmp_path / "other").mkdir()
    api.planned_graph(exported(tmp_path / "other/m.pt2"))
    assert len(read) == 1
    others = [
        lambda: api.planned_graph(exported(path, places=torch.arange(4))),  # buffers may say which rows are looked up
        lambda: api.planned_graph(exported(path, ids=torch.tensor([0, 0, 1, 1]))),
        lambda: api.planned_graph(exported(tmp_path / "n.pt2")),  # the graph has its name
        lambda: api.planned_graph(path, autocast="bfloat16"),
        lambda: api.planned_graph(path, batch_dims={"x": -1}),
        lambda: api.planned_graph(path, dtype="float64"),
    ]
    for count, other in enumerate(others, 2):
        for _ in range(2):
            other()
            assert len(read) == count


@pytest.mark.filterwarnings("ignore::soap.errors.SoapWarning")
def test_a_file_that_changes_while_it_is_read_is_not_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, path = models.load, exported(tmp_path / "m.pt2")

    def changing(spec: Any, **options: Any) -> Any:
        model = load(spec, **options)
        exported(path, ids=torch.tensor([0, 0, 1, 1]))
        return model

    monkeypatch.setattr(models, "load", changing)
    api.planned_graph(path)
    assert not cache.exists()


def test_damaged_models_are_refused_as_ever(read: list[str], cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    content = exported(path).read_bytes()
    for damaged in (b"", b"no archive", content[: len(content) // 2], content[:-30], content.replace(b"config", b"confug")):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"m\.pt2"):
            api.planned_graph(path)
    assert len(read) == 5 and not cache.exists()


@pytest.mark.slow
def test_nothing_is_kept_of_a_reading_that_is_interrupted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While operators are tried, where errors mean that one cannot be."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Trials, "_footprint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            api.planned_graph(f"{SPEC}@24")  # which no other test reads: footprints are kept by the process, too
    assert not cache.exists()
    assert api.planned_graph(f"{SPEC}@24").footprints


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_is_read(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    args = simulate.make_parser().parse_args([SPEC, "--fits"])
    assert inputs.load_graph(args, None).name == f"{SPEC}@8"
    assert capsys.readouterr() == ("", f"reading {SPEC}\n" if terminal else "")


def test_graphs_make_room(read: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [f"{SPEC}@{8 * count}" for count in (1, 2, 3)]
    monkeypatch.setattr(kept_graphs, "MOST_GRAPHS", 2)
    for spec in (specs[0], specs[1], specs[0], specs[2]):  # the first one is used again before the third comes
        api.planned_graph(spec)
        for path in cache.iterdir():
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    assert len(read) == 3 and len(list(cache.iterdir())) == 2
    api.planned_graph(specs[0])
    assert len(read) == 3
    monkeypatch.setattr(kept_graphs, "MOST_BYTES", 1)
    api.planned_graph(specs[1])
    assert len(read) == 4 and len(list(cache.iterdir())) == 1  # the newest, whatever its size


def test_what_is_not_there_is_not_kept(read: list[str], cache: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        api.planned_graph("model.pt2")
    with pytest.raises(ModelError, match="zoo"):
        api.planned_graph("zoo:none")
    assert not cache.exists()


def test_without_a_place_nothing_is_kept(read: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        api.planned_graph(SPEC)
    assert len(read) == 2


NEEDLESS = ("torch", "pandas", "networkx", "matplotlib", "polars", "bokeh", "transformers", "ray", "sympy")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(read: list[str], cache: Path) -> None:
    api.planned_graph(SPEC)
    cache.chmod(0o500)
    try:
        api.planned_graph(SPEC)
        api.planned_graph(f"{SPEC}@16")
    finally:
        cache.chmod(0o700)
    assert len(read) == 2 and len(list(cache.iterdir())) == 1


@pytest.mark.slow
def test_a_search_for_a_model_of_the_zoo_imports_neither_torch_nor_other_heavy_packages_twice(tmp_path: Path) -> None:
    program = f"""
import sys
from soap.cli.search import main
assert main(["{SPEC}", "--cluster", "p100-4x4", "--profile", "0", "--verify", "0", "--budget", "50"]) == 0
print(*(name for name in {NEEDLESS!r} if name in sys.modules), file=sys.stderr)
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}  # in which is a folder "soap", not to be taken for the package
    (tmp_path / "cache" / "soap").mkdir(parents=True)
    kept = Path(os.environ[CACHE], "soap", "machine_code")  # the one thing that takes minutes
    (tmp_path / "cache" / "soap" / "machine_code").symlink_to(kept)
    outputs, imported = [], []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        outputs.append((done.stdout, (tmp_path / "strategy.json").read_bytes()))
        imported.append(done.stderr.splitlines()[-1].split())
    assert "torch" in imported[0] and imported[1] == []
    assert outputs[0] == outputs[1]
