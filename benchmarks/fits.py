"""Whether models fit into a cluster's devices, the three fastest ways that do, and what that answer takes: ``soap-simulate --fits``.

    python -m benchmarks.fits --write docs/results/fits.md
    python -m benchmarks.fits --only gpt llama3-8b

Every model of the zoo, and Llama 3 8B in bfloat16 (8 sequences of 8192 tokens), with devices that may use ``SHARE`` of what data
parallelism needs there, so that it does not fit; Llama with all of them. Each answer is given in a process of its own, with estimates
alone. *Seconds* are processor time without reading the model: they do not count what else the machine does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.pages import give
from benchmarks.published import read
from benchmarks.published_models import graph_of
from soap import api, zoo
from soap.api.fitting import Fit, Way, fits
from soap.model.graph import OperatorGraph
from soap.units import format_bytes

LLAMA = "llama3-8b"
CLUSTERS = ("v100-4", "p100-4x4")
LARGE = ("h200-8", "a100-40gb-4x8")
SHARE = 0.6
MOST_SECONDS = 10
"""What an answer may take."""
FURTHER = (("gpt", "p100-4x4", "1.2GB"),)
"""Cells that are asked for beside the others: (model, cluster, memory budget)."""


@dataclass(frozen=True)
class Answer:
    """A line of the table. ``budget``: of each device, in words."""

    model: str
    cluster: str
    budget: str
    fit: Fit
    seconds: float


def loaded(model: str) -> OperatorGraph:
    """A model's operators."""
    if model == LLAMA:
        return graph_of(read()["models"]["llama3-8b-8192"], 8, dtype="bfloat16")
    return api.load(f"zoo:{model}", plan_only=True).graph


def answered(model: str, cluster: str, budget: str | None) -> Answer:
    """One answer. ``budget``: None for ``SHARE`` of what data parallelism needs, or for all of a large device."""
    torch.set_num_threads(1)
    graph = loaded(model)
    topology = api.load_cluster(cluster)
    if budget is None and cluster not in LARGE:
        usual = api.simulate(graph, topology, "data_parallel", costs="estimate")
        budget = f"{int(SHARE * max(usual.peak_bytes))} B"
    begin = time.process_time()
    fit = fits(graph, topology, costs="estimate", memory_budget=budget)
    return Answer(model, cluster, format_bytes(fit.asked.available_bytes), fit, time.process_time() - begin)


def row(answer: Answer) -> str:
    """A line of the table."""
    fit = answer.fit
    found = [f"{_said(way)}" for way in fit.ways] or (["-"] if fit.fits else [f"none; closest {_said(fit.closest or fit.asked)}"])
    asked = f"{fit.asked.time_ns / 1e6:,.1f} ms, {format_bytes(fit.asked.peak_bytes)}: {'yes' if fit.fits else 'no'}"
    cells = (answer.model, answer.cluster, answer.budget, asked, "; ".join(found), str(len(fit.tried)), str(len(fit.untried)))
    return f"| {' | '.join(cells)} | {answer.seconds:.1f} |"


def _said(way: Way) -> str:
    parts = f" in {way.micro_batches} batches" if way.micro_batches > 1 else ""
    return f"`{way.name}`{parts} {way.time_ns / 1e6:,.1f} ms, {format_bytes(way.peak_bytes)}"


def page(answers: Sequence[Answer], command: str) -> str:
    """The page."""
    slow = [answer for answer in answers if answer.seconds > MOST_SECONDS]
    unanswered = [answer for answer in answers if not answer.fit.fits and not answer.fit.ways]
    lines = [
        "# Does it fit, and the three fastest ways that do",
        "",
        "Answers of `soap-simulate --fits` (`soap.fits`) from data sheets alone: time of an iteration, and memory of the device that is",
        f"filled most. Devices may use {SHARE:.0%} of what data parallelism needs, or what stands under *budget*; those of",
        f"{', '.join(LARGE)} all they have. *Tried*: ways that were looked at; *untried*: those for which there was no time. *Seconds* are",
        "of a core, without reading the model.",
        "",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "| model | cluster | budget | data parallelism: fits? | the fastest that fit | tried | untried | seconds |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, answers),
        "",
        f"{len(slow)} of {len(answers)} answers took more than {MOST_SECONDS} s, the longest {max(a.seconds for a in answers):.1f} s; "
        f"{len(unanswered)} found no way.",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="fits", description=__doc__.splitlines()[0])
    every = [*zoo.names(), LLAMA]
    parser.add_argument("--only", nargs="+", metavar="MODEL", default=every, help="these models")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    args = parser.parse_args(argv)
    cells: list[tuple[str, str, str | None]] = []
    for model in args.only:
        cells += [(model, cluster, None) for cluster in (LARGE if model == LLAMA else CLUSTERS)]
        cells += [cell for cell in FURTHER if cell[0] == model]
    answers = []
    for cell in cells:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            answers.append(pool.submit(answered, *cell).result())
        print(row(answers[-1]), file=sys.stderr, flush=True)
    only = [] if args.only == every else ["--only", *args.only]
    give(page(answers, " ".join(["python -m benchmarks.fits", *only])), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
