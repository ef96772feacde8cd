"""``soap-run``: trains by a strategy on real processes, and compares with the prediction and with a single process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from soap import api
from soap.cli import checkpoints, compressing, emulation, reporting, restarting, stale_run
from soap.cli.command import Parser, UsageError, entry_point, note
from soap.cli.inputs import add_data, as_read, check_inputs, folder_of, simulated, sized
from soap.cli.options import (
    add_backend,
    add_cluster,
    add_compressed_training,
    add_costs,
    add_model,
    add_outputs,
    not_negative,
    positive,
    positive_number,
    reading,
)
from soap.cli.plain_text import aligned, listed, milliseconds, speed_up
from soap.cli.plan_summary import crowded, resting, shared_cores, throughput_document, throughput_text
from soap.cli.timelines import measured_text, not_as_priced
from soap.cli.updating import Updating, add_updating, require_trainable
from soap.cluster.kinds import run_kind
from soap.cluster.presets import says_all
from soap.errors import INTERRUPTED_EXIT_CODE, RuntimeFailure, SoapWarning, StoppedBySignal, StrategyError
from soap.files import write_text_atomically
from soap.plan.compression.training import for_scaling
from soap.runtime.comm.launched import local_numbers, own_rank, world_size
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulation
from soap.simulator.throughput import throughput
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.cli.training import Job, Outcome
    from soap.cluster.topology import Topology
    from soap.emulation.hosts import HostLimits

Argument = TypeVar("Argument")
Result = TypeVar("Result")

PROG = "soap-run"
BASELINE = "data_parallel"
LR_HELP = "learning rate (default: the checkpoint's, or 0.01, of torch.optim.NAME torch's own)"
STRATEGY = "strategy"
"""The strategy's name in lists of strategies."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Train a model by a strategy, one process per device: started on this machine, or under torchrun those that are there.",
        f"{PROG} strategy.json --model zoo:rnnlm:tiny --steps 10 --check",
    )
    parser.add_argument("strategy", metavar="STRATEGY", help="what soap-search wrote")
    add_model(parser, positional=False)
    parser.add_argument("--float8", nargs="?", const=True, metavar="KIND", help=argparse.SUPPRESS)
    add_cluster(parser, note="default: the strategy's, if it is a preset")
    add_costs(parser)
    parser.add_argument("--steps", metavar="N", type=positive, default=10, help="training steps (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare loss and every gradient with a single process first")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], help="compute in this type instead of the model's own")
    parser.add_argument("--lr", metavar="X", type=positive_number, help=LR_HELP)
    add_training(parser)
    parser.add_argument("--compare-data-parallel", action="store_true", help="train by data parallelism as well, and measure it")
    parser.add_argument("--memory", action="store_true", help="measure each rank's peak memory, in three more steps")
    parser.add_argument("--seed", metavar="S", type=not_negative, help="of data and dropout (default: the checkpoint's, or 0)")
    emulation.add_emulation(parser)
    checkpoints.add_checkpoints(parser)
    checkpoints.add_evaluation(parser)
    restarting.add_restarts(parser)
    stale_run.add_stale_run(parser)
    checkpoints.add_log(parser)
    reporting.add_report(parser, "the plan beside what was measured, task by task")
    add_outputs(parser, timeline="write an iteration for Perfetto and soap-compare, predicted and measured side by side")
    return parser


def add_training(parser: Parser) -> None:
    """How a strategy is run, whatever for."""
    add_backend(parser)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: as the cluster's devices are")
    add_updating(parser)
    accumulate_help = (
        "batches per update (default %(default)s): loss and gradients are the mean over the batches of each one's own, a mean of means "
        "where they count different numbers of tokens"
    )
    parser.add_argument("--accumulate", metavar="K", type=positive, default=1, help=accumulate_help)
    parser.add_argument("--compile", action="store_true", help="by torch.compile, which takes its time in the first step")
    add_compressed_training(parser)
    add_data(parser)
    parser.add_argument("--weights", metavar="SPEC", help=checkpoints.WEIGHTS_HELP)


