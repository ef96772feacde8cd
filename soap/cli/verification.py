"""``soap-search --verify``: run the best few strategies and data parallelism for real on this machine, and keep what is fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap import api
from soap.cli.command import UsageError
from soap.cli.options import Reading
from soap.cli.tables import aligned, milliseconds
from soap.search.starts import BASELINE
from soap.simulator.reference import execution_order
from soap.strategy import Strategy

MOST_STEPS = 6
"""Timed iterations of each strategy; two more before them warm up."""
TIMED_S = 20.0
"""Fewer are timed, at least one, if the slowest strategy's are predicted to take longer than this."""
LIMIT_S = 600.0
"""The processes are ended after so long."""


def check_possible(cluster: str) -> None:
    """UsageError unless the cluster is this machine."""
    if not cluster.startswith("local:"):
        raise UsageError(f"--verify runs on this machine, and --cluster is {cluster!r}; expected --cluster local:N, or no --verify")


def verify(
    outcome: api.SearchOutcome, count: int, model: str, reading: Reading, seed: int, data: str | None = None
) -> api.SearchOutcome:
    """The outcome with what was measured, whose strategy is the fastest of the ``count`` best ones and data parallelism.

    Data parallelism is measured if it fits into memory, and kept only if it obeys the constraints of the search. RuntimeFailure if a run
    fails or all take longer than ``LIMIT_S``; no process is left behind. ``data``: as ``soap-run --data``.
    """
    from soap.cli.run import require_devices
    from soap.cli.training import Job, train  # these need torch
    from soap.runtime.launch import launch
    from soap.runtime.measure import WARM_UP_STEPS

    simulator = outcome.simulator
    strategies = _strategies(outcome, count)
    simulations = {name: simulator.run(strategy) for name, strategy in strategies.items()}
    slowest_ns = max(simulation.makespan_ns for simulation in simulations.values())
    job = Job(
        model=model,
        reading=reading,
        topology=simulator.topology,
        strategies={
            name: (strategies[name], tuple(execution_order(simulation.tasks, simulation.schedule)))
            for name, simulation in simulations.items()
        },
        steps=WARM_UP_STEPS + max(1, min(MOST_STEPS, int(TIMED_S * 1e9 / max(1, slowest_ns)))),
        seed=seed,
        data=data,
        optimizer="adam",  # as many states as predictions and memory count
    )
    require_devices(job)
    measured = launch(processes=simulator.topology.device_count, entry=train, args=(job,), limit_s=LIMIT_S)[0].measured
    runs = [
        api.Run(name, strategy, simulations[name].makespan_ns, measured[name].median_ns, _may_be_kept(outcome, name, strategy))
        for name, strategy in strategies.items()
    ]
    return outcome.with_runs(runs)


def _strategies(outcome: api.SearchOutcome, count: int) -> dict[str, Strategy]:
    """Name -> strategy, different ones: data parallelism if it fits, then the best ones."""
    simulator = outcome.simulator
    usual = api.classical(BASELINE, simulator.graph, simulator.topology)
    found = {BASELINE: usual} if simulator.overflow_bytes(usual) == 0 else {}
    for number, finalist in enumerate(outcome.result.finalists[:count], 1):
        if finalist.strategy != usual:
            found[f"found {number}"] = finalist.strategy
    return found


def _may_be_kept(outcome: api.SearchOutcome, name: str, strategy: Strategy) -> bool:
    """Whether a strategy obeys: finalists do, data parallelism perhaps."""
    return name != BASELINE or any(start.strategy == strategy for start in outcome.result.starts)


def document(runs: Sequence[api.Run], kept: api.Run) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    return {
        "kept": kept.name,
        "runs": {
            run.name: {"predicted_ns": run.predicted_ns, "measured_ns": run.measured_ns, "allowed": run.allowed} for run in runs
        },
    }


def text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    rows: list[tuple[str, ...]] = [("measured on this machine", "predicted", "measured", "measured / predicted")]
    for name, run in found["runs"].items():
        ratio = run["measured_ns"] / max(1, run["predicted_ns"])
        mark = name + ("" if run["allowed"] else " (ruled out by --pin or --forbid)")
        rows.append((mark, milliseconds(run["predicted_ns"]), milliseconds(run["measured_ns"]), f"{ratio:.2f}"))
    return aligned(rows) + f"\n  kept: {found['kept']}, the fastest measured"
