"""Where a rank is just now: the task that it runs, what it waits for, or else a line of source. Asked for only when something goes wrong.

What training notes of it are attributes of one object per process, a store each; everything else is worked out when somebody asks, by
another thread while the rank itself waits.
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
"""Where files lie that are neither ours nor the user's."""

Line = tuple[str, int, str]
"""A file, a line in it, and the function that it is in."""
Call = tuple[str, int]
"""An action's kind and subject (``actions``)."""


class Position:
    """``step``: of the step under way, from 1 on; 0 between steps. ``call``: the action that runs, which ``name`` gives a task's name.
    ``task``: the name of what runs behind all actions. ``waits``: what is being waited for, which may be known by its ``name``."""

    __slots__ = ("call", "name", "step", "task", "waits")

    def __init__(self) -> None:
        self.name: Callable[[str, int], str] | None = None
        self.enter(0)

    def enter(self, step: int) -> None:
        """A step begins; 0: it is over."""
        self.step = step
        self.call: Call | None = None
        self.task = ""
        self.waits: object = None

    @property
    def text(self) -> str:
        """The step, the task and what it waits for; empty if neither of these two is known."""
        call, name, awaited = self.call, self.name, getattr(self.waits, "name", None)
        task = self.task if call is None or name is None else name(*call)
        step = f"step {self.step}" if self.step else ""
        return ", ".join(filter(None, [step, task, f"waiting for {awaited}" if awaited else ""])) if task or awaited else ""


HERE = Position()
"""This process's."""


def describe(trace: TracebackType | None = None) -> str:
    """Where the process is, or was when an error was raised whose ``trace`` this is: its task, and the user's line if it is in one."""
    lines = list(_running()) if trace is None else list(_raised(trace))
    task, called = HERE.text, _called(lines)
    if task:
        return f"{task}, {_shown(called[0])}" if called else task
    return f"{f'step {HERE.step}, ' if HERE.step else ''}{telling_line(lines)}"


def telling_line(lines: Sequence[Line]) -> str:
    """Of lines that are being run, the innermost first: the user's, if ours have called it, else ours, else anybody's."""
    ours = [line for line in lines if _is_ours(line)]
    return next((_shown(found[0]) for found in (_called(lines), ours, lines) if found), "nowhere")


def _called(lines: Sequence[Line]) -> list[Line]:
    """The user's lines that ours have called, the innermost first: what a program did before it called us says nothing."""
    ours = next((place for place, line in enumerate(lines) if _is_ours(line)), len(lines))
    return [line for line in lines[:ours] if not line[0].startswith((*LIBRARIES, "<"))]


def _is_ours(line: Line) -> bool:
    return Path(line[0]).is_relative_to(PACKAGE)


def _shown(line: Line) -> str:
    file, number, function = line
    return f"{Path(file).relative_to(PACKAGE.parent).as_posix() if _is_ours(line) else file}:{number} in {function}"


def _running() -> Iterator[Line]:
    """What the main thread runs, the innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _raised(trace: TracebackType | None) -> Iterator[Line]:
    """What an error came through, the innermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return reversed(found)
