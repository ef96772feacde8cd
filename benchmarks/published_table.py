"""The page of predictions beside published figures: tables, errors, and in how many pairs the order is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.told import kernels_told
from soap.units import format_bytes

if TYPE_CHECKING:
    from benchmarks.published import Row

HEAD = """# Predicted and published step times

Figures that others measured on real clusters, beside what SOAP predicts for the same model, batch, precision, cluster and way of
parallelizing. Predictions come from data sheets alone (`costs="estimate"`): nothing is measured here, and nothing is fitted to the
published figures. Their sources, with quotations and what was assumed where they are silent, are in
[benchmarks/published.json](../../benchmarks/published.json). Errors are shown as they come.

"""

NOTES = """\
"Error" is predicted / published step time less 1. Memory is what is expected on the fullest device.
"Refused" says that the device has less memory than is expected, so that no search would take this plan, although it ran.
"""


@dataclass(frozen=True)
class Outcome:
    """A row's prediction: seconds of a step; peak memory to expect on the fullest device; and how long predicting took."""

    id: str
    seconds: float
    peak_bytes: int
    fits: bool
    took_seconds: int


@dataclass(frozen=True)
class Pair:
    """Published and predicted seconds of a step, and how many samples it has."""

    published: float
    predicted: float
    samples: int

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1

    @property
    def rates(self) -> tuple[float, float]:
        """Published and predicted samples per second."""
        return self.samples / self.published, self.samples / self.predicted


def order(values: Iterable[tuple[float, float]]) -> tuple[int, int]:
    """Of pairs whose published values differ: how many are predicted in the same order, and how many there are."""
    right = count = 0
    for (published, predicted), (other_published, other_predicted) in combinations(values, 2):
        if published != other_published:
            count += 1
            right += (published < other_published) == (predicted < other_predicted) and predicted != other_predicted
    return right, count


def page(rows: Sequence[Row], data: Mapping[str, Any], outcomes: Mapping[str, Outcome], published: Mapping[str, float], day: str) -> str:
    """The Markdown page. ``published``: seconds of a step of each row. Rows without outcome are listed as waiting."""
    done = [row for row in rows if row.id in outcomes]
    pairs = {row.id: Pair(published[row.id], outcomes[row.id].seconds, row.batch * row.accumulate) for row in done}
    parts = [HEAD + f"`python -m benchmarks.published --write docs/results/published.md`, {day}.\n"]
    if done:
        refused = sum(not outcomes[row.id].fits for row in done)
        notes = f"{NOTES}So it is for {refused} of {len(done)}.\n"
        parts += ["## Simulated\n\n" + notes, _simulated(done, data, outcomes, pairs), "## Errors and order\n\n" + _summary(done, pairs)]
        families = {row.family for row in done}
        causes = [f"- **{family}**: {text}\n" for family, text in data.get("causes", {}).items() if family in families]
        parts += ["## What is known of the causes\n\n" + "".join(causes)] if causes else []
    waiting = [row for row in rows if row.id not in outcomes]
    if waiting:
        head = ("row", "devices", "strategy", "precision", "published", "step", "needs", "source")
        parts.append("## Waiting\n\n" + _table(head, _waiting(waiting, data, published)))
    parts.append("## What sources say of their runs\n\n" + SAID + _told(rows, data))
    head = ("source", "title", "date", "software")
    used = dict.fromkeys(row.source for row in rows)
    parts.append("## Sources\n\n" + _table(head, (_source(name, data["sources"][name]) for name in used)))
    return "\n".join(parts)


SAID = """\
Summaries of what sources or the code that they name run, not quotations. Kernels are priced as they say (`benchmarks/told.py`), call by
call where nothing is said. Gradients are summed in buckets of 25 MiB
beside the backward pass, unless a source sums all of them behind it. Updates pass once over parameter, gradient and states, unless
`optimizers` of the data file counts a source's own.

"""


def _told(rows: Sequence[Row], data: Mapping[str, Any]) -> str:
    """By source, its words about kernels, and about rows that differ; and about sums behind the backward pass."""
    lines = []
    for name in dict.fromkeys(row.source for row in rows):
        source, others = data["sources"][name], {row.kernels: row.id for row in rows if row.source == name and row.kernels}
        own = "; ".join([source["kernels"], *(f"{row}: {words}" for words, row in others.items())])
        lines.append((name, own, source.get("summed_together", "")))
    return _table(("source", "kernels", "all gradients at once"), lines)


