"""What a job gains when its neighbour on the same hosts moves its last layers to servers: a table for ``benchmarks.ralp``.

Both jobs have a GPU of each host and one of the server's, and share the hosts' network cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from soap import api
from soap.cluster.fewer import part_of
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.simulator.simulate import Simulation
from soap.strategy.ralp import RALP

OWN, NEIGHBOURS = "resnet50", ("vgg16", "vgg19")
HOSTS, BATCH, NETWORK = 8, 64, "56 Gbit/s"
ALL_REDUCE, PLAIN = "data_parallel", "plain servers"
CLUSTER = """
name: {hosts} hosts of two GPUs and a server
hosts:
  - {{name: worker, count: {hosts}, devices: {{type: titanxp, count: 2}}, cpu_cores: 16,
     links: {{intra: {{bandwidth: 10 GB/s, latency: 5 us}}}}}}
  - {{name: server, devices: {{type: titanxp, count: 2}}, cpu_cores: 16, server: true,
     links: {{intra: {{bandwidth: 10 GB/s, latency: 5 us}}}}}}
network: {{bandwidth: {rate}, latency: 30 us}}
"""
INTRO = """## Beside another job

`{own}` and a neighbour, each on one of the two GPUs of {hosts} hosts, {batch} samples each, and with one of the server's two GPUs; both use
the hosts' cards ({network}). Simulated in steady state (`soap.simulate_beside`, `soap-simulate --beside`), estimated costs, nothing fitted.
*Gain*: how much sooner a step of `{own}` is over than beside the neighbour with plain servers; the thesis says 10%, of a cluster and a mix
of jobs that are not known. Links serve whole messages first come, first served; real flows share: what a neighbour on plain servers
costs here may be too much; nothing of this was measured.
"""
HEAD = ("`resnet50` by", "alone, ms", "neighbour", "by", "alone, ms", "beside, ms", "`resnet50` beside it, ms", "least", "most", "gain")


def lines(
    hosts: int = HOSTS, batch: int = BATCH, network: str = NETWORK, own: str = OWN, neighbours: Sequence[str] = NEIGHBOURS
) -> Iterator[list[str]]:
    """The table's lines, cell by cell."""
    whole = parse_cluster(CLUSTER.format(hosts=hosts, rate=network))
    sides = [part_of(whole, [*(f"worker{host}/gpu{gpu}" for host in range(hosts)), f"server/gpu{gpu}"]) for gpu in range(2)]
    first = _plans(own, sides[0], hosts * batch)
    for neighbour in neighbours:
        second = _plans(neighbour, sides[1], hosts * batch)
        for way in (PLAIN, ALL_REDUCE):
            usual = 0.0
            for other in (PLAIN, RALP):
                mine, theirs = api.beside_of([first[way], second[other]], whole)
                usual = usual or mine.step_ns
                times = [f"{value / 1e6:.1f}" for value in (theirs.alone_ns, theirs.step_ns, mine.step_ns, mine.least_ns, mine.most_ns)]
                gain = f"{1 - mine.step_ns / usual:.1%}" if other == RALP else ""
                yield [way, f"{mine.alone_ns / 1e6:.1f}", neighbour, other, *times, gain]


def _plans(model: str, part: Topology, samples: int) -> dict[str, Simulation]:
    """By name. ``ralp``: the best cut, whether or not it would be taken; where there is none, plain servers."""
    graph = api.load(f"zoo:{model}@{samples}", plan_only=True).graph
    simulator = api.simulator_for(graph, part, optimizer_states=0, costs="estimate")
    placed = api.placed_layers(f"{RALP}:1", simulator)
    best = placed.plain if placed.best is None else placed.best.strategy
    plans = {PLAIN: placed.plain, RALP: best, ALL_REDUCE: api.classical(ALL_REDUCE, graph, part)}
    return {name: simulator.run(strategy) for name, strategy in plans.items()}
