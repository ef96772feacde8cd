"""What a report may show. Whatever is not known is None or empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soap.api.what_if import Elsewhere
from soap.model.graph import OperatorGraph
from soap.search.record import SearchResult
from soap.simulator.analysis.comparison import Comparison
from soap.simulator.analysis.timeline_file import Timeline
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class Alternative:
    """Another plan for the same model and cluster. ``unlike``: how many of ``of`` operators and parameters it configures otherwise."""

    name: str
    time_ns: int
    overflow_bytes: int
    unlike: int
    of: int


@dataclass(frozen=True)
class Contents:
    """What one report shows.

    ``title``: of the plan, such as the strategy's file name. ``summary``: what the commands print with ``--json`` of a simulated strategy.
    ``graph``, ``strategy``, ``simulation``: the plan and its predicted iteration. ``result``: of the search that found it.
    ``start_times``: by name, the predicted times of what it began with. ``alternatives``: other plans, the fastest first.
    ``elsewhere``: this plan on other clusters; ``not_elsewhere``: why it was not tried there.
    ``predicted``, ``measured``: timelines as read from files, the first one where there is no ``simulation``; ``comparison``: of these.
    ``tuning``: what ``soap-tune --json`` prints; ``preprocessing``: what ``soap-preprocess --json`` prints, with ``steps``.
    """

    title: str
    summary: Mapping[str, Any] | None = None
    graph: OperatorGraph | None = None
    strategy: Strategy | None = None
    simulation: Simulation | FoldedSimulation | None = None
    result: SearchResult | None = None
    start_times: Mapping[str, int] = field(default_factory=dict)
    alternatives: Sequence[Alternative] = ()
    elsewhere: Sequence[Elsewhere] = ()
    not_elsewhere: str = ""
    predicted: Timeline | None = None
    measured: Timeline | None = None
    comparison: Comparison | None = None
    tuning: Mapping[str, Any] | None = None
    preprocessing: Mapping[str, Any] | None = None
