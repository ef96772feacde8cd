"""The page of ``benchmarks.convergence``: tables of methods, warm-ups, batches, and of how far the ranks' choices overlap.

    python -m benchmarks.convergence_page results.json docs/results/convergence.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from textwrap import fill

from benchmarks import convergence_cells
from benchmarks.convergence_cells import LARGER, WARM_UPS, Cell
from benchmarks.convergence_tasks import HELD_OUT, LENGTH, RANKS, TASKS
from benchmarks.end_to_end import machine
from benchmarks.pages import give
from soap.errors import SoapError

WINDOW = 25
"""Steps over which training losses are averaged."""
WIDTH = 140
DENSE, USUAL = "dense", "none"

INTRO = f"""# Training with compressed gradients

    OMP_NUM_THREADS=1 python -m benchmarks.convergence --results FILE
    OMP_NUM_THREADS=1 python -m benchmarks.convergence --tasks lstm --methods dense rgc rgc+asq --parts methods --steps 2000 --results FILE
    python -m benchmarks.convergence_page FILE docs/results/convergence.md

{RANKS} ranks, emulated in one process, which has the bits of a distributed run (`soap-run --check` compares these). All methods have
the dense run's learning rate, batches, number of steps and starting values; nothing is tuned for them.

- `digits`: scikit-learn's 1,797 digits, {HELD_OUT} of them held out; two convolutions and two linear layers (38,282 parameters);
  {TASKS["digits"].batch} samples a batch, Nesterov's momentum (for compressed gradients corrected, with factor masking).
- `lstm`: a megabyte of Python's own library, {HELD_OUT} samples of {LENGTH} characters held out; one LSTM layer of 128 (157,025
  parameters); {TASKS["lstm"].batch} samples a batch, SGD that clips (for compressed gradients each rank).

Parameters from a kilobyte on are compressed, at the methods' own settings (a density of 0.1%: 33 of 32,768 elements; `chunked` has
1.6%) or at the density named. *Within*: the mean over the seeds is no farther from the dense runs' mean than these are from each
other (largest less smallest). *Steps to dense's loss*: the first step at which the mean training loss of the last {WINDOW} steps is as
low as the dense runs' at their end; the median of the seeds, or of how many seeds it is reached.
"""


def page(cells: Sequence[Cell]) -> str:
    """The page as Markdown."""
    lines = [*INTRO.splitlines(), "", f"{machine()}.", ""]
    for part in (methods(cells), warm_ups(cells), larger_batches(cells), unions(cells)):
        lines += part
    minutes = f"{sum(cell.seconds for cell in cells) / 60:.0f} minutes"
    return "\n".join([*lines, f"All trainings together: {minutes} of processor time.", ""])


def methods(cells: Sequence[Cell]) -> Iterator[str]:
    """Each method beside dense gradients, in the tasks' own batches."""
    own = [cell for cell in cells if cell.warm_up == USUAL and cell.batch == TASKS[cell.task].batch]
    yield from ("## Methods", "")
    yield "| task | method | bytes | held-out loss (seeds) | within | error (seeds) | within | steps to dense's loss |"
    yield "|---|---|---|---|---|---|---|---|"
    said = []
    for task, by_method in grouped(own).items():
        dense = by_method.get(DENSE, [])
        for method, runs in by_method.items():
            verdicts = compared(runs, dense)
            yield f"| {task} | {method} | {runs[0].bytes_share:.1%} | {verdicts} | {steps_text(runs, dense)} |"
        said += list(conclusion(task, by_method))
    yield from ("", *said, "")


def warm_ups(cells: Sequence[Cell]) -> Iterator[str]:
    """With a tenth of the steps to warm up."""
    own = [cell for cell in cells if cell.batch == TASKS[cell.task].batch]
    by_method = {(cell.name, cell.method): None for cell in own if cell.warm_up != USUAL}
    if not by_method:
        return
    yield from ("## Warm-up", "")
    yield "A tenth of the steps dense (RedSync), or at five densities that fall from 25% on (DGC)."
    yield ""
    yield "| task | method | warm-up | held-out loss (seeds) | within | error (seeds) | within | steps to dense's loss |"
    yield "|---|---|---|---|---|---|---|---|"
    for task, method in by_method:
        dense = [cell for cell in own if (cell.name, cell.method, cell.warm_up) == (task, DENSE, USUAL)]
        for warm_up in WARM_UPS:
            if runs := [cell for cell in own if (cell.name, cell.method, cell.warm_up) == (task, method, warm_up)]:
                yield f"| {task} | {method} | {warm_up} | {compared(runs, dense)} | {steps_text(runs, dense)} |"
    yield ""


