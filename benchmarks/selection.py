"""How long it takes to find the thousandth of a gradient that is sent: our selections beside ``torch.topk``, in one run.

    python -m benchmarks.selection [--sizes 1 4 16 64] [--device cuda] [--write docs/results/selection.md]

Sizes are in 2^20 elements of float32. Every time is the best of several rounds, in which the methods take turns; ratios above 1 are faster
than ``torch.topk`` of the magnitudes. "sampled": a search and four uses of its threshold, by five. ``sum``: one pass over the memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

import torch

from benchmarks.end_to_end import machine
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap.runtime.compression import device_selection, selection
from soap.runtime.compression.selection import Surveyed

MEGA = 2**20
DENSITY = 0.001
ROUNDS = 11
DATA: dict[str, Callable[[int], torch.Tensor]] = {"normal": torch.randn, "uniform": torch.rand}
Way = Callable[[], object]


def on_processor(tensor: torch.Tensor, count: int) -> dict[str, Way]:
    """Method -> one selection, from the first pass on."""
    threshold = selection.search(Surveyed.of(tensor), count)[1]
    assert threshold is not None
    return {
        "torch.topk": lambda: torch.topk(tensor.abs(), count, sorted=False),
        "sum": tensor.sum,
        "exact": lambda: selection.exact(Surveyed.of(tensor, mean=False), count),
        "trimmed": lambda: selection.trimmed(Surveyed.of(tensor), count),
        "search": lambda: selection.search(Surveyed.of(tensor), count),
        "reuse": lambda: selection.reused(Surveyed.of(tensor, mean=False), threshold, count // 2, 2 * count),
    }


def on_device(tensor: torch.Tensor, count: int) -> dict[str, Way]:
    """The same by torch's operations; trimmed is the exact one there."""
    threshold = device_selection.search(tensor, count)[1]
    return {
        "torch.topk": lambda: torch.topk(tensor.abs(), count, sorted=False),
        "sum": tensor.sum,
        "exact": lambda: device_selection.exact(tensor, count),
        "search": lambda: device_selection.search(tensor, count),
        "reuse": lambda: device_selection.above(tensor, threshold, 2 * count),
    }


def best_ms(ways: dict[str, Way], device: str, rounds: int) -> dict[str, float]:
    """Method -> the shortest time, in milliseconds."""
    found, clock = dict.fromkeys(ways, float("inf")), clock_of(device)
    for turn in range(rounds + 1):  # the first compiles and warms up
        for name, way in ways.items():
            _wait(device)
            begin = clock()
            way()
            _wait(device)
            if turn:
                found[name] = min(found[name], 1e3 * (clock() - begin))
    if "search" in found:
        found["sampled"] = (found["search"] + 4 * found["reuse"]) / 5
    return found


def clock_of(device: str) -> Callable[[], float]:
    """Of a single thread the processor's time, which other programs do not lengthen by waiting; else the clock on the wall."""
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def table(found: dict[tuple[str, int], dict[str, float]]) -> str:
    """Milliseconds, and how many times as fast as ``torch.topk``."""
    names = [name for name in next(iter(found.values())) if name != "torch.topk"]
    lines = ["| data | elements | torch.topk | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    for (data, size), times in found.items():
        cells = [f"{times[name]:.2f} ms ({times['torch.topk'] / times[name]:.1f}x)" for name in names]
        lines.append(f"| {data} | {size} M | {times['torch.topk']:.2f} ms | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


INTRO = """# Selecting a thousandth of a gradient

    OMP_NUM_THREADS=1 python -m benchmarks.selection --write docs/results/selection.md

Sizes are in 2^20 elements of float32; k is a thousandth. Times are the best of several rounds in which the methods take turns, from the
first pass over the tensor on; in brackets how many times as fast as `torch.topk` of the magnitudes, which makes these first. *sum* is
one pass over the memory, *reuse* a selection by the threshold of an earlier step, *sampled* a search and four of these, by five.
"""


def page(found: dict[tuple[str, int], dict[str, float]], device: str, others: float | None) -> str:
    """The page as Markdown. ``others``: share of the cores that other programs used meanwhile."""
    where = f"threads: {torch.get_num_threads()}" if device == "cpu" else torch.cuda.get_device_name()
    where += ", processor time" if clock_of(device) is time.process_time else ", by the clock"
    busy = "" if others is None else f"; other programs used {others:.0%} of the cores"
    lines = [*INTRO.splitlines(), "", *fill(f"{machine()}; {where}{busy}.", 140).splitlines(), "", *table(found).splitlines(), ""]
    largest = max(size for _, size in found)
    for data, size in (key for key in found if key[1] == largest):
        times = found[data, size]
        gains = {name: times["torch.topk"] / times[name] for name in ("exact", "trimmed", "search", "sampled") if name in times}
        lines.append(f"- {data}, {size} M elements: {', '.join(f'{name} {gain:.1f}' for name, gain in gains.items())} times as fast.")
    lines.append("- The paper, on a GPU, beside its time's `torch.topk`, uniform, 64 M elements: trimmed 38.1, sampled 16.2.")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="selection", description="Times of selecting the largest elements.")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="M", default=[1, 4, 16, 64], help="in 2^20 elements; default 1 4 16 64")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument("--write", metavar="FILE", type=Path, help="instead of printing")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    found, watch = {}, Watch()
    for name, draw in DATA.items():
        for size in args.sizes:
            tensor = draw(size * MEGA).to(args.device)
            ways = (on_processor if args.device == "cpu" else on_device)(tensor, round(size * MEGA * DENSITY))
            found[name, size] = best_ms(ways, args.device, args.rounds)
            print(name, size, {key: round(value, 2) for key, value in found[name, size].items()}, file=sys.stderr, flush=True)
    give(page(found, args.device, watch.others_share()), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
