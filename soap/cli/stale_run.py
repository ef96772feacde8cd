"""``soap-run`` of servers and workers without state, which Ray starts in a session of our own or in a cluster that is there; and of virtual
workers: each rank computes a stage, the first one of each host is a server beside that."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from soap import api
from soap.cli import emulation
from soap.cli.command import Parser, UsageError, note, refuse_given
from soap.cli.inputs import folder_of, sized
from soap.cli.options import reading
from soap.cli.plain_text import listed
from soap.cli.plan_summary import rate
from soap.cli.stale_plan import describe, head
from soap.cli.updating import Updating
from soap.cluster.topology import Topology
from soap.errors import INTERRUPTED_EXIT_CODE, StrategyError
from soap.strategy.consistency import SYNC, parse
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.elastic.launcher import Options, Outcome, Run
    from soap.elastic.layout import ElasticPlan
    from soap.elastic.store import Keeping
    from soap.elastic.worker import Batches, Report, Source
    from soap.mixed.planned import WavePlan
    from soap.mixed.run.training import Outcome as Workers
    from soap.strategy.config import Strategy
    from soap.tracing.execute import TracedModel


OWN = "own"
"""Word for a session of our own."""
REDUCTIONS = ("mean", "sum")
SHOWN_LOSSES = 8
FURTHER = ("emulate", "schedule")
"""Options that workers without state do not have, and those of ``RANKS_ALONE``."""


def add_stale_run(parser: Parser) -> None:
    """The options that belong to it."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"train with servers and workers that Ray starts in the cluster at ADDRESS, or with {OWN} in one of our own on this machine; "
        "stale strategies always are",
    )
    parser.add_argument("--fsync", action="store_true", help="servers: what is acknowledged outlives the machine's crash, not only theirs")
    for what, named in (("dense", "the dense variables"), ("sparse", "tables")):
        text = f"workers' gradients of {named} count by their share of a step's samples, or each whole (default mean)"
        parser.add_argument(f"--reduce-{what}", choices=REDUCTIONS, help=text)


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the strategy is stale, or Ray is asked for. UsageError for options that are for nothing else."""
    try:
        stale = parse(api.load_strategy_contents(args.strategy).options.get("consistency", SYNC)).stale
    except StrategyError:  # told where it is read for its model
        stale = False
    if args.ray is not None or stale:
        return True
    said = f"is for servers and workers; expected a stale strategy, or --ray {OWN} beside it"
    refuse_given(args, ("fsync", "reduce_dense", "reduce_sparse"), said)
    return False


def execute(args: argparse.Namespace, topology: Topology, prog: str) -> int:
    """Train, report."""
    virtual = api.load_strategy_contents(args.strategy).options.get("workers") is not None
    if not virtual:
        said = "is for plans that ranks run; servers and workers do not know it: leave it out"
        refuse_rank_options(args, FURTHER, said, "servers and workers")
        args.model = sized(args.model, folder_of(args.data))
    read = reading(args, topology)
    planned = api.load(args.model, plan_only=True, **read)
    strategy = api.load_strategy(args.strategy, planned, topology)
    if virtual:
        return execute_workers(args, topology, planned, strategy, read)
    from soap.cli.batches import lease_data
    from soap.elastic.launcher import laid_out
    from soap.elastic.leases import noted_run
    from soap.elastic.planned import options_of, plan_of
    from soap.elastic.worker import Source

    plan, optimizer = plan_of(strategy, planned.graph), _recipe(args, "servers").optimizer
    Updating.of(args).tried(planned.graph)
    before = None if args.resume is None else noted_run(args.resume)
    seed = _seed(args, before)
    data, batch = lease_data(args.model, read, planned, args.data, workers=len(plan.workers), batch=plan.batch, seed=seed, dtype=args.dtype)
    resumed_at = 0 if before is None else before.steps(len(plan.workers))
    options = options_of(
        plan,
        machines=[device.host for device in topology.devices],
        seed=seed,
        steps=resumed_at + args.steps,
        epochs=-(-(resumed_at + args.steps) * batch * len(plan.workers) // len(data)),
        shuffled=False,
        batch=batch,
        reduce={what: getattr(args, f"reduce_{what}") or "mean" for what in ("dense", "sparse")},
    )
    source = Source(args.model, args.dtype, seed, read)
    laid_out(source, options)  # a model that cannot be cut is refused before anything is started
    with _folder(args) as folder:
        keeping = _keeping(args, folder, optimizer, plan)
        return _train(args, topology, plan, source, data, keeping, options, resumed_at, prog)


def _train(
    args: argparse.Namespace,
    topology: Topology,
    plan: ElasticPlan,
    source: Source,
    data: Batches,
    keeping: Keeping,
    options: Options,
    resumed_at: int,
    prog: str,
) -> int:
    from soap.elastic.launcher import train
    from soap.elastic.session import session

    with tqdm(total=args.steps * len(plan.workers), unit="lease", disable=None, leave=False) as bar:
        seen = _Seen(bar, plan.batch)
        try:
            with session(None if args.ray in (None, OWN) else args.ray):
                outcome = train(source, data, keeping, options, told=seen.told, started=seen.started)
        except KeyboardInterrupt:
            bar.close()
            done = seen.run.first_left if seen.run is not None else resumed_at
            note(prog, _interrupted(args, done, resumed_at))
            return INTERRUPTED_EXIT_CODE
    report = document(args, topology, plan, outcome, seen, resumed_at)
    print(json.dumps(report, indent=2) if args.json else text(report))
    return 0


class _Seen:
    """What is shown of a run, and when its leases were acknowledged. Until the first one processes start, and models are loaded."""

    def __init__(self, bar: tqdm[Any], batch: int) -> None:
        self.run: Run | None = None
        self._bar, self._batch = bar, batch
        self._times_s: list[float] = []

    def started(self, run: Run) -> None:
        """See ``launcher.train``."""
        self.run = run

    def told(self, number: int, report: Report) -> None:
        """See ``launcher.train``."""
        self._times_s.append(time.monotonic())
        known = self.samples_per_second
        speed = "" if known is None else f", {rate(known)} samples/s"
        self._bar.set_postfix_str(f"loss {report.loss:.4g}{speed}", refresh=False)
        self._bar.update()

    @property
    def samples_per_second(self) -> float | None:
        """From the first acknowledgement on; None if there were none beside it."""
        if len(self._times_s) < 2 or self._times_s[-1] <= self._times_s[0]:
            return None
        return (len(self._times_s) - 1) * self._batch / (self._times_s[-1] - self._times_s[0])


def document(
    args: argparse.Namespace, topology: Topology, plan: ElasticPlan, outcome: Outcome, seen: _Seen, resumed_at: int
) -> dict[str, Any]:
    """What was seen, as plain JSON values. The keys are part of the command's interface."""
    leases = max(1, len(outcome.losses))
    return {
        "model": args.model,
        "cluster": topology.name,
        **describe(plan, topology),
        "ray": args.ray or OWN,
        "reduce": {what: getattr(args, f"reduce_{what}") or "mean" for what in ("dense", "sparse")},
        "steps": args.steps,
        "resumed_at": resumed_at,
        "checkpoint": args.save or args.resume,
        "losses": [outcome.step_losses[step] for step in sorted(outcome.step_losses)],
        "loss_steps": [step + 1 for step in sorted(outcome.step_losses)],  # of some an earlier run has seen a part
        "leases": len(outcome.losses),
        "throughput": {"samples_per_second": seen.samples_per_second},
        "staleness": {"missing": {str(missing): count for missing, count in sorted(outcome.missing.items())}},
        "bytes": {
            "sent": outcome.sent_bytes,
            "received": outcome.received_bytes,
            "sent_per_lease": outcome.sent_bytes / leases,
            "received_per_lease": outcome.received_bytes / leases,
        },
        "lost_workers": outcome.lost_workers,
        "dealt_again": outcome.dealt_again,
    }


