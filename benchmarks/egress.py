"""``python -m benchmarks.egress [--write docs/results/egress.md]``: what hosts send for a lease, counted at their network cards.

Twitter's layers (``zoo:full_sparse:emulation``) on emulated hosts, on one to four servers, cut by rows or by columns, with one worker
beside them, or with a worker on each server's host. Beside what was counted is what the formulas of the publication say. Needs root, as
emulation does; takes minutes, and nothing in it depends on how fast the machine is.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.bipartite import BATCH, DRAWN, MODEL, Bench, average, bench_of
from benchmarks.pages import give
from soap.elastic.layout import Place
from soap.elastic.simulation.design import Design, Traffic, bipartite, design_of, fully_connected
from soap.errors import SoapError
from soap.files import check_writable
from soap.strategy.consistency import parse

SERVERS = (1, 2, 4)
HOSTS = max(SERVERS) + 1
RATE = "1Gbit/s"
ROUNDS = 2
"""Of leases on all batches, by each worker."""
COLUMNS, ENTRIES = 3 * 32, 3 * 64
"""Of all tables; of a sample."""
ENTRY_BYTES = 2 * (4 + 4)
"""b: an id and a value, in a question for sums and again with their gradients: owners keep nothing in between."""
INTRO = f"""# Bytes that hosts send for a lease

`{MODEL}` in leases of {BATCH} samples on emulated hosts, counted at their network cards, without headers of packets.
S = {ENTRY_BYTES} nnz B: {ENTRY_BYTES} bytes for each entry (an id and a value, 4 bytes each, with the question for sums and again with
their gradients: owners keep nothing in between), {ENTRIES} entries a sample, B samples. P: servers; out: the {COLUMNS} columns of all
tables. *Beside*: what else a lease's messages have, as the simulator counts them: the dense variables (on two servers at most; a row
for servers is their mean), offsets, headers of messages (32 bytes, and 8 for each array and each of its dimensions) and of frames (16
bytes). What is counted beyond both was lost on the way, and sent again; where workers are on servers' hosts, who had which batch
differs, too.

    python -m benchmarks.egress --write docs/results/egress.md

| plan | P | node | formula | its bytes | beside | both | counted | off by |
|---|---:|---|---|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True)
class Node:
    """What nodes of a kind send for a lease, on average, in bytes. ``formula``: in words; ``expected``: by it. ``beside``: what else is
    planned; ``counted``: at their cards."""

    plan: str
    servers: int
    name: str
    formula: str
    expected: float
    beside: float
    counted: float

    @property
    def off(self) -> float:
        """How far the count is from formula and rest together."""
        return self.counted / (self.expected + self.beside) - 1


def designs(bench: Bench) -> dict[tuple[str, int], Design]:
    """By name and number of servers. Servers are the first hosts."""
    graph, found = bench.model.graph, dict[tuple[str, int], Design]()
    for servers in SERVERS:
        for axis, word in enumerate(("rows", "columns")):
            plan = bipartite(graph, [servers], range(servers), BATCH, parse("async"), axis=axis)
            found[f"bipartite, {word}", servers] = design_of(plan, graph)
        if servers > 1:
            found["fully connected, rows", servers] = design_of(fully_connected(graph, range(servers), BATCH, parse("async")), graph)
    return found


def nodes(plan: str, servers: int, design: Design, bench: Bench) -> list[Node]:
    """Trains by a design, and says what its nodes have sent."""
    with bench.hosts.prepared(design):
        trained = bench.hosts.train(design, leases=ROUNDS * DRAWN)
    traffic = Traffic(design, average(bench.needs(design)))
    beside, leases = planned(traffic), trained.leases / len(design.lanes)
    own = {host: (beside[host], trained.sent_bytes[host] / leases) for host in design.roles}
    found = []
    for name, hosts, (formula, expected) in kinds(plan, servers):
        found.append(Node(plan, servers, name, formula, expected, *(mean(own[host][i] for host in hosts) for i in (0, 1))))
    return found


def kinds(plan: str, servers: int) -> list[tuple[str, Sequence[int], tuple[str, float]]]:
    """(kind of node, its hosts, the formula in words and in bytes)."""
    entries, sums = ENTRY_BYTES * ENTRIES * BATCH, 4 * BATCH * COLUMNS
    if plan.startswith("fully"):
        value = entries * (servers - 1) / servers + 2 * (servers - 1) * sums
        return [("each", range(servers), ("S (P-1)/P + 8 (P-1) B out", value))]
    if plan.endswith("rows"):
        worker, owner = ("S + 4 P B out", entries + servers * sums), ("4 B out", sums)
    else:
        worker, owner = ("P S + 4 B out", servers * entries + sums), ("4 B out / P", sums / servers)
    return [("worker", [servers], worker), ("servers", range(servers), owner)]


def planned(traffic: Traffic) -> Mapping[int, float]:
    """By host, bytes of its messages to other hosts for a lease of each worker, without entries and sums."""
    design, found = traffic.design, Counter[int]()
    tables = {place for places in design.layout.tables.values() for place in places}
    for lane in design.lanes:
        for place in design.layout.places:
            owner = design.device(place)
            if owner == lane.front:
                continue
            if place in tables:
                sums = payload(traffic, place)
                found[lane.front] += traffic.asking(place) + traffic.push(place) - ENTRY_BYTES * traffic.entries_of(place) - sums
                found[owner] += traffic.sums(place) - sums
            else:
                found[lane.front] += traffic.pulling() + traffic.push(place)
                found[owner] += traffic.values(place)
            found[owner] += traffic.counted()
    return found


def payload(traffic: Traffic, place: Place) -> int:
    """Bytes of a lease's sums of a partition."""
    asked = traffic.needs.tables[place.partition.parameter]
    return asked.bags * place.partition.cell[1] * asked.item_bytes


def page(found: Sequence[Node]) -> str:
    """Markdown."""
    lines = []
    for own in found:
        whole = own.expected + own.beside
        figures = f"{own.expected:,.0f} | {own.beside:,.0f} | {whole:,.0f} | {own.counted:,.0f} | {own.off:+.2%}"
        lines.append(f"| {own.plan} | {own.servers} | {own.name} | {own.formula} | {figures} |")
    return INTRO + "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="egress", description="What hosts send for a lease, at their network cards.")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        if args.write:
            check_writable(args.write)
        with bench_of(HOSTS, RATE) as bench:
            found = [one for (plan, servers), design in designs(bench).items() for one in nodes(plan, servers, design, bench)]
        give(page(found), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
