"""``soap-profile links``: measures what the ranks of a cluster can send each other. Predictions then rest on it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from soap import api
from soap.cli import emulation, plan_summary
from soap.cli.command import Parser, UsageError, note
from soap.cli.options import add_backend, add_cluster, add_json, positive_number
from soap.cli.plain_text import aligned
from soap.cli.stopping import add_time_limit
from soap.cluster.kinds import has_gpus, run_kind
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.errors import INTERRUPTED_EXIT_CODE, ProfileError
from soap.measure.link_probes import (
    IN_STEPS,
    LinkTiming,
    Probe,
    by_kind,
    cpu_fits,
    fits,
    is_enough,
    modelled_seconds,
    probes_for,
    scales_of,
    with_measured_links,
)
from soap.profiles.link_places import LinkPlace, link_place
from soap.profiles.measured_links import known_links
from soap.profiles.store import Store
from soap.runtime.comm.launched import local_numbers, under_launcher
from soap.simulator.communication.prices import Communication
from soap.strategy.json_file import compact_devices
from soap.time_limit import TimeIsUp
from soap.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from soap.emulation.hosts import HostLimits

PROG = "soap-profile links"
MIB = 2**20


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Measure messages and collectives between the real ranks of a cluster: started on this machine, on emulated hosts, or under\n"
        "torchrun those that are there. soap-search, soap-simulate and soap-run then predict with links that have these latencies and\n"
        "bandwidths. Ctrl-C keeps what was measured; the same command goes on from there.",
        f"{PROG} --cluster local:4",
    )
    add_cluster(parser)
    add_backend(parser)
    emulation.add_emulation(parser)
    parser.add_argument("--show", action="store_true", help="measure nothing, only say what is known")
    parser.add_argument("--again", action="store_true", help="measure what is known already, too, and replace it")
    within = "measure only what messages and sums take within training steps, which changes with what else keeps a machine busy"
    parser.add_argument("--within-steps", action="store_true", help=within)
    seconds = "for each probe (default: 0.3), of which there are five sizes of each operation and group"
    parser.add_argument("--seconds", metavar="S", type=positive_number, help=seconds)
    add_time_limit(parser, "what was measured by then is kept, and the same command goes on from there")
    add_json(parser)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Measure and report."""
    if not args.show:
        emulation.check_possible(args)
    topology, store = api.load_cluster(args.cluster), Store()
    if topology.device_count < 2:
        raise UsageError(f"--cluster {args.cluster!r} has one device; expected at least two, which have links between them")
    place = link_place(topology, backend_of(args.backend, topology), emulated=args.emulate)
    done = 0
    if not args.show:
        _check_is_there(args, topology)
        scale = emulation.asked_scale(args)
        known = set() if args.again else {timing.probe for timing in known_links(topology, place, store) if timing.scale == scale}
        try:
            wanted = [one for one in probes_for(topology) if one.operation in IN_STEPS or not args.within_steps]
            measured = _measure(args, topology, place, [probe for probe in wanted if probe not in known], store)
        except KeyboardInterrupt as error:
            late = isinstance(error, TimeIsUp)
            how = "the time is over" if late else "interrupted"
            note(PROG, f"{how}: what was measured is kept, and the same command goes on from there")
            return 0 if late else INTERRUPTED_EXIT_CODE
        if measured is None:  # under torchrun, and not the rank that reports
            return 0
        done = measured
    found = document(topology, place, store)
    found["measured_now"] = done
    if args.json:
        print(plan_summary.dump(found))
    else:
        print("" if args.show else f"measured {done} probes now\n\n", end="")
        print(text(found))
    return 0


def _check_is_there(args: argparse.Namespace, topology: Topology) -> None:
    """UsageError if the ranks would run on a machine that is not the cluster: they would measure another one."""
    hosts = {device.host for device in topology.devices}
    if args.emulate and has_gpus(topology):
        raise UsageError(f"--emulate makes hosts with CPUs, but --cluster {args.cluster!r} has GPUs; expected a cluster of CPUs")
    if args.emulate or (len(hosts) == 1 and family(topology.name) != "emulated"):
        return
    if family(topology.name) == "emulated":
        raise UsageError(f"--cluster {args.cluster!r} exists only while it is emulated; add --emulate")
    if not under_launcher(os.environ):
        raise UsageError(
            f"--cluster {args.cluster!r} has {len(hosts)} hosts, but this machine is one host; start the command with torchrun on each of "
            "them, or add --emulate"
        )


def _measure(args: argparse.Namespace, topology: Topology, place: LinkPlace, todo: Sequence[Probe], store: Store) -> int | None:
    """Measure; the number of probes, or None on ranks that do not report. Under torchrun all take part, and rank 0 decides what is left."""
    if not todo and not under_launcher(os.environ):
        return 0
    hosts = emulation.asked_hosts(args, topology)
    return measure(topology, place, todo, store, hosts, emulation.asked_scale(args), seconds_per_probe=args.seconds)


def measure(
    topology: Topology,
    place: LinkPlace,
    todo: Sequence[Probe],
    store: Store,
    hosts: Sequence[HostLimits] = (),
    scale: float = 1.0,
    *,
    seconds_per_probe: float | None = None,
    stop_at: float = inf,
) -> int | None:
    """Measure probes on ranks of their own, and keep each at once. Returns how many, None on ranks that do not report. ``hosts``: to be
    emulated, at this scale. ``seconds_per_probe`` None: the default. ``stop_at``: as in ``LinkJob``."""
    from soap.cli.link_measuring import LinkJob, measure_and_keep
    from soap.runtime.comm.launch import launch
    from soap.runtime.comm.world import choose_backend

    kind = run_kind(topology)
    choose_backend(place.backend, kind, local_numbers(os.environ, topology.device_count)[1])  # raises if it cannot be emulated
    seconds = {} if seconds_per_probe is None else {"seconds_per_probe": seconds_per_probe}
    job = LinkJob(todo, topology.device_count, kind, place, store.path, scale, **seconds, stop_at=stop_at)
    with emulation.cluster(hosts) as emulated:
        return launch(topology.device_count, measure_and_keep, (job,), place=emulated.place, address=emulated.address).get(0)


