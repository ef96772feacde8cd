"""Does the search compress where that pays, and is the plan faster than PyTorch's own ways? On four emulated hosts, at three rates.

    python -m benchmarks.lossy_emulated --results cells.json --write docs/results/lossy_emulated.md
    python -m benchmarks.lossy_emulated --results cells.json --models emulated-alexnet --rates 50Mbit/s

For each model and rate: computations, links and compression are measured as ``soap-profile`` does, a search may compress by all methods of
``--lossy``, and what it finds trains beside our data parallelism and ``DistributedDataParallel`` with each of its hooks, in turns in the
same processes (``benchmarks.lossy_race``). Needs root, as emulation does. Cells are kept in ``--results`` as soon as they are known: the
same command goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import kept
from benchmarks.accuracy import emulated, soap_profile
from benchmarks.end_to_end import machine
from benchmarks.lossy_race import PEERS, LossyRace, race, step_ns
from benchmarks.models import export_model
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap import api
from soap.cli.options import Reading, lossy_method, positive
from soap.cli.run import on_ranks
from soap.cli.training import Job
from soap.emulation.hosts import host_limits
from soap.errors import SoapError
from soap.files import check_writable
from soap.measure.this_machine import cpu_cores
from soap.search.options import SearchOptions
from soap.search.starts import BASELINE
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

MODELS = ("emulated-alexnet", "emulated-vgg16", "emulated-lstm", "emulated-resnet50")
RATES = ("50Mbit/s", "200Mbit/s", "1Gbit/s")
HOSTS = 4
LOSSY = ("rgc", "rgc+asq", "chunked", "powersgd", "int8", "bf16")
FOUND = "found"
READING: Reading = {"batch_dims": None, "autocast": None, "batch_norm": "local"}
"""``DistributedDataParallel`` normalises each rank's samples by themselves."""
MOST_OF_OTHERS = 0.1
"""Of all cores' time. If other programs use more, an emulated device may not get its part of a core when it would compute: steps are too
long then, those of one device alone, which never waits for a link, most of all."""
HEAD = (
    "rate", "model", "sent compressed", "predicted, ms", "measured, ms", "error", f"over our {BASELINE}",
    *(f"over {name}" for name in PEERS),
)  # fmt: skip
INTRO = """# Compression on emulated hosts

What a search finds that may compress gradients ({methods}), on {hosts} hosts that this machine emulates, beside our data parallelism and
PyTorch's `DistributedDataParallel` (DDP), plain and with its bfloat16 and PowerSGD hooks; all with SGD and the same global batch. A number
above 1 says how many times as fast the found plan is. Times are medians of the timed steps of the slowest rank, all measured in turns in
the same processes. *Sent compressed* counts parameters by method; none: the search keeps gradients whole.

    python -m benchmarks.lossy_emulated --results FILE --write docs/results/lossy_emulated.md

*Others used*: the share of this machine's cores that other programs had meanwhile, if it was more than a tenth: an emulated device that
does not get its part of a core in time makes steps longer than its cluster would, and a plan of one device alone never waits for a link
in which to catch up.

The sums of PowerSGD's hook are waited for where they begin: it begins some in callbacks, whose order differs between ranks, and gloo
aborts then. What the bfloat16 hook computes behind its sums is not slowed down as an emulated device is, which is in its favour.
"""


VERSION = 1
_NUMBERS = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}
_TIMES = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
_CELL = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("model", "rate", "machine")},
        "methods": _NUMBERS,
        "predicted_ns": {**_NUMBERS, "required": [BASELINE, FOUND]},
        "times_ns": {"type": "object", "additionalProperties": _TIMES, "required": [BASELINE, FOUND, *PEERS]},
        "others_share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "required": ["model", "rate", "methods", "predicted_ns", "times_ns", "machine"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Cell:
    """One model at one rate. ``times_ns``: timed steps of each contender. ``predicted_ns``: of our plans. ``methods``: of the found plan,
    parameters by what compresses them. ``others_share``: of all cores' time, what other programs used during the race; None: unknown."""

    model: str
    rate: str
    methods: Mapping[str, int]
    predicted_ns: Mapping[str, int]
    times_ns: Mapping[str, Sequence[int]]
    machine: str
    others_share: float | None = None