def execute(args: argparse.Namespace) -> int:
    """Plan, train, report."""
    if args.float8:
        raise UsageError("--float8 prices plans alone; expected a run in the model's types: Transformer Engine or torchao train in float8")
    if args.memory and args.accumulate > 1:
        raise UsageError("--memory with --accumulate; expected one batch per update, which is what memory is predicted for")
    if own_rank(os.environ):  # under torchrun, rank 0 prints the warnings for all
        warnings.simplefilter("ignore", SoapWarning)
    reporting.check(args.report)
    check_inputs(args)
    if stale_run.is_asked(args):
        return stale_run.execute(args, api.load_cluster(args.cluster or _recorded_cluster(args.strategy)), PROG)
    checkpoints.check_optimizer(args)
    emulation.check_possible(args)
    restarting.check_possible(args)
    try:
        (job, predicted, costs), outcome, restarts = restarting.train(args, prepare, start, partial(note, PROG))
    except StoppedBySignal as error:
        raise StoppedBySignal(f"{error}{checkpoints.going_on(args)}", error.number) from None
    except KeyboardInterrupt:
        note(PROG, f"interrupted{checkpoints.going_on(args)}")
        return INTERRUPTED_EXIT_CODE
    if outcome is None:  # under torchrun, on a rank that does not report
        return 0
    scale, hosts = emulation.asked_scale(args), emulation.asked_hosts(args, job.topology, job.device_kind)
    if args.timeline or args.report:
        strategy, measured = job.strategies[STRATEGY][0], outcome.measured[STRATEGY].median_ns
        made = {"costs_hash": costs["hash"], "not_as_priced": not_as_priced(job, scale)}
        picture = measured_text(strategy, predicted[STRATEGY], outcome.iterations, measured, job.accumulate, scale=scale, **made)
        if args.timeline:
            write_text_atomically(args.timeline, picture)
        if args.report:
            reporting.write_run(args.report, args, job, predicted[STRATEGY], picture)
    report = {**document(job, predicted, outcome, costs, hosts, scale), "restarts": [asdict(one) for one in restarts]}
    print(json.dumps(report, indent=2) if args.json else text(report))
    if (written := [path for path in (args.timeline, args.report) if path]) and not args.json:
        print(f"\nwrote {' and '.join(written)}")
    if outcome.check:
        outcome.check.require()
    return 0


