"""HetPipe's cluster, simulated: data parallelism as Horovod's beside virtual workers, on 1 to 4 hosts with GPUs of four kinds.

    python -m benchmarks.hetpipe --write docs/results/hetpipe.md

Park et al., "HetPipe", USENIX ATC 2020, and the thesis behind it: VGG-19 and ResNet-152 in minibatches of 32 on ``thesis-4x4``, four GPUs
on each host. Rates are those of data sheets with the shares of them that ``RooflineCosts`` takes for GPUs of their age: one for arithmetic
and one for memory, the same for all four kinds; nothing is fitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

from benchmarks.pages import give
from soap import api
from soap.cluster.fewer import without
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.elastic.simulation.steady import NO_DELAYS, Delays
from soap.mixed.partitioning import POLICIES
from soap.mixed.steady import Finder, Found
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.simulate import Simulation

CLUSTER, BATCH = "thesis-4x4", 32
ORDER = ("titanv", "titanrtx", "p4000", "rtx2060")
"""Hosts in the order in which they are added: the one with least memory comes last."""
BOUND, BOUNDS, SPREAD = 4, (0, 4, 32), 0.2
MODELS = ("vgg19", "resnet152")
WIDTH = 140
LEADS = {
    "vgg19": {4: ("164", "300"), 8: ("205", "530"), 12: ("265", "572"), 16: ("339", "606")},
    "resnet152": {4: ("233", "256"), 8: ("353", "516"), 12: ("415", "538"), 16: ("none", "580")},
}
"""Images per second that are said to be in the paper, by GPUs: Horovod's and HetPipe's. Nobody here could verify them."""
INTRO = """# Virtual workers on HetPipe's cluster

Simulated on `thesis-4x4` (4 GPUs each: Titan V, Titan RTX, Quadro P4000, RTX 2060, hosts added in this order; 56 Gbit/s), in minibatches of
{batch} samples, float32, SGD. Rates are data sheets' times the shares that are assumed for GPUs of this age, the same for all: nothing is
fitted, nothing was measured. *Data parallel*: all-reduce, every GPU the same number of samples, as Horovod's; with SGD's momentum. *Virtual
workers*: D = {bound}, the best of HetPipe's policies, each with the best number of minibatches in flight (Nm). Images per second. The
paper's figures are leads that could not be verified; its claims are that HetPipe converges 49% (VGG-19) and 39% (ResNet-152) sooner, which
is time to an accuracy and not images per second.

Why data parallelism is 1.9 and 3.1 times its leads for VGG-19 on 4 and 8 GPUs: not by what GPUs compute, as the same four Titan V are said
to train 300 images/s as virtual workers (321 here), but by its sums. The leads fit sums with which nothing overlaps, at 2.3 GB/s inside a
host and 1.4 GB/s between hosts, a fifth of 56 Gbit/s; here they overlap with backward passes, at the rates assumed for NCCL. Which library,
which protocol and how much overlap the paper's Horovod had is not in the leads, so nothing is changed for it.

    python -m benchmarks.hetpipe --write docs/results/hetpipe.md

