"""A predicted timeline compared with a measured one: the iteration, kinds of operators and tasks, links, and the worst predictions.

Tasks are matched by name. An *error* is (predicted - measured) / measured. Tasks that only one side has are counted, but no sum includes
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from soap.errors import TimelineError
from soap.model.json_text import short
from soap.simulator.analysis.timeline_file import Description, TimedTask, Timeline

WORST = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """One task on both sides."""

    predicted: TimedTask
    measured: TimedTask

    @property
    def off_ns(self) -> int:
        """Predicted minus measured duration."""
        return self.predicted.duration_ns - self.measured.duration_ns

    @property
    def error(self) -> float:
        """``off_ns`` relative to the measured duration."""
        return relative_error(self.predicted.duration_ns, self.measured.duration_ns)


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of one kind: sums over those that both sides have, and the median of their absolute errors."""

    name: str
    tasks: int
    predicted_ns: int
    measured_ns: int
    median_error: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A link: for how long at least one of its tasks was under way, and the bytes that cross it according to the plan."""

    name: str
    predicted_ns: int
    measured_ns: int
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """How two timelines compare.

    ``predicted_ns``, ``measured_ns``: of the whole step. ``shown_ns``: (predicted, measured) time from the first task to the last in the
    timeline, where every task was timed by itself. ``not_measured``, ``not_predicted``: kind -> number of tasks that only one side has.
    """

    predicted: Description
    measured: Description
    predicted_ns: int
    measured_ns: int
    shown_ns: tuple[int, int]
    tasks: int
    operators: tuple[Group, ...]
    kinds: tuple[Group, ...]
    links: tuple[LinkUse, ...]
    worst: tuple[Pair, ...]
    not_measured: Mapping[str, int]
    not_predicted: Mapping[str, int]

    @property
    def error(self) -> float:
        """Error of the whole step."""
        return relative_error(self.predicted_ns, self.measured_ns)


def relative_error(predicted: int, measured: int) -> float:
    """(predicted - measured) / measured; a measured 0 counts as 1."""
    return (predicted - measured) / max(1, measured)


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """The whole comparison. TimelineError, in one line, unless both have the same model, strategy and batches per update."""
    one, other = predicted.description, measured.description
    pairs = matched(predicted, measured)
    both = {pair.predicted.name for pair in pairs}
    return Comparison(
        predicted=one,
        measured=other,
        predicted_ns=one.iteration_ns,
        measured_ns=other.iteration_ns,
        shown_ns=(_span_ns(predicted), _span_ns(measured)),
        tasks=len(pairs),
        operators=_groups([pair for pair in pairs if pair.predicted.operator], lambda pair: pair.predicted.operator),
        kinds=_groups(pairs, lambda pair: pair.predicted.kind.value),
        links=_links(one, pairs),
        worst=tuple(sorted(pairs, key=lambda pair: (-abs(pair.off_ns), pair.predicted.name))[:WORST]),
        not_measured=_only(predicted, both),
        not_predicted=_only(measured, both),
    )


def matched(predicted: Timeline, measured: Timeline) -> list[Pair]:
    """The tasks that both sides have. TimelineError as in ``compare``."""
    _require_same(predicted.description, measured.description)
    pairs = [Pair(predicted.tasks[name], task) for name, task in measured.tasks.items() if name in predicted.tasks]
    return [pair for pair in pairs if pair.predicted.kind == pair.measured.kind]


def _require_same(predicted: Description, measured: Description) -> None:
    for side, found in (("predicted", predicted.origin), ("measured", measured.origin)):
        if found != side:
            raise TimelineError(f"the timeline to take as {side} is {found}; give the predicted one first, the measured one second")
    differing = [
        (predicted.model_hash, measured.model_hash, f"models {short(predicted.model)} and {short(measured.model)}", "hashes "),
        (predicted.strategy_hash, measured.strategy_hash, "strategies", "hashes "),
        (predicted.micro_batches, measured.micro_batches, "batches per update", ""),
    ]
    for one, other, what, label in differing:
        if one != other:
            raise TimelineError(f"timelines of different {what}: {label}{short(one)} and {short(other)}; expected two of the same")
    if predicted.copies > 1:
        raise TimelineError(
            f"the predicted timeline shows two of {predicted.copies} equal copies, with devices of their own; expected all tasks: "
            "give soap-compare the timeline of soap-run alone, which has both sides"
        )


def _groups(pairs: Iterable[Pair], key: Callable[[Pair], str]) -> tuple[Group, ...]:
    """The pairs in groups of equal key, the group with the longest measured time first."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(key(pair), []).append(pair)
    groups = [
        Group(
            name=name,
            tasks=len(members),
            predicted_ns=sum(pair.predicted.duration_ns for pair in members),
            measured_ns=sum(pair.measured.duration_ns for pair in members),
            median_error=median(abs(pair.error) for pair in members),
        )
        for name, members in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.measured_ns, group.name)))


def _links(predicted: Description, pairs: Iterable[Pair]) -> tuple[LinkUse, ...]:
    """Every link that carries something, the busiest in the measurement first. A message counts until it arrives. A measured task counts on
    the links on which it was predicted."""
    held: dict[str, list[Pair]] = {name: [] for name, size in predicted.link_bytes.items() if size}
    for pair in pairs:
        for name in set(pair.predicted.threads) & held.keys():
            held[name].append(pair)
    links = [
        LinkUse(name, _covered_ns(pair.predicted for pair in on), _covered_ns(pair.measured for pair in on), predicted.link_bytes[name])
        for name, on in held.items()
    ]
    return tuple(sorted(links, key=lambda link: (-link.measured_ns, link.name)))


def _covered_ns(tasks: Iterable[TimedTask]) -> int:
    """For how long at least one of the tasks is under way."""
    covered = until = 0
    for start, end in sorted((task.start_ns, task.end_ns) for task in tasks):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


def _span_ns(timeline: Timeline) -> int:
    tasks = timeline.tasks.values()
    return max((task.end_ns for task in tasks), default=0) - min((task.start_ns for task in tasks), default=0)


def _only(timeline: Timeline, both: set[str]) -> dict[str, int]:
    return dict(sorted(Counter(task.kind.value for name, task in timeline.tasks.items() if name not in both).items()))
