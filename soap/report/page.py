"""The page: sections as tabs of one HTML file that holds all that it needs, scripts included.

Pictures are JSON that a script draws when their tab is first opened. All text is escaped by the template; JSON has no ``<``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from soap import __version__
from soap.files import write_text_atomically
from soap.report import compared, links, memory, operators, overview, preprocessed, searching, timeline, tuned, what_if
from soap.report.figures import require
from soap.report.section import Block, Contents, Figure, Section

SECTIONS: tuple[Section, ...] = (
    overview.SECTION,
    operators.SECTION,
    timeline.SECTION,
    compared.SECTION,
    memory.SECTION,
    links.SECTION,
    searching.SECTION,
    what_if.SECTION,
    tuned.SECTION,
    preprocessed.SECTION,
)
"""All sections, in the order of their tabs."""


ASSETS = "assets"
SCRIPTS = ("bokeh",)
"""Parts of bokeh that pictures need: not its WebGL, by which thousands of bars are slower where the processor has to play it."""


@dataclass(frozen=True)
class Pane:
    """A section of one of the plans. ``lacks``: why there is nothing in it."""

    title: str
    blocks: Sequence[Block]
    lacks: str


@dataclass(frozen=True)
class Tab:
    """A section of all plans, side by side."""

    key: str
    title: str
    panes: Sequence[Pane]


def write(path: str | Path, *contents: Contents) -> None:
    """Write the report of a plan, or of several side by side, as a whole or not at all. SoapError in one line if that fails."""
    write_text_atomically(path, render(*contents))


def render(*contents: Contents) -> str:
    """The HTML text. SoapError if bokeh is not installed."""
    require()
    from jinja2 import Environment, StrictUndefined

    tabs, left_out = tabs_of(contents)
    pictures = _Pictures()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_asset("page.html"))
    return template.render(
        title=" and ".join(own.title for own in contents),
        tabs=tabs,
        left_out=left_out,
        picture=pictures.add,
        pictures=pictures.found,
        several=len(contents) > 1,
        style=_asset("page.css"),
        script=_asset("page.js"),
        libraries=_libraries(),
        version=__version__,
    )


def tabs_of(contents: Sequence[Contents]) -> tuple[list[Tab], list[tuple[str, str]]]:
    """The tabs that have something in them, and (title, why) of the sections that have nothing."""
    tabs, left_out = [], []
    for section in SECTIONS:
        reasons = [section.lacks(own) for own in contents]
        if all(reasons):
            left_out.append((section.title, reasons[0]))
            continue
        pairs = zip(contents, reasons, strict=True)
        panes = [Pane(own.title, () if why else section.blocks(own), why) for own, why in pairs]
        tabs.append(Tab(section.key, section.title, panes))
    return tabs, left_out


class _Pictures:
    """Collects the pictures while the template asks for places for them."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, figure: Figure) -> str:
        """Name of the place of a picture."""
        from bokeh.embed import json_item

        name = f"picture-{len(self.found)}"
        self.found.append((name, _json(json_item(figure.model))))
        return name


def _json(value: Any) -> str:
    """JSON that may stand in a script element: no ``<`` that could end it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _libraries() -> tuple[str, ...]:
    from bokeh.resources import Resources

    return tuple(Resources(mode="inline", components=list(SCRIPTS)).js_raw)


@cache
def _asset(name: str) -> str:
    return files("soap.report").joinpath(ASSETS, name).read_text(encoding="utf-8")