def _simulated(rows: Sequence[Row], data: Mapping[str, Any], outcomes: Mapping[str, Outcome], pairs: Mapping[str, Pair]) -> str:
    head = ("row", "devices", "strategy", "precision", "published", "published step", "predicted step", "error", "memory", "kernels")
    lines = []
    for row in rows:
        outcome, pair = outcomes[row.id], pairs[row.id]
        memory = format_bytes(outcome.peak_bytes) + ("" if outcome.fits else ": refused")
        kernels = kernels_told(row.kernels or data["sources"][row.source]["kernels"])
        figure, steps = _figure(row), (milliseconds(pair.published), milliseconds(pair.predicted))
        lines.append((row.id, row.hosts * row.devices, strategy(row), row.precision, figure, *steps, f"{pair.error:+.0%}", memory, kernels))
    return _table(head, lines)


def _waiting(rows: Sequence[Row], data: Mapping[str, Any], published: Mapping[str, float]) -> Iterable[Sequence[object]]:
    for row in rows:
        link = f"[{row.source}]({data['sources'][row.source]['url']})"
        setup = (row.id, row.hosts * row.devices, strategy(row), row.precision)
        yield (*setup, _figure(row), milliseconds(published[row.id]), ", ".join(row.needs), link)


def _summary(rows: Sequence[Row], pairs: Mapping[str, Pair]) -> str:
    """By families of rows whose samples are alike, and of all rows."""
    lines = []
    samples = devices = (0, 0)
    for family in dict.fromkeys(row.family for row in rows):
        members = [row for row in rows if row.family == family]
        own = order(pairs[row.id].rates for row in members)
        each = order(_per_device(row, pairs[row.id].rates) for row in members)
        samples, devices = _sum(samples, own), _sum(devices, each)
        lines.append((family, len(members), *_errors([pairs[row.id] for row in members]), _share(own), _share(each)))
    lines.append(("all", len(rows), *_errors(list(pairs.values())), _share(samples), _share(devices)))
    steps = _share(order((pair.published, pair.predicted) for pair in pairs.values()))
    head = ("family", "rows", "median error", "from", "to", "order of samples/s", "order of samples/s per device")
    text = 'Median of errors without their signs. The order is counted in pairs of rows of one family; "all" adds the families up.\n\n'
    text += _table(head, lines) + f"\nOf all pairs of rows, whatever they are, the order of their step times is right in {steps}.\n\n"
    return text + _table(("precision", "rows", "median error", "from", "to"), _by_precision(rows, pairs))


def _by_precision(rows: Sequence[Row], pairs: Mapping[str, Pair]) -> Iterable[Sequence[object]]:
    for precision in dict.fromkeys(row.precision for row in rows):
        members = [pairs[row.id] for row in rows if row.precision == precision]
        yield precision, len(members), *_errors(members)


def _per_device(row: Row, rates: tuple[float, float]) -> tuple[float, float]:
    return rates[0] / (row.hosts * row.devices), rates[1] / (row.hosts * row.devices)


def _errors(pairs: Sequence[Pair]) -> tuple[str, str, str]:
    errors = [pair.error for pair in pairs]
    return f"{median(abs(error) for error in errors):.0%}", f"{min(errors):+.0%}", f"{max(errors):+.0%}"


def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _share(counted: tuple[int, int]) -> str:
    right, count = counted
    return f"{right} of {count} ({right / count:.0%})" if count else "-"


def strategy(row: Row) -> str:
    """In words, with the width of tensor-parallel groups, and stages and micro-batches of pipelines."""
    found = f"{row.strategy} ({row.tensor})" if row.tensor > 1 else row.strategy
    return f"{found}, {row.pipeline} stages, {row.microbatches} micro-batches" if row.microbatches > 1 else found


def _figure(row: Row) -> str:
    return f"{row.figure:,.10g} {row.unit}"


def milliseconds(seconds: float) -> str:
    """Three digits at least."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def _source(name: str, source: Mapping[str, str]) -> tuple[str, ...]:
    return name, f"[{source['title']}]({source['url']})", source["date"], source["software"]


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    texts = [f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines)]
    return "\n".join(texts) + "\n"
