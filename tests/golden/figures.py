"""The golden figures: what is predicted of the zoo on fixed clusters, as stored in ``predictions/*.json`` and as found now.

One file for each number of devices, one line for each strategy, so that a change shows as the lines that it changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soap import zoo
from tests.golden import adapter
from tests.golden.clusters import GoldenCluster, golden_cluster, golden_clusters

FOLDER = Path(__file__).parent
PREDICTIONS = FOLDER / "predictions"
SEARCHES = FOLDER / "searches.json"
COUNTS = (4, 16, 64)
"""Numbers of devices."""

BUDGET = 100
"""Proposals of a golden search."""
SEARCHED = (("gpt:tiny", "full-mesh", 4), ("dlrm:tiny", "ports-several", 4), ("lm1b:tiny", "pairs", 4), ("nmt:tiny", "waiting-cores", 16))

Record = dict[str, Any]


def models(count: int) -> list[str]:
    """Every model of the zoo in its smallest size, with a batch that so many devices can share; one in bfloat16, too."""
    batch = "" if count == 4 else f"@{count}"
    narrow = [f"gpt:tiny{batch}/bfloat16"] if count < 64 else []
    return sorted([*(f"{name}:tiny{batch}" for name in zoo.names()), *narrow])


def header(count: int) -> Record:
    """What a fixture says before its entries: of each cluster whether it has ports, its identity, and that of its costs."""
    clusters = {
        name: {"ports": own.ports, "hash": own.topology.hash, "costs": adapter.costs_hash_of(own.topology, own.optimizer_states)}
        for name, own in golden_clusters(count).items()
    }
    return {"torch": torch.__version__.partition("+")[0], "columns": list(adapter.COLUMNS), "clusters": clusters}


def predicted(model: str, count: int) -> Record:
    """The model's part of a fixture: the hash of its graph, and by cluster what ``on_cluster`` gives."""
    found = {name: on_cluster(model, own) for name, own in golden_clusters(count).items()}
    return {"graph": adapter.graph_of(model).hash, **found}


def on_cluster(model: str, cluster: GoldenCluster) -> Record:
    """Strategy -> entry."""
    graph = adapter.graph_of(model)
    simulator = adapter.simulator_of(graph, cluster.topology, cluster.optimizer_states)
    wanted = adapter.strategies_of(graph, cluster.topology, f"{model} {cluster.name}")
    return {name: adapter.entry(simulator, own) for name, own in sorted(wanted.items())}


def searches(wanted: Sequence[tuple[str, str, int]] = SEARCHED) -> Record:
    """Golden searches: what each found."""
    found = {}
    for model, name, count in wanted:
        own = golden_cluster(name, count)
        result = adapter.searched(adapter.graph_of(model), own.topology, own.optimizer_states, BUDGET, seed=1)
        found[f"{model} {name} {count}"] = {"ports": own.ports, **dict(zip(adapter.SEARCH_COLUMNS, result, strict=True))}
    return found


def stored(count: int) -> Record:
    """The fixture for so many devices."""
    return read(PREDICTIONS / f"{count}.json")


def read(path: Path) -> Record:
    """A fixture."""
    record: Record = json.loads(path.read_text())
    return record


def text(value: Any, depth: int = 0) -> str:
    """JSON with one line for each list or scalar."""
    if not isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    pad = " " * (depth + 1)
    lines = [f"{pad}{json.dumps(key)}: {text(own, depth + 1)}" for key, own in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{' ' * depth}}}"


@dataclass(frozen=True)
class Difference:
    """An entry that is not as stored. ``expected``, ``found``: None if there is none."""

    model: str
    cluster: str
    ports: bool
    strategy: str
    expected: Sequence[Any] | None
    found: Sequence[Any] | None

    def __str__(self) -> str:
        where = f"{self.model} on {self.cluster} ({'with' if self.ports else 'without'} ports), {self.strategy}"
        if self.expected is None or self.found is None:
            return f"{where}: {'not in the fixture' if self.expected is None else 'in the fixture alone'}"
        before, now = self.expected[0], self.found[0]
        columns = [name for name, a, b in zip(adapter.COLUMNS, self.expected, self.found, strict=True) if a != b]
        change = f"{100 * (now / max(1, before) - 1):+.4f}%"
        return f"{where}: expected {before} ns, found {now} ns ({change}); different: {', '.join(columns)}"


def differences(model: str, cluster: str, ports: bool, expected: Record, found: Record) -> Iterator[Difference]:
    """All entries of a model on a cluster that are not as stored, in the order of the fixture."""
    for strategy in sorted({*expected, *found}):
        if expected.get(strategy) != found.get(strategy):
            yield Difference(model, cluster, ports, strategy, expected.get(strategy), found.get(strategy))
