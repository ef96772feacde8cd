"""Two hosts that this machine emulates, the devices of one twice as fast as those of the other, and what they cost by ``soap-profile``.

The profiler measures devices of ``emulated:HxD``, which are all alike. What a device with another part of a core takes is in proportion:
measured times of those, times the shares' ratio, are the times of these. Links are measured between the unequal hosts themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy import soap_profile
from soap import api
from soap.cli import emulation, links
from soap.cluster.emulated import device_cores
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.measure.link_probes import probes_for
from soap.measure.this_machine import cpu_cores
from soap.model.graph import OperatorGraph
from soap.profiles.link_places import link_place
from soap.profiles.scaled import ScaledCosts
from soap.profiles.store import Store
from soap.simulator.costs import CostModel
from soap.strategy.config import Strategy
from soap.units import parse_bandwidth

SPEEDS = (("fast", 2), ("slow", 1))
"""Cores of a device, by host: cores of this machine, less what an emulation's scale takes."""
LATENCY_SECONDS = 5e-5
INSIDE = 100
"""Links between a host's devices are so many times as fast as those between hosts: not what limits anything."""


def alike(devices: int, rate: str) -> str:
    """The emulated cluster of as many devices by host that are all alike."""
    return f"emulated:2x{devices}@{rate}"


def two_speeds(devices: int, rate: str) -> Topology:
    """Two hosts with so many devices each; figures of the devices as described, without measurements."""
    own, part = api.load_cluster(alike(devices, rate)).devices[0].type, device_cores(cpu_cores(), 2 * devices)
    made = [
        Device(host * devices + place, f"{name}/cpu{place}", host, _faster(own, name, cores / part))
        for host, (name, cores) in enumerate(SPEEDS)
        for place in range(devices)
    ]
    hosts = tuple(Host(name, cores * devices, None) for name, cores in SPEEDS)
    speed, found = parse_bandwidth(rate, "rate"), list[Link]()
    for name, _ in SPEEDS:
        inside = [device.name for device in made if device.name.startswith(f"{name}/")]
        hub = inside[0] if devices == 1 else name
        pairs = [(hub, "network", speed), *((device, hub, INSIDE * speed) for device in inside if device != hub)]
        for a, b, bandwidth in pairs:
            for source, target in ((a, b), (b, a)):
                found.append(Link(len(found), f"{source}->{target}", source, target, bandwidth, LATENCY_SECONDS))
    return Topology(f"2:1, {devices} each, at {rate}", tuple(made), hosts, tuple(found))


def _faster(own: DeviceType, name: str, times: float) -> DeviceType:
    return replace(
        own,
        name=f"{own.name}, {name}",
        flops_per_second={dtype: times * rate for dtype, rate in own.flops_per_second.items()},
        memory_bandwidth_bytes_per_second=times * own.memory_bandwidth_bytes_per_second,
        kernel_seconds=own.kernel_seconds / times,
    )


def measured_costs(topology: Topology, devices: int, rate: str, optimizer_states: int) -> CostModel:
    """Of what was measured of devices that are alike (``profile``)."""
    base = api.load_cluster(alike(devices, rate))
    return ScaledCosts(api.costs_for(base, optimizer_states), base, topology, optimizer_states)


def profile(model: str, devices: int, rate: str, strategies: Iterable[Strategy], seconds: int) -> None:
    """Measure what these strategies compute, again if it is known: what was measured while the machine was busy may be a sixth too long.
    For so long in all. A model's file, or a name of the zoo's."""
    base, todo = api.load_cluster(alike(devices, rate)), list(strategies)
    graph: OperatorGraph = api.load(model, plan_only=True, batch_norm="global").graph
    with tempfile.TemporaryDirectory() as temporary:
        path = str(Path(temporary) / "strategy.json")
        for strategy in todo:
            api.save_strategy(path, strategy, graph, base)
            share = str(max(1, seconds // len(todo)))
            soap_profile([model, "--cluster", base.name, "--strategy", path, "--budget", share, "--again"])


def with_links(topology: Topology, scale: float) -> Topology:
    """The same cluster with links as they are measured between its emulated hosts, now: what was measured while the machine was busy makes
    a step a quarter too long, by what a device computes more slowly behind a wait."""
    place, store = link_place(topology, "gloo", emulated=True), Store()
    links.measure(topology, place, list(probes_for(topology)), store, emulation.limits(topology, scale), scale)
    return api.with_links(topology)
