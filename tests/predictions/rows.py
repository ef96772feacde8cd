"""The reference predictions: which, and how they are made. ``reference.json`` has their figures.

They are of full-size models on today's machines, from data sheets and the measurements that come with the package, so that whoever changes
a price, a link or the simulator sees in review what that moves. ``python -m tests.predictions.write`` writes the file anew.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from soap import api
from soap.cluster.kinds import has_gpus
from soap.measure.compute_rates import float32_precision
from soap.model.graph import OperatorGraph

REFERENCE = Path(__file__).parent / "reference.json"
MOST_CHANGE = 0.01
READINGS = {"float32": {}, "tf32": {"matmul_precision": "high"}, "bfloat16": {"autocast": "bfloat16"}}
SOURCES = ("auto", "estimate")
MODELS = {
    "zoo:gpt": ("float32", "tf32", "bfloat16"),
    "zoo:resnet50": ("float32", "bfloat16"),
    "zoo:rnnlm": ("float32",),
    "zoo:alexnet": ("float32", "bfloat16"),
    "zoo:dlrm": ("float32",),
}
PLACES = (
    ("h200-8", "single_device", "auto"),
    ("h200-8", "data_parallel", "estimate"),
    ("h100-8", "data_parallel", "estimate"),
    ("a100-80gb-2x8", "data_parallel", "estimate"),
    ("l4-4", "hybrid", "estimate"),
)
FURTHER = (("zoo:gpt", "bfloat16", "h100-8", "megatron", "estimate"), ("zoo:gpt", "float32", "p100-4x4", "megatron", "estimate"))


class Row(NamedTuple):
    """One prediction."""

    model: str
    precision: str
    cluster: str
    plan: str
    costs: str


ROWS = [Row(model, precision, *place) for model, types in MODELS.items() for precision in types for place in PLACES]
ROWS += [Row(*row) for row in FURTHER]


@cache
def graph_of(model: str, precision: str) -> OperatorGraph:
    """On GPUs, as all of the clusters have them."""
    with float32_precision("highest"):  # as before afterwards
        return api.load(model, plan_only=True, autocast_device="cuda", **READINGS[precision]).graph  # type: ignore[arg-type]


def predicted_ms(row: Row) -> float:
    """Milliseconds of a step."""
    topology = api.load_cluster(row.cluster)
    assert has_gpus(topology)
    costs = "auto" if row.costs == "auto" else "estimate"
    return api.simulate(graph_of(row.model, row.precision), topology, row.plan, costs=costs).makespan_ns / 1e6  # type: ignore[arg-type]


def stored() -> dict[Row, float]:
    """The reference's figures."""
    return {Row(*entry[:-1]): entry[-1] for entry in json.loads(REFERENCE.read_text("utf-8"))}


def text(figures: dict[Row, float]) -> str:
    """One line each."""
    return "[\n" + ",\n".join(f"  {json.dumps([*row, round(ms, 3)])}" for row, ms in figures.items()) + "\n]\n"
