"""The file of how far costs are off with other figures in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from soap.profiles import spreads

PARTS = ("rate", "kind", "shape", "all", "sort", "select", "restore")


def known_figures(figure: Callable[[str, str], float]) -> dict[str, Any]:
    """As the file, with ``figure(section, part)`` for each spread, whatever it is about."""

    def change(row: dict[str, Any], section: str) -> None:
        for name, value in row.items():
            if isinstance(value, dict):
                change(value, section)
            elif name in PARTS:
                row[name] = figure(section, name)

    found: dict[str, Any] = copy.deepcopy(dict(spreads.known_spreads()))
    for section, row in found.items():
        change(row, section)
    return found
