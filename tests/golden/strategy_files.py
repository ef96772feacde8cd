"""Strategy files of version 1, as programs before version 2 wrote them: they are to be read for good, and to mean the same plan.

``strategies/*.json`` were written once, ``strategy_hashes.json`` says for which model and cluster, and what must come of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soap
from soap.model.graph import OperatorGraph
from soap.search.options import SearchOptions
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from tests.golden import adapter, figures
from tests.golden.clusters import golden_cluster

FILES = figures.FOLDER / "strategies"
HASHES = figures.FOLDER / "strategy_hashes.json"

RECORD = {"seed": 3, "budget": 100, "predicted_ns": 12345, "note": "größer", "starts": {"data_parallel": {"predicted_ns": 23456}}}


@dataclass(frozen=True)
class Written:
    """A file to write: for which model of the zoo, cluster and number of devices, and what stands in it."""

    model: str
    cluster: str
    devices: int
    make: Callable[[OperatorGraph, soap.Topology], Strategy]


def _classical(name: str) -> Callable[[OperatorGraph, soap.Topology], Strategy]:
    return lambda graph, topology: adapter.strategies_of(graph, topology, "")[name].strategy


def _data_parallel(graph: OperatorGraph, topology: soap.Topology) -> Strategy:
    return _classical("data_parallel")(graph, topology)


def _drawn(seed: str, *, synchronized: bool) -> Callable[[OperatorGraph, soap.Topology], Strategy]:
    return lambda graph, topology: adapter.drawn(graph, topology.device_count, seed, synchronized=synchronized)


def _each_synchronization(graph: OperatorGraph, topology: soap.Topology) -> Strategy:
    """Every way for one parameter, in turn: the rows of tables, servers with and without partitions and local aggregation, all-reduces."""
    servers = [parameter_server(partitions, "host" if local else "none") for partitions in (1, 2, 5) for local in (False, True)]
    chosen: dict[str, SyncConfig] = {}
    for number, parameter in enumerate(graph.parameters):
        if parameter.name in graph.sparse:
            chosen[parameter.name] = (SPARSE_ALL_GATHER, parameter_server(3), servers[-1])[len(chosen) % 3]
        elif number % 2:
            chosen[parameter.name] = servers[number // 2 % len(servers)]
    return Strategy(_data_parallel(graph, topology).operators, chosen)


WRITTEN: Mapping[str, Written] = {
    "data_parallel": Written("gpt:tiny", "full-mesh", 4, _data_parallel),
    "megatron_16": Written("gpt:tiny@16", "pairs", 16, _classical("megatron")),
    "pipeline": Written("rnnlm:tiny", "ports-several", 4, _classical("pipeline")),
    "replicas": Written("nmt:tiny", "mixed-ring", 4, _drawn("replicas", synchronized=False)),
    "drawn": Written("full_sparse:tiny", "ports-single", 4, _drawn("drawn", synchronized=True)),
    "all_servers": Written("alexnet:tiny", "switched", 4, _classical("parameter_server")),
    "tables_on_servers": Written("dlrm:tiny@16", "full-mesh", 16, _classical("hybrid")),
    "tables_gathered": Written("nmt_gnmt:tiny", "waiting-cores", 4, _classical("sparse_allgather")),
    "each_synchronization": Written("lm1b:tiny", "pairs", 4, _each_synchronization),
}
BY_HAND = "by_hand"
"""``each_synchronization`` with all that may be left out, devices by name, and without a record."""
SEARCHED = "searched"
"""What a search has saved, with its record."""


def write_missing() -> None:
    """The files that there are not yet, and what they must give."""
    known: dict[str, Any] = figures.read(HASHES) if HASHES.exists() else {}
    cases = {**WRITTEN, BY_HAND: WRITTEN["each_synchronization"], SEARCHED: WRITTEN["tables_on_servers"]}
    for name, case in cases.items():
        path = FILES / f"{name}.json"
        if path.exists():
            continue
        graph, topology = adapter.graph_of(case.model), golden_cluster(case.cluster, case.devices).topology
        if name == SEARCHED:
            soap.find(graph, topology, SearchOptions(budget=60, seed=2, costs="estimate", forbidden={"*": "reduction"}, cores=1)).save(path)
        else:
            soap.save_strategy(path, case.make(graph, topology), graph, topology, RECORD)
        if name == BY_HAND:
            path.write_text(_spelled_out(path.read_text()))
        about = {"model": case.model, "cluster": case.cluster, "devices": case.devices}
        known[name] = {**about, **outcome(path, graph, topology)}
    HASHES.write_text(figures.text(dict(sorted(known.items()))) + "\n")


def outcome(path: Path, graph: OperatorGraph, topology: soap.Topology) -> dict[str, str]:
    """The hash of a file's strategy and the digest of its plan."""
    strategy = soap.load_strategy(path, graph, topology)
    return {"strategy": adapter.hash_of(strategy, graph), "plan": adapter.plan_digest(strategy, graph, topology)}


def _spelled_out(text: str) -> str:
    """The same document as somebody may write it by hand."""
    document = json.loads(text)
    del document["record"]
    names = document["cluster"]["devices"]
    for entry in document["operators"].values():
        entry["degrees"] = {factor: entry.get("degrees", {}).get(factor, 1) for factor in entry["sizes"]}
        entry["replicas"] = entry.get("replicas", 1)
        entry["devices"] = [names[item] if isinstance(item, int) else item for item in entry["devices"]]
    for entry in document["parameters"].values():
        if entry["sync"] == "parameter_server":
            entry.setdefault("partitions", 1)
            entry.setdefault("local_aggregation", False)
    return json.dumps(document, indent=1) + "\n"
