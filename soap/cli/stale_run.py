"""``soap-run`` of servers and workers without state, which Ray starts in a session of our own or in a cluster that is there."""

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
from soap.cli import worker_run
from soap.cli.command import Parser, UsageError, note
from soap.cli.figures import rate
from soap.cli.options import reading
from soap.cli.plain_text import listed
from soap.cli.preprocessed import folder_of, sized
from soap.cli.stale_plan import describe, head
from soap.cli.updating import Updating
from soap.cli.worker_run import check_folders, refuse_rank_options
from soap.cluster.topology import Topology
from soap.errors import INTERRUPTED_EXIT_CODE, StrategyError
from soap.strategy.consistency import SYNC, parse
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.elastic.launcher import Options, Outcome, Run
    from soap.elastic.layout import ElasticPlan
    from soap.elastic.store import Keeping
    from soap.elastic.worker import Batches, Report, Source

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
    for name in ("fsync", "reduce_dense", "reduce_sparse"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for servers and workers; expected a stale strategy, or --ray {OWN} beside it")
    return False


def execute(args: argparse.Namespace, topology: Topology, prog: str) -> int:
    """Train, report."""
    if _has_workers(args):
        return _run_workers(args, topology)
    _refuse(args)
    args.model = sized(args.model, folder_of(args.data))
    read = reading(args, topology)
    planned = api.load(args.model, plan_only=True, **read)
    strategy = api.load_strategy(args.strategy, planned, topology)
    from soap.cli.lease_data import lease_data
    from soap.elastic.launcher import laid_out
    from soap.elastic.leases import noted_run
    from soap.elastic.planned import options_of, plan_of
    from soap.elastic.worker import Source

    plan, optimizer = plan_of(strategy, planned.graph), _optimizer(args, planned.graph)
    before = None if args.resume is None else noted_run(args.resume)
    seed = args.seed if args.seed is not None else 0 if before is None else before.seed
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


def _has_workers(args: argparse.Namespace) -> bool:
    return api.load_strategy_contents(args.strategy).options.get("workers") is not None


def _run_workers(args: argparse.Namespace, topology: Topology) -> int:
    read = reading(args, topology)
    planned = api.load(args.model, plan_only=True, **read)
    return worker_run.execute(args, topology, planned, api.load_strategy(args.strategy, planned, topology), read)


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
    missing = ", ".join(f"{number}: {count}" for number, count in report["staleness"]["missing"].items())
    facts.append(("earlier minibatches that leases may lack", f"{missing} (number: leases)"))
    sizes = [format_bytes(round(report["bytes"][f"{way}_per_lease"])) for way in ("sent", "received")]
    facts.append(("bytes per lease", f"{sizes[0]} to servers, {sizes[1]} from them"))
    scaled = [f"{what} {how}" for what, how in report["reduce"].items()]
    facts.append(("gradients of a step's workers", ", ".join(scaled)))
    if report["lost_workers"]:
        facts.append(("lost workers", f"{report['lost_workers']}; {report['dealt_again']} leases were dealt again"))
    if report["checkpoint"]:
        facts.append(("kept in", report["checkpoint"]))
    first = f"{report['model']} on {report['cluster']}, {report['steps']} steps by servers and workers (Ray: {report['ray']})"
    return "\n\n".join([f"{head(report)}\n{first}", listed(facts)])


def _curve(losses: Sequence[float], steps: Sequence[int]) -> str:
    """Some losses from the first to the last, evenly spaced."""
    if not losses:
        return "no step was seen whole"
    last = len(losses) - 1
    places = sorted({round(place * last / (SHOWN_LOSSES - 1)) for place in range(SHOWN_LOSSES)})
    return ", ".join(f"{losses[place]:.6g} in step {steps[place]}" for place in places)


def _refuse(args: argparse.Namespace) -> None:
    """UsageError in one line for what workers without state do not do."""
    said = "is for plans that ranks run; servers and workers do not know it: leave it out"
    refuse_rank_options(args, FURTHER, said, "servers and workers")
    check_folders(args)


def _optimizer(args: argparse.Namespace, graph: Any) -> Any:
    """What makes the optimizer of one partition."""
    updating = Updating.of(args)
    recipe = updating.recipe()
    if isinstance(recipe.optimizer, Mapping) or recipe.groups is not None:
        raise UsageError("--optimizer GLOB=SPEC: servers update all parameters alike; expected one optimizer without GLOB=")
    updating.tried(graph)
    return recipe.optimizer


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
