"""Predicted beside published: step times and throughputs that others measured on real clusters, predicted from data sheets alone.

    python -m benchmarks.published
    python -m benchmarks.published --only dlperf-resnet50-8 libai-megatron-gpt2-tp8
    python -m benchmarks.published --write docs/results/published.md --resume /tmp/predictions.json

``published.json`` holds the figures with their sources. Nothing is fitted to them. Rows that need what SOAP does not simulate yet wait.
Other clusters, models and rows are added in that file alone. All rows take some ten minutes on two cores, most of them for exporting and
reading 55 models.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.layers import by_layers
from benchmarks.pages import give
from benchmarks.published_models import graph_of
from benchmarks.published_table import Outcome, page
from benchmarks.told import kernels_told
from soap import api
from soap.cluster.presets import says_all
from soap.cluster.topology import DeviceType, Topology
from soap.cluster.yaml_file import parse_cluster
from soap.errors import SoapError
from soap.files import write_text_atomically
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.profiles.efficiency import memory_share, update_seconds
from soap.profiles.roofline import RooflineCosts
from soap.profiles.work import ATTENTION
from soap.simulator.costs import nanoseconds
from soap.simulator.kernels import Kernels
from soap.simulator.simulate import Simulator
from soap.strategy.classical import NAMED, data_parallel, hybrid, single_device
from soap.strategy.config import Strategy
from soap.strategy.grids import uniform_config
from soap.strategy.named import ADDED, JOIN, named
from soap.strategy.recomputation import LIGHT, RECOMPUTED, refusal, with_levels
from soap.strategy.wrapped import Wrapped

DATA = Path(__file__).with_name("published.json")

PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {},
    "tf32": {"matmul_precision": "high"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "bfloat16 autocast": {"autocast": "bfloat16"},
    "float16 autocast": {"autocast": "float16"},
}
"""How a graph is loaded for a row's precision (``soap.load``). Without ``autocast`` parameters have the type named. As in PyTorch,
convolutions and recurrent layers of float32 compute in TF32 where a device has it, whatever the precision of products."""

WAITING = ("float8",)
"""Precisions of rows that wait."""

STRATEGIES = ("single", "data", "tensor", "pipeline", "table-wise", *NAMED)
"""Of rows that do not wait."""
SELECTIVE_OP = "selective_op"
"""Put on top of a strategy: recomputation as torchtitan's ``selective_ac_option = "op"`` has it."""
ON_TOP = (*ADDED, SELECTIVE_OP)
"""What may follow a row's strategy, as in ``fsdp+recompute``."""

UNITS = ("samples/s", "tokens/s", "tokens/s/device", "ms")

