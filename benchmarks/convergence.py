"""What compression does to training: final losses of all methods beside dense gradients', from the single-process emulation of four ranks,
which has the bits of a distributed run.

    OMP_NUM_THREADS=1 python -m benchmarks.convergence --results results.json --write docs/results/convergence.md

Data that packages ship: scikit-learn's digits for a small convolutional net, Python's own sources for a character LSTM. All methods have
the dense run's learning rate, batches and starting values; nothing is tuned for them. Each training is kept in ``--results`` as soon as it
is over, and the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import convergence_cells, convergence_page
from benchmarks.convergence_cells import METHODS, PARTS, Cell, Key, wanted
from benchmarks.convergence_tasks import RANKS, TASKS, Data, Task
from benchmarks.oracles.compression import Emulation, by_policy
from benchmarks.pages import give
from soap.cli.options import positive
from soap.errors import SoapError
from soap.files import check_writable
from soap.plan.compression.seam import Exchange, layout_of
from soap.runtime.compression.dgc import STAGES, WarmUp
from soap.strategy.compression import Compression, parse

LEAST_BYTES = 1024
"""The policy's lower limit here: these nets are small."""
WARM_SHARE = 10
"""A warm-up takes one of so many steps."""


def trained(key: Key, data: Data) -> Cell:
    """One training."""
    begin = time.process_time()
    task = TASKS[key.task]
    torch.manual_seed(key.seed)
    module = task.make()
    chosen = {} if key.method == "dense" else by_policy(module, parse(key.method), LEAST_BYTES)
    emulation = Emulation(module, task.loss, chosen, RANKS, replace(task.training, warm_up=warm_up_of(key)))
    losses, sent = [], Sent()
    for samples in batches(key, data.train):
        losses.append(round(emulation.step(list(zip(*(tensor.chunk(RANKS) for tensor in samples), strict=True))), 5))
        sent.note(emulation)
    final = finished(task, module, data)
    seconds = round(time.process_time() - begin, 1)
    return Cell(*key, tuple(losses), *final, round(bytes_share(module, chosen), 5), *sent.shares(), seconds)


def warm_up_of(key: Key) -> WarmUp:
    """Of a training."""
    steps = key.steps // WARM_SHARE
    return {"none": WarmUp(), "dense": WarmUp(steps), "density": WarmUp(0, max(1, steps // STAGES))}[key.warm_up]


def batches(key: Key, samples: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The batches of a training, the same for all methods."""
    generator = torch.Generator().manual_seed(key.seed)
    picks = (torch.randint(len(samples[0]), (key.batch,), generator=generator) for _ in range(key.steps))
    return [tuple(tensor[picked] for tensor in samples) for picked in picks]


def finished(task: Task, module: nn.Module, data: Data) -> tuple[float, float]:
    """Loss and error of held-out data."""
    loss, error = task.final(module, data.test)
    return round(loss, 5), round(error, 5)


class Sent:
    """Counts elements that ranks send, and those that all of them send together."""

    def __init__(self) -> None:
        self._elements = self._each = self._together = 0

    def note(self, emulation: Emulation) -> None:
        """What the last step has sent, where that is some elements."""
        for name, peers in emulation.peers.items():
            own = [peer.sent for peer in peers.ranks]
            places = [each.positions[each.real] for each in own if each is not None]
            if places:
                self._elements += emulation.parameters[name].numel()
                self._each += sum(map(len, places))
                self._together += len(torch.cat(places).unique())

    def shares(self) -> tuple[float | None, float | None]:
        """Density of a rank's elements, and of all ranks' together."""
        if not self._elements:
            return None, None
        return round(self._each / RANKS / self._elements, 6), round(self._together / self._elements, 6)


def bytes_share(module: nn.Module, chosen: Mapping[str, Compression | None]) -> float:
    """Bytes that a rank sends in a step, of those of all-reduces."""
    dense = sent = 0
    for name, tensor in module.named_parameters():
        whole, own = Exchange("sum", tensor.nbytes).sent_bytes(RANKS), chosen.get(name)
        dense += whole
        sent += whole if own is None else layout_of(own, tuple(tensor.shape), tensor.element_size(), RANKS).sent_bytes
    return sent / dense


def run_all(keys: Sequence[Key], cells: list[Cell], results: Path | None) -> list[str]:
    """Run what is missing, and keep each at once. Returns why some could not be run."""
    problems = list[str]()
    for task in dict.fromkeys(key.task for key in keys):
        there = {cell.key for cell in cells}
        try:
            data = TASKS[task].data()
        except SoapError as error:
            problems.append(_told(task, error))
            continue
        for key in (key for key in keys if key.task == task and key not in there):
            name = " ".join(map(str, key))
            try:
                cell = trained(key, data)
            except SoapError as error:  # a gradient that is not finite
                problems.append(_told(name, error))
                continue
            cells.append(cell)
            if results is not None:
                convergence_cells.write(results, cells)
            print(name, f"{cell.loss:.4f} {cell.error:.1%} in {cell.seconds:.0f} s", file=sys.stderr, flush=True)
    return problems


def _told(what: str, error: SoapError) -> str:
    """Say at once what has failed; the others go on."""
    problem = f"{what}: {error}"
    print(problem, file=sys.stderr, flush=True)
    return problem


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="convergence", description="Losses with compressed gradients.")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="default: all of the page")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the page; default: all")
    parser.add_argument("--seeds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=positive, help="default: each task's")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps each training; what is in it is not run again")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown of all trainings in --results (default: print it)")
    args = parser.parse_args(argv)
    try:
        for method in args.methods:
            if method != "dense":
                parse(method)
        cells = [] if args.results is None else convergence_cells.read(args.results)
        for path in (args.results, args.write):
            if path is not None:
                check_writable(path)
        problems = run_all(list(wanted(args.tasks, args.methods, args.seeds, args.steps, args.parts)), cells, args.results)
        if cells:
            give(convergence_page.page(cells), args.write)
    except SoapError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
