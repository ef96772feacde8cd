"""``soap-search --verify``: runs the best few strategies and data parallelism for real on this machine, and keeps the fastest.

All take turns. The fastest then meets data parallelism in further turns, which alone decide: it replaces data parallelism if the
interval in which its gain lies (``soap.measure.paired``) is above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from soap import api
from soap.cli import emulation, wanted
from soap.cli.command import UsageError
from soap.cli.options import Reading
from soap.cli.plain_text import aligned, milliseconds
from soap.cli.updating import Updating
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.presets import family
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure
from soap.measure.paired import CONFIDENCE, gain
from soap.search.starts import BASELINE
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulation
from soap.strategy.config import Strategy

DEFAULT_FINALISTS = 3
DEFAULT_S = 60.0
"""Seconds for all of it, if the user has not asked for it."""
ASKED_S = 180.0
"""Seconds if the user has asked for it."""
STARTING_S = 15.0
"""Seconds of that for starting and ending the ranks."""
LEAST_STEPS = 20
"""Steps of each of two strategies that a comparison takes: making trainers ready, a round, and enough further turns of both to decide."""
LATE = 3.0
"""The processes are ended after so many times the seconds."""


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
    seconds: float = ASKED_S,
    only_chances: bool = False,
) -> api.SearchOutcome:
    """Run the ``count`` best strategies, the best start, and data parallelism. Returns the outcome with what was measured, or the
    outcome as it is if there is nothing but data parallelism.

    ``optimizer``: usually one with as many states as predictions and memory count. ``data``: as for ``soap-run --data``. ``scale``: of
    an emulated cluster, as for ``soap-run --emulate-scale``; measured times are the cluster's. ``seconds``: for all of it; if they are
    not enough, the last of the strategies are left out.

    Data parallelism is measured if it fits into memory, and kept only if it obeys the constraints of the search. RuntimeFailure if this
    machine has not enough memory, a run fails, or all take far longer; no process is left behind.
    """
    from soap.cli.run import on_ranks
    from soap.cli.training import Job  # imported here: these need torch
    from soap.cli.trials import Trial, run_trial

    simulator = outcome.simulator
    topology = simulator.topology
    strategies = _strategies(outcome, count, only_chances)
    if list(strategies) == [BASELINE]:
        return outcome
    simulations = {name: simulator.run(strategy) for name, strategy in strategies.items()}
    tried = wanted.together(simulator.graph, topology, simulations)
    least_s = LEAST_STEPS * sum(simulations[name].makespan_ns for name in tried[:2]) / 1e9 / scale
    if least_s > seconds:
        raise RuntimeFailure(
            f"comparing two strategies is predicted to take {least_s:.0f} s, but the limit is {seconds:.0f}; try a smaller batch"
        )
    emulated = family(topology.name) == EMULATED
    job = Job(
        model=model,
        reading=reading,
        topology=topology,
        strategies={name: (strategies[name], execution_order(simulations[name].tasks, simulations[name].schedule)) for name in tried},
        steps=1,
        seed=seed,
        data=data,
        optimizer=optimizer,
        emulated=emulated,
    )
    job = replace(job, optimizer=job.updating.timed())
    to_beat = tried[0] == BASELINE and _may_be_kept(outcome, BASELINE, strategies[BASELINE])
    trial = Trial(job, to_beat, max(1.0, seconds - STARTING_S))
    times = on_ranks(job, emulation.limits(topology, scale) if emulated else (), run_trial, trial, LATE * seconds)
    assert times is not None  # None only under torchrun
    return outcome.with_runs(_runs(outcome, strategies, simulations, times.rounds, times.duels, scale))


def _runs(
    outcome: api.SearchOutcome,
    strategies: Mapping[str, Strategy],
    simulations: Mapping[str, Simulation],
    rounds: Mapping[str, Sequence[int]],
    duels: Mapping[str, Sequence[int]],
    scale: float,
) -> list[api.Run]:
    """What was tried, in the order of the strategies."""
    runs = []
    for name, own in rounds.items():
        confirmed = gain(duels[BASELINE], duels[name]) if name in duels and name != BASELINE else None
        measured_ns = round(median(own) * scale)
        allowed = _may_be_kept(outcome, name, strategies[name])
        runs.append(api.Run(name, strategies[name], simulations[name].makespan_ns, measured_ns, allowed, confirmed))
    return runs


def _strategies(outcome: api.SearchOutcome, count: int, only_chances: bool) -> dict[str, Strategy]:
    """Name -> strategy, all different: data parallelism if it fits, the best one, the best of the starts, then the other best ones."""
    simulator = outcome.simulator
    usual = simulator.data_parallel
    found = {BASELINE: usual} if simulator.overflow_bytes(usual) == 0 else {}

    def tried(strategy: Strategy) -> bool:
        return not only_chances or outcome.may_win(strategy)

    named = list(api.finalists_by_name(outcome.result).items())[:count]
    finalists = {name: strategy for name, strategy in named if strategy != usual and tried(strategy)}
    best = (usual, *finalists.values())
    others = [start for start in outcome.result.starts if start.fits and start.strategy not in best]
    first = min(others, key=lambda start: start.cost_ns, default=None)
    begun = {first.name: first.strategy} if first is not None and tried(first.strategy) else {}
    return found | dict(list(finalists.items())[:1]) | begun | finalists


def _may_be_kept(outcome: api.SearchOutcome, name: str, strategy: Strategy) -> bool:
    """Whether a strategy obeys the constraints. Finalists do; data parallelism may not."""
    return name != BASELINE or any(start.strategy == strategy for start in outcome.result.starts)


def document(runs: Sequence[api.Run], kept: api.Run, seconds: float) -> dict[str, Any]:
    """Plain JSON values. ``gain``: over data parallelism, of what was compared with it alone; ``needed``: what ``at_least`` must exceed."""
    return {
        "kept": kept.name,
        "seconds": round(seconds, 1),
        "runs": {
            run.name: {
                "predicted_ns": run.predicted_ns,
                "measured_ns": run.measured_ns,
                "allowed": run.allowed,
                "gain": _gain(run, runs),
            }
            for run in runs
        },
    }


def _gain(run: api.Run, runs: Sequence[api.Run]) -> dict[str, Any] | None:
    if run.gain is None:
        return None
    needed = next(api.least_measured(run, usual) for usual in runs if usual.name == BASELINE)
    return {"ratio": run.gain.ratio, "at_least": run.gain.at_least, "needed": needed, "rounds": run.gain.rounds}


def text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    rows: list[tuple[str, ...]] = [("measured on this machine", "predicted", "measured", "measured / predicted")]
    for name, run in found["runs"].items():
        ratio = run["measured_ns"] / max(1, run["predicted_ns"])
        mark = name + ("" if run["allowed"] else " (ruled out by --pin or --forbid)")
        rows.append((mark, milliseconds(run["predicted_ns"]), milliseconds(run["measured_ns"]), f"{ratio:.2f}"))
    return f"{aligned(rows)}\n  kept: {found['kept']}, {why(found)}\n  verifying took {found['seconds']:.0f} s"


def why(found: Mapping[str, Any]) -> str:
    """Why a plan is kept, of a ``document``."""
    compared = next(((name, run["gain"]) for name, run in found["runs"].items() if run["gain"] is not None), None)
    if compared is None:
        allowed = {name: run["measured_ns"] for name, run in found["runs"].items() if run["allowed"]}
        fastest = min(allowed, key=lambda name: allowed[name])
        return "the fastest measured" if fastest == found["kept"] else f"because no time was left to compare {fastest} with it"
    name, own = compared
    turns = f"{own['ratio']:.2f}x {BASELINE} in {own['rounds']} turns of both"
    if found["kept"] == name:
        return f"{turns}, at least {own['at_least']:.2f}x with {CONFIDENCE:.0%} confidence"
    if own["at_least"] == 0:
        return f"because {name} is {turns}, too few to tell"
    needed = f"{own['needed']:.2f}x" + (", by which it is predicted to lose" if own["needed"] > api.LEAST_MEASURED else "")
    return f"because {name} is {turns}, but may be only {own['at_least']:.2f}x, which is not above {needed}"
