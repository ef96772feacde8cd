"""Failure reports of ranks, from which the launcher finds the first cause instead of its aftermath (docs/internals/runtime.md, *Ranks that
fail*)."""

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
from soap.runtime.comm.position import describe, telling_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

OWN_S = 0.3
"""How long a rank with an error of its own stays, so that ranks with an earlier one can report it."""
AFTERMATH_S = 5.0
"""How long a rank that noticed another's end waits for the other's report."""
ANSWER_S = 1.0
"""How long a rank may take to say where it is."""
MOST_PLACES = 8
"""The most positions of waiting ranks in a message."""
MOST_CHARACTERS = 1000
"""The longest message."""

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
_DEVICE_LOST = re.compile(
    r"CUDA error: (?:no CUDA-capable device|CUDA-capable device\(s\) is/are busy|uncorrectable |unknown error|hardware stack error)"
    r"|CUDA unknown error"
)
"""What CUDA and torch say of a GPU that is broken, or gone. A wrong program does not cause these, as it does "illegal memory access"."""
_CRASHED = re.compile(r"^Current thread [^\n]*\n((?:  File .*\n?)*)", re.MULTILINE)
_CRASH_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NATIVE = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #0)| This is typically caused by a remote worker")
_SOURCE = re.compile(r"\[\S*gloo\S*:\d+\] ")


class RankLost(RuntimeFailure):
    """A rank ended without saying why, is not heard of any more, or has lost its GPU. ``rank``: its number, if it is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Kind(IntEnum):
    """The kind of a rank's error. The smaller, the closer to the cause."""

    OWN = 0
    """Something went wrong in this rank."""
    LATE = 1
    """Another rank did not come in time."""
    AFTERMATH = 2
    """Another rank has ended."""


@dataclass(frozen=True)
class Report:
    """A rank's report of its end. ``positions``: rank -> where it was, for itself and for others that it has asked. ``time_ns``: by the
    clock that all ranks share. ``trace``: the traceback if ``SOAP_DEBUG`` is set, else empty."""

    rank: int
    kind: Kind
    message: str
    time_ns: int
    positions: Mapping[int, str]
    trace: str


def kind_of(error: BaseException) -> Kind:
    """The kind of an error. An own error that was raised while a late or aftermath error was handled counts as the latter."""
    return max(_kind(one) for one in _chain(error))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and not _among(error, found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _among(error: BaseException, others: Sequence[BaseException]) -> bool:
    return any(error is other for other in others)  # by identity: a user's class may define equality in any way


def _kind(error: BaseException) -> Kind:
    """The kind of one error by itself, by its words: backends raise plain RuntimeErrors. A user's own error may use the same words."""
    if isinstance(error, RankLost):
        return Kind.AFTERMATH
    if not (isinstance(error, dist.DistError) or type(error) is RuntimeError):
        return Kind.OWN
    text = _text(error).lower()
    if type(error) is RuntimeError and not any(mark in text for mark in _COMMUNICATION):
        return Kind.OWN
    if any(mark in text for mark in _LATE):  # after a timeout backends close the connections themselves
        return Kind.LATE
    return Kind.AFTERMATH if any(mark in text for mark in _PEER_LEFT) else Kind.OWN


def message_of(error: BaseException) -> str:
    """An error in one line. A SoapError is told as it is, any other with its class and where the rank was."""
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
    """Where a rank was; empty if it is told together with the positions of all ranks."""
    told_apart = error.__traceback__ is None or kind_of(error) is Kind.LATE
    return "" if told_apart else f" ({describe(error.__traceback__)})"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's class whose __str__ fails
        return ""


def _short(text: str) -> str:
    """The text in one line, without the stack frames and advice that libraries append."""
    line = " ".join(_SOURCE.sub("", _NATIVE.split(text)[0]).split())
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 1] + "…"


class Folder:
    """The folder of a launch, in which its ranks leave their reports."""

    def __init__(self, path: str | Path, ranks: int) -> None:
        self.path, self.ranks = Path(path), ranks

    def reports(self) -> list[Report]:
        """The reports so far: own errors first, then by time."""
        found = []
        for path in self.path.glob("report-*.json"):
            entry = json.loads(path.read_text(encoding="utf-8"))
            positions = {int(rank): text for rank, text in entry.pop("positions").items()}
            found.append(Report(**{**entry, "kind": Kind(entry["kind"]), "positions": positions}))
        return sorted(found, key=lambda report: (report.kind, report.time_ns))

    def write(self, name: str, text: str) -> None:
        """Write a file; readers see all of it or nothing."""
        half = self.path / f"{name}.{threading.get_ident()}.half"
        half.write_text(text, encoding="utf-8")
        half.replace(self.path / name)

    def ask(self, besides: int | None = None) -> dict[int, str]:
        """Rank -> where it is, for all ranks but ``besides`` (the asking one) that answer within ``ANSWER_S``."""
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
        """Ask a rank; False if it does not listen."""
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
        """What faulthandler wrote when a signal ended a rank, thread by thread; empty if it wrote nothing."""
        with suppress(FileNotFoundError):
            return (self.path / f"crash-{rank}").read_text(encoding="utf-8", errors="replace")
        return ""

    def first_cause(self, failures: Mapping[int, ProcessFailure]) -> RuntimeFailure:
        """The error for the user, in one line. ``failures``: rank -> how its process ended, as the launcher saw it."""
        reports = self.reports()
        said = {report.rank for report in reports}
        silent = [rank for rank in failures if rank not in said]
        if not reports or (silent and reports[0].kind is not Kind.OWN):
            rank = next(iter(silent or failures))
            crash = self.crash(rank)
            shown = crash if os.environ.get("SOAP_DEBUG") else ""
            return _noted(RankLost(f"rank {rank} failed: {_silent_end(failures[rank].exitcode, crash)}", rank), shown)
        first = reports[0]
        if first.kind is Kind.OWN:
            told = f"rank {first.rank} failed: {first.message}"
            found = RankLost(told, first.rank) if _DEVICE_LOST.search(first.message) else RuntimeFailure(told)
            return _noted(found, first.trace)
        text = f"rank {first.rank} lost another rank, which did not say why: {first.message}"
        if first.kind is Kind.LATE:
            text = f"rank {first.rank} has waited in vain: {told_positions(first.positions, self.ranks)} ({first.message})"
        return _noted(RankLost(text), first.trace)


