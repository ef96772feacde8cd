"""All sections, in the order of their tabs."""

from __future__ import annotations

from soap.report import compared, links, memory, operators, overview, preprocessed, searching, timeline, tuned, what_if
from soap.report.section import Section

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