def prepare(args: argparse.Namespace, topology: Topology | None = None) -> tuple[Job, Mapping[str, Simulation], dict[str, Any]]:
    """The job for the ranks, the prediction for each strategy, and where these numbers come from, with the phases of a warm-up if there is
    one (``warm_up``). ``topology``: instead of the one that the options name."""
    topology = topology or api.load_cluster(args.cluster or _recorded_cluster(args.strategy))
    args.model = sized(args.model, folder_of(args.data))
    read = reading(args, topology)
    graph, record, names = checkpoints.read_weighed(args.model, args.weights, read, resumed=args.resume is not None)
    strategies = {STRATEGY: api.load_strategy(args.strategy, graph, topology), BASELINE: api.classical(BASELINE, graph, topology)}
    kept = checkpoints.chosen(args)
    if args.dtype:  # the strategy was made for the model's own type; the model in the other type is what runs and is predicted
        graph = api.planned_graph(args.model, dtype=args.dtype, **read)
    graph = api.with_recorded_rows(graph, args.strategy)
    updating = Updating.of(args)
    from soap.plan.syncs.compressed import compressed_names
    from soap.runtime.updates.trial import optimizer_states  # needed from here on anyway

    tried = updating.tried(graph)
    planned = for_scaling(compressing.training_of(args.correct_momentum, args.warm_up, args.clip_norm).planned, args.autocast)
    if planned.kept and updating.decays:  # which has a momentum of its own
        planned = replace(planned, kept=planned.kept + 1)
    states = optimizer_states(tried, sparse=bool(graph.sparse))
    simulator = api.simulator_for(
        graph, as_read(topology, args.data), optimizer_states=states, costs=args.costs, measured_updates=tried.measured, training=planned
    )
    predicted = simulated(simulator, strategies, topology)
    from soap.cli.training import Job

    same = strategies[STRATEGY] == strategies[BASELINE]
    trained = [STRATEGY, BASELINE] if args.compare_data_parallel and not same else [STRATEGY]
    for name in trained:
        require_trainable(args, predicted[name].plan, tried)
        compressing.warn_of_memory(predicted[name])
    orders = {name: execution_order(predicted[name].tasks, predicted[name].schedule) for name in trained}
    job = Job(
        model=args.model,
        reading=read,
        topology=topology,
        strategies={name: (strategies[name], orders[name]) for name in trained},
        steps=args.steps,
        seed=kept.seed if args.seed is None else args.seed,
        dtype=args.dtype,
        optimizer=updating,
        accumulate=args.accumulate,
        clip_norm=args.clip_norm,
        correct_momentum=args.correct_momentum,
        warm_up=args.warm_up,
        compressed={name: tuple(sorted(compressed_names(predicted[name].plan))) for name in trained},
        compiled=args.compile,
        data=args.data,
        weights=args.weights,
        backend=args.backend,
        device_kind=None if args.device == "auto" else args.device,
        checked=args.check,
        traced=bool(args.timeline or args.report),
        weighed=args.memory,
        checkpoints=replace(kept, names=names),
        emulated=args.emulate,
        record=record,
        evaluated=checkpoints.chosen_evaluation(args),
        log=getattr(args, "log", None),
    )
    phases = compressing.warm_up_document(simulator, strategies[STRATEGY], args.warm_up, args.accumulate)
    return job, predicted, {**api.costs_record(simulator, predicted[STRATEGY].tasks), **({"warm_up": phases} if phases else {})}


def start(job: Job, hosts: Sequence[HostLimits] = (), limit_s: float | None = None) -> Outcome | None:
    """Run the job on all ranks, on emulated hosts if there are any. None on ranks that do not report. ``limit_s``: as for ``launch``."""
    from soap.cli.training import train

    return on_ranks(job, hosts, train, job, limit_s)


def on_ranks(
    job: Job, hosts: Sequence[HostLimits], entry: Callable[[Argument], Result], argument: Argument, limit_s: float | None = None
) -> Result | None:
    """Run ``entry`` with ``argument`` on all ranks. ``job`` says for which devices."""
    from soap.runtime.comm.launch import launch
    from soap.runtime.comm.rank_processes import READING

    devices = job.topology.device_count
    require_devices(job)
    if world_size(os.environ) > devices and own_rank(os.environ) == 0:
        note(PROG, f"{world_size(os.environ)} processes for {devices} devices: {world_size(os.environ) - devices} stay idle")
    with emulation.cluster(hosts) as emulated:
        place, address = emulated.place, emulated.address
        return launch(
            processes=devices, entry=entry, args=(argument,), limit_s=limit_s, place=place, address=address, modules=READING
        ).get(0)


def require_devices(job: Job) -> None:
    """RuntimeFailure, before any rank is started, if this machine lacks the GPUs that the job asks for."""
    import torch

    from soap.runtime.comm.world import choose_backend

    kind = job.device_kind or run_kind(job.topology)
    if kind == "cuda" and not torch.cuda.is_available():
        asked = "--device cuda" if job.device_kind else f"cluster {job.topology.name!r} has GPUs"
        raise RuntimeFailure(f"{asked}: expected GPUs, but this machine has none that torch can use; use --device cpu")
    choose_backend(job.backend, kind, local_numbers(os.environ, job.topology.device_count)[1])


