"""``python -m benchmarks.stale_convergence [--seeds 2] [--out PAGE]``: synchronous, bounded and asynchronous training with servers and
workers on a made-up click log whose model is known: AUC against samples and against time. Takes minutes; resumable. Results:
docs/results/stale_convergence.md.

Clicks are drawn by a logistic model (``soap.preprocessing.generate``), whose own probabilities have the best AUC that there is. What is
trained adds up a row for each id of a sample, and a perceptron's first layer of its numbers. Test samples are others of the same log. The
clock stands still while AUC is computed; workers finish the lease that they have meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import soap
from benchmarks import kept
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap.elastic.clocks import SYNC
from soap.elastic.launcher import Options, Run, train
from soap.elastic.session import session
from soap.elastic.store import Keeping
from soap.elastic.worker import InMemory, Report, Source
from soap.preprocessing.generate import BLOCK_ROWS, NUMBERS, Rows, draw_rows

VERSION = 1
COMMAND = "python -m benchmarks.stale_convergence"
WAYS: Mapping[str, int | None] = {"sync": 0, "bounded:4": 4, "async": None}
TABLE_ROWS, WIDTH, CATEGORIES = 2**17, 16, 1000
"""``CATEGORIES``: distinct ids of a column at most, which are hashed into one table."""
SAMPLES, TEST, BATCH, EPOCHS, WORKERS, SERVERS = 200_000, BLOCK_ROWS, 256, 2, 4, 2
MARKS = 16
"""So often AUC is computed in an epoch."""
LEARNING_RATE = 0.05
SHOWN = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Epochs at which the page shows AUC."""
NEAR = 0.9
"""Of the oracle's AUC above one half: what times are compared by."""
CURVE = {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}}
CELL = {
    "type": "object",
    "properties": {
        "way": {"enum": [*WAYS]},
        "seed": {"type": "integer"},
        "curve": CURVE,
        "oracle": {"type": "number"},
        "others": {"type": ["number", "null"]},
        "date": {"type": "string"},
    },
    "required": ["way", "seed", "curve", "oracle", "others", "date"],
    "additionalProperties": False,
}


class Clicks(nn.Module):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(TABLE_ROWS, WIDTH, mode="sum")
        nn.init.normal_(self.rows.weight, std=0.05)
        self.numbers = nn.Linear(NUMBERS, WIDTH)
        self.top = nn.Linear(WIDTH, 1)

    def odds(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Log-odds of a click. ``ids``: (batch, 26); ``numbers``: (batch, 13)."""
        return self.top(F.relu(self.rows(ids) + self.numbers(numbers))).squeeze(1)

    def forward(self, ids: Tensor, numbers: Tensor, clicks: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(self.odds(ids, numbers), clicks)


def inputs(made: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Ids as rows of the table, logarithms of numbers, clicks. An empty field has an id of its own, and the logarithm 0."""
    columns = np.arange(made.ids.shape[1])
    keys = np.where(made.no_id, 2**32, made.ids) * 31 + columns
    hashed = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 17)
    logs = np.where(made.no_number, 0.0, np.log1p(np.maximum(made.numbers, 0)))
    return torch.from_numpy(hashed.astype(np.int64)), torch.from_numpy(logs).float(), torch.from_numpy(made.clicks).float()


def training_data() -> tuple[Tensor, ...]:
    """Of the blocks behind the first, which tests."""
    blocks = [inputs(draw_rows(0, begin, BLOCK_ROWS, CATEGORIES)) for begin in range(TEST, TEST + SAMPLES, BLOCK_ROWS)]
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


