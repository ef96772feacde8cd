"""Timelines as files: what is written is read back; what is malformed is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from soap.errors import TimelineError
from soap.simulator.analysis import timeline_file
from soap.simulator.analysis.timeline import chrome_trace, measured_trace
from soap.simulator.analysis.timeline_file import Description, aligned, dumps, loads
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from tests.simulator.examples import UNIT_NS, PointCosts, chain, on, pairwise_cluster, strategy

TWO = pairwise_cluster(1, 1)
PREDICTED = Description("predicted", "chain", "aa", "test", "bb", "cc", 2, 123, link_bytes={"d0->d1": 48}, versions={"soap": "0.1.0"})
MEASURED = replace(PREDICTED, origin="measured", iterations=3, link_bytes={})
EVENTS = [
    (0, "forward l1[0]", "forward", 5_000, 5_024),
    (0, "transfer l1[0:4,0:3] 0->1", "transfer", 5_024, 5_073),
    (1, "forward loss[0]", "forward", 5_073, 5_078),
]


def text() -> str:
    """A predicted iteration with memory, and three tasks of a measured one."""
    plan = build_plan(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,))), TWO)
    tasks = lower(plan, TWO, PointCosts())
    schedule = simulate(tasks)
    measured = measured_trace(EVENTS, "measured", ["d0", "d1"], {"forward l1[0]": {"median_ns": 31}, "forward loss[0]": {"bytes": 9}})
    return dumps([(chrome_trace(tasks, schedule, memory=memory_over_time(tasks, schedule)), PREDICTED), (measured, MEASURED)])


def test_what_was_written_is_read() -> None:
    predicted, measured = loads(text())
    assert (predicted.description, measured.description) == (PREDICTED, MEASURED)
    first, moved = predicted.tasks["forward l1[0]"], predicted.tasks["transfer l1[0:4,0:3] 0->1"]
    assert (first.start_ns, first.end_ns, first.duration_ns, first.operator) == (0, 24 * UNIT_NS, 24 * UNIT_NS, "linear")
    assert first.threads == ("d0",)
    assert (moved.kind, moved.bytes, moved.threads, moved.duration_ns) == ("transfer", 48, ("d0->d1",), 48 * UNIT_NS)
    assert [(task.name, task.start_ns, task.end_ns, task.duration_ns, task.bytes) for task in measured.tasks.values()] == [
        ("forward l1[0]", 0, 24, 31, 0),
        ("transfer l1[0:4,0:3] 0->1", 24, 73, 49, 0),
        ("forward loss[0]", 73, 78, 5, 9),
    ]
    again = dumps([(one.trace, one.description) for one in (predicted, measured)])
    assert json.loads(again) == json.loads(text())  # memory, names of threads, and their order stay


def test_a_message_ends_when_it_arrives() -> None:
    away = pairwise_cluster(1, 1, latency=4)
    plan = build_plan(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,))), away)
    tasks = lower(plan, away, PointCosts())
    (read,) = loads(dumps([(chrome_trace(tasks, simulate(tasks)), PREDICTED)]))
    moved = read.tasks["transfer l1[0:4,0:3] 0->1"]
    assert (moved.start_ns, moved.end_ns, moved.duration_ns) == (24 * UNIT_NS, 76 * UNIT_NS, 52 * UNIT_NS)


def test_aligned_timelines_start_at_zero() -> None:
    _, measured = loads(text())
    late = replace(measured, trace={"traceEvents": [{**e, "ts": e["ts"] + 7.5} if "ts" in e else e for e in measured.trace["traceEvents"]]})
    trace, description = aligned(late)
    assert description == MEASURED
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"] == [0.0, 0.024, 0.073]


def _edited(edit: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(text())
    edit(document)
    return json.dumps(document)


def _first(document: dict[str, Any]) -> dict[str, Any]:
    """The first task's event."""
    event: dict[str, Any] = next(event for event in document["traceEvents"] if event["ph"] == "X")
    return event


