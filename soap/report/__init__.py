"""A report to look at: one HTML file that shows a plan, and needs no network.

``Contents`` is what there is to show; ``write`` makes the file of it. Sections of which nothing is known are left out, and the page says
why. Values are those of ``soap.api``; nothing is computed here but places and colours.
"""

from __future__ import annotations

from soap.report.figures import require
from soap.report.page import render, write
from soap.report.section import Alternative, Contents

__all__ = ["Alternative", "Contents", "render", "require", "write"]
