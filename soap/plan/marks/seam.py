"""The interface between a plan and the fields of ``OpConfig`` that add tasks and memory to an operator's tiles (``strategy.marks``).

Each such field has a module here with its name. For each of its values the module says in rows which tasks each tile of an operator gets,
and what memory is held because of them. Lowering, compiled lowering, memory and ranks read these rows, and know no field.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module

from soap.strategy.config import OpConfig
from soap.strategy.marks import MARKS, mark_of

FORWARD = -1
"""In place of a row: the tile's forward pass."""
MOMENT_NS = 1
"""What a row takes that does nothing, as a task takes time."""


class On(IntEnum):
    """What a row holds while it runs: nothing, the tile's device, or what copies to the device's host, or back."""

    NOTHING = 0
    DEVICE = 1
    TO_HOST = 2
    FROM_HOST = 3


class Takes(IntEnum):
    """How long a row takes: a moment, as long as the copy of ``Amount.AWAY`` to the host or back, as long as a forward pass, or as one that
    keeps its product. From ``PASS`` on these are times of a tile on a type of devices."""

    MOMENT = 0
    COPY = 1
    PASS = 2
    LIGHT = 3


class Amount(IntEnum):
    """Bytes of a tile: what it makes, what its products make beside, or what goes to its host if it offloads."""

    MADE = 0
    PRODUCT = 1
    AWAY = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A task of each tile that has a backward pass.

    ``name``: what it is for; rows of one name are for the same. ``verb``: its task's name begins with it; ``kind``: of the task
    (``TaskKind``). ``backward``, ``stage``: among the operator's backward or forward tasks, the third part of its id. ``after``: the
    earlier rows that it waits for, or ``FORWARD``. ``needed``: it waits until the backward pass needs what the tile has made; this is the
    first row. ``again``: it is a second run of the tile, which waits for parameters' values, and for second runs that it reads from.
    ``before_backward``: the tile's backward pass waits for it.
    """

    name: str
    verb: str
    kind: str
    backward: bool
    stage: int
    on: On
    takes: Takes
    after: tuple[int, ...] = ()
    needed: bool = False
    again: bool = False
    before_backward: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory that a tile's device holds, or if ``on_host`` its host, from ``since`` to ``until``: the start and the end of a row, by name,
    or of the tile's forward pass and of its last pass, if empty. Of a CPU, which is its own host, both are one memory."""

    amount: Amount
    since: str = ""
    until: str = ""
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """What a mark adds to each tile of an operator.

    ``rows``: predecessors first. ``holds``: the memory of that. ``kept_until``: the row at whose end all is gone that the tile keeps; if
    empty that stays until the last pass. ``together``: marks of readers whose needs are also those of the tiles that they read from on
    their device. ``keeps_outputs``: whether outputs stay though the tile runs again. ``gathers``: whether operands that are gathered from
    several devices do not stay, but are gathered again, once the first row's need is there (``recomputation.gathered_again``).
    """

    rows: tuple[Row, ...] = ()
    holds: tuple[Hold, ...] = ()
    kept_until: str = ""
    together: frozenset[int] = frozenset()
    keeps_outputs: bool = False
    gathers: bool = False

    @property
    def again(self) -> int | None:
        """The row that is a second run."""
        return next((place for place, row in enumerate(self.rows) if row.again), None)

    @property
    def stays(self) -> bool:
        """Whether a tile keeps all that it has made on its device, until its last pass."""
        return self.again is None and not self.kept_until

    @property
    def needed(self) -> bool:
        """Whether something waits until the backward pass needs what the tile has made."""
        return any(row.needed for row in self.rows)

    @property
    def on_hosts(self) -> bool:
        """Whether hosts keep something."""
        return any(hold.on_host for hold in self.holds)


NOTHING = Marked()
"""Without a mark."""


@cache
def all_marked() -> tuple[Marked, ...]:
    """What each mark adds: in the module with its field's name ``MARKED``, by mark."""
    modules = {mark.field: import_module(f"soap.plan.marks.{mark.field}") for mark in MARKS if mark.field}
    return tuple(modules[mark.field].MARKED[number] if mark.field else NOTHING for number, mark in enumerate(MARKS))


@cache
def row_names() -> tuple[str, ...]:
    """The names of all rows, each once."""
    return tuple(dict.fromkeys(row.name for own in all_marked() for row in own.rows))


def marked(config: OpConfig) -> Marked:
    """What a configuration's mark adds."""
    return all_marked()[mark_of(config)]