def document(
    job: Job,
    predicted: Mapping[str, Simulation],
    outcome: Outcome,
    costs: Mapping[str, Any],
    hosts: Sequence[HostLimits] = (),
    scale: float = 1.0,
) -> dict[str, Any]:
    """What was predicted and measured, as plain JSON values. The keys are part of the command's interface.

    Of a cluster that was emulated at another scale, predicted times are those at that scale; ``throughput`` is the cluster's own.
    """
    strategies = {}
    for name, simulation in predicted.items():
        measured = outcome.measured.get(name)
        step_ns = simulation.step_ns(job.accumulate)
        foreseen = throughput(simulation.plan.graph, job.topology, step_ns, job.accumulate)
        seen = replace(foreseen, step_ns=round(measured.median_ns * scale)) if measured and measured.times_ns else None
        strategies[name] = {
            "predicted_ns": round(step_ns / scale),
            "measured_ns": measured.median_ns if measured else None,
            "steps_ns": list(measured.times_ns) if measured else None,
            "losses": list(measured.losses) if measured else None,
            "input_bytes": list(measured.input_bytes) if measured else None,
            "throughput": {"predicted": throughput_document(foreseen), "measured": throughput_document(seen) if seen else None},
            "links": emulation.crossed(hosts, simulation, job.accumulate, measured) if hosts and measured else None,
        }
    return {
        "model": job.model,
        "cluster": job.topology.name,
        "processes": job.topology.device_count,
        "shared_cores": shared_cores(job.topology),
        "backend": outcome.backend,
        "steps": job.steps,
        "costs": {key: value for key, value in costs.items() if key != "warm_up"},
        "resumed_at": job.checkpoints.resumed_at,
        "checkpoint": outcome.saved,
        "weights": job.checkpoints.weights,
        "evaluation": checkpoints.evaluation_document(job, outcome),
        "loss_scaling": outcome.loss_scaling,
        "strategies": strategies,
        "is_data_parallel": _is_data_parallel(job, predicted[STRATEGY]),
        "compressed": compressing.count(predicted[STRATEGY]),
        "warm_up": [{**own, "predicted_ns": round(own["predicted_ns"] / scale)} for own in costs.get("warm_up", ())],
        "emulation": emulation.document(hosts, scale),
        "memory": _memory(predicted[STRATEGY], outcome.peak_bytes),
        "check": {**asdict(outcome.check), "passed": outcome.check.passed, **_eager(job)} if outcome.check else None,
    }


def _is_data_parallel(job: Job, predicted: Simulation) -> bool:
    """Whether the strategy is the one that it would be compared with; then it is trained once."""
    return job.strategies[STRATEGY][0] == api.classical(BASELINE, predicted.plan.graph, job.topology)


def _eager(job: Job) -> dict[str, Any]:
    """Whether the program itself was ever compared with eager PyTorch. A check compares with the same program in one process."""
    from soap.tracing.record import OF_THE_ZOO

    if job.record is None:
        return {"compared_with_eager": None, "eager": OF_THE_ZOO}
    return {"compared_with_eager": job.record.compared, "eager": job.record.text}


def _memory(predicted: Simulation, measured: Sequence[int] | None) -> list[dict[str, Any]] | None:
    """By device: the expected peak, and the measured one."""
    if measured is None:
        return None
    rows = zip(predicted.topology.devices, predicted.peak_bytes, measured, strict=True)
    return [{"device": device.name, "predicted_bytes": peak, "measured_bytes": found} for device, peak, found in rows]


