"""What ranks that fail leave for the launcher, so that the first cause is told and not what came of it.

Each rank writes what has happened to it into a folder of the launch before its connections close, says whether it is of its own or only
the end of another rank that it noticed, and stays for a moment, so that others can write as well. A rank that has waited in vain asks the
others where they are: each has a thread that answers, even while the rank itself waits.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from soap.errors import RuntimeFailure, SoapError
from soap.runtime.comm import position

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

OWN_S = 0.3
"""How long a rank with an error of its own stays, so that others with one of theirs, perhaps earlier, can say so."""
AFTERMATH_S = 5.0
"""How long a rank that noticed another's end waits for that one to say why."""
ANSWER_S = 1.0
"""How long a rank may take to say where it is."""
MOST_PLACES = 8
"""That are told of ranks that wait."""
MOST_CHARACTERS = 1000
"""Of a message."""

_COMMUNICATION = ("gloo", "nccl", "tcpstore", "socket", "caused pair closure")
_PEER_LEFT = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "remote peer closed",
    "broken pipe",
    "connection refused",
    "got 0 bytes",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
)
_LATE = ("timed out", "timeout")
_CRASHED = re.compile(r"^Current thread [^\n]*\n((?:  File .*\n?)*)", re.MULTILINE)
_CRASH_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NATIVE = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #0)| This is typically caused by a remote worker")
_SOURCE = re.compile(r"\[\S*gloo\S*:\d+\] ")


class Kind(IntEnum):
    """What an error of a rank is, the more telling the smaller."""

    OWN = 0
    """Something went wrong in this rank."""
    LATE = 1
    """Another rank did not come in time."""
    AFTERMATH = 2
    """Another rank has ended."""


@dataclass(frozen=True)
class Report:
    """What a rank says of its end. ``positions``: rank -> where it was, of itself and of others if it has asked them. ``time_ns``: by the
    clock that all share. ``trace``: if people ask for tracebacks."""

    rank: int
    kind: Kind
    message: str
    time_ns: int
    positions: Mapping[int, str]
    trace: str


def kind_of(error: BaseException) -> Kind:
    """Whether an error is a rank's own, by it and by the errors in the course of which it was raised."""
    return max(_kind(one) for one in _chain(error))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and not _among(error, found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _among(error: BaseException, others: Sequence[BaseException]) -> bool:
    return any(error is other for other in others)  # what equals it is the error's own affair


def _kind(error: BaseException) -> Kind:
    """Of one error by itself. Backends raise plain RuntimeErrors: nothing but their words tells, and a user may use some of them."""
    if not (isinstance(error, dist.DistError) or type(error) is RuntimeError):
        return Kind.OWN
    text = _text(error).lower()
    if type(error) is RuntimeError and not any(mark in text for mark in _COMMUNICATION):
        return Kind.OWN
    if any(mark in text for mark in _LATE):  # upon which backends close connections themselves
        return Kind.LATE
    return Kind.AFTERMATH if any(mark in text for mark in _PEER_LEFT) else Kind.OWN


def message_of(error: BaseException) -> str:
    """An error in one line: what was raised on purpose as it is, others with their class and where the rank was."""
    if isinstance(error, SystemExit):
        return f"it ended itself by sys.exit({error.code!r}){_where(error)}"
    text = _short(_text(error))
    if isinstance(error, SoapError):
        return text
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, MemoryError) and not text:
        told += ": is there enough memory?"
    return told + _where(error)


def _where(error: BaseException) -> str:
    """Where a rank was, unless that is told with the positions of all."""
    told_apart = error.__traceback__ is None or kind_of(error) is Kind.LATE
    return "" if told_apart else f" ({position.describe(error.__traceback__)})"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's class that cannot tell
        return ""


def _short(text: str) -> str:
    """Without what libraries add on where they are themselves and what to do, in one line."""
    line = " ".join(_SOURCE.sub("", _NATIVE.split(text)[0]).split())
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 1] + "…"


