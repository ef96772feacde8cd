"""Why a strategy is as it is: what each operator costs beside data parallelism, what setting it back would do, and what binds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.model.graph import OperatorGraph
from soap.model.likeness import repeated_groups
from soap.search.metropolis import Evaluator
from soap.simulator.analysis.attribution import Activity, Shares, activity, task_shares
from soap.simulator.analysis.timeline import critical_path, path_parts_ns, resource_names, slack_ns
from soap.simulator.simulate import Simulation
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.marks import mark_of, with_each_mark, with_mark
from soap.strategy.recomputation import RECOMPUTED, STAYS, run_levels

Costs = Mapping[Activity, int]
"""Nanoseconds on the device, or the link, that it keeps busiest."""


@dataclass(frozen=True, slots=True)
class Binding:
    """How operators take part in what decides the iteration. ``path_ns``: their part of the critical path, by (activity, device or
    link), largest first; empty if they are not on it. ``slack_ns``: how much later the first of their tasks for which it matters could
    end before the iteration takes longer."""

    path_ns: Mapping[tuple[Activity, str], int]
    slack_ns: int


@dataclass(frozen=True, slots=True)
class Line:
    """An operator, or repeated layers that are configured alike. ``back_ns``: the iteration's time if all of them, and nothing else,
    were configured as in data parallelism; ``back_overflow_bytes``: the memory that would then be missing. ``back_alone_ns``: the same
    for one at a time, by operator."""

    operators: tuple[str, ...]
    kind: str
    config: OpConfig
    usual: OpConfig
    costs: Costs
    usual_costs: Costs
    back_ns: int
    back_overflow_bytes: int
    back_alone_ns: Mapping[str, int]
    binding: Binding


@dataclass(frozen=True, slots=True)
class Synchronized:
    """A parameter that is not all-reduced. ``reduced_ns``: the iteration's time if it were; ``reduced_overflow_bytes``: the memory that
    would then be missing."""

    parameter: str
    sync: SyncConfig
    reduced_ns: int
    reduced_overflow_bytes: int


def explain_synchronization(strategy: Strategy, evaluator: Evaluator) -> list[Synchronized]:
    """For each parameter that is not all-reduced: the cost of all-reducing it."""
    found = []
    for name, sync in strategy.parameters.items():
        if sync != SyncConfig():
            reduced = strategy.with_parameter(name, SyncConfig())
            found.append(Synchronized(name, sync, evaluator.makespan_ns(reduced), evaluator.overflow_bytes(reduced)))
    return found


@dataclass(frozen=True, slots=True)
class Unkept:
    """Operators that do not keep on their device what their backward passes need: those of a run (``recomputation.run_levels``), and of all
    runs that equal it in repeated layers. ``marks``: operator -> what it does instead (``strategy.marks``). ``runs``: how many runs these
    are. ``kept_ns``: the iteration's time if they, and no others, kept all; ``kept_overflow_bytes``: the memory that would then be
    missing."""

    marks: Mapping[str, int]
    runs: int
    kept_ns: int
    kept_overflow_bytes: int


def explain_unkept(graph: OperatorGraph, strategy: Strategy, evaluator: Evaluator) -> list[Unkept]:
    """For each run that is recomputed, or offloads what it keeps: what it would be to keep it. In the order of the graph."""
    marks = {op.name: mark for op in graph.operators if (mark := mark_of(strategy.operators[op.name]))}
    group_of = {i: group[0] for group in repeated_groups(graph) for i in group}
    runs = [[name for name in run if name in marks] for run in run_levels(graph, RECOMPUTED)]
    inside = {name for run in runs for name in run}
    alike: dict[object, list[list[str]]] = {}
    for run in sorted([run for run in runs if run] + [[name] for name in marks if name not in inside], key=lambda run: graph.index[run[0]]):
        places = (graph.index[name] for name in run)
        alike.setdefault(tuple((group_of.get(i, i), marks[graph.operators[i].name]) for i in places), []).append(run)
    found = []
    for own in alike.values():
        names = [name for run in own for name in run]
        kept = with_each_mark(strategy, dict.fromkeys(names, STAYS))
        makespan_ns = evaluator.makespan_ns(kept)
        found.append(Unkept({name: marks[name] for name in names}, len(own), makespan_ns, evaluator.overflow_bytes(kept)))
    return found


def explain(
    graph: OperatorGraph, simulation: Simulation, baseline: Simulation, strategies: tuple[Strategy, Strategy], evaluator: Evaluator
) -> list[Line]:
    """One line per operator or group of repeated layers, in the order of the graph. ``simulation``: the strategy to explain;
    ``baseline``: data parallelism; both from ``classical``. ``evaluator`` prices the variants."""
    own, usual = _Shared(simulation), _Shared(baseline)
    strategy, compared = strategies
    lines = []
    for members in configured_alike(graph, strategy, compared):
        names = [graph.operators[i].name for i in members]
        changed = [name for name in names if strategy.operators[name] != compared.operators[name]]
        alone = {name: _set_back(strategy, compared, [name], evaluator, simulation) for name in names}
        together = alone[names[0]] if len(names) == 1 else _set_back(strategy, compared, changed, evaluator, simulation)
        back = _with(strategy, compared, changed)
        lines.append(
            Line(
                operators=tuple(names),
                kind=graph.operators[members[0]].kind,
                config=strategy.operators[names[0]],
                usual=compared.operators[names[0]],
                costs=own.costs(members),
                usual_costs=usual.costs(members),
                back_ns=together,
                back_overflow_bytes=evaluator.overflow_bytes(back) if changed else simulation.overflow_bytes,
                back_alone_ns=alone,
                binding=own.binding(members),
            )
        )
    return lines


def configured_alike(graph: OperatorGraph, *strategies: Strategy) -> list[tuple[int, ...]]:
    """Positions of operators, in the order of the graph: groups of repeated layers, of which all strategies configure one like another."""
    group_of = {i: number for number, group in enumerate(repeated_groups(graph)) for i in group}
    found: dict[object, list[int]] = {}
    for i, op in enumerate(graph.operators):
        place = ("group", group_of[i]) if i in group_of else ("operator", i)
        found.setdefault((place, *(own.operators[op.name] for own in strategies)), []).append(i)
    return [tuple(members) for members in found.values()]


def _with(strategy: Strategy, compared: Strategy, names: Sequence[str]) -> Strategy:
    usual = {name: compared.operators[name] for name in names}
    return strategy.with_changes({name: with_mark(strategy.operators[name].placed_like(own), mark_of(own)) for name, own in usual.items()})


def _set_back(strategy: Strategy, compared: Strategy, names: Sequence[str], evaluator: Evaluator, simulation: Simulation) -> int:
    """The iteration's time with these operators as in data parallelism."""
    if all(strategy.operators[name] == compared.operators[name] for name in names):
        return simulation.makespan_ns
    return evaluator.makespan_ns(_with(strategy, compared, names))