def backend_of(asked: str, topology: Topology) -> str:
    """The backend that ``auto`` stands for on this cluster."""
    if asked != "auto":
        return asked
    return "nccl" if topology.has_gpus_alone else "gloo"


def document(topology: Topology, place: LinkPlace, store: Store) -> dict[str, Any]:
    """What is known of a cluster's links, as plain JSON values. The keys are part of the command's interface."""
    timings = known_links(topology, place, store)
    measured, problem, enough = topology, None, bool(timings) and is_enough(topology, timings)
    if enough:
        try:
            measured = with_measured_links(topology, timings)
        except ProfileError as cause:
            problem = str(cause)
    return {
        "cluster": {"name": topology.name, "hash": topology.hash},
        "place": place.text,
        "store": str(store.path),
        "probes": len(probes_for(topology)),
        "measured": len(timings),
        "scales": scales_of(timings),
        "used": enough and problem is None,
        "problem": problem,
        "fits": _fits(timings, Communication(measured)),
        "in_steps": [
            {
                "operation": own.probe.operation.value,
                "devices": list(own.probe.devices),
                "bytes": own.probe.size_bytes,
                "latency_ns": 1e9 * own.typical_seconds,
                "processor_ns": 1e9 * own.cpu_seconds,
            }
            for own in timings
            if own.probe.operation in IN_STEPS
        ],
        "foreign": {one.text: count for one, count in store.link_places().items() if one != place},
    }


def _fits(timings: Sequence[LinkTiming], communication: Communication) -> list[dict[str, Any]]:
    """Each operation over each group of devices of which at least two sizes were measured. ``by_links``: the median of measured time ÷
    simulated time on the measured links. ``processor_share``: the part of an operation's time for which one device's processor is busy
    with it; above 1 if the backend's threads need more than one core."""
    lines = {key: own for key, own in by_kind(timings).items() if len({one.probe.size_bytes for one in own}) > 1}
    complete = [one for own in lines.values() for one in own]
    times, processor = fits(complete), cpu_fits(complete)
    return [
        {
            "operation": operation.value,
            "devices": list(devices),
            "sizes": len(own),
            "latency_ns": 1e9 * times[operation, devices].alpha_seconds,
            "bytes_per_second": 1 / beta if (beta := times[operation, devices].beta_seconds_per_byte) > 0 else None,
            "deviation": times[operation, devices].deviation,
            "processor_ns": 1e9 * processor[operation, devices].alpha_seconds,
            "processor_ns_per_mib": 1e9 * MIB * processor[operation, devices].beta_seconds_per_byte,
            "processor_share": median(one.cpu_seconds / median(one.seconds) for one in own),
            "by_links": median(one.typical_seconds / modelled_seconds(communication, one.probe) for one in own),
            "measured_at": max(one.measured_at for one in own),
        }
        for (operation, devices), own in lines.items()
    ]


def text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    scales = "" if found["scales"] in ([], [1.0]) else f" at --emulate-scale {', '.join(f'{scale:g}' for scale in found['scales'])}"
    head = f"links of {found['place']}: {found['measured']} of {found['probes']} probes measured{scales}\nkept in: {found['store']}"
    rows = [("operation", "devices", "latency", "bandwidth", "processor", "and per MiB", "busy", "deviation", "measured / by links")]
    for line in found["fits"]:
        rate = line["bytes_per_second"]
        rows.append(
            (
                line["operation"],
                ",".join(map(str, compact_devices(line["devices"]))),
                format_seconds(line["latency_ns"] / 1e9),
                "-" if rate is None else format_rate(rate),
                format_seconds(line["processor_ns"] / 1e9),
                format_seconds(line["processor_ns_per_mib"] / 1e9),
                f"{line['processor_share']:.0%}",
                f"{line['deviation']:.0%}",
                f"{line['by_links']:.2f}",
            )
        )
    sections = [head, *([aligned(rows)] if found["fits"] else []), *_in_steps(found["in_steps"]), _use(found)]
    if found["foreign"]:
        elsewhere = [f"  {count} of {place}" for place, count in found["foreign"].items()]
        sections.append("measured elsewhere, and not used here:\n" + "\n".join(elsewhere))
    return "\n\n".join(sections)


def _in_steps(found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    rows = [("within training steps", "devices", "bytes", "latency", "processor")]
    for line in found:
        devices = ",".join(map(str, compact_devices(line["devices"])))
        times = (format_seconds(line["latency_ns"] / 1e9), format_seconds(line["processor_ns"] / 1e9))
        rows.append((line["operation"], devices, format_bytes(line["bytes"]), *times))
    return [aligned(rows)]


def _use(found: Mapping[str, Any]) -> str:
    if found["problem"]:
        return f"predictions do not use it: {found['problem']}"
    if not found["used"]:
        return "predictions take the links as they are described until all messages and exchanges are measured"
    within = ",\nwithin training steps where that is known: a message by itself is quicker than by links" if found["in_steps"] else ""
    return (
        "predictions for this cluster take the latencies of its messages and bandwidths both ways at once (--costs estimate does not)"
        f"{within};\n"
        "processor: what one device spends on an operation and cannot compute meanwhile, busy: as a part of the operation's time"
    )
