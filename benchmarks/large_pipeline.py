"""GPT-3 175B on 16 hosts of 8 H200: the pipelines that are found, beside the configuration of NVIDIA's published run on as many H100.

    python -m benchmarks.large_pipeline
    python -m benchmarks.large_pipeline --layers 8 --hosts 2 --samples 32 --simulated 4

256 samples of 2,048 tokens in bfloat16, Adam. Published (docs/source/performance/performance_summary.md of NeMo 24.07): tensor parallelism
of 4, 8 stages of 6 chunks, micro-batches of 1 sample, 726 tokens per second and GPU in FP8 on DGX H100. Here the same is simulated in
bfloat16 on H200, which have the same arithmetic and more memory. No copy is measured or run.
"""

from __future__ import annotations

import argparse
import resource
import time

import soap
from benchmarks.end_to_end import machine
from benchmarks.layers import by_layers
from benchmarks.published_models import graph_of
from soap import api
from soap.cli.options import positive
from soap.schedules.named import parse
from soap.search.pipelines import pipelines
from soap.search.pipelining import pipelined
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import MOST_PLANNED_TILES, Simulator, tile_count
from soap.strategy.config import Strategy
from soap.units import format_bytes

SEQUENCE = 2048
PUBLISHED = 726
"""Tokens per second and GPU."""
TENSOR, STAGES, SCHEDULE = 4, 8, "interleaved:6"


class Clock:
    """Says what was done, when, and how much memory the process has held."""

    def __init__(self, tokens: int, devices: int) -> None:
        self._begin, self._tokens, self._devices = time.perf_counter(), tokens, devices

    def say(self, what: str) -> None:
        """One line."""
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{time.perf_counter() - self._begin:7.1f} s, {format_bytes(held)}  {what}", flush=True)

    def timed(self, name: str, simulator: IncrementalSimulator, strategy: Strategy) -> int:
        """Simulates a strategy."""
        step_ns = simulator.makespan_ns(strategy)
        rate = self._tokens / step_ns * 1e9 / self._devices
        told = f"{step_ns / 1e9:.3f} s a step, {rate:.0f} tokens/s and device, {rate / PUBLISHED:.2f} of the published rate"
        self.say(f"{name}: {told}")
        return step_ns

    def fits(self, name: str, simulator: IncrementalSimulator, strategy: Strategy) -> bool:
        """Asks whether it fits into memory; of very many tiles the sum of all that devices ever hold says what is missing at most."""
        lacking = simulator.overflow_bytes(strategy)
        most = "" if tile_count(strategy) <= MOST_PLANNED_TILES else " at most"
        self.say(f"{name}: {f'{format_bytes(lacking)} missing{most}' if lacking else 'fits'}")
        return lacking == 0


def main() -> None:
    """Plan, and say what was found."""
    parser = argparse.ArgumentParser(description="Pipelines of GPT-3 175B on many hosts.")
    parser.add_argument("--layers", type=positive, default=96)
    parser.add_argument("--width", type=positive, default=12288)
    parser.add_argument("--heads", type=positive, default=96)
    parser.add_argument("--hosts", type=positive, default=16)
    parser.add_argument("--samples", type=positive, default=256)
    parser.add_argument("--simulated", type=positive, default=3, help="so many of the pipelines found")
    args = parser.parse_args()
    print(machine())
    topology = soap.load_cluster(f"h200-{args.hosts}x8")
    clock = Clock(args.samples * SEQUENCE, topology.device_count)
    sizes = {"sequence": SEQUENCE, "vocabulary": 51200, "width": args.width, "layers": args.layers, "heads": args.heads, "dropout": 0.0}
    graph = graph_of({"builder": "gpt", "attention": "fused", "tied": False, **sizes}, args.samples, dtype="bfloat16")
    clock.say(f"{len(graph.operators)} operators, {topology.device_count} devices")
    costs = api.costs_for(topology)
    simulator = Simulator(graph, topology, costs)
    evaluator = IncrementalSimulator(simulator)
    found = pipelines(Shared(graph, topology, costs), simulator.optimizer_states)
    clock.say(f"{len(found)} pipelines by rough costs")
    times: list[tuple[int, str, Strategy]] = []
    for own in found[: args.simulated]:
        name = f"{len(own.stages)} stages, tensor {own.tensor}, {own.microbatches} micro-batches, {own.schedule}"
        clock.say(f"{name}: expected {own.expected_ns / 1e9:.3f} s, {format_bytes(own.lacking_bytes)} missing")
        strategy = pipelined(graph, topology, own)
        folding = simulator.folding(strategy)
        clock.say(f"{name}: {folding if isinstance(folding, str) else f'two of {folding.count} copies'}, {tile_count(strategy):,} tiles")
        times.append((clock.timed(name, evaluator, strategy), name, strategy))
    for _, name, strategy in sorted(times, key=lambda own: own[0]):
        if clock.fits(name, evaluator, strategy):
            clock.say(f"planned: {name}")
            break
    if args.layers % (STAGES * parse(SCHEDULE).chunks) == 0:
        count = args.samples * TENSOR * STAGES // topology.device_count
        known = by_layers(graph, topology, stages=STAGES, microbatches=count, schedule=SCHEDULE, tensor=TENSOR)
        clock.timed("published configuration", evaluator, known)
        clock.fits("published configuration", evaluator, known)


if __name__ == "__main__":
    main()
