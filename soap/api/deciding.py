"""Plans under draws of the costs: how sure predictions are, and which of the plans that a search found is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap.profiles.spreads import KnownSpreads, known_spreads
from soap.search.deciding import DECIDING_DRAWS, RANGE, Decision, Timed, decide
from soap.search.record import SearchResult
from soap.simulator.drawn_times import drawn_times
from soap.simulator.draws import Draws, Error, Risk, drawn_ns
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

SEARCH_SEED = "search"
DECIDING_SEED = "deciding"
"""Seeds of the draws that a search compares plans by, and of those by which it is decided: others, so that luck does not count."""


def draws_for(simulator: Simulator, count: int, risk: Risk = Risk.MEAN, seed: str = SEARCH_SEED) -> Draws:
    """Draws of the costs and links of a simulator."""
    return Draws(known_spreads_of(simulator), count, seed, risk)


def timed(
    simulator: Simulator,
    plans: Mapping[str, Strategy],
    usual: Strategy,
    draws: int = DECIDING_DRAWS,
    *,
    reference: Strategy | None = None,
    compiled: bool = True,
    whole: bool = True,
) -> list[Timed]:
    """Plans by name with their times under draws of the costs, the same for all. ``usual``: data parallelism. ``reference``: the plan that
    others must beat, if it is another one. ``compiled``: see ``drawn_times``. ``whole``: with what a step takes beside its tasks."""
    found = drawn_times(simulator, plans.values(), drawn := draws_for(simulator, draws, seed=DECIDING_SEED), compiled=compiled)
    of_step = known_spreads_of(simulator).of_step() if whole else ()
    timed_plans = []
    for (name, strategy), times in zip(plans.items(), found, strict=True):
        factors = drawn.factors((*plan_errors(simulator, strategy, usual), *of_step)).tolist()
        own_ns = tuple(drawn_ns(ns, factor) for ns, factor in zip(times.times_ns, factors, strict=True))
        differing = len(unlike(strategy, reference or usual))
        timed_plans.append(Timed(name, strategy, times.usual_ns, own_ns, differing, times.messages))
    return timed_plans


def plan_errors(simulator: Simulator, strategy: Strategy, usual: Strategy) -> tuple[Error, ...]:
    """The errors of a plan beside those of its costs. ``usual``: data parallelism."""
    whole = len(simulator.graph.operators) + len(simulator.graph.parameters)
    return known_spreads_of(simulator).of_plan(unlike(strategy, usual), whole)


def known_spreads_of(simulator: Simulator) -> KnownSpreads:
    """How far the costs and links of a simulator may be off."""
    return KnownSpreads(simulator.costs, simulator.topology)


def decision(
    simulator: Simulator, result: SearchResult, usual: Strategy, *, possible: bool, confidence: float, draws: int = DECIDING_DRAWS
) -> Decision:
    """The fastest and the safe plan of a search. ``usual``: data parallelism, ``possible``: whether it may be kept. If not, the best start
    that is allowed is what a plan must beat."""
    named, to_beat = _plans(result, usual, possible=possible)
    plans = timed(simulator, named, usual, draws, reference=to_beat)
    return decide(plans, next((plan for plan in plans if plan.strategy == to_beat), None), confidence)


def decision_by_costs(result: SearchResult, usual: Strategy, *, possible: bool, confidence: float) -> Decision:
    """``decision`` where no time is left to simulate anything: by what the search compared plans by, as if these were their times in the
    only draw."""
    named, to_beat = _plans(result, usual, possible=possible)
    costs = [(start.strategy, start.cost_ns) for start in (*result.starts, *result.finalists)]
    plans = []
    for name, strategy in named.items():
        cost_ns = next(cost_ns for known, cost_ns in costs if known == strategy)
        plans.append(Timed(name, strategy, cost_ns, (cost_ns,), len(unlike(strategy, to_beat or usual))))
    return decide(plans, next((plan for plan in plans if plan.strategy == to_beat), None), confidence)


def _plans(result: SearchResult, usual: Strategy, *, possible: bool) -> tuple[dict[str, Strategy], Strategy | None]:
    """The plans to decide among, by name, and which of them the others must beat, if any."""
    starts = sorted((start for start in result.starts if start.fits), key=lambda start: start.cost_ns)
    named = {start.name: start.strategy for start in starts[:1]}
    if possible:
        named |= {next((start.name for start in starts if start.strategy == usual), "data_parallel"): usual}
    known = list(named.values())
    named |= {name: strategy for name, strategy in finalists_by_name(result).items() if strategy not in known}
    return named, usual if possible else starts[0].strategy if starts else None


def finalists_by_name(result: SearchResult) -> dict[str, Strategy]:
    """The best few plans of a search, ``found 1`` first, by what it compared them by."""
    return {f"found {number}": finalist.strategy for number, finalist in enumerate(result.finalists, 1)}


def decision_record(found: Decision) -> dict[str, Any]:
    """The fastest and the safe plan, as plain values. ``answer``: which of both was kept. ``plans``: these two by name, with their times
    under the most likely costs, on average over the draws and between which 80% of these are, ``wins``, the share of ``draws`` in which
    each beats the reference (at least ``confidence`` of a safe one that replaces it), and ``gain``, between which factors it beats it
    (``RANGE``); both None if there is no reference."""
    return {
        "answer": found.answer,
        "kept": found.kept.name,
        "fastest": found.fastest.name,
        "safe": found.safe.name,
        "reference": None if found.reference is None else found.reference.name,
        "plans": {plan.name: _beside(plan, found.reference) for plan in (found.fastest, found.safe)},
        "confidence": found.confidence,
        "draws": found.draws,
    }


def _beside(plan: Timed, reference: Timed | None) -> dict[str, Any]:
    own = {"predicted_ns": plan.usual_ns, "mean_ns": round(plan.mean_ns), "time_ns": plan.quantiles_ns(), "wins": None, "gain": None}
    if reference is None:
        return own
    gain = [round(float(own), 4) for own in _quantiles(plan.gains(reference))]
    return {**own, "wins": round(plan.wins(reference), 4), "gain": gain}


def range_record(plan: Timed, usual: Timed, step_factor: float) -> dict[str, Any]:
    """How sure a prediction is, as plain values: the times that 10, 50 and 90% of the draws are below, the gain over data parallelism in
    the same way, and the share of the draws in which the plan beats it. ``step_factor``: how many times as long as its tasks say a step
    is expected to take; the times have it, the simulated ones (``predicted_ns``) have not."""
    shares = (RANGE[0], 0.5, RANGE[1])
    return {
        "shares": list(shares),
        "time_ns": plan.quantiles_ns(shares),
        "speedup": [round(float(own), 4) for own in _quantiles(plan.gains(usual), shares)],
        "wins": round(plan.wins(usual), 4),
        "draws": len(plan.times_ns),
        "step_factor": round(step_factor, 4),
    }


def memory_range(expected_bytes: int) -> list[int]:
    """What a device that is expected to need so many bytes at its peak uses in truth, between the 10 and 90% quantiles."""
    return [round(expected_bytes * share) for share in known_spreads()["memory"]["quantiles"]]


def _quantiles(values: Any, shares: Sequence[float] = RANGE) -> Any:
    import numpy as np

    return np.quantile(values, shares)


def unlike(strategy: Strategy, other: Strategy) -> list[tuple[str, ...]]:
    """The operators and parameters that are configured unlike another strategy's, with how."""
    operators = [(name, repr(config)) for name, config in strategy.operators.items() if config != other.operators[name]]
    parameters = sorted({*strategy.parameters, *other.parameters})
    syncs = [(name, repr(strategy.sync(name))) for name in parameters if strategy.sync(name) != other.sync(name)]
    return [*(("operator", *one) for one in operators), *(("parameter", *one) for one in syncs)]
