"""``soap-run`` of virtual workers: each rank computes a stage, the first one of each host is a server beside that."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soap.cli import emulation
from soap.cli.command import UsageError
from soap.cli.figures import rate
from soap.cli.plain_text import listed
from soap.cli.updating import Updating
from soap.cluster.topology import Topology
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.mixed.planned import WavePlan
    from soap.mixed.run.training import Outcome
    from soap.strategy.config import Strategy
    from soap.tracing.execute import TracedModel


def check_folders(args: argparse.Namespace) -> None:
    """UsageError in one line if ``--save`` and ``--resume`` contradict each other, or something else is in the folder."""
    if args.save is not None and args.resume is not None and Path(args.save).resolve() != Path(args.resume).resolve():
        raise UsageError("--save beside --resume; expected --resume alone: a stale run goes on in its own folder")
    if args.save_every is not None and args.save is None and args.resume is None:
        raise UsageError("--save-every without --save; add --save DIR")
    place = Path(args.save) if args.save is not None and args.resume is None else None
    if place is not None and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"--save {args.save}: something is there; expected an empty folder, or --resume {args.save} to go on from it")


FURTHER = ("ray", "fsync", "reduce_dense", "reduce_sparse", "save_every")
"""Options that virtual workers do not have, and those of ``RANKS_ALONE``."""


def execute(args: argparse.Namespace, topology: Topology, planned: TracedModel, strategy: Strategy, read: Mapping[str, Any]) -> int:
    """Train, report. ``planned``: the model of all workers' minibatches together, without values; ``read``: how it is read."""
    refuse_rank_options(args, FURTHER, "is not for virtual workers; leave it out", "virtual workers")
    check_folders(args)
    emulation.check_possible(args)
    from soap.cli.lease_data import lease_data
    from soap.elastic.worker import Source
    from soap.emulation.placement import run_evenly
    from soap.mixed.planned import minibatch_dims, wave_plan
    from soap.mixed.run.stage_program import Updates
    from soap.mixed.run.training import Job, checkpoint_of, train
    from soap.runtime.comm.launch import launch
    from soap.runtime.comm.rank_processes import READING

    recipe = Updating.of(args).recipe()
    if isinstance(recipe.optimizer, Mapping) or recipe.groups is not None:
        raise UsageError("--optimizer GLOB=SPEC: workers update all parameters alike; expected one optimizer without GLOB=")
    plan, workers = wave_plan(strategy, planned.graph, topology), len(strategy.workers.groups) if strategy.workers else 0
    Updates(recipe.optimizer, recipe.schedule, workers)  # refused before anything is started
    before = None if args.resume is None else checkpoint_of(args.resume, plan)
    seed = args.seed if args.seed is not None else 0 if before is None else before.seed
    dims = minibatch_dims(planned.graph)
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
    told = document(args, topology, strategy, plan, outcome, 0 if before is None else before.finished)
    print(json.dumps(told, indent=2) if args.json else text(told))
    return 0


def document(
    args: argparse.Namespace, topology: Topology, strategy: Strategy, plan: WavePlan, outcome: Outcome, resumed_at: int
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


def text(told: Mapping[str, Any]) -> str:
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
    missing = ", ".join(f"{number}: {count}" for number, count in told["staleness"].items())
    facts.append(("others' earlier minibatches that starts may lack", f"{missing} (number: starts)"))
    if told["checkpoint"]:
        facts.append(("kept in", told["checkpoint"]))
    return f"{head}\n\n{listed(facts)}"


def samples_per_second(outcome: Outcome, plan: WavePlan) -> float | None:
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
    """UsageError for an option in ``RANKS_ALONE`` or ``further`` that was given, as ``said``; and if ``who`` should compute on GPUs."""
    asked = [name for name in (*RANKS_ALONE, *further) if getattr(args, name, None)]
    asked += ["accumulate"] if args.accumulate > 1 else ["warm_up"] if args.warm_up != (0, 0) else []
    if asked:
        raise UsageError(f"--{asked[0].replace('_', '-')} {said}")
    if args.autocast == "float16":
        raise UsageError(f"--autocast float16 with {who}, which scale no loss; expected bfloat16")
    if args.device == "cuda" or args.backend == "nccl":
        raise UsageError(f"{who} compute on processors; expected --device cpu")