def text(report: Mapping[str, Any]) -> str:
    """The document in a few lines."""
    speed = report["throughput"]["samples_per_second"]
    facts = [("loss", _curve(report["losses"], report["loss_steps"]))]
    facts.append(("throughput", "one lease alone says none" if speed is None else f"{rate(speed)} samples/s behind the first lease"))
    facts.append(("earlier minibatches that leases may lack", _missing(report["staleness"]["missing"], "leases")))
    sizes = [format_bytes(round(report["bytes"][f"{way}_per_lease"])) for way in ("sent", "received")]
    facts.append(("bytes per lease", f"{sizes[0]} to servers, {sizes[1]} from them"))
    scaled = [f"{what} {how}" for what, how in report["reduce"].items()]
    facts.append(("gradients of a step's workers", ", ".join(scaled)))
    if report["lost_workers"]:
        facts.append(("lost workers", f"{report['lost_workers']}; {report['dealt_again']} leases were dealt again"))
    facts += _kept(report)
    first = f"{report['model']} on {report['cluster']}, {report['steps']} steps by servers and workers (Ray: {report['ray']})"
    return "\n\n".join([f"{head(report)}\n{first}", listed(facts)])


def _curve(losses: Sequence[float], steps: Sequence[int]) -> str:
    """Some losses from the first to the last, evenly spaced."""
    if not losses:
        return "no step was seen whole"
    last = len(losses) - 1
    places = sorted({round(place * last / (SHOWN_LOSSES - 1)) for place in range(SHOWN_LOSSES)})
    return ", ".join(f"{losses[place]:.6g} in step {steps[place]}" for place in places)