def larger_batches(cells: Sequence[Cell]) -> Iterator[str]:
    """Batches that are ``LARGER`` times as large, each beside dense gradients in the same batches."""
    own = [cell for cell in cells if cell.warm_up == USUAL]
    large = [cell for cell in own if cell.batch == LARGER * TASKS[cell.task].batch]
    if not large:
        return
    yield from ("## Batches", "")
    yield f"As the paper's Table 2: batches {LARGER} times apart, each beside dense gradients in the same batches. As many steps, the same"
    yield "learning rate."
    yield ""
    yield "| task | batch | method | held-out loss (seeds) | within | error (seeds) | within |"
    yield "|---|---|---|---|---|---|---|"
    for task, by_method in grouped(large).items():
        largest = max(run.batch for runs in by_method.values() for run in runs)
        for batch in (largest // LARGER, largest):
            there = grouped(cell for cell in own if (cell.name, cell.batch) == (task, batch)).get(task, {})
            for method in by_method:
                if method in there:
                    yield f"| {task} | {batch} | {method} | {compared(there[method], there.get(DENSE, []))} |"
    yield ""


def unions(cells: Sequence[Cell]) -> Iterator[str]:
    """How many elements a sum has."""
    own = [cell for cell in cells if cell.warm_up == USUAL and cell.batch == TASKS[cell.task].batch and cell.union is not None]
    if not own:
        return
    yield from ("## Density of the sum", "")
    yield "Ranks that choose independently of each other have together 1 - (1 - D)^p of the elements, nearly p D (the paper: 1.55% of 16"
    yield "times 0.1%, for VGG-16); if all chose the same, D. Means over steps and seeds, of all compressed parameters by size."
    yield ""
    yield "| task | method | D, of a rank | p D | 1 - (1 - D)^p | of the sum | of p D |"
    yield "|---|---|---|---|---|---|---|"
    for task, by_method in grouped(own).items():
        for method, runs in by_method.items():
            density, union = mean(run.density or 0 for run in runs), mean(run.union or 0 for run in runs)
            expected, alone = RANKS * density, 1 - (1 - density) ** RANKS
            yield f"| {task} | {method} | {density:.3%} | {expected:.3%} | {alone:.3%} | {union:.3%} | {union / expected:.2f} |"
    yield ""


def compared(runs: Sequence[Cell], dense: Sequence[Cell]) -> str:
    """Four columns: loss and error, each with its seeds and its verdict."""
    losses, errors = [run.loss for run in runs], [run.error for run in runs]
    shown = ", ".join(f"{loss:.3f}" for loss in losses), ", ".join(f"{error:.1%}" for error in errors)
    words = ("", "")
    if dense and runs[0].method != DENSE:
        words = verdict(losses, [run.loss for run in dense]), verdict(errors, [run.error for run in dense])
    return f"**{mean(losses):.3f}** ({shown[0]}) | {words[0]} | **{mean(errors):.1%}** ({shown[1]}) | {words[1]}"


def verdict(own: Sequence[float], dense: Sequence[float]) -> str:
    """Whether the mean is within the spread of the dense runs."""
    if abs(mean(own) - mean(dense)) <= max(dense) - min(dense) + 1e-12:
        return "yes"
    return "no, lower" if mean(own) < mean(dense) else "no"


def conclusion(task: str, by_method: Mapping[str, Sequence[Cell]]) -> Iterator[str]:
    """Which methods' losses are within the dense runs' spread."""
    dense = [run.loss for run in by_method.get(DENSE, [])]
    if not dense:
        return
    verdicts = {name: verdict([run.loss for run in runs], dense) for name, runs in by_method.items() if name != DENSE}
    parts = []
    for word, meaning in (("yes", "within dense's spread"), ("no, lower", "lower than that"), ("no", "higher than that")):
        if names := [name for name, own in verdicts.items() if own == word]:
            parts.append(f"{', '.join(names)}: {meaning}")
    spread = f"{max(dense) - min(dense):.3f}"
    yield fill(f"- `{task}`, held-out loss (dense's spread: {spread}): {'; '.join(parts)}.", WIDTH, subsequent_indent="  ")
    waits = {name: 1 / mean(run.density or 1 for run in runs) for name, runs in by_method.items() if verdicts.get(name) == "no"}
    if rare := {name: wait for name, wait in waits.items() if wait > by_method[name][0].steps}:
        said = ", ".join(f"{name}: {wait:.0f}" for name, wait in rare.items())
        yield f"  An element waits longer for its turn, on average, than the training's {by_method[DENSE][0].steps} steps: {said}."


def steps_text(runs: Sequence[Cell], dense: Sequence[Cell]) -> str:
    """When the dense runs' final training loss is reached."""
    if not dense:
        return ""
    aim = mean(mean(run.losses[-WINDOW:]) for run in dense)
    found = [step for run in runs if (step := first_step(run.losses, aim)) is not None]
    if len(found) == len(runs):
        return f"{median(found):.0f}"
    return f"not in {runs[0].steps}" + (f" (in {median(found):.0f} by {len(found)} of {len(runs)})" if found else "")


def first_step(losses: Sequence[float], aim: float) -> int | None:
    """After how many steps the mean of the last ``WINDOW`` losses is no more than ``aim``; None if it never is."""
    width = min(WINDOW, len(losses))
    ends = range(width, len(losses) + 1)
    return next((end for end in ends if mean(losses[end - width : end]) <= aim), None)


def grouped(cells: Iterable[Cell]) -> dict[str, dict[str, list[Cell]]]:
    """Name of the task -> method -> its trainings, in the order in which they were run."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        found.setdefault(cell.name, {}).setdefault(cell.method, []).append(cell)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="convergence_page", description="The page of trainings that are known.")
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args(argv)
    try:
        if not (cells := convergence_cells.read(args.results)):
            parser.error(f"results {str(args.results)!r} have no trainings; expected a file of benchmarks.convergence")
        give(page(cells), args.page)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
