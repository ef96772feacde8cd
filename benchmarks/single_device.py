"""What a step takes on one device: predicted from its data sheet, from a quick measurement and from a profile; and measured.

    python -m benchmarks.single_device --sheet h200 zoo:gpt zoo:resnet50 zoo:rnnlm

on a machine with a GPU; without one, on its processor's cores together. Nothing is communicated, so that what is wrong is the costs. Every
model is trained by ``soap-run``'s ranks, in ``--rounds`` turns of which the quickest counts, and its peak memory is compared as well.
``--export`` writes what was measured, as ``soap-profile export`` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accuracy import READING, soap_profile
from benchmarks.end_to_end import machine
from benchmarks.turns import in_turns, turns_of
from soap import api
from soap.cli.options import Reading, not_negative, positive
from soap.cli.run import start
from soap.cli.training import Job
from soap.cli.updating import states_of
from soap.cluster.presets import device_types, local_topology
from soap.cluster.topology import Topology
from soap.profiles.lookup import ProfiledCosts
from soap.profiles.shares import corrected, shares, text
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.classical import CLASSICAL

CLUSTER = "local:1"
STRATEGY = "single_device"
MODELS = ("zoo:gpt", "zoo:resnet50", "zoo:rnnlm")


@dataclass(frozen=True)
class Result:
    """One model. ``predicted_ns``: by where costs come from. ``shares``: of compute time, where the profile's answers come from."""

    model: str
    predicted_ns: dict[str, int]
    measured_ns: int
    rounds_ns: tuple[int, ...]
    predicted_bytes: int
    measured_bytes: int
    shares: str


def benchmark(model: str, args: argparse.Namespace) -> Result:
    """Profile, predict and measure one model."""
    topology = api.load_cluster(CLUSTER)
    states = states_of(args.optimizer)
    reading: Reading = {**READING, "autocast": args.autocast, "autocast_device": topology.devices[0].type.kind}
    graph = api.load(model, plan_only=True, **reading).graph
    strategy = CLASSICAL[STRATEGY](graph, topology)

    def simulated(on: Topology, costs: CostSource) -> tuple[Simulator, Simulation]:
        simulator = api.simulator_for(graph, on, optimizer_states=states, costs=costs)
        return simulator, simulator.run(strategy)

    predicted = {}
    if args.sheet:
        predicted["data sheet"] = simulated(local_topology(1, device_types()[args.sheet]), "estimate")[1].makespan_ns
    predicted["quick measurement"] = simulated(topology, "estimate")[1].makespan_ns
    if args.profile:
        autocast = ["--autocast", args.autocast] if args.autocast else []
        soap_profile([model, "--cluster", CLUSTER, "--budget", str(args.profile), *autocast])
    simulator, simulation = simulated(topology, "auto")
    predicted["profile"] = simulation.makespan_ns
    job = Job(
        model=model,
        reading=reading,
        topology=topology,
        strategies=in_turns({STRATEGY: strategy}, {STRATEGY: simulation}, args.rounds),
        steps=args.steps,
        seed=0,
        optimizer=args.optimizer,
        weighed=True,
        compiled=args.compile,
    )
    outcome = start(job)
    assert outcome is not None and outcome.peak_bytes is not None  # not under torchrun, and weighed
    rounds = tuple(own.median_ns for own in turns_of(outcome.measured, STRATEGY))
    costs = simulator.costs
    origin = text(shares(costs, simulation.tasks), corrected(costs, simulation.tasks)) if isinstance(costs, ProfiledCosts) else ""
    return Result(model, predicted, min(rounds), rounds, simulation.peak_bytes[0], outcome.peak_bytes[0], origin)


def line(result: Result) -> str:
    """Of the table."""
    ratios = " | ".join(f"{ns / 1e6:.1f} ms, {ns / result.measured_ns:.3f}" for ns in result.predicted_ns.values())
    rounds = ", ".join(f"{ns / 1e6:.1f}" for ns in result.rounds_ns)
    memory = f"{result.predicted_bytes / 2**20:.0f} MiB | {result.measured_bytes / 2**20:.0f} MiB"
    ratio = result.predicted_bytes / max(1, result.measured_bytes)
    return f"| {result.model} | {ratios} | {result.measured_ns / 1e6:.1f} ms ({rounds}) | {memory} | {ratio:.3f} | {result.shares} |"


def options() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="single_device", description="Predicted against measured steps on one device.")
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help="default: " + " ".join(MODELS))
    parser.add_argument("--sheet", choices=sorted(device_types()), help="the device's data sheet")
    parser.add_argument("--profile", type=not_negative, default=60, help="seconds for each model; 0: as it is (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="in a round, warm-up included (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="adam", help="default %(default)s")
    parser.add_argument("--autocast", choices=["bfloat16"], help="compute in this type what torch.autocast does")
    parser.add_argument("--compile", action="store_true", help="measure by torch.compile (predictions are of eager steps)")
    parser.add_argument("--export", metavar="FILE", help="write the store's measurements")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = options().parse_args(argv)
    print(f"{machine()}, {api.load_cluster(CLUSTER).devices[0].type.name}\n")
    names = [*(["data sheet"] if args.sheet else []), "quick measurement", "profile"]
    columns = ["model", *(f"{name} (÷ measured)" for name in names), "measured (rounds)", "memory predicted", "measured", "ratio"]
    columns.append("the profile's answers")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for model in args.models:
        print(line(benchmark(model, args)), flush=True)
    if args.export:
        soap_profile(["export", args.export])
    return 0


if __name__ == "__main__":
    sys.exit(main())