OPTIONAL: dict[str, Any] = {
    "accumulate": 1, "tensor": 1, "pipeline": 1, "microbatches": 1, "schedule": "1f1b", "kernels": "", "needs": [], "assumed": [],
}  # fmt: skip
COUNTS = ("accumulate", "tensor", "pipeline", "microbatches")
REQUIRED = (
    "id", "family", "source", "quote", "model", "batch", "precision", "strategy", "cluster", "hosts", "devices", "optimizer",
    "optimizer_states", "figure", "unit",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published figure. ``batch``: samples of all devices in one iteration; ``accumulate``: iterations of a step. ``cluster``: of the
    data file, a preset, or a family of presets, such as ``h100``; ``devices``: of each host. ``tensor``: devices of a tensor-parallel
    group. ``pipeline``: stages, each of neighbouring devices; ``microbatches``, ``schedule``: of such a pipeline. ``kernels``: which
    ones it ran, in words (``kernels_told``); empty: those of all of the source's rows. ``needs``: what keeps it waiting."""

    id: str
    family: str
    source: str
    quote: str
    model: str
    batch: int
    precision: str
    strategy: str
    cluster: str
    hosts: int
    devices: int
    optimizer: str
    optimizer_states: int
    figure: float
    unit: str
    accumulate: int
    tensor: int
    pipeline: int
    microbatches: int
    schedule: str
    kernels: str
    needs: Sequence[str]
    assumed: Sequence[str]


def read(path: Path = DATA) -> dict[str, Any]:
    """The data file."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows; ValueError with everything that is wrong in them, a line each."""
    found = problems(data)
    if found:
        raise ValueError("\n".join(found))
    return [Row(**{**OPTIONAL, **row}) for row in data["rows"]]


def problems(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with the data file: missing or unknown fields, names that lead nowhere, figures without source or quotation."""
    found: list[str] = []
    for name, source in data["sources"].items():
        lacking = [field for field in ("title", "url", "date", "software", "kernels") if not str(source.get(field, "")).strip()]
        found += [f"source {name}: no {field}" for field in lacking]
        found += [f"source {name}: {source['url']!r} is no address"] if not str(source.get("url", "")).startswith("https://") else []
    for name, cluster in [*data["clusters"].items(), *data["device_types"].items(), *data["optimizers"].items()]:
        found += [] if str(cluster.get("source", "")).strip() else [f"{name}: no source"]
    families = {row.get("family") for row in data["rows"]}
    found += [f"causes: no row is of family {family!r}" for family in data.get("causes", {}) if family not in families]
    seen: set[str] = set()
    for row in data["rows"]:
        found += [f"row {row.get('id', '?')}: {problem}" for problem in _row_problems(row, data)]
        found += [f"row {row.get('id')}: occurs twice"] if row.get("id") in seen else []
        seen.add(row.get("id"))
    return found


def _row_problems(row: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    found = [f"no {field}" for field in REQUIRED if row.get(field) in (None, "")]
    found += [f"unknown field {field}" for field in row if field not in (*REQUIRED, *OPTIONAL)]
    if found:
        return found
    for field, known in (("source", data["sources"]), ("model", data["models"]), ("unit", UNITS)):
        found += [] if row[field] in known else [f"{field} {row[field]!r}; expected one of {', '.join(known)}"]
    if row["cluster"] not in data["clusters"]:
        try:
            api.load_cluster(preset_name(row["cluster"], row["hosts"], row["devices"]))
        except SoapError as error:
            found.append(str(error))
    for field in ("batch", "hosts", "devices", "figure", *(field for field in COUNTS if field in row)):
        found += [] if row[field] > 0 else [f"{field} {row[field]}; expected more than 0"]
    known = (*PRECISIONS, *WAITING) if row.get("needs") else tuple(PRECISIONS)
    found += [] if row["precision"] in known else [f"precision {row['precision']!r}; expected one of {', '.join(known)}"]
    base, *added = row["strategy"].split(JOIN)
    if not row.get("needs") and (base not in STRATEGIES or not set(added) <= set(ON_TOP)):
        known = f"{', '.join(STRATEGIES)}; with {JOIN}{f' or {JOIN}'.join(ON_TOP)} behind it"
        found.append(f"strategy {row['strategy']!r}; expected one of {known}; or what it needs")
    if row["unit"].startswith("tokens") and "sequence" not in data["models"].get(row["model"], {}):
        found.append(f"{row['unit']} of a model without sequence")
    return found


def published_seconds(row: Row, data: Mapping[str, Any]) -> float:
    """The published time of a step."""
    if row.unit == "ms":
        return row.figure / 1e3
    samples = row.batch * row.accumulate
    if row.unit == "samples/s":
        return samples / row.figure
    tokens: int = samples * data["models"][row.model]["sequence"]
    return tokens / row.figure / (row.hosts * row.devices if row.unit == "tokens/s/device" else 1)


def topology_of(row: Row, data: Mapping[str, Any]) -> Topology:
    """The row's cluster. Other device types than the data file's own are those that SOAP knows."""
    if row.cluster not in data["clusters"]:
        return api.load_cluster(preset_name(row.cluster, row.hosts, row.devices))
    description = copy.deepcopy(data["clusters"][row.cluster])
    del description["source"]
    (host,) = description["hosts"]
    host |= {"count": row.hosts, "devices": {**host["devices"], "count": row.devices}}
    if row.hosts == 1:
        description.pop("network", None)
    return parse_cluster(yaml.safe_dump({"name": row.cluster, "device_types": data["device_types"], **description}), DATA.name)


def preset_name(cluster: str, hosts: int, devices: int) -> str:
    """The name of a preset of which a cluster is the family; the cluster's own name if it is none."""
    sized = f"{cluster}-{devices}" if hosts == 1 else f"{cluster}-{hosts}x{devices}"
    return cluster if says_all(cluster) or not says_all(sized) else sized


def strategy_of(row: Row, graph: OperatorGraph, topology: Topology) -> Strategy:
    """The row's strategy: one of ``STRATEGIES``, with something ``ON_TOP`` of it or not."""
    base, *added = row.strategy.split(JOIN)
    if base == "tensor":
        strategy = hybrid(graph, topology, tensor=row.tensor)
    elif base == "pipeline":
        shape = {"stages": row.pipeline, "microbatches": row.microbatches, "tensor": row.tensor}
        strategy = by_layers(graph, topology, schedule=row.schedule, **shape)
    else:
        strategy = BASES[base](graph, topology) if base in BASES else named(base, graph, topology)
    for name in added:
        strategy = with_levels(strategy, selected(graph)) if name == SELECTIVE_OP else ADDED[name](graph, topology, strategy)
    return strategy


def selected(graph: OperatorGraph) -> dict[str, int]:
    """How torchtitan's selective checkpointing by operators runs them a second time: of each layer everything, but attention and the first,
    third, ... matrix product keep what they make (its ``parallelize_llama.py``, ``_save_list``), and what goes on to the next layer stays,
    as each layer is a checkpoint of its own."""
    products: Counter[str] = Counter()
    layers = [re.search(r"\blayers\.\d+\b", op.name) for op in graph.operators]
    names = [layer and layer.group() for layer in layers]
    found = {}
    for position, (op, layer) in enumerate(zip(graph.operators, layers, strict=True)):
        readers = {names[reader] for out in op.outputs for reader, _ in graph.consumers.get(out.tensor, ())}
        if layer is None or refusal(graph, op) is not None or readers != {names[position]}:
            continue
        products[layer.group()] += op.kind == "linear"
        kept = op.kind == ATTENTION or (op.kind == "linear" and products[layer.group()] % 2)
        found[op.name] = LIGHT if kept else RECOMPUTED
    return found


def table_wise(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism, but each embedding table on one device, where the touched rows alone are updated: the largest table first, on the
    device that has least so far."""
    shapes = {name: graph.tensors[name].shape for name in (parameter.name for parameter in graph.parameters)}
    tables = [(shapes[op.parameters[0].tensor][0], op) for op in graph.operators if op.kind == "embedding"]
    load, configs = [0] * topology.device_count, {}
    for rows, op in sorted(tables, key=lambda one: -one[0]):
        device = load.index(min(load))
        load[device] += rows
        configs[op.name] = uniform_config(op, {}, (device,))
    return NAMED["sparse_allgather"](graph, topology).with_changes(operators=configs)


BASES = {"single": single_device, "data": data_parallel, "table-wise": table_wise}
"""Strategies by the names of this file's own."""


def predict(row: Row, data: Mapping[str, Any]) -> Outcome:
    """Simulate a row that does not wait, with estimates alone."""
    _quiet()
    begin = time.process_time()
    graph = graph_of(data["models"][row.model], row.batch, **PRECISIONS[row.precision])
    topology = topology_of(row, data)
    simulation = simulator_of(row, data, graph, topology).run(strategy_of(row, graph, topology))
    seconds = simulation.step_ns(row.accumulate) / 1e9
    return Outcome(row.id, seconds, max(simulation.peak_bytes), simulation.fits, round(time.process_time() - begin))


def simulator_of(row: Row, data: Mapping[str, Any], graph: OperatorGraph, topology: Topology) -> Simulator:
    """A simulator with the row's kernels, optimizer, and moment at which gradients are summed."""
    source = data["sources"][row.source]
    kernels = kernels_told(row.kernels or source["kernels"])
    own = api.simulator_for(graph, topology, optimizer_states=row.optimizer_states, costs="estimate", kernels=kernels)
    update, costs = data["optimizers"].get(row.optimizer), own.costs
    if update is not None:
        costs = CountedUpdates(topology, row.optimizer_states, kernels, update)
    everything = (tuple(parameter.name for parameter in graph.parameters),)
    training = PlannedTraining(wrapped=Wrapped(everything)) if "summed_together" in source else PLAIN
    return Simulator(own.graph, topology, costs, row.optimizer_states, training)


class CountedUpdates(RooflineCosts):
    """Costs of an optimizer whose passes over memory are counted in its source."""

    def __init__(self, topology: Topology, optimizer_states: int, kernels: Kernels, update: Mapping[str, Any]) -> None:
        """``update``: ``passes``: how often a tensor of a parameter's size is read or written; ``calls`` for each parameter, beside kernels
        for many."""
        super().__init__(topology, optimizer_states, kernels)
        self._passes, self._calls = update["passes"], update["calls"]

    @property
    def hash(self) -> str:
        """Of the figures that enter an answer."""
        return f"{super().hash} {self._passes} {self._calls}"

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """The passes' traffic, and the calls."""
        bandwidth = device.memory_bandwidth_bytes_per_second * memory_share(device)
        calls = self._calls * device.kernel_seconds + (update_seconds(device, self.optimizer_states) or 0.0)
        return nanoseconds(self._passes * parameter_bytes / bandwidth + calls)


def predictions(rows: Sequence[Row], data: Mapping[str, Any], processes: int, resume: Path | None) -> dict[str, Outcome]:
    """Predictions of the rows that do not wait, by id. ``resume``: a file with earlier ones, which is kept up to date."""
    known: dict[str, Outcome] = {}
    if resume is not None and resume.exists():
        known = {outcome["id"]: Outcome(**outcome) for outcome in json.loads(resume.read_text(encoding="utf-8"))}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for outcome in pool.map(partial(predict, data=data), [row for row in rows if not row.needs and row.id not in known]):
            known[outcome.id] = outcome
            print(f"{outcome.id}: {outcome.seconds * 1e3:.1f} ms, {outcome.took_seconds} s", file=sys.stderr, flush=True)
            if resume is not None:
                write_text_atomically(resume, _json(known))
    return {row.id: known[row.id] for row in rows if row.id in known}


def _json(outcomes: Mapping[str, Outcome]) -> str:
    return json.dumps([asdict(outcome) for outcome in outcomes.values()], indent=1)


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="published", description="Predicted beside published step times.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these rows")
    parser.add_argument("--json", action="store_true", help="print predictions as JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="do not simulate the rows in this JSON file again; others are added")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="simulate so many rows at a time (2)")
    args = parser.parse_args(argv)
    data = read()
    rows = rows_of(data)
    unknown = sorted(set(args.only or ()) - {row.id for row in rows})
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; expected ids of {DATA.name}")
    if args.processes < 1:
        parser.error(f"--processes {args.processes}; expected at least 1")
    rows = [row for row in rows if not args.only or row.id in args.only]
    outcomes = predictions(rows, data, args.processes, args.resume)
    if args.json:
        print(_json(outcomes))
        return 0
    text = page(rows, data, outcomes, {row.id: published_seconds(row, data) for row in rows}, date.today().isoformat())
    give(text, args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