class _Shared:
    """One simulation, by operator: what each holds and for how long, its part of the critical path, its slack."""

    def __init__(self, simulation: Simulation) -> None:
        tasks, schedule = simulation.tasks, simulation.schedule
        count = len(tasks.plan.graph.operators)
        shares = task_shares(tasks)
        self._names = resource_names(tasks)
        self._held: list[dict[tuple[Activity, int], float]] = [{} for _ in range(count)]
        self._path: list[dict[tuple[Activity, int], float]] = [{} for _ in range(count)]
        self._slack_ns = [simulation.makespan_ns] * count
        busy: dict[int, int] = {}
        for task, parts, slack in zip(tasks.tasks, shares, slack_ns(tasks, schedule), strict=True):
            for resource in task.resources:
                busy[resource] = busy.get(resource, 0) + task.held_ns
                _add(self._held, parts, (activity(task), resource), task.held_ns)
            for operator in parts:
                self._slack_ns[operator] = min(self._slack_ns[operator], slack)
        path = critical_path(tasks, schedule)
        for position, part_ns in zip(path, path_parts_ns(schedule, path), strict=True):
            task = tasks.tasks[position]
            if task.resources:  # of the resources that a task holds, the busiest one
                where = max(task.resources, key=lambda resource: busy[resource])
                _add(self._path, shares[position], (activity(task), where), part_ns)

    def costs(self, operators: Sequence[int]) -> Costs:
        """By activity: how long they hold the device or link that they hold longest for it."""
        held = _sums(self._held, operators)
        return {
            kind: round(max((duration for (found, _), duration in held.items() if found is kind), default=0.0)) for kind in Activity
        }

    def binding(self, operators: Sequence[int]) -> Binding:
        """Their part of the critical path, and the least slack of any of their tasks."""
        path = sorted(_sums(self._path, operators).items(), key=lambda entry: (-entry[1], entry[0]))
        found = {(kind, self._names[resource]): round(duration) for (kind, resource), duration in path if round(duration) > 0}
        return Binding(found, min(self._slack_ns[i] for i in operators))


def _add(table: list[dict[tuple[Activity, int], float]], parts: Shares, key: tuple[Activity, int], duration_ns: int) -> None:
    for operator, part in parts.items():
        table[operator][key] = table[operator].get(key, 0.0) + part * duration_ns


def _sums(table: Sequence[Mapping[tuple[Activity, int], float]], operators: Sequence[int]) -> dict[tuple[Activity, int], float]:
    found: dict[tuple[Activity, int], float] = {}
    for i in operators:
        for key, duration in table[i].items():
            found[key] = found.get(key, 0.0) + duration
    return found
