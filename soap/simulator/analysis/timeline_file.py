"""Timelines as files: Chrome traces that also say what they show, so that a measured one can be compared with a predicted one.

Under ``otherData``, which viewers ignore, a file has a ``Description`` of each process of the trace (a predicted or a measured iteration).
Files are untrusted: their size is limited, they are parsed strictly, and refused in one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from soap.errors import TimelineError
from soap.model.json_text import one_line, parse_json, short
from soap.simulator.analysis.timeline import NS_PER_US, Trace, merge_traces
from soap.simulator.tasks import TaskKind

FORMAT = "soap-timeline"
VERSION = 1
MAX_BYTES = 2**29
MAX_EVENTS = 2**22
MAX_NAME = 1000
MAX_NUMBER = 2**53
"""Limits of what is read: far above real timelines, far below what would exhaust memory. Floats are exact up to 2**53 ns (104 days)."""

Origin = Literal["predicted", "measured"]
T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """What one timeline shows.

    ``optimizer``: its states per parameter (SGD 0, Adam 2). ``micro_batches``: batches per update; the trace shows the last of them.
    ``iteration_ns``: duration of one whole training step, predicted, or the median of steps measured without tracing. ``iterations``: how
    many iterations the durations are medians of. ``copies``: above 1 if the trace shows two of so many equal copies. ``link_bytes``: bytes
    on each link, by name, where known. ``versions``: of the programs that made it. ``costs_hash``: a prediction's ``Simulator.costs_hash``.
    ``not_as_priced``: options of a run with which computations differ from those that the cost model prices; "" if there are none.
    """

    origin: Origin
    model: str
    model_hash: str
    cluster: str
    cluster_hash: str
    strategy_hash: str
    optimizer: int
    iteration_ns: int
    micro_batches: int = 1
    iterations: int = 1
    copies: int = 1
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    costs_hash: str = ""
    not_as_priced: str = ""


@dataclass(frozen=True, slots=True)
class TimedTask:
    """One task of a timeline. ``threads``: names of the devices and links that it holds. ``operator``: kind of a tile's operator, or "".

    ``duration_ns``: the median, if several iterations were measured. ``start_ns``, ``end_ns``: in the iteration that is shown.
    """

    name: str
    kind: TaskKind
    start_ns: int
    end_ns: int
    duration_ns: int
    bytes: int
    operator: str
    threads: tuple[str, ...]


@dataclass(frozen=True)
class Timeline:
    """A timeline as read from a file. ``tasks`` by name. ``trace``: its events, as process 0."""

    description: Description
    tasks: Mapping[str, TimedTask]
    trace: Trace


def dumps(timelines: Sequence[tuple[Trace, Description]]) -> str:
    """The text of a file with these timelines. Each is one process of the file's trace."""
    described = [asdict(description) for _, description in timelines]
    other = {"format": FORMAT, "version": VERSION, "timelines": described}
    return json.dumps({"otherData": other, **merge_traces(*(trace for trace, _ in timelines))}, allow_nan=False) + "\n"


def aligned(timeline: Timeline) -> tuple[Trace, Description]:
    """The timeline as ``dumps`` takes it, shifted so that its first task starts at 0."""
    first_us = min((event["ts"] for event in timeline.trace["traceEvents"] if event["ph"] == "X"), default=0)
    events = [
        {**event, "ts": round((event["ts"] - first_us) * NS_PER_US) / NS_PER_US} if "ts" in event else event  # whole nanoseconds
        for event in timeline.trace["traceEvents"]
    ]
    return {**timeline.trace, "traceEvents": events}, timeline.description


def loads(text: str) -> tuple[Timeline, ...]:
    """All timelines of a file's text, in order. TimelineError, in one line, if it is malformed or was not written by this program."""
    try:
        document = parse_json(text)
    except (ValueError, RecursionError) as cause:
        raise TimelineError(f"not valid JSON ({one_line(str(cause))}); expected what soap-run --timeline wrote") from None
    other = document.get("otherData") if isinstance(document, dict) else None
    found = other.get("format") if isinstance(other, dict) else None
    if not isinstance(other, dict) or found != FORMAT:
        raise TimelineError(f"otherData.format is {short(found)}, expected {FORMAT!r}; write the timeline again with soap-run --timeline")
    if other.get("version") != VERSION or isinstance(other.get("version"), bool):
        raise TimelineError(f"version {short(other.get('version'))}; this program reads version {VERSION}: write the timeline again")
    described = _list(other, "timelines", 16)
    descriptions = [_description(entry, f"otherData.timelines[{i}]") for i, entry in enumerate(described)]
    per_process = _events(_list(document, "traceEvents", MAX_EVENTS), len(descriptions))
    return tuple(_timeline(description, events) for description, events in zip(descriptions, per_process, strict=True))


def _timeline(description: Description, events: list[dict[str, Any]]) -> Timeline:
    threads = {event["tid"]: event["args"].get("name", "") for event in events if event["name"] == "thread_name" and event["ph"] == "M"}
    tasks: dict[str, TimedTask] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        task, known = _task(event, threads), tasks.get(event["name"])
        if known is not None and "chunk" in event.get("args", {}):
            task = _with_chunk(known, task)
        elif known is not None:
            if replace(task, threads=known.threads) != known:
                raise TimelineError(f"task {short(task.name)} occurs twice, at different times; expected what soap-run --timeline wrote")
            task = replace(task, threads=known.threads + task.threads)
        tasks[task.name] = task
    return Timeline(description, tasks, {"traceEvents": events, "displayTimeUnit": "ms"})


