"""Layers on servers (RALP): which models it is for, what it saves, and whether servers keep up.

    python -m benchmarks.ralp --results cells.json --write docs/results/ralp.md
    python -m benchmarks.ralp --results cells.json --models --rates 200Mbit/s --rounds 1 --profile 20

*Simulated*: nets of the zoo on hosts with a GPU each, of which one or two are servers: the cut that ``--builtin ralp`` takes, beside plain
parameter servers and beside all-reduces over the workers; and what a second job on the same hosts gains by it (``ralp_beside``).
*Emulated*: a small net on hosts of this machine, one of them a server, links of the given rates: measured in the same processes, in turn,
as in ``benchmarks.accuracy``. That part needs root; its rounds are kept in ``--results`` as soon as they are known, and the same command
goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import kept, ralp_beside
from benchmarks.accuracy import OPTIMIZER, READING, emulated, measure, soap_profile
from benchmarks.end_to_end import machine
from benchmarks.models import export_model
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap import api
from soap.cli.options import not_negative, positive
from soap.cli.updating import states_of
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.errors import SoapError
from soap.files import check_writable
from soap.model.graph import OperatorGraph
from soap.simulator.analysis.timeline import link_bytes
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy, settled_config
from soap.strategy.ralp import RALP, front_parameters

MODELS = ("alexnet", "vgg16", "vgg19", "inception_v3", "resnet50")
WORKERS, BATCH = 30, 64
"""Of the thesis: 30 workers and one or two servers; samples of each worker: an assumption (SYSTEMS' traffic figures are for 64)."""
SERVERS = (1, 2)
CLUSTER = """
name: {workers} workers and {servers} servers
hosts:
  - {{name: worker, count: {workers}, devices: {{type: titanxp, count: 1}}, cpu_cores: 16}}
  - {{name: server, count: {servers}, devices: {{type: titanxp, count: 1}}, cpu_cores: 16, server: true}}
network: {{bandwidth: {rate}, latency: 30 us}}
"""
NETWORK = "56 Gbit/s"
EMULATED, EMULATED_MODEL, RATES = "emulated:2x1+1", "emulated-alexnet", ("100Mbit/s", "200Mbit/s")
PLAIN, ALL_REDUCE = "parameter_server", "data_parallel"
PLANS = (RALP, PLAIN, ALL_REDUCE)
VERSION = 1
_TIMES = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "required": list(PLANS)}
_CELL = {
    "type": "object",
    "properties": {
        "rate": {"type": "string"},
        "number": {"type": "integer", "minimum": 0},
        "predicted_ns": _TIMES,
        "measured_ns": _TIMES,
        "machine": {"type": "string"},
        "others_share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "required": ["rate", "number", "predicted_ns", "measured_ns", "machine", "others_share"],
    "additionalProperties": False,
}
INTRO = """# Layers on servers (RALP)

The last layers of some convolutional nets have most of the parameters and little to compute. `--builtin ralp` runs them where parameter
servers are: workers send activations instead of gradients.

    python -m benchmarks.ralp --results FILE --write docs/results/ralp.md

## Simulated

{workers} workers with one GPU each (Titan Xp, {batch} samples each, SGD) and one or two servers with such a GPU, {network} links (of 30
us, an assumption); estimated costs, nothing fitted. *ralp*: the best cut, whether or not it is taken; *from*: the first operator on
servers. *Gain*: what it saves of a step with plain servers; below 10% a model is unfriendly and stays with these. *Sent by a worker*: both
ways, in MiB, by the plan, which 2·(front's parameters) + 2·B·a of the cut gives, too, where *= formula* says so (what batch norm adds is no
part of it). *Computes*: the busiest worker, and the busiest server's GPU, in ms; *link*: for which share of a step the server's card
receives.
"""
HEAD = (
    "model", "workers + servers", "all-reduce, ms", "plain servers, ms", "ralp, ms", "from", "gain", "friendly", "sent by a worker: plain",
    "ralp", "= formula", "computes: worker", "server", "link",
)  # fmt: skip
EMULATED_INTRO = """## Emulated

Steps of `{model}` (32 samples, Adam) on two workers and a server, which this machine emulates: medians of the rounds' medians.
*Others used*: the share of this machine's cores that other programs had meanwhile, at most; above a tenth a line says little.
"""
EMULATED_HEAD = ("rate", "plan", "predicted, ms", "measured, ms", "error", "ralp is so many times as fast", "predicted", "others used")


def crossing(graph: OperatorGraph, cut: int) -> tuple[str, ...]:
    """The activations that are made before the cut and read behind it, each once, also those that a residual connection carries past other
    operators. Without what only changed buffers are made of, which have places of their own."""
    made = {out.tensor for op in graph.operators[:cut] for out in op.outputs}
    read = {operand.tensor for op in graph.operators[cut:] if settled_config(op, 1) is None for operand in op.inputs}
    return tuple(sorted(made & read))


@dataclass(frozen=True)
class Round:
    """All plans on an emulated cluster, run once. ``others_share``: of all cores' time; None: unknown."""

    rate: str
    number: int
    predicted_ns: Mapping[str, int]
    measured_ns: Mapping[str, int]
    machine: str
    others_share: float | None


def worker_bytes(graph: OperatorGraph, cut: int, workers: int) -> int:
    """What one worker sends and receives in a step: gradients and values of the front's parameters, activations of its samples and the
    gradients of these. ``workers``: a divisor of the samples."""
    front = sum(graph.tensors[name].bytes for name in front_parameters(graph, cut))
    passed = [graph.tensors[name] for name in crossing(graph, cut)]
    return 2 * front + sum((1 + tensor.requires_grad) * tensor.bytes for tensor in passed) // workers


def simulated_line(model: str, servers: int, workers: int = WORKERS, batch: int = BATCH, network: str = NETWORK) -> str:
    """A line of the first table."""
    topology = parse_cluster(CLUSTER.format(workers=workers, servers=servers, rate=network))
    graph = api.load(f"zoo:{model}@{workers * batch}", plan_only=True).graph
    simulator = api.simulator_for(graph, topology, optimizer_states=0, costs="estimate")
    placed = api.placed_layers(f"{RALP}:{servers}", simulator)
    plain, usual = simulator.run(placed.plain), simulator.run(api.classical(ALL_REDUCE, graph, topology))
    start = [model, f"{workers} + {servers}", *(f"{own.makespan_ns / 1e6:.1f}" for own in (usual, plain))]
    if placed.best is None:
        return _row([*start, "none keeps up and fits", *[""] * (len(HEAD) - len(start) - 1)])
    cut = simulator.run(placed.best.strategy)
    sent, expected = sent_by_worker(cut), worker_bytes(graph, placed.best.position, workers)
    card = f"network->{topology.devices[topology.servers[0]].name}"
    return _row([
        *start, f"{cut.makespan_ns / 1e6:.1f}", graph.operators[placed.best.position].name, f"{placed.gain:.0%}",
        "yes" if placed.friendly else "no", f"{sent_by_worker(plain) / 2**20:.1f}", f"{sent / 2**20:.1f}",
        "yes" if sent == expected else f"{expected / 2**20:.1f}", f"{placed.best.front_ns / 1e6:.1f}", f"{placed.best.tail_ns / 1e6:.1f}",
        f"{cut.busy_ns[card] / cut.makespan_ns:.0%}",
    ])  # fmt: skip


def sent_by_worker(simulation: Simulation) -> int:
    """Bytes that cross the last worker's link, both ways. (Changed buffers are copied from the first one.)"""
    topology = simulation.tasks.topology
    name = topology.devices[topology.workers[-1]].name
    return sum(size for link, size in link_bytes(simulation.tasks).items() if name in link.split("->"))


def emulated_plans(simulator: Simulator) -> dict[str, Strategy]:
    """All plans by name. The best cut in any case."""
    graph, topology = simulator.graph, simulator.topology
    placed = api.placed_layers(RALP, simulator, least_gain=-1.0)
    return {RALP: placed.strategy, **{name: api.classical(name, graph, topology) for name in (PLAIN, ALL_REDUCE)}}


def finished(file: Path, rate: str, number: int, args: argparse.Namespace) -> Round:
    """Measure what plans are made of, find the cut, run all."""
    cluster = f"{EMULATED}@{rate}"
    graph, topology = api.load(file, plan_only=True, **READING).graph, api.load_cluster(cluster)
    if args.profile:
        _profile(file, cluster, graph, topology, args.profile)
    simulator = api.simulator_for(graph, topology, optimizer_states=states_of(OPTIMIZER))
    watch = Watch()
    plans = measure(simulator, cluster, EMULATED_MODEL, file, emulated_plans(simulator), args.steps, 1)
    predicted, measured = {own.strategy: own.predicted_ns for own in plans}, {own.strategy: own.measured_ns for own in plans}
    return Round(rate, number, predicted, measured, machine(), watch.others_share())


def _profile(file: Path, cluster: str, graph: OperatorGraph, topology: Topology, seconds: int) -> None:
    """Measure the tiles of all plans, and links."""
    strategies = emulated_plans(api.simulator_for(graph, topology, optimizer_states=states_of(OPTIMIZER)))
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "plan.json"
        for strategy in strategies.values():
            api.save_strategy(path, strategy, graph, topology)
            share = str(max(1, seconds // len(strategies)))
            soap_profile([str(file), "--cluster", cluster, "--strategy", str(path), "--budget", share, "--again"])
    soap_profile(["links", *emulated(cluster, 1.0), "--within-steps", "--again"])


def emulated_lines(rounds: Sequence[Round]) -> list[str]:
    """The lines of one rate."""
    predicted, measured = ({name: median(times[name] for times in own) for name in PLANS} for own in _times(rounds))
    shares = [own.others_share for own in rounds if own.others_share is not None]
    others = f"{max(shares):.0%}" if shares else "?"
    return [
        _row([
            rounds[0].rate, name, f"{predicted[name] / 1e6:.1f}", f"{measured[name] / 1e6:.1f}",
            f"{predicted[name] / measured[name] - 1:+.1%}", f"{measured[name] / measured[RALP]:.2f}",
            f"{predicted[name] / predicted[RALP]:.2f}", others,
        ])
        for name in PLANS
    ]  # fmt: skip


def _times(rounds: Sequence[Round]) -> tuple[list[Mapping[str, int]], list[Mapping[str, int]]]:
    return [own.predicted_ns for own in rounds], [own.measured_ns for own in rounds]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([_row(head), f"|{'---|' * len(head)}", *lines])


def page(simulated: Sequence[str], rounds: Sequence[Round], beside: Sequence[str] = ()) -> str:
    """Markdown. ``simulated``: lines of the first table; ``beside``: of that of two jobs."""
    parts = [INTRO.format(workers=WORKERS, batch=BATCH, network=NETWORK), _table(HEAD, simulated), ""]
    if beside:
        own = {"own": ralp_beside.OWN, "hosts": ralp_beside.HOSTS, "batch": ralp_beside.BATCH, "network": ralp_beside.NETWORK}
        parts += [ralp_beside.INTRO.format(**own), _table(ralp_beside.HEAD, beside), ""]
    if rounds:
        where = "\n\n".join(f"{own}." for own in dict.fromkeys(one.machine for one in rounds))
        by_rate = [[own for own in rounds if own.rate == rate] for rate in dict.fromkeys(own.rate for own in rounds)]
        lines = [line for own in by_rate for line in emulated_lines(own)]
        parts += [EMULATED_INTRO.format(model=EMULATED_MODEL), where, "", _table(EMULATED_HEAD, lines), ""]
    return "\n".join(parts)


def read(path: Path) -> list[Round]:
    """The rounds of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [Round(**own) for own in kept.read(path, _CELL, VERSION, "benchmarks.ralp")]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="ralp", description="Layers on servers, simulated and emulated.")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="to simulate (default: all)")
    others = ralp_beside.NEIGHBOURS
    parser.add_argument("--neighbours", nargs="*", choices=others, default=list(others), help="of two jobs to simulate (default: all)")
    parser.add_argument("--rates", nargs="*", default=list(RATES), help="of emulated links (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="of each rate (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=12, help="of each plan in a round, warm-up included (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=90, help="seconds, before each round (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", required=True, help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        rounds = read(args.results)
        with tempfile.TemporaryDirectory() as temporary:
            file = export_model(EMULATED_MODEL, Path(temporary)) if args.rates else Path()
            for rate in args.rates:
                _complete(rounds, file, rate, args)
        lines = []
        for model in args.models:
            lines += [simulated_line(model, servers) for servers in SERVERS]
            print("\n".join(lines[-len(SERVERS) :]), file=sys.stderr, flush=True)
        beside = [_row(line) for line in ralp_beside.lines(neighbours=args.neighbours)]
        give(page(lines, rounds, beside), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


def _complete(rounds: list[Round], file: Path, rate: str, args: argparse.Namespace) -> None:
    """Add the rounds of a rate that are missing, each kept at once."""
    for number in sorted({*range(args.rounds)} - {own.number for own in rounds if own.rate == rate}):
        rounds.append(finished(file, rate, number, args))
        kept.write(args.results, map(asdict, rounds), VERSION)
        print("\n".join(emulated_lines(rounds[-1:])), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
