"""One node: does its tasks of a step, so many at once as its resource manager allows at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from os import getpid
from typing import Protocol

from soap.preprocessing.container import PreprocessError
from soap.preprocessing.manager import Limits, Machine, Manager, State
from soap.preprocessing.work import Done, Task, Work
from soap.units import format_bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A task whose process was killed."""

    task: Task


class Executor(Protocol):
    """Does tasks of one node. Errors of tasks are raised by ``wait``."""

    @property
    def processes(self) -> Sequence[int]:
        """Ids of its processes."""

    def used_bytes(self) -> int:
        """Memory of its processes."""

    def start(self, task: Task) -> None:
        """Begin a task."""

    def wait(self, limit_s: float) -> Sequence[Done | Lost]:
        """What has ended, after so many seconds at most."""

    def take_back(self) -> Task | None:
        """End the task that was begun last; it must be begun again."""

    def close(self) -> None:
        """End all processes."""


class InProcess:
    """Does tasks in this process, in the order in which they were begun."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._begun: list[Task] = []

    @property
    def processes(self) -> Sequence[int]:
        """None of its own."""
        return ()

    def used_bytes(self) -> int:
        """None of its own."""
        return 0

    def start(self, task: Task) -> None:
        """Remember a task."""
        self._begun.append(task)

    def wait(self, limit_s: float) -> Sequence[Done | Lost]:
        """Do one task."""
        from soap.preprocessing.steps import perform  # numba

        if not self._begun:
            return ()
        return (perform(self._work, self._begun.pop(0)),)

    def take_back(self) -> Task | None:
        """Forget the last task."""
        return self._begun.pop() if self._begun else None

    def close(self) -> None:
        """Nothing to end."""
        self._begun.clear()


TICK_S = 0.5
"""After so long limits are asked for again, though no task has ended."""
MOST_LOST = 3
"""A task that was killed so often, with nothing else running, will not get through."""

Seen = Callable[[Done | None, Limits], None]


@dataclass
class Node:
    """``seen``: told of every task that is done, and (with None) of limits that were asked for."""

    executor: Executor
    manager: Manager
    machine: Machine
    seen: Seen | None = None

    def run(self, tasks: Sequence[Task]) -> list[Done]:
        """Do all tasks of one step. PreprocessError if one fails."""
        self.manager.new_step()
        waiting, running = list(tasks), dict[Task, None]()
        found: list[Done] = []
        lost = Counter[Task]()
        while waiting or running:
            limits = self._limits(waiting, running)
            if limits.pressed and (task := self.executor.take_back()) is not None:
                running.pop(task, None)
                waiting.insert(0, task)
            while (task := _next(waiting, running, limits)) is not None:
                waiting.remove(task)
                running[task] = None
                self.executor.start(task)
            for ended in self.executor.wait(TICK_S):
                count = len(running)
                running.pop(ended.task, None)
                if isinstance(ended, Lost):
                    lost[ended.task] += 1
                    self._lost(ended.task, count, lost[ended.task])
                    waiting.insert(0, ended.task)
                else:
                    self.manager.learn(ended)
                    found.append(ended)
                    if self.seen is not None:
                        self.seen(ended, limits)
        return found

    def close(self) -> None:
        """End all processes."""
        self.executor.close()

    def _limits(self, waiting: Sequence[Task], running: dict[Task, None]) -> Limits:
        processes = self.executor.processes
        counts = Counter(task.unit for task in [*waiting, *running])
        size = max((task.size for task in [*waiting, *running]), default=0)
        state = State(counts, len(running), self.executor.used_bytes(), len(processes), size)
        step = (waiting[0] if waiting else next(iter(running))).step
        limits = self.manager.limits(step, state, self.machine.sample([getpid(), *processes]))
        if self.seen is not None:
            self.seen(None, limits)
        return limits

    def _lost(self, task: Task, running: int, times: int) -> None:
        if self.manager.mode(task.step) == "unit" or (running == 1 and times >= MOST_LOST):
            raise PreprocessError(
                f"step {task.step}: a process was killed, most likely because memory ran out (its task is about "
                f"{format_bytes(task.size)}); expected more memory, or smaller tasks: mode adaptive for this step "
                f"(--mode {task.step}=adaptive), a smaller chunk_bytes (--chunk-bytes)"
            )
        self.manager.lost(running)


def _next(waiting: Sequence[Task], running: dict[Task, None], limits: Limits) -> Task | None:
    """The first task that may begin. One may always, and under pressure no second one."""
    if len(running) >= (1 if limits.pressed else limits.tasks):
        return None
    units = Counter(task.unit for task in running)
    for task in waiting:
        if units[task.unit] < limits.chunks and (task.unit in units or len(units) < limits.units):
            return task
    return None


class NodesTogether:
    """Several nodes, each of which runs in a thread of this process."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._pool = ThreadPoolExecutor(len(nodes))  # kept: a worker ends with the thread that started it

    @property
    def count(self) -> int:
        """How many."""
        return len(self._nodes)

    def run(self, tasks: Sequence[Sequence[Task]]) -> list[Done]:
        """All nodes at once. The first error ends the run."""
        if len(self._nodes) == 1:
            return self._nodes[0].run(tasks[0])
        futures = [self._pool.submit(node.run, own) for node, own in zip(self._nodes, tasks, strict=True)]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [done for future in futures for done in future.result()]

    def close(self) -> None:
        """End them."""
        for node in self._nodes:
            node.close()
        self._pool.shutdown(cancel_futures=True)
