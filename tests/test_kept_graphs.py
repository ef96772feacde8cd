"""Graphs of the zoo's models that are kept: the same graph again, without torch; anything that does not fit is read anew."""

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

import soap
from soap import api
from soap.api import kept_graphs, models
from soap.errors import ModelError
from soap.model.graph import OperatorGraph
from soap.model.graph_json import graph_from, graph_values

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


@pytest.mark.parametrize(("name", "reading"), CASES, ids=[name for name, _ in CASES])
def test_a_graph_survives_as_text(name: str, reading: dict[str, Any]) -> None:
    graph = soap.load(f"zoo:{name}", plan_only=True, **reading).graph
    again = graph_from(json.loads(json.dumps(graph_values(graph))))
    assert plain(again) == plain(graph)
    assert repr(plain(again)) == repr(plain(graph))  # types of numbers too
    assert again.hash == graph.hash


def test_it_is_read_once(read: list[str]) -> None:
    first, second = api.planned_graph(SPEC), api.planned_graph(SPEC)
    assert read == [SPEC]
    assert plain(first) == plain(second)
    api.planned_graph(SPEC, autocast="bfloat16")
    api.planned_graph("zoo:rnnlm:tiny@16")
    assert len(read) == 3
    api.planned_graph("zoo:rnnlm:tiny@16", batch_norm="global", autocast=None, autocast_device="cpu", imports=(), batch_dims=None)
    assert len(read) == 4  # other arguments, if only in their words


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
    values = graph_values(soap.load(SPEC, plan_only=True).graph)
    for place, wrong in ((0, 1), (1, {}), (1, [1]), (2, [["a"]]), (3, None), (10, [["a", True]])):
        with pytest.raises((ValueError, TypeError)):
            graph_from([*values[:place], wrong, *values[place + 1 :]])
    with pytest.raises(ModelError, match="loss 'none' is produced by no operator"):
        graph_from([*values[:3], "none", *values[4:]])


@pytest.mark.parametrize("reading", [{"imports": ["math"]}, {"matmul_precision": "highest"}])
def test_what_depends_on_more_is_not_kept(reading: dict[str, Any], read: list[str], cache: Path) -> None:
    for _ in range(2):
        api.planned_graph(SPEC, **reading)
    assert len(read) == 2 and not cache.exists()


def test_files_are_not_kept(read: list[str], cache: Path) -> None:
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


@pytest.mark.slow
def test_a_search_for_a_model_of_the_zoo_imports_neither_torch_nor_other_heavy_packages_twice(tmp_path: Path) -> None:
    program = f"""
import sys
from soap.cli.search import main
assert main(["{SPEC}", "--cluster", "p100-4x4", "--profile", "0", "--verify", "0", "--budget", "50"]) == 0
print(*(name for name in {NEEDLESS!r} if name in sys.modules), file=sys.stderr)
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}  # in which is a folder "soap", not to be taken for the package
    outputs, imported = [], []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        outputs.append((done.stdout, (tmp_path / "strategy.json").read_bytes()))
        imported.append(done.stderr.splitlines()[-1].split())
    assert "torch" in imported[0] and imported[1] == []
    assert outputs[0] == outputs[1]
