"""The seam between sections and the page: a section says what it lacks, and gives blocks; the page puts them into HTML.

All text is plain: the page escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from soap.report.contents import Contents

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM


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