class Folder:
    """Where the ranks of a launch leave what they have to say."""

    def __init__(self, path: str | Path, ranks: int) -> None:
        self.path, self.ranks = Path(path), ranks

    def reports(self) -> list[Report]:
        """What there is so far, the most telling first, and of those the earliest."""
        found = []
        for path in self.path.glob("report-*.json"):
            entry = json.loads(path.read_text(encoding="utf-8"))
            positions = {int(rank): text for rank, text in entry.pop("positions").items()}
            found.append(Report(**{**entry, "kind": Kind(entry["kind"]), "positions": positions}))
        return sorted(found, key=lambda report: (report.kind, report.time_ns))

    def write(self, name: str, text: str) -> None:
        """All of a file or nothing."""
        half = self.path / f"{name}.{threading.get_ident()}.half"
        half.write_text(text, encoding="utf-8")
        half.replace(self.path / name)

    def ask(self, besides: int | None = None) -> dict[int, str]:
        """Where each rank is (but ``besides``, which asks); of those that answer in time."""
        asked = [rank for rank in range(self.ranks) if rank != besides and self._ask(rank)]
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not all((self.path / f"at-{rank}").exists() for rank in asked):
            time.sleep(0.01)
        found = {}
        for rank in asked:
            with suppress(FileNotFoundError):
                found[rank] = (self.path / f"at-{rank}").read_text(encoding="utf-8")
        return found

    def _ask(self, rank: int) -> bool:
        """Whether the rank hears it."""
        with suppress(FileNotFoundError):
            (self.path / f"at-{rank}").unlink()
        try:
            pipe = os.open(self.path / f"ask-{rank}", os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(pipe, "wb", buffering=0) as asking:
                asking.write(b"?")
        except OSError:  # it has not begun, or has ended
            return False
        return True

    def crash(self, rank: int) -> str:
        """What a rank's interpreter wrote when a signal ended it, thread by thread; empty if nothing."""
        with suppress(FileNotFoundError):
            return (self.path / f"crash-{rank}").read_text(encoding="utf-8", errors="replace")
        return ""

    def first_cause(self, failures: Mapping[int, ProcessFailure]) -> RuntimeFailure:
        """What to tell people, in one line. ``failures``: of processes that the launcher has seen end, by rank."""
        reports = self.reports()
        said = {report.rank for report in reports}
        silent = [rank for rank in failures if rank not in said]
        if not reports or (silent and reports[0].kind is not Kind.OWN):
            rank = next(iter(silent or failures))
            crash = self.crash(rank)
            shown = crash if os.environ.get("SOAP_DEBUG") else ""
            return _failure(f"rank {rank} failed: {_silent_end(failures[rank].exitcode, crash)}", shown)
        first = reports[0]
        text = f"rank {first.rank} failed: {first.message}"
        if first.kind is Kind.AFTERMATH:
            text = f"rank {first.rank} lost another rank, which did not say why: {first.message}"
        elif first.kind is Kind.LATE:
            text = f"rank {first.rank} has waited in vain: {told_positions(first.positions, self.ranks)} ({first.message})"
        return _failure(text, first.trace)


def _failure(text: str, trace: str) -> RuntimeFailure:
    """With the rank's own traceback, if people ask for tracebacks."""
    failure = RuntimeFailure(text)
    if trace:
        failure.add_note(f"rank's own:\n{trace}")
    return failure


def _silent_end(exit_code: int, crash: str) -> str:
    """Of a process that has written no report."""
    if exit_code >= 0:
        return f"it ended with exit code {exit_code} and did not say why"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-exit_code, f"signal {-exit_code}")
    found = _CRASHED.search(crash)
    lines = [(file, int(number), function) for file, number, function in _CRASH_LINE.findall(found[1])] if found else []
    where = f" at {position.telling_line(lines)}" if lines else ""
    return f"killed by {name}{where}" + ("; is there enough memory?" if name == "SIGKILL" else "")


def told_positions(positions: Mapping[int, str], ranks: int) -> str:
    """Where each rank is, those at one place together."""
    together: dict[str, list[int]] = {}
    for rank in range(ranks):
        together.setdefault(positions.get(rank, "no answer"), []).append(rank)
    places = [f"rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}: {place}" for place, own in together.items()]
    more = f"; and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return "; ".join(places[:MOST_PLACES]) + more


class Desk:
    """A rank's side of the folder. ``tell`` writes the first error that it is given, and again only what has nothing to do with that."""

    def __init__(self, folder: Folder, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._told: BaseException | None = None
        self._crash = (folder.path / f"crash-{rank}").open("w", encoding="utf-8")
        faulthandler.enable(self._crash)  # not to standard error, where it would be many lines
        with suppress(AttributeError, OSError):  # where there are no named pipes, nobody is asked
            path = folder.path / f"ask-{rank}"
            os.mkfifo(path)
            pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for writing too: then it is open for whoever asks, and has no end
            threading.Thread(target=self._answer, args=(pipe,), daemon=True).start()

    def tell(self, error: BaseException) -> Kind:
        """Write what has happened; what kind of error it is."""
        kind = kind_of(error)
        if self._told is not None and _among(self._told, _chain(error)):
            return kind_of(self._told)
        self._told = error
        trace = "".join(traceback.format_exception(error)) if os.environ.get("SOAP_DEBUG") else ""
        positions = {self.rank: position.describe(error.__traceback__)}
        report = Report(self.rank, kind, message_of(error), time.monotonic_ns(), positions, trace)
        self._write(report)
        if kind is Kind.LATE:
            self._write(replace(report, positions={**positions, **self.folder.ask(besides=self.rank)}))  # asking takes a while
        return kind

    def _write(self, report: Report) -> None:
        self.folder.write(f"report-{self.rank}.json", json.dumps(asdict(report)))

    def stay(self, kind: Kind) -> None:
        """Wait a moment: for the cause, or for others that know of an earlier one."""
        deadline = time.monotonic() + (AFTERMATH_S if kind is Kind.AFTERMATH else OWN_S)
        while time.monotonic() < deadline:
            kinds = [report.kind for report in self.folder.reports()]
            if len(kinds) == self.folder.ranks or (kind is Kind.AFTERMATH and kinds and min(kinds) is not Kind.AFTERMATH):
                return
            time.sleep(0.01)

    def _answer(self, pipe: int) -> None:
        """Say where the rank is whenever somebody asks."""
        while os.read(pipe, 1):
            with suppress(Exception):  # the main thread goes on meanwhile, perhaps to another program; whoever asked can do without
                self.folder.write(f"at-{self.rank}", position.describe())


_desk: Desk | None = None


def open_desk(folder: Folder, rank: int) -> Desk:
    """Have this process be a rank whose end is told."""
    global _desk
    _desk = Desk(folder, rank)
    return _desk


def tell_before_leaving() -> None:
    """Called before connections are closed: if that is because of an error, it is written first, or others would be heard before."""
    error = sys.exception()
    if _desk is not None and error is not None:
        _desk.tell(error)
