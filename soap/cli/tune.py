"""``soap-tune``: chooses into how many partitions servers cut sparse parameters, from a few short runs on the cluster itself."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from soap import api, outputs
from soap.cli import emulation, reporting
from soap.cli.command import Parser, UsageError, entry_point, note, one_line
from soap.cli.inputs import check_inputs, simulator_of
from soap.cli.options import add_cluster, add_costs, add_json, add_model, not_negative, positive
from soap.cli.plain_text import aligned, listed, milliseconds
from soap.cli.plan_summary import crowded, recorded, shared_cores
from soap.cli.run import STRATEGY, add_training, on_ranks, prepare
from soap.cli.run import make_parser as run_parser
from soap.cli.stopping import Stopping, add_time_limit
from soap.errors import RuntimeFailure, SoapWarning, StoppedBySignal
from soap.runtime.comm.launched import own_rank, under_launcher
from soap.search.partition_tuning import BATCHES, ITERATIONS, MOST_SAMPLES, Sample, Tuning, choose, next_partitions
from soap.simulator.simulate import Simulation

if TYPE_CHECKING:
    from soap.cli.training import Job
    from soap.cli.trials import PartitionTrial
    from soap.emulation.hosts import HostLimits
    from soap.runner.tuning import Range

PROG = "soap-tune"
FINISHING_SHARE = 0.15
"""Part of a time limit that is left when runs are ended, to say what they were predicted to take."""
OUT_OF_MEMORY = ("out of memory", "enough memory", "allocate memory", "memoryerror")
"""Words of errors that fewer bytes on a server may avoid: from torch, Python, and the launcher when a rank was killed."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        f"Choose the number of partitions of the sparse parameters that a strategy has on servers, one for each group, from at most "
        f"{MOST_SAMPLES} short runs: from as many as there are hosts on, doubled and then halved until the time rises. Nothing is trained.",
        f"{PROG} strategy.json --model zoo:lm1b:tiny -o tuned.json",
    )
    parser.add_argument("strategy", metavar="STRATEGY", help="what soap-search wrote")
    add_model(parser, positional=False)
    add_cluster(parser, note="default: the strategy's, if it is a preset")
    add_costs(parser)
    parser.add_output("-o", "--output", kind=outputs.STRATEGY, required=True, help="where the tuned strategy goes (JSON)")
    parser.add_argument(
        "--iterations",
        dest="steps",
        metavar="N",
        type=positive,
        default=ITERATIONS,
        help="of each run, the first half of which is dropped (default %(default)s)",
    )
    parser.add_argument(
        "--batches", metavar="N", type=positive, default=BATCHES, help="the first N batches, in turn, for all runs (default %(default)s)"
    )
    parser.add_repeatable(
        "--group",
        metavar="GLOB",
        help="parameters with these names get a number of their own, from runs of their own (repeatable; default: one for all)",
    )
    add_training(parser)
    add_time_limit(parser, "the best of the runs so far is written")
    parser.add_argument("--seed", metavar="S", type=not_negative, default=0, help="of data and dropout (default %(default)s)")
    emulation.add_emulation(parser)
    reporting.add_report(parser, "the tuned plan, and its runs against the number of partitions")
    add_json(parser)
    return parser


def _with_others(args: argparse.Namespace) -> argparse.Namespace:
    """Also what ``soap-run`` would be told of the options that this command does not have, which it runs as that one does."""
    return argparse.Namespace(**{**vars(run_parser().parse_args([args.strategy, "--model", args.model])), **vars(args)})


def execute(args: argparse.Namespace) -> int:
    """Run, fit, choose, save, report; after a signal or at the end of the time limit, choose by the runs so far."""
    with Stopping(args.limit) as stopping:
        try:
            _tune(args, stopping)
        except StoppedBySignal as error:
            return _ended("nothing was chosen yet", 128 + error.number)
        except KeyboardInterrupt:
            if stopping.number is None and args.limit.over:
                raise
            return _ended("nothing was chosen yet", stopping.exit_code)
        return 0 if stopping.number is None else _ended(f"the best of the runs so far is in {args.output}", stopping.exit_code)


def _ended(how: str, code: int) -> int:
    note(PROG, f"interrupted: {how}")
    return code


