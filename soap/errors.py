"""The error tree: every failure that a user can cause or meet is a ``SoapError``.

A message is one line that names the value, what was expected and what to do next. Commands print that line and exit with
the class's ``exit_code``; a traceback shown to a user is a bug. Usage errors of the command line exit with 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from types import MappingProxyType


class SoapError(Exception):
    """Base of all errors raised on purpose by this project."""

    exit_code = 1


class ModelError(SoapError):
    """The exported model cannot be read or planned."""

    exit_code = 3


class TopologyError(SoapError):
    """The cluster description is malformed, inconsistent, or names an unknown device."""

    exit_code = 4


class StrategyError(SoapError):
    """A strategy is malformed, illegal for its graph, or made for another model or cluster."""

    exit_code = 5


class ScheduleError(StrategyError):
    """A pipeline's schedule is malformed or cannot be executed. Where a cell of a table is at fault, a note holds the grid around it."""

    @property
    def grid(self) -> str:
        """The table's grid, in several lines, with the cell marked; empty if no cell is at fault."""
        return "\n".join(getattr(self, "__notes__", ()))


class ProfileError(SoapError):
    """A measurement failed, or a table of costs is malformed."""

    exit_code = 6


class TimelineError(SoapError):
    """A timeline cannot be read, or two timelines belong to different models or strategies."""


class InfeasibleError(SoapError):
    """No strategy fits into the memory of the devices."""

    exit_code = 7


class RuntimeFailure(SoapError):
    """A distributed run failed: too few processes, a rank that died, a check that did not hold."""

    exit_code = 8


class StoppedBySignal(RuntimeFailure):
    """A signal other than Ctrl-C ended a distributed run. ``number``: of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class CheckpointError(RuntimeFailure):
    """A checkpoint cannot be written, is damaged, or belongs to another model or optimizer."""


class SoapWarning(UserWarning):
    """Warns of something that is legal but probably unintended, or slow; shown once, in one line."""


_OPTIONS: ContextVar[Mapping[str, str]] = ContextVar("options", default=MappingProxyType({}))


@contextmanager
def options_of(names: Mapping[str, str]) -> Iterator[None]:
    """Within this context ``asked`` names fields by these options: a command's user knows no fields."""
    before = _OPTIONS.set(names)
    try:
        yield
    finally:
        _OPTIONS.reset(before)


def asked(field: str) -> str:
    """A field's name as whoever asked for it knows it: its own in Python, the option's in a command."""
    return _OPTIONS.get().get(field, field)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was perhaps meant: the most similar one with the same first part (``a100-…``), else a similar one, if any."""
    names = list(known)
    first = name.partition("-")[0]
    alike = [one for one in names if first and one.partition("-")[0] == first]
    found = get_close_matches(name, alike or names, 1, 0.0 if alike else 0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a message about a name that nobody has: the known one that was perhaps meant; empty if none is like it."""
    near = None if name in known else nearest(name[:100], known)
    return f": did you mean {near!r}?" if near else ""


def one_of(name: str, known: Collection[str]) -> str:
    """``one of a, b, c``, which are known, and the one that was perhaps meant by a name that nobody has."""
    return f"one of {', '.join(known) or '(none)'}{did_you_mean(name, known)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class name if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C (128 + SIGINT)."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, with an exit code of its own."""

    exit_code = 143
    number = 15


def interrupted_code(error: KeyboardInterrupt) -> int:
    """The exit code after a signal that raised this."""
    return error.exit_code if isinstance(error, Terminated) else INTERRUPTED_EXIT_CODE
