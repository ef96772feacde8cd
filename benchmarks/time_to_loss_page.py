"""The page of ``benchmarks.time_to_loss``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.convergence_page import DENSE, WIDTH, WINDOW
from benchmarks.convergence_tasks import RANKS
from benchmarks.lossy_emulated import MOST_OF_OTHERS, RATES

if TYPE_CHECKING:
    from benchmarks.time_to_loss import Cell

PEER = "DDP"
"""PyTorch's DistributedDataParallel with whole gradients: it takes dense training's steps."""
INTRO = f"""# Time to the dense run's loss

    OMP_NUM_THREADS=1 python -m benchmarks.time_to_loss --results FILE --write docs/results/time_to_loss.md

Compressed gradients make steps shorter and may take more of them. *Steps*: after how many the mean training loss of the last {WINDOW} is
as low as the dense runs' at their end (median of the seeds), in the single-process emulation of {RANKS} ranks, which compresses the same
gradients to the same bits as ranks do (gradients themselves differ by rounding, and training enlarges that); tasks, batches and starting
values are those of [convergence](convergence.md), but tables of which a batch reads some rows are not compressed. *Step*: the middle of
the timed steps of data parallelism that compresses alike, on {RANKS} hosts that this machine emulates, in turns with PyTorch's
`DistributedDataParallel` (DDP) in the same processes. *Time*: their product. *Over DDP*: how many times as soon as DDP with whole
gradients, which takes dense training's steps.
"""


def page(cells: Sequence[Cell]) -> str:
    """Markdown."""
    places = {rate: number for number, rate in enumerate(RATES)}
    ordered = sorted(cells, key=lambda cell: (cell.task, places.get(cell.rate, len(places))))
    where = "\n\n".join(f"{own}." for own in dict.fromkeys(cell.machine.partition(", load average")[0] for cell in cells))
    head = ("task", "rate", "method", "steps", "step, ms", "time, s", "over dense", f"over {PEER}")
    table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for cell in ordered:
        table += lines(cell)
    whole = [line for cell in ordered for line in whole_lines(cell)]
    busy = [f"{own.task} at {own.rate}: {own.others_share:.0%}" for own in ordered if (own.others_share or 0.0) > MOST_OF_OTHERS]
    where += f"\n\nOther programs used more than a tenth of the cores, so steps are too long: {', '.join(busy)}." if busy else ""
    return "\n".join([INTRO, where, "", *table, *(["", "## From beginning to end", "", *whole] if whole else []), ""])


def seconds(cell: Cell, method: str, steps: float | None = None) -> float | None:
    """Time to the loss; None if it is not reached by all seeds. ``steps``: those of another method."""
    runs = [own for own in cell.steps.get(method, ()) if own is not None]
    if steps is None and len(runs) < len(cell.steps.get(method, (None,))):
        return None
    return (median(runs) if steps is None else steps) * median(cell.times_ns[method]) / 1e9


def lines(cell: Cell) -> Iterator[str]:
    """A line for each method."""
    dense = [own for own in cell.steps[DENSE] if own is not None]
    usual = seconds(cell, DENSE)
    peer = seconds(cell, PEER, median(dense)) if dense and PEER in cell.times_ns else None
    for method, runs in cell.steps.items():
        own, reached = seconds(cell, method), [step for step in runs if step is not None]
        told = f"{median(reached):.0f}" if own is not None else f"not in {cell.limit}"
        over = [f"{other / own:.2f}" if own and other else "" for other in (usual, peer)]
        step = f"{median(cell.times_ns[method]) / 1e6:.1f}"
        yield f"| {' | '.join([cell.task, cell.rate, method, told, step, f'{own:.1f}' if own else '', *over])} |"
    if peer is not None:
        step = f"{median(cell.times_ns[PEER]) / 1e6:.1f}"
        over = [f"{usual / peer:.2f}" if usual else "", "1.00"]
        yield f"| {' | '.join([cell.task, cell.rate, PEER, f'{median(dense):.0f}', step, f'{peer:.1f}', *over])} |"


def whole_lines(cell: Cell) -> Iterator[str]:
    """What was trained on the hosts until it had the loss, beside the product of the first seed."""
    for run in cell.whole:
        first, step_s = cell.steps[run["method"]][0], median(cell.times_ns[run["method"]]) / 1e9
        product = "" if first is None else f"; {first} steps times the step's time are {first * step_s:.1f} s"
        told = (
            f"- `{cell.task}`, {cell.rate}, {run['method']}: {run['steps']} steps in {run['seconds']:.1f} s by the wall clock{product}. "
            f"All its losses are within {run['apart']:.1e} of the emulation's."
        )
        yield fill(told, WIDTH, subsequent_indent="  ")
