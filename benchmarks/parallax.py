"""Parallax's cluster simulated: which synchronization wins, by how much, and how many partitions are best.

    python -m benchmarks.parallax

Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019: 8 machines with 6 TITAN Xp, 100 Gbit/s
InfiniBand. Three constants are calibrated on the published Table 1 alone: what part of their peak the GPUs reach (from AR of the image
models), what part of their rates the links (from what PS takes beside AR of them), and what finding a row's place takes a server (from what
PS takes beside AR of LM). That a server keeps ``SERVER_CORES`` cores busy is assumed; Table 1 does not depend on it. Then Tables 1, 2 and 4
to 6 and the figures in Figure 9's caption are simulated and printed beside the published ones. Parallax aggregates gradients per host, but
every worker reads variables for itself (ibid., section 5, has accumulators on each machine and nothing of the kind for reading); SOAP's
runtime pulls through a host's leader, too. It is Parallax that is simulated here. Dense parameters on servers are cut into as many
partitions as there are hosts, which stands for many parameters of which each is on one of them.

The model of Table 6 is not published beyond "a constructed LM model": it is simulated as ``lm1b`` with as many words as a worker's batch of
one-word instances can touch 4% of, every worker touching the published share of them, independently of the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch

import soap
from soap import api
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.sparse_access import RowAccess
from soap.search.partition_tuning import Sample, Tuning, choose, next_partitions, settled_ns
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from soap.strategy.sync_contracts import MAX_PARTITIONS
from soap.zoo.lm1b import SampledConfig, SampledLanguageModel

CLUSTER = "titanxp-8x6"
BATCH_PER_DEVICE = {"resnet50": 64, "inception_v3": 64, "lm1b": 128, "nmt_gnmt": 128}
ITEMS_PER_SAMPLE = {"resnet50": 1, "inception_v3": 1, "lm1b": 20}
"""Images, or words; how many words a sample of NMT has was not published."""
TABLE_1 = {"resnet50": (5.8e3, 7.6e3), "inception_v3": (3.8e3, 5.9e3), "lm1b": (98.9e3, 45.5e3), "nmt_gnmt": (102e3, 68.3e3)}
"""Items per second of (PS, AR)."""
TABLE_2 = {
    "lm1b": {8: 50.5e3, 16: 78.6e3, 32: 96.5e3, 64: 96.1e3, 128: 98.9e3, 256: 93.2e3},
    "nmt_gnmt": {8: 90.7e3, 16: 97.0e3, 32: 96.5e3, 64: 101.6e3, 128: 98.5e3, 256: 100.0e3},
}
"""Words per second of PS by the number of partitions."""
TABLE_4 = {"lm1b": (45.5e3, 98.9e3, 250e3, 274e3), "nmt_gnmt": (68.3e3, 102e3, 116e3, 204e3)}
"""Words per second of AR, PS as it is, PS with local aggregation and more, and the hybrid."""
BEST_PARTITIONS = {"lm1b": 128, "nmt_gnmt": 64}
"""Of Table 2."""
TABLE_5 = {"lm1b": (274e3, 96.5e3, 260.3e3), "nmt_gnmt": (204e3, 124.1e3, 208e3)}
"""Words per second of the hybrid with the number of partitions that Parallax's method finds, with the fewest, and with the best."""
FEWEST_PARTITIONS = {"lm1b": 4, "nmt_gnmt": 2}
BRUTE_DROP = 0.1
"""The brute-force method ends where throughput is over 10% below the best. It adds 2 partitions at a time; here they are doubled."""
TABLE_6 = {120: (1.0, 2.04), 60: (0.52, 2.33), 30: (0.28, 2.43), 15: (0.16, 2.89), 8: (0.1, 3.02), 4: (0.07, 3.03), 1: (0.04, 3.42)}
"""Words of an instance: share of the rows that a worker touches, and throughput of Parallax over TF-PS."""
CONSTRUCTED_WORDS = 3200
FIGURE_9 = {
    "resnet50": (39.8, 30.4, 39.8), "inception_v3": (43.6, 28.6, 44.4), "lm1b": (9.4, 3.4, 1.6), "nmt_gnmt": (18.4, 9.1, 6.1),
}  # fmt: skip
"""Throughput of Parallax, TF-PS and Horovod on 48 GPUs over that on one."""
SERVER_CORES = 8
STEPS = 8
"""Of each constant's bisection: to 1/2^8 of a factor of 1,000, 3%."""