def _tune(args: argparse.Namespace, stopping: Stopping) -> None:
    if own_rank(os.environ):  # under torchrun, rank 0 prints the warnings for all
        warnings.simplefilter("ignore", SoapWarning)
    reporting.check(args.report)
    emulation.check_possible(args)
    check_inputs(args)
    job, predicted, costs = prepare(_with_others(args))
    from soap.cli.trials import PartitionTrial  # torch is loaded by now
    from soap.runner.tuning import tuned_range, with_partitions

    strategy, order = job.strategies[STRATEGY]
    given = predicted[STRATEGY]
    graph, topology = given.plan.graph, job.topology
    wanted = tuned_range(strategy, graph, topology)
    hosts, chosen = emulation.asked_hosts(args, topology, job.device_kind), strategy
    tunings: list[tuple[Range, Tuning]] = []
    for own in grouped(wanted, args.group):
        try:
            with args.limit.part(1 - FINISHING_SHARE) as running:
                tuning = sample(PartitionTrial(replace(job, strategies={STRATEGY: (chosen, order)}), own, args.batches), hosts, stopping)
        except (KeyboardInterrupt, StoppedBySignal) as error:
            if not tunings:
                raise
            stopping.heard(error)
            break
        if tuning is None:  # under torchrun, on a rank that does not report
            return
        tunings.append((own, tuning))
        chosen = with_partitions(chosen, own.parameters, tuning.partitions)
        if stopping.ended or running.over:
            break
    record = dict(api.load_strategy_contents(args.strategy).record)
    for of_the_found in ("measured", "decision", "guard"):  # which the tuned strategy no longer is; older files have a guard
        record.pop(of_the_found, None)
    partitions = {name: chosen.sync(name).partitions for own, _ in tunings for name in own.parameters}

    def unsimulated() -> None:
        api.save_strategy(args.output, chosen, graph, topology, {**record, "tuning": {"partitions": partitions}})
        print(f"chosen: {partitions}\nno time was left to say more\n\nwrote {args.output}")

    stopping.in_time(lambda: _report(args, job, given, costs, tunings, wanted, record), unsimulated)


def _report(
    args: argparse.Namespace,
    job: Job,
    given: Simulation,
    costs: Mapping[str, Any],
    tunings: Sequence[tuple[Range, Tuning]],
    wanted: Range,
    record: Mapping[str, Any],
) -> None:
    """Simulate what was run and what is chosen, save it, and print that."""
    from soap.runner.tuning import with_partitions

    strategy, _ = job.strategies[STRATEGY]
    graph, topology = given.plan.graph, job.topology
    scale, hosts = emulation.asked_scale(args), emulation.asked_hosts(args, topology, job.device_kind)
    simulator = simulator_of(job, given, args.costs)
    documents, held = [], strategy
    for own, tuning in tunings:
        tried = sorted({*(sample.partitions for sample in tuning.samples), tuning.partitions})
        predicted_ns = {
            count: round(simulator.run(with_partitions(held, own.parameters, count)).step_ns(job.accumulate) / scale) for count in tried
        }
        documents.append({"parameters": list(own.parameters), **document(tuning, predicted_ns)})
        held = with_partitions(held, own.parameters, tuning.partitions)
    before = {name: strategy.sync(name).partitions for name in wanted.parameters}
    only = {key: value for key, value in documents[0].items() if key != "parameters"} if len(documents) == 1 else {"groups": documents}
    found = {**only, "iterations": job.steps, "batches": args.batches, "before": before}
    tuned = simulator.run(held)
    api.save_strategy(args.output, held, graph, topology, {**record, **recorded(tuned), "costs": costs, "tuning": found})
    if args.report:
        reporting.write_tuning(args.report, args.output, simulator, held, tuned, found)
    report = {
        "model": job.model,
        "cluster": topology.name,
        "processes": topology.device_count,
        "shared_cores": shared_cores(topology),
        "servers": wanted.servers,
        "emulation": emulation.document(hosts, scale),
        "strategy": args.output,
        **found,
    }
    print(json.dumps(report, indent=2) if args.json else text(report))
    if args.report and not args.json:
        print(f"wrote {args.report}")


def grouped(wanted: Range, patterns: Sequence[str]) -> list[Range]:
    """What is tuned one after the other. UsageError for a pattern without a parameter, and for several groups under torchrun."""
    from soap.runner.tuning import divided

    for pattern in patterns:
        if not fnmatch.filter(wanted.parameters, pattern):
            some = ", ".join(wanted.parameters[:3])
            raise UsageError(f"--group {pattern}: no sparse parameter on servers has such a name; expected some of {some}")
    found = divided(wanted, [fnmatch.filter(wanted.parameters, pattern) for pattern in patterns])
    if len(found) > 1 and under_launcher(os.environ):
        raise UsageError("--group under torchrun, whose processes run once; expected one number for all, or ranks that this command starts")
    return found