def text(report: Mapping[str, Any]) -> str:
    """The document as a short table."""
    rows: list[tuple[str, ...]] = [("time per iteration", "predicted", "measured", "measured / predicted")]
    for name, entry in report["strategies"].items():
        predicted_ns, measured_ns = entry["predicted_ns"], entry["measured_ns"]
        ratio = "" if measured_ns is None else f"{measured_ns / max(1, predicted_ns):.2f}"
        without = "the same plan" if report["is_data_parallel"] else "not measured"
        rows.append((name, milliseconds(predicted_ns), without if measured_ns is None else milliseconds(measured_ns), ratio))
    own, usual = report["strategies"][STRATEGY], report["strategies"][BASELINE]
    gain = "" if usual["measured_ns"] is None else speed_up(usual["measured_ns"], own["measured_ns"])
    rows.append(("speed-up", speed_up(usual["predicted_ns"], own["predicted_ns"]), gain))
    losses, before = own["losses"], report["resumed_at"]
    first, last = (f"{losses[i]:.6g} in step {before + number}" for i, number in ((0, 1), (-1, len(losses))))
    facts = [("predicted from", resting(report["costs"])), ("loss", f"{first}, {last}")]
    if report["costs"]["links"]:
        facts.insert(1, ("links", report["costs"]["links"]))
    facts.append(("throughput", _throughput(own["throughput"], report["emulation"])))
    if report["warm_up"]:
        facts.append(("predicted warm-up", compressing.warm_up_text(report["warm_up"], own["predicted_ns"])))
    facts += [(what, report[what]) for what in ("checkpoint", "weights") if report[what]]
    facts += [*loss_scaling_facts(report), *checkpoints.evaluation_facts(report), *restarting.facts(report)]
    if report["check"]:
        facts.append(("check", _checked(report["check"], lossy=report["compressed"] > 0)))
    head = f"{report['model']} on {report['cluster']}: {report['processes']} processes, {report['backend']}, {report['steps']} steps"
    if report["compressed"]:
        head = f"{compressing.lossy_line(report['compressed'])}\n{head}"
    if report["shared_cores"]:
        head += "\n" + crowded(report["processes"], report["shared_cores"])
    held = [_held(report["memory"])] if report["memory"] else []
    links = emulation.text(report)
    return "\n\n".join([head, aligned(rows), *([links] if links else []), *held, listed(facts)])


def _throughput(own: Mapping[str, Any], emulated: Mapping[str, Any] | None) -> str:
    notes = [] if own["measured"] else ["predicted"]
    notes += ["of the cluster at its full scale"] if emulated and emulated["scale"] != 1 else []
    return throughput_text(own["measured"] or own["predicted"]) + (f" ({', '.join(notes)})" if notes else "")


def _held(memory: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [("peak memory", "predicted", "measured", "measured / predicted")]
    for own in memory:
        sizes = [own[key] for key in ("predicted_bytes", "measured_bytes")]
        rows.append((own["device"], *map(format_bytes, sizes), f"{own['measured_bytes'] / max(1, own['predicted_bytes']):.2f}"))
    return aligned(rows)


def _checked(found: Mapping[str, Any], *, lossy: bool) -> str:
    worst = found["worst"]
    ours, alone = worst["from_float64"], worst["alone_from_float64"]
    judged = "" if ours is None else f"; from float64 it is {ours:.1e}, one process {alone:.1e}"
    same = "before compression as in one process, then as one process emulates it, bit for bit" if lossy else "as in one process"
    verdict = same if found["passed"] else f"NOT {same}"
    return (
        f"{verdict}: {found['compared']} tensors in {found['steps']} steps, largest difference {worst['error']:.1e} "
        f"({worst['kind']} {worst['name']}), allowed {found['tolerance']:.0e}"
    ) + f"{judged}; {found['eager']}"


def loss_scaling_facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of the scale, if there is one."""
    found = report["loss_scaling"]
    if found is None:
        return []
    left = "no update was" if not found["skipped"] else "1 update was" if found["skipped"] == 1 else f"{found['skipped']} updates were"
    return [("loss scaled by", f"{found['scale']:,g} at the end; {left} left out because of gradients that are not finite")]


def _recorded_cluster(path: str) -> str:
    """The cluster that a strategy file names, if the name is enough to make it."""
    name = api.load_strategy_header(path).cluster
    if says_all(name):
        return name
    raise StrategyError(f"{path}: made for cluster {name!r}, which is no preset; expected --cluster FILE with its description")


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
