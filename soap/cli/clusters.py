"""``soap-search`` for several clusters: each is searched, and the best one's strategy is kept ("which machine shall I rent?")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soap import api
from soap.cli import certainty, figures
from soap.cli.command import UsageError
from soap.cli.plain_text import left_last, milliseconds
from soap.cluster.topology import Topology
from soap.errors import InfeasibleError, SoapError, TopologyError

TIME, COST = "time", "cost"
OBJECTIVES = (TIME, COST)
NOT_SEARCHED = "not searched"


@dataclass(frozen=True)
class Candidate:
    """A cluster, as the user named it, and what was found for it. ``problem``: why there is no outcome, in one line."""

    spec: str
    topology: Topology
    outcome: api.SearchOutcome | None = None
    problem: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the search has come to its end."""
        return not self.outcome.result.interrupted if self.outcome is not None else self.problem != NOT_SEARCHED

    def value(self, objective: str) -> float:
        """What is compared: nanoseconds or money per iteration. There must be an outcome."""
        assert self.outcome is not None
        each = self.outcome.throughput.cost_per_step
        return float(self.outcome.time_ns) if objective == TIME or each is None else each


def check_priced(objective: str, clusters: Mapping[str, Topology]) -> None:
    """TopologyError if the objective is cost and a cluster has no price, or prices are in several currencies."""
    if objective != COST:
        return
    prices = {spec: topology.price for spec, topology in clusters.items()}
    unpriced = next((spec for spec, price in prices.items() if price is None), None)
    if unpriced is not None:
        raise TopologyError(
            f"--objective cost: cluster {unpriced!r} has no price; expected price_per_hour in its file (of a preset: "
            f"a file with 'preset: NAME' and 'price_per_hour: 2.5')"
        )
    currencies = sorted({price.currency for price in prices.values() if price is not None})
    if len(currencies) > 1:
        shown = ", ".join(currency or "none" for currency in currencies)
        raise TopologyError(f"--objective cost: prices in several currencies ({shown}); expected the same currency in all cluster files")


def check_different(specs: Sequence[str]) -> None:
    """UsageError if a cluster is given twice."""
    twice = next((spec for number, spec in enumerate(specs) if spec in specs[:number]), None)
    if twice is not None:
        raise UsageError(f"--cluster {twice} is given twice; expected different clusters")


def search_each(
    clusters: Mapping[str, Topology], find: Callable[[Topology], api.SearchOutcome], stopped: Callable[[], bool]
) -> list[Candidate]:
    """Search for each cluster in turn. Ctrl-C or SIGTERM ends the search that is under way, with its best so far; clusters behind it are
    not searched. KeyboardInterrupt if nothing is known then; InfeasibleError if the model fits on none of the clusters."""
    outcomes: dict[str, api.SearchOutcome] = {}
    problems: dict[str, str] = {}
    try:
        for spec, topology in clusters.items():
            try:
                outcomes[spec] = find(topology)
            except InfeasibleError as error:
                if not stopped():  # a search that was ended may not have come to what fits
                    problems[spec] = str(error)
            except SoapError as error:
                error.args = (f"cluster {spec!r}: {error}", *error.args[1:])
                raise
            if stopped():
                break
    except KeyboardInterrupt:
        if not outcomes:
            raise
    if not outcomes:
        if len(problems) < len(clusters):
            raise KeyboardInterrupt
        raise InfeasibleError("; ".join(f"cluster {spec!r}: {problem}" for spec, problem in problems.items()))
    return [
        Candidate(spec, topology, outcomes.get(spec), "" if spec in outcomes else problems.get(spec, NOT_SEARCHED))
        for spec, topology in clusters.items()
    ]


def best_of(candidates: Sequence[Candidate], objective: str) -> Candidate:
    """The best one by the objective; the first of equally good ones."""
    return min((one for one in candidates if one.outcome is not None), key=lambda one: one.value(objective))


def document(candidates: Sequence[Candidate], objective: str, report: Callable[[api.SearchOutcome], dict[str, Any]]) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface. ``report``: the document of one search."""
    return {
        "objective": objective,
        "chosen": best_of(candidates, objective).spec,
        "clusters": [
            {"cluster_given": one.spec, "fits": True, **report(one.outcome)}
            if one.outcome is not None
            else {"cluster_given": one.spec, "fits": None if one.problem == NOT_SEARCHED else False, "problem": one.problem}
            for one in candidates
        ],
    }


def text(candidates: Sequence[Candidate], objective: str) -> str:
    """A table of the clusters, and which one is chosen."""
    rows: list[tuple[str, ...]] = [("cluster", "predicted", "80% of draws", "MFU", "samples/s", "cost per million samples", "")]
    chosen = best_of(candidates, objective)
    for one in candidates:
        if one.outcome is None:
            rows.append((one.spec, "-", "-", "-", "-", "-", one.problem if one.problem == NOT_SEARCHED else "nothing fits into memory"))
            continue
        own = figures.document(one.outcome.throughput)
        rate, cost = own["samples_per_second"], own["cost_per_million_samples"]
        unknown = "no price" if one.topology.price is None else "-"
        rows.append(
            (
                one.spec,
                milliseconds(one.outcome.time_ns),
                certainty.between(one.outcome.range),
                figures.share(own["mfu"]),
                "-" if rate is None else figures.rate(rate),
                unknown if cost is None else figures.cost(cost, own["currency"]),
                _note(one, chosen),
            )
        )
    word = "fastest" if objective == TIME else "cheapest"
    return f"{left_last(rows)}\n\n{word}: {chosen.spec}; of its strategy:"


def _note(one: Candidate, chosen: Candidate) -> str:
    assert one.outcome is not None
    interrupted = f"interrupted after {one.outcome.result.evaluations} evaluations" if one.outcome.result.interrupted else ""
    return ", ".join(note for note in ("chosen" if one is chosen else "", interrupted) if note)
