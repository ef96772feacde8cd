"""What notebooks show of strategies, simulations and searches: the numbers that these have, and names as text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import soap
from soap.strategy.rich_display import MOST_ROWS, bars, strategy_html, table
from soap.strategy.sync import parameter_server

MODEL, CLUSTER = "zoo:rnnlm:tiny", "v100-4"


class Cells(HTMLParser):
    """The text of each cell, row by row; fails for a tag that is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open:
            self.rows[-1][-1] += data


def shown(value: Any) -> list[list[str]]:
    return Cells(value._repr_html_()).rows


def test_a_strategy_shows_equal_operators_on_one_line() -> None:
    graph = soap.load(MODEL, plan_only=True).graph
    strategy = soap.classical("data_parallel", MODEL, CLUSTER)
    head, *rows = shown(strategy)
    assert head == ["operators", "split", "devices"]
    assert sum(int(found[1]) if (found := re.search(r"\((\d+)\)$", row[0])) else 1 for row in rows) == len(graph.operators)
    assert {row[2] for row in rows} == {"0-3"}
    named = Cells(strategy_html(strategy, graph)).rows
    assert {row[1] for row in named[1:]} == {"sample b:4", "replicas:4"}  # the sum of losses has no samples


def test_a_strategy_shows_what_is_unlike_the_default() -> None:
    strategy = soap.classical("data_parallel", MODEL, CLUSTER)
    name = next(iter(soap.load(MODEL, plan_only=True).graph.sparse))
    changed = replace(strategy.with_parameter(name, parameter_server(4)), microbatches=2)
    html = changed._repr_html_()
    assert "microbatches 2" in html
    assert Cells(html).rows[-2:] == [["parameters", "synchronized"], [name, "parameter_server, 4 partitions"]]


def test_a_simulation_shows_its_numbers() -> None:
    simulation = soap.simulate(MODEL, CLUSTER, "data_parallel", costs="estimate")
    rows = {row[0]: row[1:] for row in shown(simulation)}
    assert rows["predicted"] == [f"{simulation.makespan_ns / 1e6:,.3f} ms an iteration"]
    assert rows["memory"] == ["fits"] and rows["cluster"] == ["v100-4, 4 devices"]
    name, busy_ns = max(simulation.busy_ns.items(), key=lambda own: own[1])
    assert rows[name][-1] == f"{busy_ns / simulation.makespan_ns:.0%}"


def test_what_does_not_fit_is_said() -> None:
    simulation = soap.simulate(MODEL, CLUSTER, "data_parallel", costs="estimate", memory_budget="100kB")
    assert dict(row for row in shown(simulation) if len(row) == 2)["memory"].startswith("does NOT fit: ")


@pytest.mark.slow
def test_a_search_shows_what_it_kept_and_began_with() -> None:
    found = soap.find(MODEL, CLUSTER, soap.SearchOptions(budget=20, costs="estimate"))
    html = found._repr_html_()
    assert f"{found.time_ns / 1e6:,.3f} ms an iteration, {found.speedup:.2f} times as fast as data parallelism" in html
    rows = {row[0]: row[-1] for row in Cells(html).rows}
    assert rows["kept"] == f"{found.time_ns / 1e6:,.3f} ms"
    assert rows["data_parallel"].startswith(f"{found.data_parallel_ns / 1e6:,.3f} ms")
    assert strategy_html(found.strategy, found.simulator.graph) in html


def test_long_tables_say_how_much_is_left_out_and_names_are_text() -> None:
    rows = Cells(table(("n", "m"), [(str(i), "x") for i in range(MOST_ROWS + 3)])).rows
    assert len(rows) == MOST_ROWS + 2 and rows[-1] == ["… and 3 more"]
    strategy = soap.Strategy({"<script>": soap.OpConfig((1,), (0,))})
    assert "<script>" not in strategy._repr_html_() and "&lt;script&gt;" in strategy._repr_html_()
    assert [float(re.findall(r"width:([\d.]+)em", bar)[-1]) for bar in bars([1.0, 0.5, 0.0])] == [16.0, 8.0, 0.0]
