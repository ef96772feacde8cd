"""The operators, repeated layers folded into one row: who reads whom, and which device computes which part of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from soap.model.graph import FactorKind, Operator, OperatorGraph
from soap.report.figures import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, height_of, legend_above, mixed, name_rows, new_figure, plain
from soap.report.section import Block, Contents, Figure, Section, Text
from soap.search.explanation import configured_alike
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.diff import pattern_of
from soap.strategy.marks import MARKS, mark_of
from soap.units import format_count

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

MOST_ROWS = 120
LABELLED_DEVICES = 16
"""Up to so many devices there is room for words in a cell."""
PALEST = 0.62
"""Share of white in the colour of an operator's first tile; the last one has none."""
ARCS = 1.5
"""Width of the arcs beside the cells, in cells of a grid of eight devices."""

WHOLE, SEVERAL = "whole (or copies)", "several kinds"
SPLITS = {
    FactorKind.SAMPLE.value: BLUE,
    FactorKind.ATTRIBUTE.value: GREEN,
    FactorKind.PARAMETER.value: ORANGE,
    FactorKind.REDUCTION.value: RED,
    SEVERAL: PINK,
    WHOLE: GREY,
}


@dataclass(frozen=True)
class Cell:
    """One device's part of a row. ``tile``: its part of each factor that is split, for people; ``short``: the same in a few characters."""

    row: int
    device: int
    colour: str
    tile: str
    short: str


@dataclass(frozen=True)
class Row:
    """Operators that are configured alike: positions in the graph, and what the row is called."""

    members: tuple[int, ...]
    name: str


def _lacks(contents: Contents) -> str:
    return "" if contents.graph is not None and contents.strategy is not None else "no strategy for a model was given"


def _blocks(contents: Contents) -> Sequence[Block]:
    graph, strategy = contents.graph, contents.strategy
    assert graph is not None and strategy is not None
    rows, left_out = rows_of(graph, strategy)
    about = (
        "One row for each operator, or for repeated layers that are configured alike, in the order of the model; b/4 says that factor b is "
        "cut into four. A cell is the part that a device computes; cells of one shade compute the same part. Arcs at the left lead from "
        "the row that makes a value to the row that reads it, and are left out between neighbours."
    )
    title = f"{len(graph.operators)} operators in {len(rows)} rows: how each is split, and over which devices"
    found: list[Block] = [Figure(title, _grid(graph, strategy, rows), about)]
    if left_out:
        found.append(Text(f"{left_out} rows with the least arithmetic are left out; the strategy file has all operators."))
    return found


def rows_of(graph: OperatorGraph, strategy: Strategy) -> tuple[list[Row], int]:
    """The rows, in the order of the graph, and how many were left out: those with the least arithmetic beyond ``MOST_ROWS``."""
    groups = configured_alike(graph, strategy)
    work = {own: sum(graph.operators[i].flops for i in own) for own in groups}
    kept = set(sorted(groups, key=lambda own: (-work[own], own))[:MOST_ROWS])
    rows = [Row(own, name_of([graph.operators[i].name for i in own])) for own in groups if own in kept]
    return rows, len(groups) - len(rows)


def name_of(names: Sequence[str]) -> str:
    """An operator's name, or that of repeated layers: ``blocks.*.up (12 layers)``."""
    return names[0] if len(names) == 1 else f"{pattern_of(names)} ({len(names)} layers)"


def kind_of(op: Operator, config: OpConfig) -> str:
    """What an operator is split along, a key of ``SPLITS``."""
    kinds = {factor.kind.value for factor, degree in zip(op.factors, config.degrees, strict=True) if degree > 1}
    return WHOLE if not kinds else kinds.pop() if len(kinds) == 1 else SEVERAL


def split_of(op: Operator, config: OpConfig) -> str:
    """``b/4 n/2``: into how many parts each factor is cut."""
    return " ".join(f"{factor.name}/{degree}" for factor, degree in zip(op.factors, config.degrees, strict=True) if degree > 1)


def cells_of(op: Operator, config: OpConfig, row: int) -> list[Cell]:
    """A cell for each device that computes some of the operator."""
    places = list(product(*(range(degree) for degree in config.degrees)))
    colour, by_device = SPLITS[kind_of(op, config)], dict[int, list[int]]()
    for number, device in enumerate(config.devices):
        by_device.setdefault(device, []).append(number % len(places))
    found = []
    for device, tiles in by_device.items():
        names = [_tile(op, config, places[tile]) for tile in tiles[:3]] + ([f"and {len(tiles) - 3} more"] if len(tiles) > 3 else [])
        white = PALEST * (1 - (tiles[0] + 1) / len(places))
        numbers = [str(part + 1) for part, degree in zip(places[tiles[0]], config.degrees, strict=True) if degree > 1]
        short = ("·".join(numbers) or "all") + ("…" if len(tiles) > 1 else "")
        found.append(Cell(row, device, mixed(colour, white), ", ".join(names), short))
    return found