def _recipe(args: argparse.Namespace, who: str) -> Any:
    """How parameters are updated, all alike. UsageError if that is not so."""
    recipe = Updating.of(args).recipe()
    if isinstance(recipe.optimizer, Mapping) or recipe.groups is not None:
        raise UsageError(f"--optimizer GLOB=SPEC: {who} update all parameters alike; expected one optimizer without GLOB=")
    return recipe


def _seed(args: argparse.Namespace, before: Any) -> int:
    """The one that is asked for, or that of the run that goes on (``before``)."""
    return args.seed if args.seed is not None else 0 if before is None else int(before.seed)


def _missing(staleness: Mapping[str, int], what: str) -> str:
    return f"{', '.join(f'{number}: {count}' for number, count in staleness.items())} (number: {what})"


def _kept(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("kept in", report["checkpoint"])] if report["checkpoint"] else []


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[str]:
    """Where servers keep their partitions."""
    kept = args.resume or args.save
    if kept is not None:
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield str(Path(kept).resolve())
        return
    with tempfile.TemporaryDirectory(prefix="soap-servers-") as folder:
        yield folder


def _keeping(args: argparse.Namespace, folder: str, optimizer: Any, plan: ElasticPlan) -> Keeping:
    from soap.elastic.store import Keeping

    every = {} if args.save_every is None else {"snapshot_every_pushes": args.save_every * len(plan.workers)}
    return Keeping(folder, optimizer, fsync=args.fsync, temporary=not (args.resume or args.save), **every)


def _interrupted(args: argparse.Namespace, done: int, before: int) -> str:
    said = f"interrupted after {done - before} of {args.steps} steps"
    kept = args.resume or args.save
    if kept is None:
        return f"{said}; nothing is kept without --save DIR"
    return f"{said}; the same command with --resume {kept} --steps {args.steps - (done - before)} instead of --save goes on"


WORKERS_LACK = ("ray", "fsync", "reduce_dense", "reduce_sparse", "save_every")
"""Options that virtual workers do not have, and those of ``RANKS_ALONE``."""


