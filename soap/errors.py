"""The error tree: every failure that a user can cause or meet is a ``SoapError``.

A message is one line that names the value, what was expected and what to do next. Commands print that line and exit with
the class's ``exit_code``; a traceback shown to a user is a bug. Usage errors of the command line exit with 2.
"""

from __future__ import annotations


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


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class name if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C (128 + SIGINT)."""
