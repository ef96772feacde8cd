"""A fast and a slow device share samples: equal shares beside shares by speed, on two hosts that this machine emulates.

    python -m benchmarks.uneven
    python -m benchmarks.uneven --rounds 1 --steps 6

One host has twice the processor time of the other, and its device is said to be twice as fast. Both plans, and what shifting samples makes
of the second, run in the same processes, in turn, as in ``benchmarks.accuracy``. Needs root, as emulation does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy import OPTIMIZER, READING, measure
from benchmarks.accuracy_report import Plan
from benchmarks.end_to_end import machine
from benchmarks.models import export_model
from benchmarks.quiet import Watch
from soap import api
from soap.cli.options import positive
from soap.cli.updating import states_of
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.errors import SoapError
from soap.search.shares import divisions, shifted
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.units import parse_bandwidth

MODEL, RATE, SCALE = "emulated-vgg16", "1Gbit/s", 0.5
"""``SCALE``: of the cluster's three cores and its links, so that the machine has half of a core left for what communicates."""
EQUAL, BY_SPEED, SHIFTED = "data_parallel", "data_parallel+uneven", "shifted"
AIM = 1.3
LATENCY_SECONDS = 5e-5


def two_hosts(rate: str) -> Topology:
    """A host with two cores and a device twice as fast as this machine's, and one with one core and this machine's device."""
    own = api.load_cluster("local:1").devices[0].type
    devices = (Device(0, "fast/cpu0", 0, _faster(own, 2)), Device(1, "slow/cpu0", 1, _faster(own, 1)))
    hosts = (Host("fast", 2, None), Host("slow", 1, None))
    ends = [(a, b) for device in devices for a, b in ((device.name, "network"), ("network", device.name))]
    speed = parse_bandwidth(rate, "rate")
    links = tuple(Link(i, f"{a}->{b}", a, b, speed, LATENCY_SECONDS) for i, (a, b) in enumerate(ends))
    return Topology(f"2:1 at {rate}", devices, hosts, links)


def _faster(own: DeviceType, times: int) -> DeviceType:
    return replace(
        own,
        name=f"{own.name}, {times} times",
        flops_per_second={dtype: times * rate for dtype, rate in own.flops_per_second.items()},
        memory_bandwidth_bytes_per_second=times * own.memory_bandwidth_bytes_per_second,
        kernel_seconds=own.kernel_seconds / times,
    )


def plans_of(simulator: Simulator) -> dict[str, Strategy]:
    """By name."""
    graph, topology = simulator.graph, simulator.topology
    equal, by_speed = (api.classical(name, graph, topology) for name in (EQUAL, BY_SPEED))
    return {EQUAL: equal, BY_SPEED: by_speed, SHIFTED: shifted(graph, IncrementalSimulator(simulator), by_speed)}


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
    args = parser.parse_args(argv)
    try:
        topology = two_hosts(args.rate)
        with tempfile.TemporaryDirectory() as temporary:
            file = export_model(args.model, Path(temporary))
            graph = api.load(file, plan_only=True, **READING).graph
            simulator = api.simulator_for(graph, topology, optimizer_states=states_of(OPTIMIZER), costs="estimate")
            strategies, watch = plans_of(simulator), Watch()
            found = measure(simulator, topology.name, args.model, file, strategies, args.steps, args.rounds, scale=SCALE)
            others = watch.others_share()
    except SoapError as error:
        parser.error(str(error))
    used = "?" if others is None else f"{others:.0%}"
    print(f"{machine()}; {args.model}, {topology.name}; others used {used}; aim {AIM}\n\n{table(found, strategies, simulator)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
