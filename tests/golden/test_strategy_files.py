"""Strategy files of version 1 are read, and mean the plan that they meant when they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.api import load_strategy_contents, load_strategy_header
from tests.golden import adapter, figures, strategy_files
from tests.golden.clusters import golden_cluster

HASHES = figures.read(strategy_files.HASHES)


def test_every_stored_file_is_checked() -> None:
    assert sorted(path.stem for path in strategy_files.FILES.glob("*.json")) == sorted(HASHES)


QUICK = {"by_hand", "data_parallel", "each_synchronization"}
"""Each of the others is of a further model, which takes seconds to read."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HASHES])
def test_version_1_files_load_and_keep_hash_and_plan(name: str, tmp_path: Path) -> None:
    about, path = HASHES[name], strategy_files.FILES / f"{name}.json"
    document = json.loads(path.read_text())
    assert document["version"] == 1
    graph, topology = adapter.graph_of(about["model"]), golden_cluster(about["cluster"], about["devices"]).topology
    expected = {key: about[key] for key in ("strategy", "plan")}
    assert strategy_files.outcome(path, graph, topology) == expected
    again = tmp_path / "again.json"
    soap.save_strategy(again, soap.load_strategy(path, graph, topology), graph, topology)
    assert strategy_files.outcome(again, graph, topology) == expected


@pytest.mark.parametrize("name", HASHES)
def test_version_1_files_are_read_without_their_models(name: str) -> None:
    path = strategy_files.FILES / f"{name}.json"
    document, header, contents = json.loads(path.read_text()), load_strategy_header(path), load_strategy_contents(path)
    assert (header.model, header.model_hash) == (document["model"]["name"], document["model"]["hash"])
    assert (header.cluster_hash, list(header.devices)) == (document["cluster"]["hash"], document["cluster"]["devices"])
    assert list(contents.operators) == list(document["operators"])
    assert list(contents.parameters) == list(document["parameters"])
    assert contents.record == document.get("record", {})