def finished(model: str, rate: str, path: Path, args: argparse.Namespace) -> Cell:
    """Measure, search, race."""
    cluster = f"emulated:{HOSTS}x1@{rate}"
    lossy = [word for method in args.lossy for word in ("--lossy", method.word)]
    soap_profile([str(path), "--cluster", cluster, "--budget", str(args.profile), "--batch-norm", READING["batch_norm"], *lossy])
    soap_profile(["links", *emulated(cluster, 1.0)])
    options = SearchOptions(budget=args.budget, seed=0, lossy=args.lossy, optimizer_states=0)
    graph = api.load(path, plan_only=True, **READING).graph
    outcome = api.find(graph, cluster, options)
    simulator = api.simulator_for(graph, cluster, optimizer_states=0)
    usual = api.classical(BASELINE, simulator.graph, simulator.topology)
    plans = {BASELINE: usual, FOUND: outcome.strategy}
    kept = outcome.strategy.parameters.values()
    methods = Counter(sync.compression.word for sync in kept if sync.compression is not None)
    watch = Watch()
    predicted, times = raced(model, path, simulator, plans, args)
    return Cell(model, rate, dict(methods), predicted, times, machine(), watch.others_share())


def raced(
    model: str, path: Path, simulator: Simulator, plans: Mapping[str, Strategy], args: argparse.Namespace
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """(predicted times of our plans, times of all contenders)."""
    simulations = {name: simulator.run(own) for name, own in plans.items()}
    orders = {name: execution_order(own.tasks, own.schedule) for name, own in simulations.items()}
    strategies = {name: (own, orders[name]) for name, own in plans.items()}
    job = Job(str(path), READING, simulator.topology, strategies, args.steps, 0, "sgd", emulated=True)
    limits = host_limits(simulator.topology, 1.0, cpu_cores())
    found = on_ranks(job, limits, race, LossyRace(job, model, args.rounds))
    assert found is not None  # not under torchrun
    return {name: own.makespan_ns for name, own in simulations.items()}, found


def line(cell: Cell) -> str:
    """Of the table."""
    measured = step_ns({name: tuple(own) for name, own in cell.times_ns.items()})
    own_ns = measured[FOUND]
    error = cell.predicted_ns[FOUND] / own_ns - 1
    methods = ", ".join(f"{count} {name}" for name, count in sorted(cell.methods.items())) or "none"
    over = [f"{measured[name] / own_ns:.2f}" for name in (BASELINE, *PEERS)]
    beside = f" (others used {cell.others_share:.0%})" if cell.others_share and cell.others_share > MOST_OF_OTHERS else ""
    times = [f"{cell.predicted_ns[FOUND] / 1e6:.1f}", f"{own_ns / 1e6:.1f}{beside}", f"{error:+.0%}"]
    return f"| {' | '.join([cell.rate, cell.model, methods, *times, *over])} |"


def page(cells: Sequence[Cell], lossy: Sequence[str]) -> str:
    """Markdown."""
    places = {rate: number for number, rate in enumerate(RATES)}
    ordered = sorted(cells, key=lambda cell: (places.get(cell.rate, len(places)), cell.model))
    where = "\n\n".join(f"{own}." for own in dict.fromkeys(cell.machine for cell in cells))
    table = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *map(line, ordered)]
    return "\n".join([INTRO.format(methods=", ".join(lossy), hosts=HOSTS), where, "", *table, ""])


def read(path: Path | None) -> list[Cell]:
    """The cells of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [] if path is None else [Cell(**own) for own in kept.read(path, _CELL, VERSION, "benchmarks.lossy_emulated")]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="lossy_emulated", description="Compressed plans beside PyTorch's hooks, on emulated hosts.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of benchmarks.models (default %(default)s)")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of the hosts' links (default %(default)s)")
    parser.add_argument("--lossy", nargs="+", type=lossy_method, default=[lossy_method(word) for word in LOSSY], help="as soap-search")
    parser.add_argument("--profile", type=positive, default=40, help="seconds to measure a model (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=1000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="turns of each contender (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=5, help="timed in a turn (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        cells = read(args.results)
        known = {(cell.model, cell.rate) for cell in cells}
        for model in args.models:
            rates = [rate for rate in args.rates if (model, rate) not in known]
            if not rates:
                continue
            with tempfile.TemporaryDirectory() as folder:
                path = export_model(model, Path(folder))
                for rate in rates:
                    cells.append(finished(model, rate, path, args))
                    print(line(cells[-1]), file=sys.stderr, flush=True)
                    if args.results is not None:
                        kept.write(args.results, map(asdict, cells), VERSION)
        give(page(cells, [method.word for method in args.lossy]), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
