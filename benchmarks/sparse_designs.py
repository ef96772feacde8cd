"""Twitter's three designs of a cluster for sparse models, simulated on one list of machines.

    python -m benchmarks.sparse_designs --write docs/results/sparse_designs.md

Andrew Bean, "Distributed training of sparse machine learning models at Twitter", parts 1 and 2: a batch has 512 samples with 1,000 entries
of 20 bytes each; a machine sends 150 MB/s; so one input pipeline that sends each batch once gives at most 14.6 batches a second. Nodes of
their own for input, partitions and the rest (*naive*) mostly idle; *fully connected*: each node is all three; *bipartite*: partitions are
on nodes of their own, and only these hold state. What machines compute with was not published: here each is assumed (``MACHINE``). The
model is ``zoo:full_sparse``, which has the published 23 million weights in three layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.pages import give
from soap import api
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.elastic.layout import Place
from soap.elastic.messages import Kind
from soap.elastic.simulation.design import Design, Traffic, bipartite, design_of, frame_bytes, needs_of_graph, three_designs
from soap.elastic.simulation.steady import Steady, simulate
from soap.elastic.simulation.work import EstimatedWork
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.strategy.consistency import ASYNC, parse

MODEL, BATCH = "zoo:full_sparse", 512
EGRESS_BYTES_PER_SECOND = 150e6
ENTRY_BYTES = 20
"""Row and column as int64, and a float32."""
MACHINE = DeviceType(
    "machine of 8 cores", "cpu", {"float32": 2e11}, 2e10, 2**36, 4e-6,
    "assumed: half of what 8 cores of 3 GHz with 16 operations a cycle can do, and of two channels of DDR4-2400",
)  # fmt: skip
LATENCY_SECONDS = 50e-6
MACHINES = (4, 8, 12)
INTRO = """# Three designs of a cluster for sparse models

Simulated steady states of `{model}` ({weights:.1f} million weights) in batches of {batch} samples, asynchronous, on machines that send and
receive 150 MB/s each, by Twitter's bytes (20 for an entry, sent once) and by ours (8, sent again with the gradients). Servers have one
partition of each layer each, cut by rows. Batches per second; idle shares of the machines of each kind; how many hold state. Machines are
assumed ones (8 cores of an older server), so batches per second are no prediction of Twitter's, whose tables are lost.

    python -m benchmarks.sparse_designs --write docs/results/sparse_designs.md
"""


def machines(count: int) -> Topology:
    """So many machines around a switch."""
    hosts = [Host(f"host{i}", 8, None) for i in range(count)]
    devices = [Device(i, f"host{i}/cpu", i, MACHINE) for i in range(count)]
    links: list[Link] = []
    for device in devices:
        for source, target in ((device.name, "switch"), ("switch", device.name)):
            links.append(Link(len(links), f"{source}->{target}", source, target, EGRESS_BYTES_PER_SECOND, LATENCY_SECONDS / 2))
    return Topology(f"{count} machines", tuple(devices), tuple(hosts), tuple(links))


class PublishedTraffic(Traffic):
    """Twitter's bytes. Owners keep what they were asked for until the gradient comes, so that a push has no ids."""

    def asking(self, place: Place) -> int:
        return ENTRY_BYTES * self.entries_of(place) + frame_bytes(Kind.LOOK_UP)

    def push(self, place: Place) -> int:
        is_table = place.partition.parameter in self.needs.tables
        return frame_bytes(Kind.PUSH_OUTPUTS, self._outputs(place)) if is_table else super().push(place)


def steady(graph: OperatorGraph, design: Design, topology: Topology, *, published: bool) -> Steady:
    """``published``: with Twitter's bytes."""
    needs = needs_of_graph(graph, [*design.layout.tables], BATCH)
    traffic = (PublishedTraffic if published else Traffic)(design, needs)
    return simulate(topology, traffic, EstimatedWork(graph, topology, RooflineCosts(topology, 1), traffic))


def one_pipeline(graph: OperatorGraph) -> float:
    """Batches per second of one input pipeline whose partitions and rest take hardly any time: its link is the limit."""
    design = design_of(bipartite(graph, [0], [1], BATCH, parse(ASYNC)), graph)
    traffic = PublishedTraffic(design, needs_of_graph(graph, [*design.layout.tables], BATCH))
    return EGRESS_BYTES_PER_SECOND / sum(traffic.asking(place) for places in design.layout.tables.values() for place in places)


def page(graph: OperatorGraph) -> str:
    """Markdown."""
    weights = sum(tensor.bytes // tensor.itemsize for tensor in graph.parameters) / 1e6
    parts = [INTRO.format(model=MODEL, batch=BATCH, weights=weights)]
    parts.append(
        f"Sending {sum(own.indices for own in graph.sparse.values()) // BATCH} entries a sample of {ENTRY_BYTES} bytes, one pipeline gives "
        f"{one_pipeline(graph):.1f} batches a second at most (published, with 1,000 entries: 14.6)."
    )
    for published in (True, False):
        parts += ["", "## By Twitter's bytes" if published else "## By ours", ""]
        parts += ["| machines | design | batches per second | idle | stateful |", "|---:|---|---:|---|---:|"]
        for count in MACHINES:
            for name, design in three_designs(graph, range(count), parse(ASYNC), BATCH).items():
                found = steady(graph, design, machines(count), published=published)
                idle = ", ".join(f"{role} {share:.0%}" for role, share in found.idle_by_role.items())
                rate = found.samples_per_second / BATCH
                parts.append(f"| {count} | {name} | {rate:.1f} | {idle} | {found.stateful} |")
    return "\n".join([*parts, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="sparse_designs", description="Three designs of a cluster for sparse models, simulated.")
    parser.add_argument("--write", metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    give(page(api.load(MODEL, plan_only=True).graph), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