def _with_chunk(known: TimedTask, chunk: TimedTask) -> TimedTask:
    """A task extended by one of its chunks. It lasts from the first chunk's start to the last one's end, as a measured task does."""
    start_ns, end_ns = min(known.start_ns, chunk.start_ns), max(known.end_ns, chunk.end_ns)
    threads = known.threads + tuple(thread for thread in chunk.threads if thread not in known.threads)
    return replace(known, start_ns=start_ns, end_ns=end_ns, duration_ns=end_ns - start_ns, threads=threads)


def _task(event: Mapping[str, Any], threads: Mapping[int, str]) -> TimedTask:
    start_ns, shown_ns = round(event["ts"] * NS_PER_US), round(event["dur"] * NS_PER_US)
    args = event.get("args", {})
    shown_ns += args.get("latency_ns", 0)
    duration_ns = args.get("median_ns", shown_ns)
    thread = threads.get(event["tid"], f"thread {event['tid']}")
    kind, size, operator = TaskKind(event["cat"]), args.get("bytes", 0), args.get("operator", "")
    return TimedTask(event["name"], kind, start_ns, start_ns + shown_ns, duration_ns, size, operator, (thread,))


def _events(events: list[Any], processes: int) -> list[list[dict[str, Any]]]:
    """The events of each described process, with process number 0. Events of other processes and other kinds are left out."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(processes)]
    for number, event in enumerate(events):
        place = f"traceEvents[{number}]"
        if not isinstance(event, dict):
            raise _malformed(place, event, "an object")
        process = _get(event, "pid", place, _count)
        phase = _get(event, "ph", place, _name)
        if phase in _EVENT_FIELDS and process < processes:
            checks = {key: check for key, check in _EVENT_FIELDS[phase].items() if key in event or (phase, key) != ("X", "args")}
            kept = {key: _get(event, key, place, check) for key, check in checks.items()}
            found[process].append({**kept, "ph": phase, "pid": 0})
    return found


def _description(entry: Any, place: str) -> Description:
    if not isinstance(entry, dict):
        raise _malformed(place, entry, "an object")
    if entry.keys() != _DESCRIPTION_FIELDS.keys():
        differing = sorted(one_line(str(key), 40) for key in entry.keys() ^ _DESCRIPTION_FIELDS.keys())
        raise TimelineError(f"{place}: key {differing[0]!r} is missing or unknown; write the timeline again with soap-run --timeline")
    return Description(**{key: _get(entry, key, place, check) for key, check in _DESCRIPTION_FIELDS.items()})


def _list(document: Mapping[str, Any], key: str, most: int) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list) or len(value) > most:
        shown = f"{len(value)} entries" if isinstance(value, list) else short(value)
        raise TimelineError(f"{key}: {shown}; expected a list of at most {most}")
    return value


def _get(entry: Mapping[str, Any], key: str, place: str, check: Callable[[Any], T]) -> T:
    try:
        return check(entry.get(key))
    except ValueError as expected:
        raise _malformed(f"{place}.{key}", entry.get(key), str(expected)) from None


def _malformed(place: str, value: Any, expected: str) -> TimelineError:
    return TimelineError(f"{place}: {short(value)}; expected {expected}, as soap-run --timeline writes it")


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ValueError(f"text of at most {MAX_NAME} characters")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"a whole number from 0 to {MAX_NUMBER}")
    return value


def _time_us(value: Any) -> float:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not 0 <= value <= MAX_NUMBER / NS_PER_US:
        raise ValueError(f"microseconds from 0 to {MAX_NUMBER // NS_PER_US}")
    return cast(float, value)


def _origin(value: Any) -> Origin:
    if value not in ("predicted", "measured"):
        raise ValueError("'predicted' or 'measured'")
    return cast(Origin, value)


def _kind(value: Any) -> str:
    if value not in list(TaskKind):
        raise ValueError(f"one of {', '.join(TaskKind)}")
    return cast(str, value)


def _mapping(check: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """A check of an object whose values all pass another check."""

    def checked(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError("an object")
        return {_name(key): check(entry) for key, entry in value.items()}

    return checked


def _details(value: Any) -> dict[str, Any]:
    """An event's ``args``: the names and counts that are known; others are left out."""
    if not isinstance(value, dict):
        raise ValueError("an object")
    checks: dict[str, Callable[[Any], Any]] = dict.fromkeys(("bytes", "median_ns", "latency_ns", "chunk", "sort_index"), _count)
    checks |= dict.fromkeys(("operator", "name"), _name)
    return {key: check(value[key]) for key, check in checks.items() if key in value}


def _label(value: Any) -> dict[str, Any]:
    """A metadata event's ``args``: a name or a sort index."""
    found = _details(value)
    if not found:
        raise ValueError("a name or a sort_index")
    return found


_EVENT_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "X": {"name": _name, "cat": _kind, "tid": _count, "ts": _time_us, "dur": _time_us, "args": _details},
    "M": {"name": _name, "tid": _count, "args": _label},
    "C": {"name": _name, "ts": _time_us, "args": _details},
}
_NAMES = ("model", "model_hash", "cluster", "cluster_hash", "strategy_hash", "costs_hash", "not_as_priced")
_DESCRIPTION_FIELDS: dict[str, Callable[[Any], Any]] = {
    "origin": _origin,
    **dict.fromkeys(_NAMES, _name),
    **dict.fromkeys(("optimizer", "iteration_ns", "micro_batches", "iterations", "copies"), _count),
    "link_bytes": _mapping(_count),
    "versions": _mapping(_name),
}