def execute_workers(args: argparse.Namespace, topology: Topology, planned: TracedModel, strategy: Strategy, read: Mapping[str, Any]) -> int:
    """Train, report. ``planned``: the model of all workers' minibatches together, without values; ``read``: how it is read."""
    refuse_rank_options(args, WORKERS_LACK, "is not for virtual workers; leave it out", "virtual workers")
    emulation.check_possible(args)
    from soap.cli.batches import lease_data
    from soap.elastic.worker import Source
    from soap.emulation.placement import run_evenly
    from soap.mixed.planned import minibatch_dims, wave_plan
    from soap.mixed.run.stage_program import Updates
    from soap.mixed.run.training import Job, checkpoint_of, train
    from soap.runtime.comm.launch import launch
    from soap.runtime.comm.rank_processes import READING

    recipe = _recipe(args, "workers")
    plan, workers = wave_plan(strategy, planned.graph, topology), len(strategy.workers.groups) if strategy.workers else 0
    Updates(recipe.optimizer, recipe.schedule, workers)  # refused before anything is started
    before = None if args.resume is None else checkpoint_of(args.resume, plan)
    seed, dims = _seed(args, before), minibatch_dims(planned.graph)
    counts: dict[str, int] = {"workers": workers, "batch": plan.samples, "seed": seed}
    data, batch = lease_data(args.model, read, planned, args.data, dtype=args.dtype, dims=dims, **counts)
    if batch != 1:
        raise UsageError("--data preprocessed:… with virtual workers; expected batches: PKG.MOD:CALLABLE, or none")
    hosts = emulation.asked_hosts(args, topology)
    job = Job(
        plan=plan,
        source=Source(args.model, args.dtype, seed, read),
        batches=data,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        minibatches=(args.steps,) * workers,
        ranks=topology.device_count,
        save=args.save or args.resume,
        resume=args.resume,
        evenly=run_evenly if hosts else None,
    )
    with emulation.cluster(hosts) as emulated:
        found = launch(job.ranks, train, (job,), place=emulated.place, address=emulated.address, modules=READING)
    outcome = found.get(0)
    if outcome is None:  # under torchrun, on a rank that does not report
        return 0
    told = workers_document(args, topology, strategy, plan, outcome, 0 if before is None else before.finished)
    print(json.dumps(told, indent=2) if args.json else workers_text(told))
    return 0


def workers_document(
    args: argparse.Namespace, topology: Topology, strategy: Strategy, plan: WavePlan, outcome: Workers, resumed_at: int
) -> dict[str, Any]:
    """What was seen, as plain JSON values. The keys are part of the command's interface."""
    workers = []
    for number, stages in enumerate(plan.workers):
        seen = [outcome.of(number, stage) for stage in range(len(stages))]
        waited_ns = [start.waited_ns for start in seen[0].starts]
        workers.append(
            {
                "devices": [topology.devices[stage.device].name for stage in stages],
                "losses": outcome.losses(number),
                "samples_per_second": rate_of(seen[0].ended_s, plan.samples, plan.in_flight),
                "waiting_ns": sum(waited_ns) / max(1, len(waited_ns)),
                "pushes": seen[0].pushes,
                "pulls": seen[0].pulls,
                "pushed_bytes": sum(own.pushed_bytes for own in seen),
                "pulled_bytes": sum(own.pulled_bytes for own in seen),
                "activation_bytes": sum(own.activation_bytes for own in seen),
            }
        )
    return {
        "model": args.model,
        "cluster": topology.name,
        "consistency": str(strategy.consistency),
        "in_flight": plan.in_flight,
        "minibatches": args.steps,
        "resumed_at": resumed_at,
        "checkpoint": args.save or args.resume,
        "workers": workers,
        "throughput": {"samples_per_second": samples_per_second(outcome, plan)},
        "staleness": {str(missing): count for missing, count in sorted(outcome.missing.items())},
    }


