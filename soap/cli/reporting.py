"""``--report FILE`` of the commands: what each of them knows, put together for ``soap.report``.

That package is imported when a report is asked for: others need none of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soap import api, outputs
from soap.api.baselines import takes_long, usual_strategies
from soap.api.deciding import unlike
from soap.api.predictions import quick_evaluator
from soap.cli.command import Parser
from soap.cli.inputs import simulator_of
from soap.cluster.presets import presets_like
from soap.cluster.topology import Topology
from soap.search.metropolis import Evaluator
from soap.simulator.analysis.comparison import Comparison, compare
from soap.simulator.analysis.timeline_file import Timeline, loads
from soap.simulator.costs import CostSource
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator, tile_count
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    from soap.cli.training import Job
    from soap.report import Alternative, Contents

MOST_ELSEWHERE = 6
"""Presets on which a plan is tried unasked."""
MOST_FOUND = 3
"""At most so many of the next best plans, which differ little from each other."""
MOST_TILES_ELSEWHERE = 2**11
"""A plan of more tiles is not tried on other clusters unasked: each would take seconds."""


def add_report(parser: Parser, what: str) -> None:
    """``--report FILE``. ``what``: what it shows."""
    parser.add_output("--report", kind=outputs.PAGE, help=f"write a page to look at (HTML): {what}; needs bokeh")


def check(path: str | None) -> None:
    """SoapError now if the report could not be drawn later."""
    if path:
        from soap.report import require

        require()


def titled(name: str, simulator: Simulator) -> str:
    """``strategy.json: zoo:gpt:tiny@8 on p100-4x4``."""
    return f"{Path(name).name}: {simulator.graph.name} on {simulator.topology.name}"


def plan_contents(
    title: str,
    simulator: Simulator,
    strategy: Strategy,
    simulation: Simulation | FoldedSimulation,
    summary: Mapping[str, Any] | None = None,
    *,
    on: Sequence[str] | None = None,
    costs: CostSource = "auto",
    **more: Any,
) -> Contents:
    """A simulated plan. ``summary``: ``plan_summary.document``, if it is there already. ``on``: other clusters to try it on; None: presets
    like its own, if the plan is small. ``costs``: where those of these come from. ``more``: further fields of ``Contents``."""
    from soap.cli import plan_summary
    from soap.report import Contents

    names, why = _elsewhere(simulator.topology, strategy) if on is None else (tuple(on), "")
    return Contents(
        title=title,
        summary=plan_summary.document(simulator, strategy, simulation) if summary is None else summary,
        graph=simulator.graph,
        strategy=strategy,
        simulation=simulation,
        elsewhere=api.elsewhere(simulator, strategy, names, costs=costs),
        not_elsewhere=why,
        **more,
    )


def _elsewhere(topology: Topology, strategy: Strategy) -> tuple[tuple[str, ...], str]:
    """Presets on which the plan is tried, or why on none."""
    if tile_count(strategy) > MOST_TILES_ELSEWHERE:
        return (), "The plan is too large to be tried on other clusters unasked; soap-report --on NAME does so."
    names = presets_like(topology)
    return names[:MOST_ELSEWHERE], "" if names else "No other preset has as many devices; soap-report --on FILE tries a cluster of yours."


def write_search(
    path: str, output: str, outcome: api.SearchOutcome, summary: Mapping[str, Any], costs: CostSource = "auto"
) -> None:
    """Contents of a search's page: its plan, and how it was found. ``costs``: as the search was told."""
    from soap.report import write

    simulator = outcome.simulator
    on: Sequence[str] | None = () if outcome.result.interrupted else None
    quick = quick_evaluator(simulator)
    times = {start.name: quick.makespan_ns(start.strategy) for start in outcome.result.starts}
    others = _alternatives(outcome, quick)
    found: dict[str, Any] = {"result": outcome.result, "start_times": times, "alternatives": others, "costs": costs}
    write(path, plan_contents(titled(output, simulator), simulator, outcome.strategy, outcome.simulation, summary, on=on, **found))


def _alternatives(outcome: api.SearchOutcome, evaluator: Evaluator) -> list[Alternative]:
    """The other one of the fastest and the safe plan, the next best that were found, and what people would use; each plan once."""
    from soap.report import Alternative

    named: dict[str, Strategy] = {} if outcome.other is None else {outcome.decision.other_answer: outcome.other.strategy}
    named |= dict(list(api.finalists_by_name(outcome.result).items())[:MOST_FOUND])
    named |= {name: own for name, own in usual_strategies(outcome.simulator).items() if not takes_long(outcome.simulator, own)}
    found, known = list[Alternative](), [outcome.strategy]
    of = len(outcome.simulator.graph.operators) + len(outcome.simulator.graph.parameters)
    for name, strategy in named.items():
        if strategy in known:
            continue
        known.append(strategy)
        time_ns, overflow_bytes = evaluator.makespan_ns(strategy), evaluator.overflow_bytes(strategy)
        found.append(Alternative(name, time_ns, overflow_bytes, len(unlike(strategy, outcome.strategy)), of))
    return sorted(found, key=lambda one: one.time_ns)


def write_run(path: str, args: argparse.Namespace, job: Job, simulation: Simulation, timelines: str) -> None:
    """A plan that was trained by. ``timelines``: the text of ``timelines.measured_text``."""
    from soap.report import write

    strategy, _ = job.strategies[job.main]
    simulator = simulator_of(job, simulation, args.costs)
    predicted, measured = loads(timelines)
    more: dict[str, Any] = {"measured": measured, "comparison": compare(predicted, measured)}
    write(path, plan_contents(titled(args.strategy, simulator), simulator, strategy, simulation, on=(), **more))


def write_comparison(path: str, comparison: Comparison, predicted: Timeline, measured: Timeline) -> None:
    """Two timelines."""
    from soap.report import Contents, write

    title = f"{measured.description.model} on {measured.description.cluster}: predicted and measured"
    write(path, Contents(title, predicted=predicted, measured=measured, comparison=comparison))


def write_side_by_side(path: str, simulator: Simulator, plans: Mapping[str, tuple[Strategy, Simulation | FoldedSimulation]]) -> None:
    """Plans by the name of their file."""
    from soap.report import write

    write(path, *(plan_contents(titled(name, simulator), simulator, *own, on=()) for name, own in plans.items()))


def write_tuning(
    path: str, output: str, simulator: Simulator, strategy: Strategy, simulation: Simulation, tuning: Mapping[str, Any]
) -> None:
    """A tuned plan."""
    from soap.report import write

    write(path, plan_contents(titled(output, simulator), simulator, strategy, simulation, on=(), tuning=tuning))


def write_preprocessing(path: str, found: Mapping[str, Any]) -> None:
    """What was preprocessed."""
    from soap.report import Contents, write

    write(path, Contents(f"Preprocessing into {Path(found['output']).name}", preprocessing=found))
