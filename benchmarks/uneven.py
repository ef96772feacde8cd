"""A fast and a slow device share samples: equal shares beside shares by speed, on two hosts that this machine emulates.

    python -m benchmarks.uneven
    python -m benchmarks.uneven --rounds 1 --steps 6

One host has twice the processor time of the other (``two_speeds``). Both plans, and what shifting samples makes of the second, run in the
same processes, in turn, as in ``benchmarks.accuracy``; predicted is from what ``soap-profile`` measures before (``--profile`` seconds; 0:
with what is known). Needs root, as emulation does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import two_speeds
from benchmarks.accuracy import OPTIMIZER, READING, measure
from benchmarks.accuracy_report import Plan
from benchmarks.end_to_end import machine
from benchmarks.models import export_model
from benchmarks.quiet import Watch
from soap import api
from soap.cli.options import not_negative, part_of_the_box, positive
from soap.cli.updating import states_of
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.model.graph import OperatorGraph
from soap.search.shares import divisions, shifted
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

MODEL, RATE, SCALE = "emulated-vgg16", "2Gbit/s", 0.25
"""``SCALE``: of the cluster's three cores and its links, so that the machine has more than a core left for what communicates."""
EQUAL, BY_SPEED, SHIFTED = "data_parallel", "data_parallel+uneven", "shifted"
AIM = 1.3


def plans_of(simulator: Simulator) -> dict[str, Strategy]:
    """By name."""
    graph, topology = simulator.graph, simulator.topology
    equal, by_speed = (api.classical(name, graph, topology) for name in (EQUAL, BY_SPEED))
    return {EQUAL: equal, BY_SPEED: by_speed, SHIFTED: shifted(graph, IncrementalSimulator(simulator), by_speed)}


def _simulator(graph: OperatorGraph, topology: Topology, rate: str) -> Simulator:
    """With the costs that are known now."""
    states = states_of(OPTIMIZER)
    return Simulator(graph, topology, two_speeds.measured_costs(topology, 1, rate, states), states)


def table(plans: Sequence[Plan], strategies: Mapping[str, Strategy], simulator: Simulator) -> str:
    """Markdown: samples of each device, times, and how many times as fast as equal shares."""
    usual = next(plan for plan in plans if plan.strategy == EQUAL)
    lines = ["| plan | samples | predicted, ms | measured, ms | as fast as equal shares | predicted |", f"|{'---|' * 6}"]
    for plan in plans:
        counts = {":".join(map(str, own)) for _, own in divisions(simulator.graph, strategies[plan.strategy])} or {"equal"}
        gains = usual.measured_ns / plan.measured_ns, usual.predicted_ns / plan.predicted_ns
        times = f"{plan.predicted_ns / 1e6:.1f} | {plan.measured_ns / 1e6:.1f}"
        lines.append(f"| {plan.strategy} | {', '.join(sorted(counts))} | {times} | {gains[0]:.2f} | {gains[1]:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="uneven", description="Shares of samples on a fast and a slow emulated host.")
    parser.add_argument("--model", default=MODEL, help="of benchmarks.models (default %(default)s)")
    parser.add_argument("--rate", default=RATE, help="of the hosts' links (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=positive, default=10, help="of each plan in a round, warm-up included (default %(default)s)")
    seconds = "to measure computations, before (default %(default)s)"
    parser.add_argument("--profile", type=not_negative, default=60, help=seconds)
    parser.add_argument("--scale", type=part_of_the_box, default=SCALE, help="of rates and CPU time; less beside other programs")
    args = parser.parse_args(argv)
    try:
        topology = two_speeds.two_speeds(1, args.rate)
        topology = two_speeds.with_links(topology, args.scale) if args.profile else api.with_links(topology)
        with tempfile.TemporaryDirectory() as temporary:
            file = export_model(args.model, Path(temporary))
            graph = api.load(file, plan_only=True, **READING).graph
            simulator = _simulator(graph, topology, args.rate)
            strategies = plans_of(simulator)
            for _ in range(2 if args.profile else 0):  # what is shifted depends on what is measured, and is measured then
                two_speeds.profile(str(file), 1, args.rate, strategies.values(), args.profile // 2)
                simulator = _simulator(graph, topology, args.rate)
                strategies = plans_of(simulator)
            watch = Watch()
            found = measure(simulator, topology.name, args.model, file, strategies, args.steps, args.rounds, scale=args.scale)
            others = watch.others_share()
    except SoapError as error:
        parser.error(str(error))
    used = "?" if others is None else f"{others:.0%}"
    print(f"{machine()}; {args.model}, {topology.name}; others used {used}; aim {AIM}\n\n{table(found, strategies, simulator)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
