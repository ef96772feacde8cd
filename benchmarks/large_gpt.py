"""Searching a plan for a GPT of 48 layers (width 1,536) on 8 hosts of 8 H200: where the time goes, and what is found.

    python -m benchmarks.large_gpt
    python -m benchmarks.large_gpt --layers 4 --hosts 2 --budget 20

256 samples of 1,024 tokens per iteration, Adam. Expected: at least as good as data parallelism and as tensor parallelism inside each host
with data parallelism across hosts (the start ``megatron``), whichever is better, and memory respected. One thread searches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import soap
from benchmarks.end_to_end import machine
from benchmarks.scale import cluster
from soap.cli.options import not_negative, positive
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.search.oracles.bounds import lower_bound
from soap.search.space import build_space
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.units import format_bytes
from soap.zoo.gpt import GPT, GPTConfig

PER_HOST = 8
CONTEXT = 1024


def load_graph(layers: int, samples: int) -> OperatorGraph:
    """The model's operators."""
    config = GPTConfig(context=CONTEXT, width=1536, heads=16, layers=layers)
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        text = torch.zeros(samples, CONTEXT, dtype=torch.int64)
        soap.export(GPT(config), (text, text), path=Path(folder) / "gpt.pt2")
        return soap.load(Path(folder) / "gpt.pt2", plan_only=True).graph


def main() -> None:
    """Search, and say what was found."""
    parser = argparse.ArgumentParser(description="Search for a large GPT on many hosts.")
    parser.add_argument("--layers", type=positive, default=48)
    parser.add_argument("--hosts", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=256)
    parser.add_argument("--budget", type=positive, default=500)
    parser.add_argument("--seed", type=not_negative, default=0)
    args = parser.parse_args()
    print(machine())
    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s, {time.process_time():6.1f} s of the processor  {what}", flush=True)

    graph = load_graph(args.layers, args.samples)
    topology = cluster(args.hosts * PER_HOST)
    say(f"{len(graph.operators)} operators, {topology.device_count} devices")
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    evaluator = IncrementalSimulator(simulator)
    result = search(graph, topology, evaluator, SearchOptions(budget=args.budget, seed=args.seed))
    say(f"found a cost of {result.cost_ns / 1e6:.3f} ms in {result.evaluations} evaluations: data parallelism's is {result.speedup:.2f}x")
    for start in result.starts:
        lacks = "" if start.fits else f", {format_bytes(start.overflow_bytes)} missing"
        print(f"           start {start.name}: {start.cost_ns / 1e6:.3f} ms{lacks}")
    fits = simulator.overflow_bytes(result.strategy) == 0
    best_ns = min(result.start_costs[name][0] for name in ("data_parallel", "megatron") if result.start_costs[name][1])
    say(f"fits: {fits}; at least as good as the better of data_parallel and megatron: {result.cost_ns <= best_ns}")
    bound = lower_bound(build_space(graph, topology.device_count), simulator.shared.cuts)
    say(f"no strategy of the space takes less than {bound.bound_ns / 1e6:.3f} ms")


if __name__ == "__main__":
    main()
