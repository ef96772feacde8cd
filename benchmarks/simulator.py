"""How fast is the compiled simulator, beside FlexFlow's own C++ one? Full simulations, exact delta simulations, and proposals of a
Metropolis chain whose decisions may end a simulation early.

    python -m benchmarks.simulator
    python -m benchmarks.simulator --nets inception_v3 --devices 4 16 --proposals 20000

Space "sample", as in FlexFlow's search: only the sample dimension is split, into a power of two of parts on an aligned block of devices,
64 samples per device, four devices per host. Space "soap": up to ``MOST_CHOICES`` configurations of each operator, drawn from all that
``soap-search`` looks at but replicas. The chain starts from data parallelism, with the inverse temperature of ``soap-search``; what its
configurations cost is known before it is timed. The nets have no batch norm, as FlexFlow's examples. One process, one thread; start-up is
measured in processes of their own.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import soap
from benchmarks.end_to_end import machine
from benchmarks.metropolis_walk import walk
from soap import api, zoo
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.model.graph import FactorKind, Operator, OperatorGraph
from soap.search.metropolis import DEFAULT_BETA
from soap.search.space import build_space
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import parameter_server, synchronized
from soap.zoo.gpt import GPT, GPTConfig

SAMPLES = 64
"""Per device."""

FLEXFLOW: dict[tuple[str, str], dict[int, float]] = {
    ("inception_v3", "allreduce"): {4: 2390, 16: 331, 64: 49},
    ("transformer", "allreduce"): {4: 1928, 16: 311, 64: 43},
    ("resnet101", "parameter_server"): {4: 1385, 16: 162, 64: 17},
    ("inception_v3", "parameter_server"): {4: 1638, 16: 174, 64: 21},
    ("nmt", "parameter_server"): {4: 7840, 16: 806, 64: 96},
    ("transformer", "parameter_server"): {4: 1864, 16: 170, 64: 18},
}
"""Proposals per second of FlexFlow's last release with MCMC (r21.09, C++, one thread), by (net, how gradients are synchronized) and number
of devices, measured on the same kind of machine, +-25%."""

SPACES = ("sample", "soap")
MOST_CHOICES = 200

NETS = ("inception_v3", "resnet101", "nmt", "transformer")
METHODS = ("allreduce", "parameter_server")


class Rates(NamedTuple):
    """What was measured: tasks of the first strategy, seconds per lowering and per simulation, proposals per second, tasks per proposal."""

    tasks: int
    lower_seconds: float
    play_seconds: float
    exact: float
    bounded: float
    exact_tasks: float
    bounded_tasks: float
    accepted: int


def build(net: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A net without memory for its tensors."""
    if net == "transformer":
        with torch.device("meta"):
            text = torch.zeros(batch, 512, dtype=torch.int64)
            return GPT(GPTConfig(vocabulary=1000, context=512, width=1024, heads=16, layers=12, dropout=0.0)), (text, text)
    made = zoo.build(f"{net}@{batch}", fake=True)
    return _without_batch_norm(made.module), made.args


def _without_batch_norm(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.Identity())
        else:
            _without_batch_norm(child)
    return module


def load_net(net: str, batch: int, folder: Path) -> OperatorGraph:
    """Its operator graph."""
    path = folder / f"{net}-{batch}.pt2"
    module, args = build(net, batch)
    soap.export(module, args, path=path)
    return api.load(str(path), plan_only=True).graph


def cluster(hosts: int) -> Topology:
    """So many of the hosts of ``p100-4x4``: four P100 with NVLink, 100 Gbit/s between hosts."""
    return parse_cluster(
        f"""name: p100-{hosts}x4
hosts:
  - name: node
    count: {hosts}
    devices: {{type: p100, count: 4}}
    cpu_cores: 20
    memory: 256 GB
    links:
      intra: {{kind: full, bandwidth: 20 GB/s, latency: 10 us}}
      host: {{bandwidth: 15.75 GB/s, latency: 5 us}}
network: {{bandwidth: 100 Gbit/s, latency: 2 us}}
"""
    )


def sample_configs(op: Operator, devices: int) -> list[OpConfig]:
    """Powers of two of parts of the sample dimension, on aligned blocks of devices."""
    sample = next((i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE), None)
    found = []
    parts = 1
    while parts <= devices:
        if parts == 1 or (sample is not None and op.partitionable and op.factors[sample].size % parts == 0):
            degrees = tuple(parts if i == sample else 1 for i in range(len(op.factors)))
            found += [OpConfig(degrees, tuple(range(first, first + parts))) for first in range(0, devices, parts)]
        parts *= 2
    return found


def soap_configs(graph: OperatorGraph, devices: int) -> dict[str, list[OpConfig]]:
    """Name of each operator -> some of its configurations in all dimensions, each once."""
    space, draw = build_space(graph, devices), random.Random(0)
    found = {}
    for op, own in zip(graph.operators, space.operators, strict=True):
        drawn = dict.fromkeys(own.draw_structured(draw) for _ in range(MOST_CHOICES))
        found[op.name] = [config for config in drawn if config.replicas == 1]
    return found