class Constants(NamedTuple):
    """What is calibrated. ``gpu``, ``links``: parts of the published peaks. ``row_seconds``: of one core of a host."""

    gpu: float
    links: float
    row_seconds: float


class Cluster:
    """The published cluster with calibrated constants, and what models take on it."""

    def __init__(self, constants: Constants, graphs: Mapping[str, OperatorGraph]) -> None:
        self._topology, self._graphs = with_constants(api.load_cluster(CLUSTER), constants), graphs
        self._simulators = {
            name: api.simulator_for(graph, self._topology, costs="estimate") for name, graph in graphs.items()
        }

    def seconds(self, model: str, sync: str, partitions: int | None = None) -> float:
        """Of an iteration. ``sync``: "AR", "PS", "OptPS" or "HYB"; ``partitions`` of sparse parameters, the published best if None."""
        graph, simulator = self._graphs[model], self._simulators[model]
        strategy = synchronized(graph, self._topology, sync, partitions or BEST_PARTITIONS.get(model, 1))
        if sync in ("AR", "PS"):
            return simulator.makespan_ns(strategy) / 1e9
        plan = build_plan(graph, strategy, self._topology)
        return simulate(lower(plan, self._topology, simulator.costs, pull_together=False)).makespan_ns / 1e9

    def single(self, model: str) -> float:
        """Seconds of an iteration of one device, which updates the rows that it touched."""
        strategy = synchronized(self._graphs[model], self._topology, "AR", 1)
        alone = api.classical("single_device", self._graphs[model], self._topology)
        return self._simulators[model].makespan_ns(alone.with_changes(parameters=strategy.parameters)) / 1e9

    def beside(self, model: str) -> float:
        """How many times as long as AR PS takes."""
        return self.seconds(model, "PS") / self.seconds(model, "AR")


def tune(measure: Callable[[int], Sequence[float] | None], hosts: int, most: int = MAX_PARTITIONS) -> Tuning:
    """Sample, fit, choose. ``measure``: times of a run's iterations in nanoseconds for a number of partitions; None if the run fails.
    SoapError if all runs fail."""
    samples: list[Sample] = []
    while (partitions := next_partitions(samples, hosts, most)) is not None:
        found = measure(partitions)
        samples.append(Sample(partitions, settled_ns(found) if found else None))
    return choose(samples)


def with_constants(topology: Topology, constants: Constants) -> Topology:
    """GPUs, links, and hosts' cores at these rates."""
    devices = []
    for device in topology.devices:
        rates = {dtype: rate * constants.gpu for dtype, rate in device.type.flops_per_second.items()}
        memory = device.type.memory_bandwidth_bytes_per_second * constants.gpu
        devices.append(replace(device, type=replace(device.type, flops_per_second=rates, memory_bandwidth_bytes_per_second=memory)))
    links = [replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * constants.links) for link in topology.links]
    hosts = [replace(host, cpu_cores=SERVER_CORES, row_seconds=constants.row_seconds) for host in topology.hosts]
    return replace(topology, devices=tuple(devices), links=tuple(links), hosts=tuple(hosts))


def synchronized(graph: OperatorGraph, topology: Topology, sync: str, partitions: int) -> Strategy:
    """Data parallelism, synchronized so."""
    strategy = api.classical("data_parallel", graph, topology)
    hosts = len(topology.hosts)
    methods = {
        "AR": (SPARSE_ALL_GATHER, SyncConfig()),
        "PS": (parameter_server(partitions, rows=True), parameter_server(hosts)),
        "OptPS": (parameter_server(partitions, "host", rows=True), parameter_server(hosts, "host")),
        "HYB": (parameter_server(partitions, "host", rows=True), SyncConfig()),
    }
    sparse, dense = methods[sync]
    trained = [parameter.name for parameter in graph.parameters if parameter.requires_grad]
    return strategy.with_changes(parameters={name: sparse if name in graph.sparse else dense for name in trained})


