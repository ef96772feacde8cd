"""Where a rank is right now: the task that it runs and what it waits for, or else a line of source. For error messages.

Training only sets attributes of one object per process. The rest is worked out when somebody asks, by another thread if the rank waits.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

PACKAGE = Path(__file__).parents[2]
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
INSTALLED = {"site-packages", "dist-packages"}
"""Folders with files that are neither ours nor the user's; a virtual environment may use those of another one."""

Line = tuple[str, int, str]
"""(file, line number, function)."""
Call = tuple[str, int]
"""(name of an action's kind, its subject), see ``actions``."""


class Position:
    """Where a process is. ``step``: number of the step under way, from 1 on; 0 between steps. ``call``: the action that runs. ``name``:
    makes a task's name of an action. ``task``: the name of what runs after all actions. ``waits``: what it waits for, told by its
    ``name`` if it has one."""

    __slots__ = ("call", "name", "step", "task", "waits")

    def __init__(self) -> None:
        self.name: Callable[[str, int], str] | None = None
        self.enter(0)

    def enter(self, step: int) -> None:
        """Begin a step; 0: the step is over."""
        self.step = step
        self.call: Call | None = None
        self.task = ""
        self.waits: object = None

    @property
    def text(self) -> str:
        """Step, task and what it waits for, in one line; empty if neither task nor wait is known."""
        call, name, awaited = self.call, self.name, getattr(self.waits, "name", None)
        task = self.task if call is None or name is None else name(*call)
        step = f"step {self.step}" if self.step else ""
        return ", ".join(filter(None, [step, task, f"waiting for {awaited}" if awaited else ""])) if task or awaited else ""


HERE = Position()
"""This process's position."""


def describe(trace: TracebackType | None = None) -> str:
    """Where the process is, or where it was when the error with this ``trace`` was raised: its task, and the user's line if it runs one."""
    lines = list(_running()) if trace is None else list(_raised(trace))
    task, called = HERE.text, _called(lines)
    if task:
        return f"{task}, {_shown(called[0])}" if called else task
    return f"{f'step {HERE.step}, ' if HERE.step else ''}{telling_line(lines)}"


def telling_line(lines: Sequence[Line]) -> str:
    """The most telling of the lines on a call stack, innermost first: the user's line that we called, else ours, else any."""
    ours = [line for line in lines if _is_ours(line)]
    return next((_shown(found[0]) for found in (_called(lines), ours, lines) if found), "nowhere")


def _called(lines: Sequence[Line]) -> list[Line]:
    """The user's lines that our code has called, innermost first. Lines that called us say nothing."""
    ours = next((place for place, line in enumerate(lines) if _is_ours(line)), len(lines))
    return [line for line in lines[:ours] if not line[0].startswith((*LIBRARIES, "<")) and not INSTALLED & {*Path(line[0]).parts}]


def _is_ours(line: Line) -> bool:
    return Path(line[0]).is_relative_to(PACKAGE)


def _shown(line: Line) -> str:
    file, number, function = line
    return f"{Path(file).relative_to(PACKAGE.parent).as_posix() if _is_ours(line) else file}:{number} in {function}"


def _running() -> Iterator[Line]:
    """The call stack of the main thread, innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _raised(trace: TracebackType | None) -> Iterator[Line]:
    """The lines of a traceback, innermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return reversed(found)