def sample(trial: PartitionTrial, hosts: Sequence[HostLimits] = (), stopping: Stopping | None = None) -> Tuning | None:
    """All runs, in one launch of ranks; None under torchrun on all ranks but rank 0. A run for which a server has not enough memory
    ends its launch and counts as failed; another launch goes on after it. What ends them early is noted by ``stopping``, and the best of
    the runs so far is taken, if there is one."""
    from soap.cli.trials import measure, read_notes

    known: tuple[Sample, ...] = ()
    while True:
        with TemporaryDirectory(prefix="soap-tune-") as folder:
            notes = Path(folder) / "notes"
            try:
                return on_ranks(trial.job, hosts, measure, replace(trial, known=known, notes=str(notes)))
            except (KeyboardInterrupt, StoppedBySignal) as error:
                known = (*known, *read_notes(notes)[0])
                if stopping is None or all(one.time_ns is None for one in known):
                    raise
                stopping.heard(error)
                note(PROG, f"ended after {len(known)} runs, of which the best is taken")
                return choose(known)
            except RuntimeFailure as error:
                ran, broke = read_notes(notes)
                known = (*known, *ran)
                lacks = any(mark in str(error).lower() for mark in OUT_OF_MEMORY)
                if broke is None or not lacks or under_launcher(os.environ):  # torchrun ends the other ranks, and starts no new ones
                    raise
                note(PROG, f"{broke} partitions: {one_line(str(error))}")
                known = (*known, Sample(broke, None))
        if next_partitions(known, trial.wanted.servers, trial.wanted.most) is None:
            return choose(known)


def document(tuning: Tuning, predicted_ns: Mapping[int, int]) -> dict[str, Any]:
    """Samples, fit and choice as plain JSON values. ``deviation``: relative root mean square of distances from the curve."""
    curve = tuning.curve
    samples = [
        {
            "partitions": sample.partitions,
            "measured_ns": None if sample.time_ns is None else round(sample.time_ns),
            "fitted_ns": None if curve is None else round(curve.time_ns(sample.partitions)),
            "predicted_ns": predicted_ns[sample.partitions],
        }
        for sample in tuning.samples
    ]
    fit = None
    if curve is not None:
        thetas = {"theta0_ns": curve.theta0_ns, "theta1_ns": curve.theta1_ns, "theta2_ns": curve.theta2_ns}
        fit = {**thetas, "deviation": tuning.deviation}
    return {"samples": samples, "fit": fit, "partitions": tuning.partitions}


def text(report: Mapping[str, Any]) -> str:
    """The document as a short table."""
    names, servers = list(report["before"]), report["servers"]
    head = f"{report['model']} on {report['cluster']}: {_counted(len(names), 'sparse parameter')} on {_counted(servers, 'server')}"
    if report["shared_cores"]:
        head += "\n" + crowded(report["processes"], report["shared_cores"])
    groups = report.get("groups") or [{**report, "parameters": names}]
    taken = f"{report['iterations']} iterations per run, the first half dropped; {_counted(report['batches'], 'batch', 'batches')} in turn"
    sections = [section for own in groups for section in _sections(own, report["before"], taken)]
    return "\n\n".join([head, *sections, f"wrote {report['strategy']}"])


def _sections(own: Mapping[str, Any], earlier: Mapping[str, int], taken: str) -> tuple[str, str]:
    """The runs of parameters that have one number, and what was chosen."""
    rows: list[tuple[str, ...]] = [("partitions", "measured", "fitted", "predicted")]
    for sample in own["samples"]:
        measured, fitted = sample["measured_ns"], sample["fitted_ns"]
        cells = ("failed" if measured is None else milliseconds(measured), "" if fitted is None else milliseconds(fitted))
        rows.append((str(sample["partitions"]), *cells, milliseconds(sample["predicted_ns"])))
    before = sorted({earlier[name] for name in own["parameters"]})
    were = ", ".join(map(str, before)) + (" until now" if len(before) == 1 else " until now, which differed between parameters")
    facts = [("fit", _fit(own["fit"])), ("chosen", f"{_counted(own['partitions'], 'partition')}; {were}")]
    return aligned(rows), listed([*facts, ("of", ", ".join(own["parameters"])), ("runs", taken)])


def _fit(fit: Mapping[str, float] | None) -> str:
    if fit is None:
        return "none of so few runs: the fastest counts"
    thetas = [fit[f"theta{i}_ns"] / 1e6 for i in range(3)]
    return f"{thetas[0]:.4g} ms + {thetas[1]:.4g} ms / P + {thetas[2]:.4g} ms * P, from which the runs deviate by {fit['deviation']:.1%}"


def _counted(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