def calibrate(graphs: Mapping[str, OperatorGraph]) -> Constants:
    """One constant after the other, each from entries of Table 1 that hardly depend on those that follow; the first two twice."""
    images = ("resnet50", "inception_v3")
    found = Constants(1.0, 1.0, 1e-6)

    def reduced(gpu: float) -> float:
        cluster = Cluster(found._replace(gpu=gpu), graphs)
        return geometric_mean(cluster.seconds(name, "AR") / _published(name, TABLE_1[name][1]) for name in images)

    def served(links: float) -> float:
        cluster = Cluster(found._replace(links=links), graphs)
        return geometric_mean(cluster.beside(name) / (TABLE_1[name][1] / TABLE_1[name][0]) for name in images)

    def rows(per_second: float) -> float:
        cluster = Cluster(found._replace(row_seconds=1 / per_second), graphs)
        return cluster.beside("lm1b") / (TABLE_1["lm1b"][1] / TABLE_1["lm1b"][0])

    for _ in range(2):
        found = found._replace(gpu=_bisect(reduced, 0.1, 10.0))
        found = found._replace(links=_bisect(served, 0.01, 1.0))
    return found._replace(row_seconds=1 / _bisect(rows, 1e3, 1e7))


def _published(model: str, items_per_second: float) -> float:
    """Seconds of an iteration."""
    return 48 * BATCH_PER_DEVICE[model] * ITEMS_PER_SAMPLE[model] / items_per_second


def _bisect(ratio: Callable[[float], float], low: float, high: float) -> float:
    """Where a ratio that falls with its argument is 1, by halving the interval's logarithm."""
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ratio(middle) > 1 else (low, middle)
    return (low * high) ** 0.5


