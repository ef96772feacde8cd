"""``--emulate``: the cluster on this box; and the bytes that crossed its hosts' links beside the plan's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from soap.cli.command import Parser, UsageError
from soap.cli.options import part_of_the_box
from soap.cli.plain_text import aligned
from soap.cluster.topology import DeviceKind, Topology
from soap.emulation.hosts import Card, HostLimits, host_limits
from soap.emulation.network import HEADER_BYTES, MTU_BYTES
from soap.emulation.placement import Placement
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure
from soap.measure.this_machine import core_reference_ns, cpu_cores
from soap.runtime.comm.launched import under_launcher
from soap.simulator.analysis.timeline import link_bytes
from soap.simulator.simulate import Simulation
from soap.simulator.tasks import TaskKind

if TYPE_CHECKING:
    from soap.measure.iteration import StepTimes

WAYS = ("sent", "received")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where ranks go, and by which address they reach the launcher: arguments of ``launch``."""

    place: Placement | None = None
    address: str = "127.0.0.1"  # as in ``launch``, whose module needs torch


def add_emulation(parser: Parser) -> None:
    """Add ``--emulate`` and ``--emulate-scale``."""
    parser.add_argument(
        "--emulate", action="store_true", help="make the cluster's hosts, links and CPU shares on this Linux box; needs root"
    )
    parser.add_argument(
        "--emulate-scale",
        metavar="S",
        type=part_of_the_box,
        help="multiply link rates and CPU shares by S, at most 1; predicted times are divided by it (default 1)",
    )


def asked_scale(args: argparse.Namespace) -> float:
    """The value of ``--emulate-scale``; 1 if it is not given."""
    return args.emulate_scale or 1.0


def check_possible(args: argparse.Namespace) -> None:
    """UsageError or RuntimeFailure if the options or this system do not allow the emulation that is asked for."""
    if not args.emulate:
        if args.emulate_scale is not None:
            raise UsageError("--emulate-scale needs an emulated cluster; add --emulate")
        return
    if under_launcher(os.environ):
        raise UsageError("--emulate starts the processes itself; expected no torchrun: run the command alone")
    require_support()


def limits(topology: Topology, scale: float, device_kind: DeviceKind | None = None) -> tuple[HostLimits, ...]:
    """The hosts to emulate for a cluster. ``device_kind`` None: the cluster's own. RuntimeFailure if this machine cannot emulate it."""
    kinds = {device_kind} if device_kind else {device.type.kind for device in topology.devices}
    if "cuda" in kinds:
        raise RuntimeFailure(
            f"--emulate slows down CPUs, but cluster {topology.name!r} is to run on GPUs; use --device cpu or another cluster"
        )
    return host_limits(topology, scale, cpu_cores())


def asked_hosts(args: argparse.Namespace, topology: Topology, device_kind: DeviceKind | None = None) -> tuple[HostLimits, ...]:
    """``limits`` at the scale that is asked for; none without ``--emulate``."""
    return limits(topology, asked_scale(args), device_kind) if args.emulate else ()


@contextmanager
def cluster(hosts: Sequence[HostLimits]) -> Iterator[Placed]:
    """Arguments of ``launch`` while the hosts exist; the usual ones if there are none to emulate."""
    if not hosts:
        yield Placed()
        return
    from soap.emulation.emulate import emulated  # imported here: it locks files in a way that only Unix has

    with emulated(hosts, core_reference_ns()) as emulation:
        yield Placed(emulation.place, emulation.address)


def planned_bytes(simulation: Simulation, micro_batches: int) -> Mapping[str, int]:
    """Bytes by link of one update: several iterations, of which only the last synchronizes gradients."""
    tasks = simulation.tasks
    whole = link_bytes(tasks)
    if micro_batches == 1:
        return whole
    last = link_bytes(replace(tasks, tasks=tuple(task for task in tasks.tasks if task.kind is TaskKind.SYNC)))
    return {name: micro_batches * size - (micro_batches - 1) * last[name] for name, size in whole.items()}


def crossed(hosts: Sequence[HostLimits], simulation: Simulation, micro_batches: int, measured: StepTimes) -> list[dict[str, Any]]:
    """By host, bytes in all timed steps as plain JSON values: counted by its network card, the headers of frames, and planned."""
    planned, steps = planned_bytes(simulation, micro_batches), len(measured.times_ns)
    links = simulation.tasks.topology.links

    def plan(card: Card | None) -> int:
        return 0 if card is None else steps * planned[links[card.link].name]

    rows = []
    for host in hosts:
        counted = measured.card_counts[host.ranks[0]]  # all ranks of a host read the same card
        row: dict[str, Any] = {"host": host.name}
        for way, size, frames, card in zip(WAYS, counted[:2], counted[2:], (host.sending, host.receiving), strict=True):
            row |= {f"{way}_bytes": size, f"{way}_header_bytes": frames * HEADER_BYTES, f"planned_{way}_bytes": plan(card)}
        rows.append(row)
    return rows


def document(hosts: Sequence[HostLimits], scale: float) -> dict[str, Any] | None:
    """What was emulated, as plain JSON values; None if nothing was."""
    if not hosts:
        return None
    entries = [
        {
            "name": host.name,
            "ranks": list(host.ranks),
            "cores": host.cores,
            "sending_bytes_per_second": host.sending.bytes_per_second if host.sending else None,
            "receiving_bytes_per_second": host.receiving.bytes_per_second if host.receiving else None,
            "local_bytes_per_second": host.local_bytes_per_second,
        }
        for host in hosts
    ]
    return {"scale": scale, "mtu_bytes": MTU_BYTES, "hosts": entries}


def text(report: Mapping[str, Any]) -> str:
    """Bytes that crossed the hosts' links, as a short table per strategy; empty if nothing was emulated."""
    if report["emulation"] is None:
        return ""
    parts = []
    for name, entry in report["strategies"].items():
        if not entry["links"]:
            continue
        steps = len(entry["steps_ns"])
        heads = [head for way in WAYS for head in (way, "planned", "ratio", "headers")]
        rows: list[tuple[str, ...]] = [(f"bytes per step, {name}", *heads)]
        for row in entry["links"]:
            cells = [row["host"]]
            for way in WAYS:
                headers, planned = row[f"{way}_header_bytes"], row[f"planned_{way}_bytes"]
                carried = row[f"{way}_bytes"] - headers
                ratio = f"{carried / planned:.3f}" if planned else ""
                cells += [f"{carried / steps:,.0f}", f"{planned / steps:,.0f}", ratio, f"{headers / steps:,.0f}"]
            rows.append(tuple(cells))
        parts.append(aligned(rows))
    emulation = report["emulation"]
    parts.append(
        f"  counted by the hosts' network cards; headers ({HEADER_BYTES} bytes of each frame; acknowledgements are nothing else) apart,\n"
        "  the two barriers around each step included, by which it is timed; latency is not emulated"
    )
    if emulation["scale"] != 1:
        parts.append(f"  link rates and CPU shares times {emulation['scale']:g}; predicted times are divided by it")
    return "\n".join(parts)