def auc(scores: NDArray[np.floating[Any]], clicks: NDArray[np.bool_]) -> float:
    """The share of pairs of a click and none in which the click has the higher score; equal scores count one half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    positive = int(clicks.sum())
    return float((ranks[places][clicks].sum() - positive * (positive + 1) / 2) / (positive * (len(clicks) - positive)))


@dataclass
class Judge:
    """Computes AUC now and then. ``curve``: (samples, seconds of training, AUC)."""

    test: Rows
    run: Run | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    leases: int = 0
    paused_s: float = 0.0
    begin_s: float = 0.0

    def started(self, run: Run) -> None:
        """The run has its actors; workers come as they are ready, so the clock begins with the first lease."""
        self.run = run

    def told(self, number: int, report: Report) -> None:
        """A lease is done."""
        now_s = time.monotonic()
        if not self.leases:
            self.begin_s = now_s - report.seconds
        self.leases += 1
        if self.leases * BATCH * MARKS // SAMPLES == (self.leases - 1) * BATCH * MARKS // SAMPLES:
            return
        assert self.run is not None
        seconds = now_s - self.begin_s - self.paused_s
        self.curve.append((self.leases * BATCH, seconds, self.judged(self.run.parameters())))
        self.paused_s += time.monotonic() - now_s

    def judged(self, parameters: Mapping[str, Tensor]) -> float:
        """AUC of these values on the test samples."""
        model = Clicks()
        model.load_state_dict(dict(parameters))
        with torch.no_grad():
            ids, numbers, _ = inputs(self.test)
            return auc(model.odds(ids, numbers).numpy(), self.test.clicks)


def measure(way: str, seed: int) -> dict[str, Any]:
    """One training."""
    watch, judge = Watch(), Judge(draw_rows(0, 0, TEST, CATEGORIES))
    with tempfile.TemporaryDirectory(prefix="stale-") as folder:
        data, path = training_data(), Path(folder) / "clicks.pt2"
        torch.manual_seed(seed)
        soap.export(Clicks(), tuple(one[:BATCH] for one in data), path=path, dynamic_batch=True, verify=False)
        keeping = Keeping(str(Path(folder) / "run"), partial(torch.optim.Adagrad, lr=LEARNING_RATE))
        bound = WAYS[way]
        options = Options(BATCH, EPOCHS, WORKERS, SERVERS, bound=bound, averaged=bound == SYNC, seed=seed)
        with session(cpus=1):
            train(Source(str(path), seed=seed), InMemory(data), keeping, options, told=judge.told, started=judge.started)
    oracle = auc(judge.test.probabilities, judge.test.clicks)
    facts = {"others": watch.others_share(), "date": date.today().isoformat()}
    return {"way": way, "seed": seed, "curve": [list(point) for point in judge.curve], "oracle": oracle, **facts}


def at(curve: Sequence[Sequence[float]], samples: float) -> float:
    """AUC at the first mark from so many samples on; that of the last mark beyond."""
    return next((value for count, _, value in curve if count >= samples), curve[-1][2])


def seconds_to(curve: Sequence[Sequence[float]], wanted: float) -> float:
    """When an AUC was reached; infinite if it was not."""
    return next((seconds for _, seconds, value in curve if value >= wanted), float("inf"))


def page(cells: Sequence[dict[str, Any]]) -> str:
    """Medians over seeds."""
    oracle = cells[0]["oracle"]
    seeds = len({cell["seed"] for cell in cells})
    wanted = 0.5 + NEAR * (oracle - 0.5)
    busy = [cell["others"] for cell in cells if cell["others"] is not None]
    shown = " | ".join(f"AUC at {epochs:g}" for epochs in SHOWN)
    lines = [
        "# Convergence of stale training",
        "",
        f"`{COMMAND}`, {max(cell['date'] for cell in cells)}, two cores, of which others (Ray's processes among them) used "
        f"{min(busy, default=0):.0%} to {max(busy, default=0):.0%}.",
        f"{WORKERS} workers, {SERVERS} servers, leases of {BATCH} samples, {SAMPLES:,} samples, Adagrad at {LEARNING_RATE:g}; "
        f"AUC on {TEST:,} others.",
        f"The model that drew the clicks has an AUC of {oracle:.4f}. Medians over seeds ({seeds}), AUC by epochs, and when it was",
        f"{NEAR:.0%} of the way from one half to that.",
        "",
        f"| consistency | {shown} | samples/s | seconds to {wanted:.3f} |",
        "|---|" + "---:|" * (len(SHOWN) + 2),
    ]
    for way in WAYS:
        own = [cell["curve"] for cell in cells if cell["way"] == way]
        if own:
            values = [_spread([at(curve, epochs * SAMPLES) for curve in own], ".4f") for epochs in SHOWN]
            rates = _spread([curve[-1][0] / curve[-1][1] for curve in own], ",.0f")
            lines.append(f"| {way} | {' | '.join(values)} | {rates} | {_spread([seconds_to(curve, wanted) for curve in own], '.1f')} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], form: str) -> str:
    if max(values) == float("inf"):
        return "not reached"
    middle, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def main() -> None:
    """Measure what is missing, the ways in turn; write cells behind each run, and the page at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cells", type=Path, default=Path("stale_convergence.json"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = kept.read(args.cells, CELL, VERSION, COMMAND)
    for seed in range(args.seeds):
        for way in WAYS:
            if not any((cell["way"], cell["seed"]) == (way, seed) for cell in cells):
                cells.append(measure(way, seed))
                kept.write(args.cells, cells, VERSION)
                samples, seconds, value = cells[-1]["curve"][-1]
                print(f"{way} {seed}: AUC {value:.4f} after {samples:,.0f} samples, {seconds:.1f} s", file=sys.stderr)
    give(page(cells), args.out)


if __name__ == "__main__":
    main()