"""


def hosts(count: int) -> Topology:
    """The first hosts."""
    topology = preset(CLUSTER)
    names = ORDER[:count]
    return without(topology, [d.index for d in topology.devices if topology.hosts[d.host].name not in names])


def graph_of(model: str, batch: int = BATCH) -> OperatorGraph:
    """A model of the zoo with so many samples."""
    return api.load(f"zoo:{model}@{batch}", plan_only=True, autocast_device="cuda").graph


@dataclass(frozen=True)
class DataParallel:
    """Images per second, and whether each GPU has memory for it."""

    rate: float
    fits: bool

    def __str__(self) -> str:
        return f"{self.rate:.0f}" if self.fits else f"does not fit ({self.rate:.0f})"


def as_horovod(model: str, topology: Topology) -> Simulation:
    """As Horovod trains: the same number of samples on each GPU, all-reduce."""
    return api.simulate(graph_of(model, BATCH * topology.device_count), topology, "data_parallel", optimizer_states=1)


def data_parallel(model: str, topology: Topology) -> DataParallel:
    """Its rate."""
    found = as_horovod(model, topology)
    return DataParallel(1e9 * BATCH * topology.device_count / found.makespan_ns, found.fits)


def sums_row(model: str, topology: Topology) -> str:
    """What the lead of data parallelism leaves for sums beside what GPUs compute here."""
    found, gpus = as_horovod(model, topology), topology.device_count
    computes = max(found.busy_ns[device.name] for device in topology.devices) / 1e6
    carried, (lead, _) = max(found.link_bytes.values()) / 1e6, LEADS[model][gpus]
    own = f"| {gpus} | {found.makespan_ns / 1e6:.0f} | {computes:.0f} | {carried:.0f}"
    if not lead.isdigit():
        return f"{own} | none | | |"
    step = 1e3 * BATCH * gpus / int(lead)
    return f"{own} | {step:.0f} | {step - computes:.0f} | {carried / (step - computes):.1f} |"


def finder(graph: OperatorGraph, topology: Topology, bound: int = BOUND, spread: float = 0.0) -> Finder:
    """For these workers."""
    delays = Delays(spread) if spread else NO_DELAYS
    return Finder(graph, topology, RooflineCosts(topology, 0), bound, delays)


def policies(graph: OperatorGraph, topology: Topology) -> dict[str, Found | str]:
    """Each policy with its best number in flight, or why there is none."""
    own, found = finder(graph, topology), dict[str, Found | str]()
    for name, make in POLICIES.items():
        try:
            found[name] = own.best_in_flight(make(topology))
        except ElasticError as problem:
            found[name] = str(problem)
    return found


def growing_row(model: str, topology: Topology, by_policy: Mapping[str, Found | str]) -> str:
    """The best policy on so many hosts beside data parallelism."""
    found = {name: own for name, own in by_policy.items() if isinstance(own, Found)}
    name = max(found, key=lambda name: found[name].steady.samples_per_second)
    best, reference = found[name], data_parallel(model, topology)
    rate, gpus = best.steady.samples_per_second, topology.device_count
    ed = f"{found['ED'].steady.samples_per_second:.0f}" if "ED" in found else "does not fit"
    gain = f"{rate / reference.rate:.2f}" if reference.fits else ""
    lead = " → ".join(LEADS[model][gpus])
    added = ORDER[gpus // 4 - 1]
    return f"| {gpus} | + {added} | {reference} | {rate:.0f} | {name}, Nm {best.in_flight} | {gain} | {ed} | {lead} |"


def policy_row(name: str, own: Found | str) -> str:
    """A policy on all hosts."""
    if isinstance(own, str):
        return f"| {name} | none | | | | | {own} |"
    steady, most = own.steady, ", ".join(map(str, own.most_in_flight))
    moved = f"{steady.parameter_bytes / 1e6:.1f} | {steady.activation_bytes / 1e6:.1f}"
    idle = sum(steady.idle.values()) / len(steady.idle)
    settled = "" if steady.settled else "not settled"
    return f"| {name} | {steady.samples_per_second:.0f} | {own.in_flight} ({most}) | {moved} | {idle:.0%} | {settled} |"


def bound_row(graph: OperatorGraph, topology: Topology, own: Found, bound: int) -> str:
    """A policy with another bound, at random delays, with the number in flight that is best without delays; says so where hosts have no
    room for as many versions."""
    try:
        found = finder(graph, topology, bound, SPREAD).with_in_flight(own.allocation, own.in_flight).steady
    except ElasticError:
        return f"| {own.allocation.name} | {bound} | does not fit | | | | |"
    waiting = ", ".join(f"{each / 1e6:.0f}" for each in found.waiting_ns)
    missing = f"{found.mean_staleness:.1f} | {max(found.staleness)}"
    return f"| {own.allocation.name} | {bound} | {found.samples_per_second:.0f} | {waiting} | {missing} | {found.pulls:.2f} |"


def sums(model: str) -> Iterator[str]:
    """Why data parallelism is faster than its leads."""
    yield fill(
        "Data parallelism beside its leads. Here sums overlap with backward passes, at the rates that are assumed for NCCL, so what the "
        "slowest GPU computes is nearly all of a step. *Left*: what the lead's step has more than that; *rate*: at which the busiest link "
        "would carry its bytes in that time, which is what sums reached if nothing overlapped with them.",
        WIDTH,
    )
    yield ""
    yield "| GPUs | step, ms | computed, ms | busiest link, MB | the lead's step, ms | left, ms | rate, GB/s |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    yield from (sums_row(model, hosts(count)) for count in range(1, len(ORDER) + 1))
    yield ""


def section(model: str) -> Iterator[str]:
    """One model."""
    graph, everything = graph_of(model), hosts(len(ORDER))
    yield from (f"## {model}", "")
    yield "| GPUs | hosts | data parallel | virtual workers | policy | gain | ED alone | paper (lead): Horovod → HetPipe |"
    yield "|---:|---|---:|---:|---|---:|---:|---|"
    found: dict[str, Found | str] = {}
    for count in range(1, len(ORDER) + 1):
        found = policies(graph, hosts(count))
        yield growing_row(model, hosts(count), found)
    yield ""
    yield from sums(model)
    yield fill(
        "On all 16, by policy. Maxm is by worker; MB go from host to host for each minibatch of a worker. *Not settled*: when as much was "
        "played as is allowed, the rate still changed by more than 0.2%, or what workers may be apart was too large a part of it.",
        WIDTH,
    )
    yield ""
    yield "| policy | images/s | Nm (Maxm) | parameters, MB | activations, MB | GPUs idle | |"
    yield "|---|---:|---|---:|---:|---:|---|"
    yield from (policy_row(name, own) for name, own in found.items())
    yield ""
    yield fill(
        f"On all 16 with random delays (each stage's computation of a minibatch with a standard deviation of {SPREAD:.0%}). Waiting: ms "
        "that a minibatch waits for the bound, by worker. Missing: earlier minibatches of another worker that a start's values may lack, "
        "on average and at most. Pulls: for each wave.",
        WIDTH,
    )
    yield from ("", "| policy | D | images/s | waiting, ms | missing | at most | pulls |", "|---|---:|---:|---|---:|---:|---:|")
    for own in found.values():
        yield from (bound_row(graph, everything, own, bound) for bound in BOUNDS if isinstance(own, Found))
    yield ""


def page(models: Sequence[str]) -> str:
    """Markdown. Lines are also printed as they come: all of it takes minutes."""
    lines = []
    for model in models:
        for line in section(model):
            print(line, file=sys.stderr, flush=True)
            lines.append(line)
    return INTRO.format(batch=BATCH, bound=BOUND) + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="hetpipe", description="Virtual workers on HetPipe's cluster, simulated.")
    parser.add_argument("--write", metavar="PAGE", help="Markdown (default: print it)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help="default: all")
    args = parser.parse_args(argv)
    give(page(args.models), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
