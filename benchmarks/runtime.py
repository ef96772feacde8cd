"""Does a plan cost more than the same by PyTorch's own tools? Data parallelism against DistributedDataParallel, Megatron's plan against
``parallelize_module``: iterations per second and peak memory, as ratios measured in one run.

    python -m benchmarks.runtime

Two ranks with one thread each, over gloo. Both sides train in the same processes, in turn, round after round; a ratio is the median of
the rounds' ratios. ``--wait`` says for how long it may wait for an idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.contenders import Contest, peak_bytes, race
from benchmarks.end_to_end import machine, quietly
from benchmarks.models import export_model
from soap.cli.options import not_negative, positive
from soap.runtime.launch import launch

CONTESTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "resnet50": ("data_parallel", "DistributedDataParallel", {"batch_norm": "local"}),
    "gpt": ("data_parallel", "DistributedDataParallel", {}),
    "rnnlm": ("data_parallel", "DistributedDataParallel", {}),
    "gpt-megatron": ("megatron", "parallelize_module", {}),
}
"""Name -> (strategy, peer, how the model is loaded). DistributedDataParallel has batch norm over each rank's samples alone."""


def benchmark(name: str, args: argparse.Namespace, folder: Path) -> str:
    """One line of the table."""
    ours, theirs, options = CONTESTS[name]
    model = "runtime-" + name.split("-")[0]
    contest = Contest(model, export_model(model, folder), ours, theirs, options)
    times, others = quietly(lambda: launch(args.ranks, race, (contest, args.rounds, args.steps))[0], args.wait)
    memory = [launch(args.ranks, peak_bytes, (contest, side))[0] for side in (True, False)]
    speed = sorted(b / a for a, b in times)
    quarter = len(speed) // 4
    own, peer = (median(side) * 1e3 for side in zip(*times, strict=True))
    half = f"{speed[quarter]:.3f} to {speed[-1 - quarter]:.3f}"
    held = " | ".join(f"{size / 2**20:.0f} MiB" for size in memory)
    return (
        f"| {name} | {ours} | {theirs} | {own:.1f} ms | {peer:.1f} ms | **{median(speed):.3f}** | {half} | {held} "
        f"| {memory[0] / memory[1]:.2f} | {others:.0%} |"
    )


HEAD = """| model | plan | peer | SOAP | peer | speed ratio | middle half | SOAP's peak | peer's peak | memory ratio | others |
|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|"""


def options() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="runtime", description="Speed and memory of plans beside PyTorch's own tools.")
    parser.add_argument("--ranks", type=positive, default=2, help="processes (default %(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(CONTESTS), default=list(CONTESTS), help="default: all")
    parser.add_argument("--rounds", type=positive, default=15, help="in which both sides train in turn (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=5, help="of each side in a round (default %(default)s)")
    parser.add_argument("--wait", type=not_negative, default=0, help="seconds to wait for an idle machine, per model (default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = options().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}\n\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            start = time.monotonic()
            print(benchmark(name, args, Path(folder)), flush=True)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