def _noted(failure: RuntimeFailure, trace: str) -> RuntimeFailure:
    """The error, with the rank's own traceback as a note if there is one."""
    if trace:
        failure.add_note(f"rank's own:\n{trace}")
    return failure


def _silent_end(exit_code: int, crash: str) -> str:
    """How a process ended that has written no report."""
    if exit_code >= 0:
        return f"it ended with exit code {exit_code} and did not say why"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-exit_code, f"signal {-exit_code}")
    found = _CRASHED.search(crash)
    lines = [(file, int(number), function) for file, number, function in _CRASH_LINE.findall(found[1])] if found else []
    where = f" at {telling_line(lines)}" if lines else ""
    return f"killed by {name}{where}" + ("; is there enough memory?" if name == "SIGKILL" else "")


def told_positions(positions: Mapping[int, str], ranks: int) -> str:
    """Where each rank is, in one line; ranks at the same place together."""
    together: dict[str, list[int]] = {}
    for rank in range(ranks):
        together.setdefault(positions.get(rank, "no answer"), []).append(rank)
    places = [f"rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}: {place}" for place, own in together.items()]
    more = f"; and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return "; ".join(places[:MOST_PLACES]) + more


class Desk:
    """A rank's side of the folder. ``tell`` writes a report of the first error; later ones replace it only if they have another cause."""

    def __init__(self, folder: Folder, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._told: BaseException | None = None
        self._crash = (folder.path / f"crash-{rank}").open("w", encoding="utf-8")
        faulthandler.enable(self._crash)  # into a file: on standard error it would be many lines
        with suppress(AttributeError, OSError):  # without named pipes this rank cannot be asked
            path = folder.path / f"ask-{rank}"
            os.mkfifo(path)
            pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for writing too, so that a read blocks instead of meeting the end
            threading.Thread(target=self._answer, args=(pipe,), daemon=True).start()

    def tell(self, error: BaseException) -> Kind:
        """Write a report of an error. Returns the error's kind."""
        kind = kind_of(error)
        if self._told is not None and _among(self._told, _chain(error)):
            return kind_of(self._told)
        self._told = error
        trace = "".join(traceback.format_exception(error)) if os.environ.get("SOAP_DEBUG") else ""
        positions = {self.rank: describe(error.__traceback__)}
        report = Report(self.rank, kind, message_of(error), time.monotonic_ns(), positions, trace)
        self._write(report)
        if kind is Kind.LATE:
            self._write(replace(report, positions={**positions, **self.folder.ask(besides=self.rank)}))  # again: asking takes a while
        return kind

    def _write(self, report: Report) -> None:
        self.folder.write(f"report-{self.rank}.json", json.dumps(asdict(report)))

    def stay(self, kind: Kind) -> None:
        """Wait a moment: after an aftermath for the report of the cause, otherwise for reports of earlier errors."""
        deadline = time.monotonic() + (AFTERMATH_S if kind is Kind.AFTERMATH else OWN_S)
        while time.monotonic() < deadline:
            kinds = [report.kind for report in self.folder.reports()]
            if len(kinds) == self.folder.ranks or (kind is Kind.AFTERMATH and kinds and min(kinds) is not Kind.AFTERMATH):
                return
            time.sleep(0.01)

    def _answer(self, pipe: int) -> None:
        """Answer where the rank is whenever it is asked."""
        while os.read(pipe, 1):
            with suppress(Exception):  # the main thread may change everything meanwhile; a missing answer does no harm
                self.folder.write(f"at-{self.rank}", describe())


_desk: Desk | None = None


def open_desk(folder: Folder, rank: int) -> Desk:
    """Make this process a rank that reports its end."""
    global _desk
    _desk = Desk(folder, rank)
    return _desk


def tell_before_leaving() -> None:
    """Called before connections are closed. If an error is the reason, report it first: otherwise aftermath of others would come before."""
    error = sys.exception()
    if _desk is not None and error is not None:
        _desk.tell(error)
