"""The seam between sections and the page: a section says what it lacks, and gives blocks; the page puts them into HTML.

All text is plain: the page escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from soap.api.what_if import Elsewhere
from soap.model.graph import OperatorGraph
from soap.search.record import SearchResult
from soap.simulator.analysis.comparison import Comparison
from soap.simulator.analysis.timeline_file import Timeline
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM


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


@dataclass(frozen=True)
class Text:
    """A paragraph. ``leading``: what is to be read first."""

    text: str
    leading: bool = False
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column is text, the others are numbers unless ``words``."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Figure:
    """A picture. ``title`` says what one sees, ``about`` how to read it."""

    title: str
    model: LayoutDOM
    about: str = ""
    kind: str = "figure"


@dataclass(frozen=True)
class Choice:
    """Pictures of which the reader chooses one; the first is shown. ``options``: (name, picture)."""

    label: str
    options: Sequence[tuple[str, Figure]]
    kind: str = "choice"


Block: TypeAlias = Text | Table | Figure | Choice


@dataclass(frozen=True)
class Section:
    """One tab. ``lacks``: why it cannot be drawn, in one line; "" if it can. ``blocks``: what it shows; called only if it lacks nothing."""

    key: str
    title: str
    lacks: Callable[[Contents], str]
    blocks: Callable[[Contents], Sequence[Block]]


def without(field: str, why: str) -> Callable[[Contents], str]:
    """A ``Section.lacks``: ``why`` where contents have no such field."""
    return lambda contents: why if getattr(contents, field) is None else ""
