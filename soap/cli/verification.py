"""``soap-search --verify``: run the best few strategies and data parallelism for real on this machine, and keep what is fastest.

Each is run in several turns, and its quickest turn counts: other users of the machine slow it down for seconds, and only ever add time.
What beats data parallelism by no more than turns of one strategy differ does not replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap import api
from soap.cli import emulation
from soap.cli.command import UsageError
from soap.cli.options import Reading
from soap.cli.tables import aligned, milliseconds
from soap.cli.turns import in_turns, turns_of
from soap.cli.updating import Updating
from soap.emulated_cluster import FAMILY as EMULATED
from soap.emulation.support import require_support
from soap.presets import family
from soap.search.starts import BASELINE
from soap.strategy import Strategy

MOST_STEPS = 9
"""Timed iterations of each strategy; more before each turn's warm up."""
TURNS = 3
TIMED_S = 20.0
"""Fewer are timed, at least one, if the slowest strategy's are predicted to take longer than this."""
LIMIT_S = 600.0
"""The processes are ended after so long."""


def check_possible(cluster: str) -> None:
    """UsageError unless the cluster is this machine; RuntimeFailure if it cannot be emulated."""
    if family(cluster) is None:
        raise UsageError(
            f"--verify runs on this machine, and --cluster is {cluster!r}; expected --cluster local:N or emulated:HxD@RATE, or no --verify"
        )
    if family(cluster) == EMULATED:
        require_support()


def verify(
    outcome: api.SearchOutcome,
    count: int,
    model: str,
    reading: Reading,
    seed: int,
    data: str | None = None,
    optimizer: str | Updating = "adam",
    scale: float = 1.0,
) -> api.SearchOutcome:
    """The outcome with what was measured, whose strategy is the fastest of the ``count`` best ones, the best of those that the search began
    with, and data parallelism. ``optimizer``: usually one with as many states as predictions and memory count. ``data``: as ``soap-run
    --data``. ``scale``: of an emulated cluster, as ``soap-run --emulate-scale``; measured times are the cluster's.

    Data parallelism is measured if it fits into memory, and kept only if it obeys the constraints of the search. RuntimeFailure if a run
    fails or all take longer than ``LIMIT_S``; no process is left behind.
    """
    from soap.cli.run import start
    from soap.cli.training import Job  # these need torch
    from soap.runtime.measure import WARM_UP_STEPS

    simulator = outcome.simulator
    strategies = _strategies(outcome, count)
    simulations = {name: simulator.run(strategy) for name, strategy in strategies.items()}
    slowest_ns = max(simulation.makespan_ns for simulation in simulations.values())
    timed = max(1, min(MOST_STEPS, int(TIMED_S * 1e9 / max(1, slowest_ns))))
    turns = min(TURNS, timed)
    topology = simulator.topology
    emulated = family(topology.name) == EMULATED
    job = Job(
        model=model,
        reading=reading,
        topology=topology,
        strategies=in_turns(strategies, simulations, turns),
        steps=WARM_UP_STEPS + timed // turns,
        seed=seed,
        data=data,
        optimizer=optimizer,
        emulated=emulated,
    )
    done = start(job, emulation.limits(topology, scale) if emulated else (), LIMIT_S)
    assert done is not None  # not under torchrun
    runs = []
    for name, strategy in strategies.items():
        measured_ns, *later_ns = sorted(round(own.median_ns * scale) for own in turns_of(done.measured, name))
        apart_ns = later_ns[0] - measured_ns if later_ns else 0
        allowed = _may_be_kept(outcome, name, strategy)
        runs.append(api.Run(name, strategy, simulations[name].makespan_ns, measured_ns, allowed, apart_ns))
    return outcome.with_runs(runs)


def _strategies(outcome: api.SearchOutcome, count: int) -> dict[str, Strategy]:
    """Name -> strategy, different ones: data parallelism if it fits, the best of the starts, then the best ones."""
    simulator = outcome.simulator
    usual = api.classical(BASELINE, simulator.graph, simulator.topology)
    found = {BASELINE: usual} if simulator.overflow_bytes(usual) == 0 else {}
    best = [finalist.strategy for finalist in outcome.result.finalists[:count]]
    others = [start for start in outcome.result.starts if start.fits and start.strategy not in (usual, *best)]
    for begun in sorted(others, key=lambda start: start.cost_ns)[:1]:
        found[begun.name] = begun.strategy
    return found | {f"found {number}": strategy for number, strategy in enumerate(best, 1) if strategy != usual}


def _may_be_kept(outcome: api.SearchOutcome, name: str, strategy: Strategy) -> bool:
    """Whether a strategy obeys: finalists do, data parallelism perhaps."""
    return name != BASELINE or any(start.strategy == strategy for start in outcome.result.starts)


def document(runs: Sequence[api.Run], kept: api.Run) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    return {
        "kept": kept.name,
        "runs": {
            run.name: {
                "predicted_ns": run.predicted_ns,
                "measured_ns": run.measured_ns,
                "turns_apart_ns": run.apart_ns,
                "allowed": run.allowed,
            }
            for run in runs
        },
    }


def text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    rows: list[tuple[str, ...]] = [("measured on this machine", "predicted", "measured", "measured / predicted")]
    for name, run in found["runs"].items():
        ratio = run["measured_ns"] / max(1, run["predicted_ns"])
        mark = name + ("" if run["allowed"] else " (ruled out by --pin or --forbid)")
        rows.append((mark, milliseconds(run["predicted_ns"]), milliseconds(run["measured_ns"]), f"{ratio:.2f}"))
    kept = found["kept"]
    fastest = min((name for name, run in found["runs"].items() if run["allowed"]), key=lambda name: found["runs"][name]["measured_ns"])
    why = "the fastest measured" if kept == fastest else f"as {fastest} is faster by no more than turns of one strategy differ"
    return f"{aligned(rows)}\n  kept: {kept}, {why}"