def measure(graph: OperatorGraph, topology: Topology, method: str, space: str, proposals: int) -> Rates:
    """All figures of one line."""
    costs = api.simulator_for(graph, topology).costs
    if space == "soap":
        choices = soap_configs(graph, topology.device_count)
    else:
        choices = {op.name: sample_configs(op, topology.device_count) for op in graph.operators}
    choices = {name: configs for name, configs in choices.items() if configs}
    start = _start(graph, topology, method)
    rates, tasks_each, accepted = [], [], 0
    for bounded in (False, True):
        engine = Engine(Shared(graph, topology, costs))
        engine.load(start)
        beta = DEFAULT_BETA / engine.simulate()
        walk(engine, choices, proposals, beta, 7, bounded=bounded)  # everything is loaded, and the cost model knows all that will come
        engine.load(start)
        engine.simulate()
        begin = time.perf_counter()
        found = walk(engine, choices, proposals, beta, 7, bounded=bounded)
        rates.append(proposals / (time.perf_counter() - begin))
        tasks_each.append(found.played_tasks / proposals)
        accepted = found.accepted
    lower, play = _full_seconds(engine, start)
    return Rates(len(engine.taken()), lower, play, rates[0], rates[1], tasks_each[0], tasks_each[1], accepted)


def _start(graph: OperatorGraph, topology: Topology, method: str) -> Strategy:
    strategy = api.classical("data_parallel", graph, topology)
    if method == "parameter_server":
        return strategy.with_changes(parameters=synchronized(graph, parameter_server(), sparse=False))
    return strategy


def _full_seconds(engine: Engine, strategy: Strategy) -> tuple[float, float]:
    """Median seconds of (lowering, playing) a whole strategy."""
    lower, play = [], []
    for _ in range(7):
        begin = time.perf_counter()
        engine.load(strategy)
        between = time.perf_counter()
        engine.play()
        lower.append(between - begin)
        play.append(time.perf_counter() - between)
    engine.simulate()
    return sorted(lower)[3], sorted(play)[3]


def start_up() -> tuple[float, float]:
    """Processor seconds until a first simulation and a proposal are done: when nothing is compiled yet, and in a later process."""
    with tempfile.TemporaryDirectory() as folder:
        used = []
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", FIRST_USE], check=True, env={**os.environ, "XDG_CACHE_HOME": folder})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", FIRST_USE.partition("engine =")[0]], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        without = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used[0] - without, used[1] - without


FIRST_USE = """
from soap import api
from soap.simulator.engine import Engine
graph, topology = api.load("zoo:gpt:tiny", plan_only=True).graph, api.load_cluster("local:2")
simulator = api.simulator_for(graph, topology)
strategy = api.classical("data_parallel", graph, topology)
engine = Engine(simulator.shared)
engine.load(strategy)
engine.simulate()
name, config = next(iter(strategy.operators.items()))
engine.propose(name, config)
engine.reject()
"""
"""A process that does what a search begins with; what stands before ``engine`` is no part of what is measured."""

COLUMNS = (
    "net", "operators", "devices", "space", "gradients", "tasks", "full simulations/s", "M tasks/s", "with lowering, /s", "FlexFlow, /s",
    "delta/s", "tasks played", "ratio", "proposals/s", "tasks played", "ratio", "accepted",
)  # fmt: skip


def line(net: str, graph: OperatorGraph, devices: int, method: str, space: str, rates: Rates, proposals: int) -> str:
    """One line of the table."""
    theirs = FLEXFLOW.get((net, method), {}).get(devices) if space == "sample" else None
    ratios = [f"{rate / theirs:.1f}" if theirs else "" for rate in (rates.exact, rates.bounded)]
    cells = [
        net, len(graph.operators), devices, space, method, rates.tasks, f"{1 / rates.play_seconds:,.0f}",
        f"{rates.tasks / rates.play_seconds / 1e6:.1f}", f"{1 / (rates.lower_seconds + rates.play_seconds):,.0f}",
        f"{theirs:,.0f}" if theirs else "",
        f"{rates.exact:,.0f}", f"{rates.exact_tasks:,.0f}", ratios[0], f"{rates.bounded:,.0f}", f"{rates.bounded_tasks:,.0f}", ratios[1],
        f"{rates.accepted / proposals:.1%}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="simulator", description="Speed of the compiled simulator beside FlexFlow's.")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--devices", nargs="+", type=positive, default=[4, 16, 64], help="multiples of four")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="how gradients are synchronized")
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--proposals", type=positive, default=4000, help="of each chain (default %(default)s)")
    args = parser.parse_args(argv)
    print(f"{machine()}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for net in args.nets:
            for devices in args.devices:
                graph, topology = load_net(net, SAMPLES * devices, Path(folder)), cluster(devices // 4)
                for space, method in product(args.spaces, args.methods):
                    rates = measure(graph, topology, method, space, args.proposals)
                    print(line(net, graph, devices, method, space, rates, args.proposals), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    first, later = start_up()
    print(f"\nPeak resident memory: {peak:,.0f} MiB. Start-up: {first:.1f} s of processor time in a fresh environment, then {later:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
