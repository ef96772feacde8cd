"""Does ``soap-search MODEL --cluster local:N -o FILE``, as the README has it, make training slower? Its plan beside data parallelism.

    python -m benchmarks.default_command --results results.json --write docs/results/default_command.md
    python -m benchmarks.default_command --results results.json --models gpt2 t5 --clusters local:2 --modes default

exports twelve small models (``benchmarks.small_models``) and runs the command, each time with an empty store of measurements, in three
modes: with nothing but its defaults, without measuring, and blind (without measuring, running and any confidence: what the defaults are
for). What it wrote is then trained beside data parallelism by us and by ``DistributedDataParallel`` in turns in the same processes
(``benchmarks.default_race``).

Each cell (model, cluster, mode) is kept in ``--results`` as soon as it is known: the same command goes on with those that are missing.
``--write`` makes the page of all that the file has; ``python -m benchmarks.default_page FILE PAGE`` does nothing but that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import soap
from benchmarks import default_cells, default_page
from benchmarks.default_cells import FOUND, MODES, PEER, USUAL, Cell, Key
from benchmarks.default_race import Race, Raced, race
from benchmarks.end_to_end import machine
from benchmarks.quiet import Watch
from benchmarks.small_models import NAMES, export_small
from soap import api
from soap.cli.options import Reading, positive
from soap.cli.run import on_ranks
from soap.cli.training import Job
from soap.errors import RuntimeFailure, SoapError
from soap.files import check_writable
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

CLUSTERS = ("local:2", "local:4")
OPTIMIZER = "adam"
"""Whose states predictions count."""
READING: Reading = {"batch_dims": None, "autocast": None, "batch_norm": "global"}


class Failed(SoapError):
    """A cell could not be finished."""


@dataclass(frozen=True)
class Turns:
    """How plans are timed: ``rounds``, and ``steps`` that are timed in each."""

    rounds: int
    steps: int


def missing(wanted: Sequence[Key], known: Sequence[Cell]) -> list[Key]:
    """Those of the wanted cells that are not known yet."""
    there = {cell.key for cell in known}
    return [key for key in wanted if key not in there]


def finished(key: Key, path: Path, turns: Turns) -> Cell:
    """Run the command, then what it wrote. SoapError in one line if either fails."""
    model, cluster, mode = key
    with tempfile.TemporaryDirectory() as folder, _nothing_known(Path(folder) / "cache"):
        out = Path(folder) / "strategy.json"
        began = time.monotonic()
        report = search(path, cluster, out, MODES[mode])
        seconds = time.monotonic() - began
        graph, topology = api.load(path, plan_only=True).graph, soap.load_cluster(cluster)
        usual, found = api.classical(USUAL, graph, topology), api.load_strategy(out, graph, topology)
        plans = {USUAL: usual} if found == usual else {USUAL: usual, FOUND: found}
        simulator = api.simulator_for(graph, topology)
        drawn = {plan.name: plan.times_ns for plan in api.timed(simulator, plans, usual, whole=False)}
        watch = Watch()
        raced, note = timed(model, path, simulator, plans, turns)
        sources = api.costs_record(simulator, simulator.run(plans.get(FOUND, usual)).tasks)["shares"]
    return Cell(
        model,
        cluster,
        mode,
        kept_of(report),
        differs=found != usual,
        seconds=round(seconds, 1),
        times_ns=raced.times_ns,
        draws_ns=drawn,
        profiled=report.get("profiled"),
        verifying_s=report.get("measured", {}).get("seconds"),
        sources={name: round(share, 4) for name, share in sources.items()},
        note=note,
        others=watch.others_share(),
    )


def kept_of(report: Mapping[str, Any]) -> str:
    """What the command says that it took."""
    decided = report.get("measured") or report.get("decision") or {"kept": report.get("same_as") or FOUND}
    return str(decided["kept"])


def search(path: Path, cluster: str, out: Path, options: Sequence[str]) -> dict[str, Any]:
    """What the command says. ``Failed`` if it fails."""
    command = [sys.executable, "-m", "soap.cli.search", str(path), "--cluster", cluster, "-o", str(out), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"soap-search failed with exit code {done.returncode}: {' '.join(command)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def timed(model: str, path: Path, simulator: Simulator, plans: Mapping[str, Strategy], turns: Turns) -> tuple[Raced, str]:
    """Steps of all plans and of the peer, and what is to be said of the peer. If that cannot be run, ours alone."""
    simulations = {name: simulator.run(own) for name, own in plans.items()}
    job = Job(
        model=str(path),
        reading=READING,
        topology=simulator.topology,
        strategies={name: (own, execution_order(simulations[name].tasks, simulations[name].schedule)) for name, own in plans.items()},
        steps=turns.steps,
        seed=0,
        optimizer=OPTIMIZER,
    )
    own = Race(job, model, turns.rounds)
    try:
        raced, said = on_ranks(job, (), race, own), ""
    except RuntimeFailure as error:
        raced, said = on_ranks(job, (), race, replace(own, peer=None)), f"{PEER} failed: {error}"
    assert raced is not None  # not under torchrun
    return raced, said or (f"find_unused_parameters: {raced.unused} have no gradient" if raced.unused else "")


@contextmanager
def _nothing_known(cache: Path) -> Iterator[None]:
    """Measurements are kept in this empty folder meanwhile."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def run_all(args: argparse.Namespace, cells: list[Cell]) -> list[str]:
    """Finish what is missing, and keep each at once. Returns why some could not be finished."""
    wanted = [(model, cluster, mode) for model in args.models for cluster in args.clusters for mode in args.modes]
    todo, where, problems = missing(wanted, cells), machine(), list[str]()
    for model in dict.fromkeys(key[0] for key in todo):
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = export_small(model, Path(folder))
            except SoapError as error:
                problems.append(_told(model, error))
                continue
            for key in [key for key in todo if key[0] == model]:
                began = time.monotonic()
                try:
                    cell = replace(finished(key, path, Turns(args.rounds, args.steps)), machine=where)
                except SoapError as error:
                    problems.append(_told(" ".join(key), error))
                    continue
                cells.append(cell)
                if args.results is not None:
                    default_cells.write(args.results, cells)
                print(f"{default_page.line(cell)} {key[2]}, {time.monotonic() - began:.0f} s in all", flush=True)
    return problems


def _told(what: str, error: SoapError) -> str:
    """Say at once what has failed; the others go on."""
    problem = f"{what}: {error}"
    print(problem, file=sys.stderr, flush=True)
    return problem


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="default_command", description="What the default command finds, beside data parallelism.")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), help="default: all")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), help="default %(default)s")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: all")
    parser.add_argument("--rounds", type=positive, default=11, help="turns of each contender (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=6, help="that are timed in a turn (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps each cell; what is in it is not run again")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown of all cells in --results")
    args = parser.parse_args(argv)
    try:
        cells = [] if args.results is None else default_cells.read(args.results)
        for path in (args.results, args.write):
            if path is not None:
                check_writable(path)
        print(default_page.head(), flush=True)
        problems = run_all(args, cells)
        if args.write is not None and cells:
            default_page.write(args.write, cells)
    except SoapError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    for mode, own in default_page.by_mode(cells).items():
        print("\n".join(["", f"{mode}:", *default_page.conclusion(own, default_page.LEAST[mode])]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
