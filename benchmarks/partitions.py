"""The number of partitions that ``soap-tune`` chooses against a sweep over all powers of two, on an emulated cluster.

    python -m benchmarks.partitions
    python -m benchmarks.partitions --models lm1b:emulation --most 32 --rounds 2

For every model of the zoo, tables on servers and all else all-reduced (the strategy ``hybrid``). The tuner runs as people run it. The
sweep then runs each number of partitions up to ``--most``, and the tuner's choice, all in one launch and again for each round, so that
what slows the machine down for a while does not hit one of them alone; a number's time is the median of all its timed steps. Printed is
the throughput of the choice over that of the best of the sweep, whose own rounds say what of it is noise. Needs root, as emulation does.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accuracy import READING
from benchmarks.end_to_end import machine
from benchmarks.turns import in_turns, turns_of
from soap import api
from soap.cli import tune
from soap.cli.options import positive
from soap.cli.run import start
from soap.cli.training import Job
from soap.emulation.hosts import host_limits
from soap.measure.this_machine import cpu_cores
from soap.runner.tuning import tuned_range, with_partitions

CLUSTER = "emulated:4x1@200Mbit/s"
MODELS = ("lm1b:emulation", "full_sparse:emulation")


class Swept(NamedTuple):
    """Nanoseconds of an iteration by number of partitions: in all, and the median of each round."""

    times_ns: dict[int, float]
    rounds_ns: dict[int, list[float]]


def tuned(model: str, cluster: str, strategy: Path, iterations: int) -> dict[str, Any]:
    """What ``soap-tune --json`` prints."""
    words = [str(strategy), "--model", model, "--cluster", cluster, "--emulate", "-o", str(strategy.with_name("tuned.json"))]
    with redirect_stdout(io.StringIO()) as out:
        if tune.main([*words, "--iterations", str(iterations), "--json"]):
            sys.exit("partitions: soap-tune failed")
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def swept(model: str, cluster: str, strategy: Path, counts: Sequence[int], steps: int, rounds: int) -> Swept:
    """Each number in each round, as ``soap-run --emulate`` runs them."""
    topology = api.load_cluster(cluster)
    simulator = api.simulator_for(model, topology)
    given = api.load_strategy(strategy, simulator.graph, topology)
    names = tuned_range(given, simulator.graph, topology).parameters
    strategies = {str(count): with_partitions(given, names, count) for count in counts}
    runs = in_turns(strategies, dict.fromkeys(strategies, simulator.run(given)), rounds)
    job = Job(model=model, reading=READING, topology=topology, strategies=runs, steps=steps, seed=0, optimizer="sgd", emulated=True)
    outcome = start(job, host_limits(topology, 1.0, cpu_cores()))
    assert outcome is not None  # not under torchrun
    times = {count: [own.times_ns for own in turns_of(outcome.measured, str(count))] for count in counts}
    whole = {count: median(time for own in found for time in own) for count, found in times.items()}
    return Swept(whole, {count: [median(own) for own in found] for count, found in times.items()})


def report(model: str, found: dict[str, Any], sweep: Swept) -> str:
    """One line: choice, best of the sweep, and the ratio of their throughputs."""
    chosen, times = found["partitions"], sweep.times_ns
    best = min(times, key=lambda count: times[count])
    rounds = sweep.rounds_ns[best]
    noise = (max(rounds) - min(rounds)) / times[best]
    deviation = "" if found["fit"] is None else f"{found['fit']['deviation']:.1%}"
    tried = ", ".join(f"{own['partitions']}: {own['measured_ns'] / 1e6:.1f}" for own in found["samples"])
    all_times = ", ".join(f"{count}: {time / 1e6:.1f}" for count, time in sorted(times.items()))
    return f"| {model} | {tried} | {deviation} | {chosen} | {best} | {times[best] / times[chosen]:.3f} | {noise:.1%} | {all_times} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="partitions", description="The tuner's number of partitions against a sweep.")
    parser.add_argument("--cluster", default=CLUSTER, help="to emulate (default %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of the zoo (default %(default)s)")
    parser.add_argument("--most", type=positive, default=64, help="partitions of the sweep (default %(default)s)")
    parser.add_argument("--iterations", type=positive, default=20, help="of each of the tuner's runs (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=12, help="of each number in a round, two to warm up (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="default %(default)s")
    args = parser.parse_args(argv)
    print(f"{machine()}\n\n| model | tried, ms | deviation | chosen | best | throughput, chosen / best | its rounds apart | sweep, ms |")
    print(f"|{'---|' * 8}", flush=True)
    for own in args.models:
        model = f"zoo:{own}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "hybrid.json"
            graph, topology = api.load(model, plan_only=True).graph, api.load_cluster(args.cluster)
            api.save_strategy(path, api.classical("hybrid", graph, topology), graph, topology)
            found = tuned(model, args.cluster, path, args.iterations)
            counts = sorted({2**k for k in range(args.most.bit_length()) if 2**k <= args.most} | {found["partitions"]})
            print(report(own, found, swept(model, args.cluster, path, counts, args.steps, args.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