def constructed(length: int, alpha: float) -> OperatorGraph:
    """The model of Table 6 for instances of so many words, of whose rows each of 48 workers touches this share."""
    samples = 48 * BATCH_PER_DEVICE["lm1b"]
    config = SampledConfig(vocabulary=CONSTRUCTED_WORDS, steps=length, candidates=CONSTRUCTED_WORDS // 4)
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        words = torch.zeros(samples, length, dtype=torch.int64)
        inputs = (words, words.clone(), torch.zeros(config.candidates, dtype=torch.int64))
        soap.export(SampledLanguageModel(config), inputs, path=Path(folder) / "model.pt2", verify=False)
        graph = api.load(Path(folder) / "model.pt2", plan_only=True).graph
    return replace(graph, sparse={name: _touched(access, alpha) for name, access in graph.sparse.items()})


def _touched(access: RowAccess, alpha: float) -> RowAccess:
    """Each of 48 workers touches so many rows; together they touch what independent workers do."""
    counts = [min(access.rows, ceil(access.rows * (1 - (1 - min(alpha, 0.999)) ** (48 / 2**k)))) for k in range(len(access.touched))]
    limits = [min(access.rows, -(-access.indices // 2**k)) for k in range(len(counts))]
    counts = [max(1, min(pair)) for pair in zip(counts, limits, strict=True)]
    for k, (before, after) in enumerate(pairwise(counts)):
        counts[k + 1] = max(after, -(-before // 2))
    return RowAccess(access.rows, access.lookups, tuple(counts), given=True)


def brute_force(seconds: Callable[[int], float], fewest: int) -> int:
    """The number of partitions that the paper's other method finds."""
    best, least = fewest, seconds(fewest)
    partitions = 2 * fewest
    while partitions <= MOST_PARTITIONS and (found := seconds(partitions)) <= least / (1 - BRUTE_DROP):
        best, least = (partitions, found) if found < least else (best, least)
        partitions *= 2
    return best


MOST_PARTITIONS = 256
"""As many as Table 2 has; simulated curves may stay flat for longer."""


def partitioned(cluster: Cluster) -> Iterable[str]:
    """Table 5: throughput beside that with the fewest partitions."""
    yield "| Table 5, beside the fewest | Parallax | simulated (partitions) | optimal | simulated (partitions) |\n|---|---:|---:|---:|---:|"
    for name, (found, fewest, best) in TABLE_5.items():
        taken: dict[int, float] = {}

        def seconds(partitions: int, name: str = name, taken: dict[int, float] = taken) -> float:
            return taken.setdefault(partitions, taken.get(partitions) or cluster.seconds(name, "HYB", partitions))

        first = seconds(FEWEST_PARTITIONS[name])
        tuned = tune(lambda partitions: [seconds(partitions) * 1e9], hosts=8, most=MOST_PARTITIONS).partitions
        optimal = brute_force(seconds, FEWEST_PARTITIONS[name])
        cells = (f"{rate / fewest:.2f} | {first / seconds(chosen):.2f} ({chosen})" for rate, chosen in ((found, tuned), (best, optimal)))
        yield f"| {name} | {' | '.join(cells)} |"


def by_sparsity(constants: Constants) -> Iterable[str]:
    """Table 6: the hybrid over servers as they are."""
    yield f"| Table 6 | {' | '.join(map(str, TABLE_6))} |\n|---|{'---:|' * len(TABLE_6)}"
    yield f"| alpha of a worker | {' | '.join(str(alpha) for alpha, _ in TABLE_6.values())} |"
    yield f"| Parallax / TF-PS, published | {' | '.join(f'{gain:.2f}' for _, gain in TABLE_6.values())} |"
    graphs = {f"length {length}": constructed(length, alpha) for length, (alpha, _) in TABLE_6.items()}
    cluster = Cluster(constants, graphs)
    gains = [cluster.seconds(name, "PS", 8) / cluster.seconds(name, "HYB", 8) for name in graphs]
    yield f"| simulated | {' | '.join(f'{gain:.2f}' for gain in gains)} |"


def scaled_up(cluster: Cluster, alone: Cluster) -> Iterable[str]:
    """Figure 9. One GPU does not communicate."""
    systems = {"Parallax": "HYB", "TF-PS": "PS", "Horovod": "AR"}
    yield f"| Figure 9, 48 GPUs over one | {' | '.join(f'{name} | simulated' for name in systems)} |\n|---|{'---:|' * 6}"
    for name, published in FIGURE_9.items():
        one = alone.single(name)
        rates = (48 * one / cluster.seconds(name, sync) for sync in systems.values())
        yield f"| {name} | {' | '.join(f'{figure} | {rate:.1f}' for figure, rate in zip(published, rates, strict=True))} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="parallax", description="Parallax's published tables, simulated.")
    parser.add_argument("--constants", nargs=3, type=float, metavar=("GPU", "LINKS", "ROW_SECONDS"), help="instead of calibrating")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    graphs = {name: api.load(f"zoo:{name}@{48 * batch}", plan_only=True).graph for name, batch in BATCH_PER_DEVICE.items()}
    constants = Constants(*args.constants) if args.constants else calibrate(graphs)
    print(
        f"GPUs at {constants.gpu:.3f} of their peak, links at {constants.links:.3f} of their rates, {constants.row_seconds * 1e6:.1f} us "
        "to find a row\n"
    )
    cluster = Cluster(constants, graphs)
    print("| Table 1 | AR / PS, published | simulated | ratio |\n|---|---:|---:|---:|")
    for name, (served, reduced) in TABLE_1.items():
        found = cluster.beside(name)
        print(f"| {name} | {reduced / served:.2f} | {found:.2f} | {found / (reduced / served):.2f} |", flush=True)
    print("\n| Table 4, beside AR | PS | simulated | OptPS | simulated | HYB | simulated |\n|---|---:|---:|---:|---:|---:|---:|")
    for name, (reduced, *others) in TABLE_4.items():
        seconds = cluster.seconds(name, "AR")
        columns = zip(others, ("PS", "OptPS", "HYB"), strict=True)
        cells = [f"{other / reduced:.2f} | {seconds / cluster.seconds(name, sync):.2f}" for other, sync in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    counts = list(TABLE_2["lm1b"])
    print(f"\n| Table 2, PS by partitions beside 8 | {' | '.join(map(str, counts))} |\n|---|{'---:|' * len(counts)}")
    for name, rows in TABLE_2.items():
        seconds = cluster.seconds(name, "PS", 8)
        print(f"| {name}, published | {' | '.join(f'{rate / rows[8]:.2f}' for rate in rows.values())} |")
        ratios = [seconds / cluster.seconds(name, "PS", partitions) for partitions in rows]
        print(f"| {name}, simulated | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |", flush=True)
    single = {name: api.load(f"zoo:{name}@{batch}", plan_only=True).graph for name, batch in BATCH_PER_DEVICE.items()}
    for lines in (partitioned(cluster), by_sparsity(constants), scaled_up(cluster, Cluster(constants, single))):
        print("\n" + "\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