def _tile(op: Operator, config: OpConfig, place: Sequence[int]) -> str:
    """``b 2/8``: the second of eight parts along factor b."""
    named = zip(op.factors, config.degrees, place, strict=True)
    return " ".join(f"{factor.name} {part + 1}/{degree}" for factor, degree, part in named if degree > 1) or "all"


def edges_of(graph: OperatorGraph, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(row that makes a value, row that reads it), but of neighbours and of one row; repeated layers have each pair once."""
    row_of = {member: number for number, row in enumerate(rows) for member in row.members}
    makers = {operand.tensor: i for i, op in enumerate(graph.operators) for operand in op.outputs}
    pairs = {
        (row_of[makers[operand.tensor]], row_of[i])
        for i, op in enumerate(graph.operators)
        for operand in op.inputs
        if i in row_of and makers.get(operand.tensor) in row_of
    }
    return sorted(pair for pair in pairs if abs(pair[0] - pair[1]) > 1)


def _grid(graph: OperatorGraph, strategy: Strategy, rows: Sequence[Row]) -> BokehFigure:
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool

    count = 1 + max(max(config.devices) for config in strategy.operators.values())
    cell = count / 8
    made = new_figure(height_of(len(rows)) + 40, x_range=(-ARCS * cell - 0.5, count - 0.5), y_range=(0.5 - len(rows), 0.5))
    made.xaxis.axis_label = "device number"
    made.xaxis.ticker = FixedTicker(ticks=list(range(0, count, max(1, count // 16))))
    made.grid.grid_line_color = None
    _arcs(made, edges_of(graph, rows), cell)
    hover, items = [], []
    for split, colour in SPLITS.items():
        chosen = [(number, row) for number, row in enumerate(rows) if kind_of(*_first(graph, strategy, row)) == split]
        cells = [own for number, row in chosen for own in cells_of(*_first(graph, strategy, row), number)]
        if not cells:
            continue
        source = ColumnDataSource(_columns(graph, strategy, rows, cells))
        drawn = made.rect(x="device", y="y", width=0.94, height=0.84, fill_color="colour", line_color=None, source=source)
        if count <= LABELLED_DEVICES:
            made.text(
                x="device", y="y", text="short", text_font_size="10px", text_align="center", text_baseline="middle", text_color="#000000",
                source=source,
            )  # fmt: skip
        shown = made.rect(x=[-99], y=[99], width=0.1, height=0.1, fill_color=colour, line_color=None)
        hover.append(drawn)
        items.append((split, [shown]))
    legend_above(made, items, hide=False)
    name_rows(made, [f"{plain(row.name, 44)}  {split_of(*_first(graph, strategy, row))}" for row in rows], most=70)
    made.add_tools(
        HoverTool(
            renderers=hover,
            tooltips=[("operator", "@name"), ("kind", "@kind"), ("device", "@device"), ("part", "@tile"), ("arithmetic", "@work")],
        )
    )
    return made


def _first(graph: OperatorGraph, strategy: Strategy, row: Row) -> tuple[Operator, OpConfig]:
    op = graph.operators[row.members[0]]
    return op, strategy.operators[op.name]


def _columns(graph: OperatorGraph, strategy: Strategy, rows: Sequence[Row], cells: Sequence[Cell]) -> dict[str, list[object]]:
    ops = [graph.operators[rows[own.row].members[0]] for own in cells]
    marks = [MARKS[mark_of(strategy.operators[op.name])].feature for op in ops]
    more = ["" if feature is None else f", {feature.said[0]}" for feature in marks]
    return {
        "device": [own.device for own in cells],
        "y": [-own.row for own in cells],
        "colour": [own.colour for own in cells],
        "tile": [own.tile for own in cells],
        "short": [own.short for own in cells],
        "name": [plain(rows[own.row].name) for own in cells],
        "kind": [f"{op.kind}{own}" for op, own in zip(ops, more, strict=True)],
        "work": [f"{format_count(op.flops, 'FLOP')} forward, each" for op in ops],
    }


def _arcs(made: BokehFigure, edges: Sequence[tuple[int, int]], cell: float) -> None:
    """From row to row, the further to the left the longer."""
    if not edges:
        return
    longest = max(abs(b - a) for a, b in edges)
    out = [-0.55 - cell * ARCS * 0.95 * 4 / 3 * min(1.0, 0.25 + 0.75 * abs(b - a) / longest) * 0.75 for a, b in edges]
    ends = [-0.55] * len(edges)
    made.bezier(
        x0=ends, y0=[-a for a, _ in edges], x1=ends, y1=[-b for _, b in edges], cx0=out, cy0=[-a for a, _ in edges], cx1=out,
        cy1=[-b for _, b in edges], line_color=INK, line_width=1.3, line_alpha=0.8,
    )  # fmt: skip


SECTION = Section("operators", "Operators", _lacks, _blocks)
