"""Schedules as CSV files, as torch.distributed.pipelining (``_load_csv``, ``_dump_csv``) reads and writes them.

A row for each stage, an action in each cell; empty cells are idle time, and mean nothing. In torch's words a stage is a rank, and a chunk a
stage. What torch also writes is read, too: cells that send, receive, gather or reduce are left out, since communication follows from the
plan; a forward and a backward pass that overlap, ``(0F1;3B0)OVERLAP_F_B``, become one behind the other, as torch runs them by default.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from soap.errors import ScheduleError
from soap.files import read_text, write_text_atomically
from soap.schedules.table import ACTION, MOST_ACTIONS, MOST_STAGES, Action, Table, parse_action

MOST_BYTES = 2**26
MOST_CELLS = 8 * MOST_ACTIONS
"""Empty ones and communication included."""

_COMMUNICATION = re.compile(r"\d{1,6}(?:(?:UNSHARD|RESHARD|REDUCE_GRAD)|(?:SEND_F|RECV_F|SEND_B|RECV_B)\d{1,6})", re.ASCII)
_OVERLAPPED = re.compile(rf"\(({ACTION}(?:;{ACTION})*)\)OVERLAP_F_B", re.ASCII)


def loads(text: str) -> Table:
    """The table of a CSV text, not checked. ScheduleError in one line that names row and column, counted from 1."""
    stages: list[list[Action]] = []
    cells = 0
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True)
    try:
        for row, line in enumerate(reader, 1):
            cells += len(line)
            if row > MOST_STAGES or cells > MOST_CELLS:
                raise ScheduleError(f"row {row}: too long; expected at most {MOST_STAGES} rows and {MOST_CELLS} cells")
            stages.append([action for column, cell in enumerate(line, 1) for action in _actions(cell.strip(), row, column)])
    except csv.Error as error:
        raise ScheduleError(f"row {len(stages) + 1}: {error}; expected cells such as 2F0, with commas between them") from None
    return Table.of(stages)


def _actions(cell: str, row: int, column: int) -> Iterator[Action]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    for part in overlapped[1].split(";") if overlapped else [cell]:
        if part and not _COMMUNICATION.fullmatch(part):
            try:
                yield parse_action(part)
            except ScheduleError as error:
                raise ScheduleError(f"row {row}, column {column}: {error}") from None


def dumps(table: Table) -> str:
    """The table as CSV text, lines ended as Python's ``csv`` and torch end them."""
    return "".join(",".join(map(str, actions)) + "\r\n" for actions in table.stages)


def load(path: str | Path) -> Table:
    """The table of a CSV file, not checked. ScheduleError in one line if it cannot be read."""
    text = read_text(path, what="schedule", error=ScheduleError, limit_bytes=MOST_BYTES)
    try:
        return loads(text)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {str(path)!r}: {error}") from None


def dump(path: str | Path, table: Table) -> None:
    """Write the table as a CSV file. ScheduleError in one line if that fails; the old file stays."""
    write_text_atomically(path, dumps(table), error=ScheduleError)