def workers_text(told: Mapping[str, Any]) -> str:
    """The document in a few lines."""
    head = (
        f"{told['model']} on {told['cluster']}: {len(told['workers'])} virtual workers ({told['consistency']}), {told['in_flight']} "
        f"minibatches in flight, {told['minibatches']} minibatches each"
    )
    facts = []
    for number, own in enumerate(told["workers"]):
        losses, speed = own["losses"], own["samples_per_second"]
        known = "" if speed is None else f"{rate(speed)} samples/s, "
        name = f"worker {number} ({', '.join(own['devices'])})"
        facts.append((name, f"{known}loss {losses[0]:.6g} to {losses[-1]:.6g}, waits {own['waiting_ns'] / 1e6:.3g} ms for a start"))
        moved = [format_bytes(own[f"{what}_bytes"]) for what in ("pushed", "pulled", "activation")]
        facts.append(("", f"{own['pushes']} pushes ({moved[0]}), {own['pulls']} pulls ({moved[1]}), {moved[2]} of activations"))
    if (speed := told["throughput"]["samples_per_second"]) is not None:
        facts.append(("all workers", f"{rate(speed)} samples/s behind their first minibatches"))
    facts.append(("others' earlier minibatches that starts may lack", _missing(told["staleness"], "starts")))
    return f"{head}\n\n{listed([*facts, *_kept(told)])}"


def samples_per_second(outcome: Workers, plan: WavePlan) -> float | None:
    """Of all workers; None if one had a single minibatch."""
    rates = [rate_of(outcome.of(worker, 0).ended_s, plan.samples, plan.in_flight) for worker in range(len(plan.workers))]
    known = [own for own in rates if own is not None]
    return sum(known) if len(known) == len(rates) else None


def rate_of(ended_s: Sequence[float], samples: int, in_flight: int) -> float | None:
    """Samples per second of a worker from its first minibatch's end on. As many count as are in flight, or a multiple, as they may end in
    bunches; all if they are too few. ``ended_s``: when its minibatches ended, in order. None if there was one alone."""
    whole = (len(ended_s) - in_flight) // in_flight * in_flight
    counted = ended_s[: whole + 1] if whole > 0 else ended_s
    return None if len(counted) < 2 or counted[-1] <= counted[0] else (len(counted) - 1) * samples / (counted[-1] - counted[0])


RANKS_ALONE = (
    "check", "memory", "timeline", "compare_data_parallel", "compile", "clip_norm", "correct_momentum", "keep", "weight_decay", "no_decay",
    "weights", "save_weights", "eval_data", "eval_steps", "eval_model", "restarts", "spare_plans", "report", "log",
)  # fmt: skip
"""Parsed options that only plans of ranks in step know. Whatever else trains refuses them, rather than to ignore them."""


def refuse_rank_options(args: argparse.Namespace, further: Sequence[str], said: str, who: str) -> None:
    """UsageError for an option in ``RANKS_ALONE`` or ``further`` that was given, as ``said``; if ``who`` should compute on GPUs; and if
    ``--save`` and ``--resume`` contradict each other, or something else is in the folder."""
    refuse_given(args, (*RANKS_ALONE, *further, *["accumulate"] * (args.accumulate > 1), *["warm_up"] * any(args.warm_up)), said)
    if args.autocast == "float16":
        raise UsageError(f"--autocast float16 with {who}, which scale no loss; expected bfloat16")
    if args.device == "cuda" or args.backend == "nccl":
        raise UsageError(f"{who} compute on processors; expected --device cpu")
    if args.save is not None and args.resume is not None and Path(args.save).resolve() != Path(args.resume).resolve():
        raise UsageError("--save beside --resume; expected --resume alone: a stale run goes on in its own folder")
    if args.save_every is not None and args.save is None and args.resume is None:
        raise UsageError("--save-every without --save; add --save DIR")
    place = Path(args.save) if args.save is not None and args.resume is None else None
    if place is not None and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"--save {args.save}: something is there; expected an empty folder, or --resume {args.save} to go on from it")
