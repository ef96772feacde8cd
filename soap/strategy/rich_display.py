"""What notebooks show of a strategy, as HTML: small tables without scripts, and what other values' tables are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from soap.model.json_text import option_texts, written_options
from soap.strategy.config import WORDED
from soap.strategy.json_file import compact_devices, whole_options

if TYPE_CHECKING:
    from soap.model.graph import OperatorGraph
    from soap.strategy.config import OpConfig, Strategy, SyncConfig

MOST_ROWS = 16
"""Of a table; its last line says how many more there are."""
BAR = '<div style="background:#5b8dbe;height:.8em;min-width:1px;width:{:.1f}em"></div>'
LONGEST_EM = 16.0


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of rows of HTML; at most ``MOST_ROWS`` of them."""
    lines = ["<tr>" + "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in head) + "</tr>"] if any(head) else []
    lines += ["<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>" for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f'<tr><td colspan="{len(rows[0])}">… and {len(rows) - MOST_ROWS:,} more</td></tr>')
    return f"<table>{''.join(lines)}</table>"


def bars(numbers: Sequence[float]) -> list[str]:
    """A bar for each number, as HTML: the largest one is longest."""
    most = max([*numbers, 0.0]) or 1.0
    return [BAR.format(LONGEST_EM * max(0.0, number) / most) for number in numbers]


def strategy_html(strategy: Strategy, graph: OperatorGraph | None = None) -> str:
    """The strategy: equal operators on one line, and parameters not all-reduced. ``graph``: its model's, for names of factors."""
    whole = option_texts(type(strategy), whole_options(strategy))
    title = f"strategy of {len(strategy.operators):,} operators" + "".join(f", {text}" for text in whole)
    split = [(_degrees(name, config, graph), str(_places(config)), name) for name, config in strategy.operators.items()]
    found = f"<b>{escape(title)}</b>" + table(("operators", "split", "devices"), _grouped(split))
    synced = [(_words(sync), "", name) for name, sync in strategy.parameters.items() if sync != type(sync)()]
    return found + (table(("parameters", "synchronized"), [row[:2] for row in _grouped(synced)]) if synced else "")


def _grouped(entries: Iterable[tuple[str, str, str]]) -> list[list[str]]:
    """Lines of (names, first text, second text), of what has equal texts."""
    groups: dict[tuple[str, str], list[str]] = {}
    for first, second, name in entries:
        groups.setdefault((first, second), []).append(name)
    return [[escape(_names(names)), escape(first), escape(second)] for (first, second), names in groups.items()]


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names):,})"


def _degrees(name: str, config: OpConfig, graph: OperatorGraph | None) -> str:
    further = option_texts(type(config), written_options(config), ":")
    if graph is None:
        parts = ["·".join(map(str, config.degrees))] if any(degree > 1 for degree in config.degrees) else []
    else:
        factors = graph.operators[graph.index[name]].factors
        parts = [f"{own.kind.value} {own.name}:{degree}" for own, degree in zip(factors, config.degrees, strict=True) if degree > 1]
    return ", ".join([*parts, *further]) or "whole"


def _places(config: OpConfig) -> str:
    return ",".join(map(str, compact_devices(config.devices)))


def _words(sync: SyncConfig) -> str:
    partitions = [f"{sync.partitions} partitions"] if sync.partitions > 1 else []
    return ", ".join([sync.word, *partitions, *option_texts(type(sync), written_options(sync, WORDED))])