def _described(document: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = document["otherData"]["timelines"][0]
    return entry


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.pop("otherData"), "otherData.format is None, expected 'soap-timeline'"),
        (lambda d: d["otherData"].update(version=2), "version 2; this program reads version 1"),
        (lambda d: d["otherData"].update(version=True), "version True"),
        (lambda d: d["otherData"].update(timelines={}), "timelines: a dict; expected a list"),
        (lambda d: d["otherData"].update(timelines=[0] * 17), "timelines: 17 entries; expected a list of at most 16"),
        (lambda d: d["otherData"].update(timelines=[[]]), "timelines/0: a list; expected a list of 15"),
        (lambda d: _described(d).pop("model"), "timelines/0: key 'model' is missing"),
        (lambda d: _described(d).update(extra=1), "timelines/0: unknown key 'extra'; expected one of origin, model"),
        (lambda d: _described(d).update(origin="guessed"), "origin: 'guessed'; expected one of predicted, measured"),
        (lambda d: _described(d).update(iteration_ns=-1), "iteration_ns: -1; expected a whole number from 0"),
        (lambda d: _described(d).update(iteration_ns=2**60), "expected a whole number from 0 to 9007199254740992"),
        (lambda d: _described(d).update(iterations=True), "iterations: True"),
        (lambda d: _described(d).update(model=5), "model: 5; expected text"),
        (lambda d: _described(d).update(link_bytes={"a": "b"}), "link_bytes/a: 'b'; expected a whole number"),
        (lambda d: _described(d).update(link_bytes=[]), "link_bytes: a list; expected an object"),
        (lambda d: d.update(traceEvents=5), "traceEvents: 5; expected a list"),
        (lambda d: d.update(traceEvents=[5]), "traceEvents/0: 5; expected an object"),
        (lambda d: _first(d).update(pid="0"), "pid: '0'; expected a whole number"),
        (lambda d: _first(d).update(ph=5), "ph: 5; expected text"),
        (lambda d: _first(d).update(cat="nap"), "cat: 'nap'; expected one of forward, recompute, backward"),
        (lambda d: _first(d).update(cat=[]), "cat: a list; expected one of forward, recompute, backward"),
        (lambda d: _first(d).update(ts=-1), "ts: -1; expected microseconds"),
        (lambda d: _first(d).update(dur="1"), "dur: '1'; expected microseconds"),
        (lambda d: _first(d).update(dur=10**400), "dur: 1000"),
        (lambda d: _first(d).pop("name"), "key 'name' is missing"),
        (lambda d: _first(d).update(name="x" * 1001), "expected text of at most 1000 characters"),
        (lambda d: _first(d).update(args=[]), "args: a list; expected an object"),
        (lambda d: _first(d).update(args={"bytes": 1.5}), "args/bytes: 1.5; expected a whole number"),
        (lambda d: d["traceEvents"][0].update(args={}), "expected a name or a sort_index"),
        (lambda d: d["traceEvents"].append({**_first(d), "ts": 3}), r"task 'forward l1\[0\]' occurs twice, at different times"),
    ],
)
def test_malformed(edit: Callable[[dict[str, Any]], object], words: str) -> None:
    with pytest.raises(TimelineError, match=words) as caught:
        loads(_edited(edit))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[", "5", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '"\\ud800"'])
def test_not_even_a_trace(content: str) -> None:
    with pytest.raises(TimelineError) as caught:
        loads(content)
    assert "\n" not in str(caught.value)


def test_events_of_others_are_left_out() -> None:
    """Other phases, processes without a description, unknown keys."""

    def add(document: dict[str, Any]) -> None:
        document["traceEvents"] += [{"ph": "B", "pid": 0}, {**_first(document), "pid": 7}, {**_first(document), "sf": 1}]

    assert [one.tasks.keys() for one in loads(_edited(add))] == [one.tasks.keys() for one in loads(text())]
    assert all("sf" not in event for one in loads(_edited(add)) for event in one.trace["traceEvents"])


def test_too_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_file, "MAX_EVENTS", 10)
    with pytest.raises(TimelineError, match="traceEvents: a list; expected a list of at most 10"):
        loads(text())
