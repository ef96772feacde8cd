"""Does a plan cost more than the same by PyTorch's own tools? Data parallelism against DistributedDataParallel, sharded optimizer states
against ZeroRedundancyOptimizer, sharded parameters against ``fully_shard``, with recomputation against ``checkpoint_wrapper`` as well,
Megatron's plan against ``parallelize_module``, one device against the plain module: time of a step and peak memory, as ratios measured in
one run, and what a rank sends in a step.

    python -m benchmarks.runtime
    python -m benchmarks.runtime --ranks 2 4 --models gpt-zero gpt-fsdp gpt-fsdp-recompute llama-zero llama-fsdp llama-fsdp-recompute
    python -m benchmarks.runtime --device cuda --models single-gpt-large single-resnet50-large

Ranks have one thread each, over gloo. Both sides train in the same processes, in turn, round after round, half of them with the one
side made first and half with the other; a ratio is the median of the rounds' ratios. ``single-*`` also compares the losses of 50 steps.
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
from typing import Any

from benchmarks.contenders import Contest, curves, peak_bytes, race, sent_bytes
from benchmarks.end_to_end import machine, quietly
from benchmarks.models import export_model
from soap.cli.options import not_negative, positive
from soap.runtime.comm.launch import launch

LOCAL = {"batch_norm": "local"}
"""DistributedDataParallel normalises each rank's samples by themselves."""
CONTESTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "resnet50": ("resnet50", "data_parallel", "DistributedDataParallel", LOCAL),
    "gpt": ("gpt", "data_parallel", "DistributedDataParallel", {}),
    "rnnlm": ("rnnlm", "data_parallel", "DistributedDataParallel", {}),
    "rnnlm-short": ("rnnlm-short", "data_parallel", "DistributedDataParallel", {}),
    "gpt-zero": ("gpt", "zero1", "ZeroRedundancyOptimizer", {}),
    "rnnlm-zero": ("rnnlm", "zero1", "ZeroRedundancyOptimizer", {}),
    "gpt-fsdp": ("gpt", "fsdp", "fully_shard", {}),
    "gpt-fsdp-recompute": ("gpt", "fsdp+recompute", "fully_shard + checkpoint_wrapper", {}),
    "llama-zero": ("llama", "zero1", "ZeroRedundancyOptimizer", {}),
    "llama-fsdp": ("llama", "fsdp", "fully_shard", {}),
    "llama-fsdp-recompute": ("llama", "fsdp+recompute", "fully_shard + checkpoint_wrapper", {}),
    "gpt-megatron": ("gpt", "megatron", "parallelize_module", {}),
    "single-gpt": ("gpt-dry", "single_device", "plain", {}),
    "single-resnet50": ("resnet50", "single_device", "plain", {}),
    "single-gpt-large": ("gpt-large", "single_device", "plain", {}),
    "single-resnet50-large": ("resnet50-large", "single_device", "plain", {}),
}
"""Name -> (model, strategy, peer, how the model is loaded)."""
USUAL = ("resnet50", "gpt", "rnnlm", "rnnlm-short", "gpt-megatron")
CURVE_STEPS = 50


def benchmark(name: str, ranks: int, args: argparse.Namespace, folder: Path) -> str:
    """One line of the table."""
    model, ours, theirs, options = CONTESTS[name]
    contest = Contest(f"runtime-{model}", export_model(f"runtime-{model}", folder), ours, theirs, options, args.device)
    halves = [quietly(partial(_race, ranks, contest, args, first), args.wait) for first in (False, True)]
    times, others = halves[0][0] + halves[1][0], max(share for _, share in halves)
    memory = [launch(ranks, peak_bytes, (contest, side))[0] for side in (True, False)]
    sent = [launch(ranks, sent_bytes, (contest, side))[0] for side in (True, False)] if ranks > 1 else (0, 0)
    speed = sorted(b / a for a, b in times)
    quarter = len(speed) // 4
    own, peer = (median(side) * 1e3 for side in zip(*times, strict=True))
    half = f"{speed[quarter]:.3f} to {speed[-1 - quarter]:.3f}"
    line = (
        f"| {name} | {ranks} | {ours} | {theirs} | {own:.1f} ms | {peer:.1f} ms | **{median(speed):.3f}** | {half} | {_mib(memory)} "
        f"| {memory[0] / memory[1]:.3f} | {_mib(sent)} | {others:.0%} |"
    )
    return line if theirs != "plain" else f"{line} {_apart(contest):.1e} |"


def _mib(sizes: Sequence[int]) -> str:
    """Sizes in MiB, a column each."""
    return " | ".join(f"{size / 2**20:.1f} MiB" for size in sizes)


def _race(ranks: int, contest: Contest, args: argparse.Namespace, theirs_first: bool) -> list[tuple[float, float]]:
    return launch(ranks, race, (contest, args.rounds, args.steps, theirs_first))[0]


def _apart(contest: Contest) -> float:
    """Largest difference of the losses of a run of steps, relative to the plain module's."""
    ours, theirs = launch(1, curves, (contest, CURVE_STEPS))[0]
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


COLUMNS = (
    *("model", "ranks", "plan", "peer", "SOAP", "peer", "speed ratio", "middle half"),
    *("SOAP's peak", "peer's peak", "memory ratio", "SOAP sends", "peer sends", "others"),
)
WORDS = ("model", "plan", "peer", "middle half")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'|'.join('---' if own in WORDS else '---:' for own in COLUMNS)}|"


def options() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="runtime", description="Speed and memory of plans beside PyTorch's own tools.")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[2], help="processes, one number after the other (default 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default %(default)s")
    parser.add_argument("--models", nargs="+", choices=list(CONTESTS), default=list(USUAL), help=f"default: {' '.join(USUAL)}")
    parser.add_argument("--rounds", type=positive, default=8, help="in which both sides train in turn, twice over (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=5, help="of each side in a round (default %(default)s)")
    parser.add_argument("--wait", type=not_negative, default=0, help="seconds to wait for an idle machine, per model (default %(default)s)")
    return parser


def contests(names: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Each contest with each number of ranks; those beside the plain module with one."""
    return [(name, count) for name in names for count in ((1,) if CONTESTS[name][2] == "plain" else ranks)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = options().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}\n\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks in contests(args.models, args.ranks):
            start = time.monotonic()
            print(benchmark(name, ranks, args, Path(folder)), flush=True)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
