"""A field that somebody adds to a configuration is one line there: files, schema, hashes, keys, ``soap-diff`` and reports have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from soap.cli import diff as soap_diff
from soap.cli import plain_text
from soap.errors import StrategyError
from soap.profiles.roofline import RooflineCosts
from soap.simulator.simulate import Simulator
from soap.strategy import config, diff, json_file
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from tests.graph_builder import mlp
from tests.strategies import cluster

GRAPH, CLUSTER = mlp(), cluster([2, 2])
OPERATOR, PARAMETER = GRAPH.operators[0].name, GRAPH.parameters[0].name
MODULES: tuple[ModuleType, ...] = (diff, json_file, plain_text, soap_diff)


@dataclass(frozen=True, slots=True)
class NewOpConfig(OpConfig):
    padded: bool = False


@dataclass(frozen=True, slots=True)
class NewSyncConfig(SyncConfig):
    density: float = 1.0


@dataclass(frozen=True)
class NewStrategy(Strategy):
    rounds: int = 1


@pytest.fixture
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the three classes had one more field each."""
    classes: dict[str, Any] = {"OpConfig": NewOpConfig, "SyncConfig": NewSyncConfig, "Strategy": NewStrategy}
    for module in MODULES:
        for name, value in classes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(config, "_USUAL_SYNC", NewSyncConfig())  # of parameters without an entry
    monkeypatch.setattr(json_file, "_document", json_file._document.__wrapped__)  # not those that were made before


def new(**values: Any) -> NewStrategy:
    """Data parallelism; ``values``: of the new fields."""
    usual = data_parallel(GRAPH, CLUSTER)
    operators = {name: NewOpConfig(own.degrees, own.devices, own.replicas) for name, own in usual.operators.items()}
    operators[OPERATOR] = replace(operators[OPERATOR], padded=values.get("padded", False))
    parameters = {PARAMETER: NewSyncConfig(density=values["density"])} if "density" in values else {}
    return NewStrategy(operators, parameters, rounds=values.get("rounds", 1))


CHANGES: list[dict[str, Any]] = [{"padded": True}, {"density": 0.01}, {"rounds": 4}]
EACH = pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))


@pytest.mark.usefixtures("_added")
@EACH
def test_it_is_written_read_and_hashed(change: dict[str, Any]) -> None:
    usual, text = new(), json_file.dumps(new(**change), GRAPH, CLUSTER)
    assert json_file.loads(text, GRAPH, CLUSTER)[0] == new(**change)
    assert json_file.strategy_hash(new(**change), GRAPH) != json_file.strategy_hash(usual, GRAPH)
    assert not any(name in json_file.dumps(usual, GRAPH, CLUSTER) for name in change)
    simulator = Simulator(GRAPH, CLUSTER, RooflineCosts(CLUSTER))
    assert ("rounds" in change) or simulator.key(new(**change)) != simulator.key(usual)  # those of strategies are known at import


@EACH
def test_where_it_is_not_known_it_is_refused(change: dict[str, Any]) -> None:
    (name,) = change
    entries: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "padded": lambda document: document["operators"][OPERATOR],
        "density": lambda document: document["parameters"].setdefault(PARAMETER, {}),
        "rounds": lambda document: document,
    }
    document = json.loads(json_file.dumps(data_parallel(GRAPH, CLUSTER), GRAPH, CLUSTER))
    entries[name](document)[name] = change[name]
    with pytest.raises(StrategyError, match="malformed"):
        json_file.loads(json.dumps(document), GRAPH, CLUSTER)


TOLD = {"padded": "padded:yes", "density": "allreduce, density 0.01", "rounds": "rounds  default  4"}


@pytest.mark.usefixtures("_added")
@EACH
def test_soap_diff_tells_it(change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = change
    for path, strategy in (("a", new()), ("b", new(**change))):
        (tmp_path / path).write_text(json_file.dumps(strategy, GRAPH, CLUSTER))
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert soap_diff.main(files) == 1
    assert " ".join(TOLD[name].split()) in " ".join(capsys.readouterr().out.split())
    assert soap_diff.main([*files, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (changed,) = [*found["operators"], *found["parameters"], *found["options"]]
    told = changed["second"] if name == "rounds" else changed["second"][name]
    assert told == change[name]


@pytest.mark.usefixtures("_added")
def test_reports_tell_it() -> None:
    strategy = new(padded=True, density=0.01)
    assert plain_text.split(GRAPH.operators[0], strategy.operators[OPERATOR]).endswith("padded:yes")
    document = plain_text.sync_document(strategy.parameters[PARAMETER])
    assert (document["density"], plain_text.sync_text(document)) == (0.01, "allreduce, density 0.01")
