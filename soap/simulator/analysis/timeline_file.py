"""Timelines as files: Chrome traces that also say what they show, so that a measured one can be compared with a predicted one.

Under ``otherData``, which viewers ignore, a file has a ``Description`` of each process of the trace (a predicted or a measured iteration).
Files are untrusted: their size is limited, they are parsed strictly, and refused in one line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from soap.errors import TimelineError
from soap.model.json_text import Reader, Schema, Unfit, one_line, parse_json, read_as, read_each, reader_of, short, unfit
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
Name = Annotated[str, Schema(maxLength=MAX_NAME)]
Count = Annotated[int, Schema(minimum=0, maximum=MAX_NUMBER)]
Time = Annotated[
    float, Schema(minimum=0, maximum=MAX_NUMBER / NS_PER_US, description=f"microseconds from 0 to {MAX_NUMBER // NS_PER_US}")
]
_DETAILS = {name: reader_of(Count) for name in ("bytes", "median_ns", "latency_ns", "chunk", "sort_index")}
_DETAILS |= {name: reader_of(Name) for name in ("operator", "name")}


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
    model: Name
    model_hash: Name
    cluster: Name
    cluster_hash: Name
    strategy_hash: Name
    optimizer: Count
    iteration_ns: Count
    micro_batches: Count = 1
    iterations: Count = 1
    copies: Count = 1
    link_bytes: Mapping[Name, Count] = field(default_factory=dict)
    versions: Mapping[Name, Name] = field(default_factory=dict)
    costs_hash: Name = ""
    not_as_priced: Name = ""


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
    try:
        descriptions = read_as(Annotated[tuple[Description, ...], Schema(maxItems=16)], other.get("timelines"))
    except Unfit as fault:
        raise _malformed("/".join(filter(None, ("otherData/timelines", fault.place))), fault) from None
    events = document.get("traceEvents")
    if not isinstance(events, list) or len(events) > MAX_EVENTS:
        raise _malformed("traceEvents", unfit(events, f"a list of at most {MAX_EVENTS}"))
    per_process = _events(events, len(descriptions))
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
        try:
            process, phase = (part := _known({"pid": reader_of(Count), "ph": reader_of(Name)}, event))["pid"], part["ph"]
            if phase in _EVENTS and process < processes:
                found[process].append({**_known(_EVENTS[phase], event, ("args",) if phase == "X" else ()), "ph": phase, "pid": 0})
        except Unfit as fault:
            raise _malformed("/".join(filter(None, (f"traceEvents/{number}", fault.place))), fault) from None
    return found


def _known(readers: Mapping[str, Reader], entry: Any, optional: Collection[str] = ()) -> dict[str, Any]:
    """What is read of an object, whatever else it has."""
    if not isinstance(entry, dict):
        raise unfit(entry, "an object")
    return read_each(readers, {name: own for name, own in entry.items() if name in readers}, optional)


def _malformed(place: str, fault: Unfit) -> TimelineError:
    return TimelineError(f"{place}: {fault}, as soap-run --timeline writes it")


def _details(value: Any) -> dict[str, Any]:
    """An event's ``args``: the names and counts that are known."""
    return _known(_DETAILS, value, _DETAILS)


def _label(value: Any) -> dict[str, Any]:
    """A metadata event's ``args``: a name or a sort index."""
    found = _details(value)
    if not found:
        raise unfit(value, "a name or a sort_index")
    return found


_EVENTS: dict[str, dict[str, Reader]] = {
    "X": {
        "name": reader_of(Name), "cat": reader_of(TaskKind), "tid": reader_of(Count), "ts": reader_of(Time), "dur": reader_of(Time),
        "args": _details,
    },
    "M": {"name": reader_of(Name), "tid": reader_of(Count), "args": _label},
    "C": {"name": reader_of(Name), "ts": reader_of(Time), "args": _details},
}  # fmt: skip
