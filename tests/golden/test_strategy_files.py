"""Strategy files of version 1 are read, and mean the plan that they meant when they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.api import load_strategy_contents, load_strategy_header
from soap.errors import StrategyError
from soap.strategy.json_file import loads
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
    strategy = soap.load_strategy(path, graph, topology)
    for op in graph.operators:
        degrees = dict(zip((factor.name for factor in op.factors), strategy.operators[op.name].degrees, strict=True))
        assert degrees == dict.fromkeys(degrees, 1) | document["operators"][op.name].get("degrees", {})
    again = tmp_path / "again.json"
    soap.save_strategy(again, strategy, graph, topology)
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


def test_losses_divided_by_samples_alone_are_no_excuse_for_another_model() -> None:
    """The stored file is from before a loss of tokens had positions, so the hash of its model is another one."""
    name = "data_parallel"
    about, text = HASHES[name], (strategy_files.FILES / f"{name}.json").read_text()
    graph, topology = adapter.graph_of(about["model"]), golden_cluster(about["cluster"], about["devices"]).topology
    for edit, words in (
        (lambda d: d["model"].update(hash=graph.hash), "strategy file was changed by hand"),
        (lambda d: d["operators"]["cross_entropy_loss"]["sizes"].update(b=4), "cross_entropy_loss has b of size 4 instead of 8"),
        (lambda d: d["operators"]["cross_entropy_loss"].update(kind="nll_loss_nd"), "another model.*cross_entropy_loss is 'nll_loss_nd'"),
        (lambda d: d["operators"].pop("head"), "not in the file: 'head'"),
        (lambda d: d["operators"]["head"]["sizes"].pop("b"), "head has b of size none instead of 8"),
    ):
        document = json.loads(text)
        edit(document)
        with pytest.raises(StrategyError, match=words):
            loads(json.dumps(document), graph, topology)
