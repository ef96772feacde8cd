"""Does a pipeline cost more than the same by ``torch.distributed.pipelining``? ScheduleGPipe, Schedule1F1B and ScheduleInterleaved1F1B
beside our plans with the same stages, micro-batches and schedules: time of a step and peak memory, as ratios measured in one run.

    python -m benchmarks.pipelines
    python -m benchmarks.pipelines --contests gpt-1f1b llama-1f1b --ranks 2 --microbatches 4

Ranks have one thread each and talk over gloo; stages have equal numbers of layers. Both sides train in the same processes, in turn, round
after round, half of them with the one side made first. Memory counts from when a side is ready to train, as each rank makes the whole model
first on both sides. ``losses apart``: the largest difference of the losses of some steps on the last rank, relative to torch's.
``--wait`` says for how long it may wait for an idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.contenders import curves, peak_bytes, race
from benchmarks.end_to_end import machine, quietly
from benchmarks.models import export_model
from benchmarks.pipeline_contenders import SCHEDULES, PipelineContest
from soap.cli.options import not_negative, positive
from soap.runtime.comm.launch import launch

MODELS = {"gpt": "runtime-gpt-deep", "llama": "runtime-llama-deep"}
CONTESTS = {f"{model}-{own.word}": (MODELS[model], schedule) for model in MODELS for schedule, own in SCHEDULES.items()}
"""Name -> (model, torch's schedule)."""
CURVE_STEPS = 5

HEAD = """| pipeline | peer | SOAP | peer | speed ratio | middle half | SOAP's peak | peer's peak | memory ratio | losses apart | others |
|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|"""


def contest_of(name: str, args: argparse.Namespace, folder: Path) -> PipelineContest:
    """Both sides of a line of the table."""
    model, schedule = CONTESTS[name]
    path = folder / f"{model}.pt2"
    path = path if path.exists() else export_model(model, folder)
    return PipelineContest(model, path, SCHEDULES[schedule].ours, schedule, {}, settled=True, microbatches=args.microbatches)


def benchmark(name: str, args: argparse.Namespace, folder: Path) -> str:
    """One line of the table."""
    contest = contest_of(name, args, folder)
    measures = [partial(launch, args.ranks, race, (contest, args.rounds, args.steps, first)) for first in (False, True)]
    halves = [quietly(lambda measure=measure: measure()[0], args.wait) for measure in measures]  # type: ignore[misc]
    times, others = halves[0][0] + halves[1][0], max(share for _, share in halves)
    memory = [launch(args.ranks, peak_bytes, (contest, side))[0] for side in (True, False)]
    losses = launch(args.ranks, curves, (contest, CURVE_STEPS))[args.ranks - 1]  # the last rank alone has torch's
    apart = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    speed = sorted(b / a for a, b in times)
    quarter = len(speed) // 4
    own, peer = (median(side) * 1e3 for side in zip(*times, strict=True))
    half = f"{speed[quarter]:.3f} to {speed[-1 - quarter]:.3f}"
    held = " | ".join(f"{size / 2**20:.1f} MiB" for size in memory)
    return (
        f"| {name} | {contest.theirs} | {own:.1f} ms | {peer:.1f} ms | **{median(speed):.3f}** | {half} | {held} "
        f"| {memory[0] / memory[1]:.2f} | {apart:.1e} | {others:.0%} |"
    )


def options() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="pipelines", description="Speed and memory of pipelines beside torch.distributed.pipelining.")
    parser.add_argument("--ranks", type=positive, default=4, help="processes, one for each stage (default %(default)s)")
    parser.add_argument("--microbatches", type=positive, default=8, help="of a step's 16 samples (default %(default)s)")
    parser.add_argument("--contests", nargs="+", choices=list(CONTESTS), default=list(CONTESTS), help="default: all")
    parser.add_argument("--rounds", type=positive, default=8, help="in which both sides train in turn, twice over (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=3, help="of each side in a round (default %(default)s)")
    parser.add_argument("--wait", type=not_negative, default=0, help="seconds to wait for an idle machine, per half (default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = options().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}\n\n{args.ranks} ranks, {args.microbatches} micro-batches\n\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.contests:
            start = time.monotonic()
            print(benchmark(name, args, Path(folder)), flush=True)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
