"""The page as a file: what is in it, that it needs nothing else, and that no text of others becomes markup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")

from soap.errors import SoapError
from soap.report import Contents, figures, render, require, write
from soap.report.page import SECTIONS, tabs_of
from soap.units import format_bytes, format_seconds
from tests.graph_builder import GraphBuilder
from tests.report.made import contents, usual

EVIL = '<script>document.title="owned"</script>'
LARGEST = 5_000_000


class Parsed(HTMLParser):
    """Elements and their text; of scripts the JSON of pictures alone."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.pictures: list[object] = []
        self._in_script = self._in_picture = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag in ("script", "style")
        self._in_picture = "data-picture" in dict(attrs)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_picture = False

    def handle_data(self, data: str) -> None:
        if self._in_picture:
            self.pictures.append(json.loads(data))
        elif not self._in_script:
            self.words.append(data)

    @property
    def programs(self) -> int:
        """How many scripts would run."""
        return sum(tag == "script" and "data-picture" not in own for tag, own in self.tags)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


@pytest.fixture(scope="module")
def page() -> Parsed:
    text = render(usual())
    assert len(text) < LARGEST
    return Parsed(text)


@pytest.mark.slow
def test_every_section_is_a_tab_with_pictures(page: Parsed) -> None:
    tabs = [own["aria-controls"] for tag, own in page.tags if tag == "button"]
    assert tabs == [section.key for section in SECTIONS]
    assert [own["id"] for tag, own in page.tags if tag == "section"] == tabs
    places = [own["id"] for tag, own in page.tags if own.get("class") == "picture"]
    assert len(places) == len(page.pictures) == len(set(places)) > 10


def test_values_are_the_api_s(page: Parsed) -> None:
    own = usual()
    assert own.summary is not None and own.simulation is not None and own.comparison is not None
    assert format_seconds(own.summary["predicted_ns"] / 1e9) in page.text
    assert own.summary["predicted_ns"] == own.simulation.makespan_ns
    for name, baseline in own.summary["baselines"].items():
        assert name in page.text and format_seconds(baseline["predicted_ns"] / 1e9) in page.text
    for device, peak in zip(own.simulation.topology.devices, own.simulation.peak_bytes, strict=True):
        assert format_bytes(peak) in page.text, device.name
    for size in own.simulation.link_bytes.values():
        assert not size or format_bytes(size) in page.text
    assert f"Measured: {format_seconds(own.comparison.measured_ns / 1e9)} in the iteration that was traced" in page.text
    assert f"off by {own.comparison.error:+.1%}" in " ".join(page.text.split())
    assert "1,234 rows in data, 5 left out" in page.text
    assert "h100-4" in page.text and format_seconds(own.elsewhere[0].time_ns / 1e9) in page.text


def test_nothing_is_loaded_from_elsewhere(page: Parsed) -> None:
    for tag, own in page.tags:
        assert "src" not in own and own.get("href", "data:,") == "data:,", (tag, own)
    policy = next(own["content"] for tag, own in page.tags if own.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "http" not in policy


@pytest.mark.slow
def test_names_of_others_do_not_become_markup() -> None:
    builder = GraphBuilder(name=EVIL)
    hidden = builder.linear(builder.input("x", 8, 16), 4, name=EVIL)
    graph = builder.build(builder.cross_entropy(hidden, builder.input("y", 8, dtype="int64")))
    found = render(contents(graph, title=f"{EVIL}.json"))
    assert EVIL not in found
    parsed = Parsed(found)
    assert f"{EVIL}.json" in parsed.text  # as text
    assert EVIL in json.dumps(parsed.pictures).replace('\\"', '"')
    assert parsed.programs == Parsed(render(usual())).programs


def test_labels_are_not_taken_for_tex() -> None:
    assert not re.search(r"\$\$|\\\(|\\\[", figures.plain(r"a$$x$$ \(b\) \[c\]"))
    assert len(figures.plain("n" * 500, 40)) == 40


@pytest.mark.slow
def test_what_is_not_known_is_left_out_with_a_reason() -> None:
    tabs, left_out = tabs_of([Contents("nothing")])
    assert tabs == [] and len(left_out) == len(SECTIONS) and all(why for _, why in left_out)
    own = usual()
    tabs, left_out = tabs_of([replace(own, result=None, tuning=None, preprocessing=None)])
    assert {name for name, _ in left_out} == {"Search", "Partitions", "Preprocessing"}
    assert "Search: the plan was not searched for here" in Parsed(render(replace(own, result=None))).text


@pytest.mark.slow
def test_two_plans_stand_side_by_side() -> None:
    own = usual()
    tabs, _ = tabs_of([own, replace(own, title="another", result=None)])
    assert all([pane.title for pane in tab.panes] == ["a plan", "another"] for tab in tabs)
    (searched,) = (tab for tab in tabs if tab.key == "search")
    assert searched.panes[0].blocks and not searched.panes[1].blocks and searched.panes[1].lacks


@pytest.mark.slow
def test_equal_contents_have_equal_tables_and_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write(path, usual())
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(SoapError, match=r"cannot write '.*': folder '.*' does not exist"):
        write(tmp_path / "no" / "report.html", usual())


def test_missing_bokeh_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(SoapError, match=r"^reports need bokeh, which is not installed; install it, or soap-search\[report\]$"):
        require()


def test_nobody_loads_bokeh_without_need() -> None:
    program = "import sys, soap.report, soap.cli.search, soap.cli.report; sys.exit(bool({'bokeh', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
