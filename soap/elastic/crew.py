"""A run's workers as actors of Ray. Each is held on its machine, where Ray starts it again if it is lost; if the machine is gone for good,
the worker is created anew on another one. It holds no state, so nothing else has to move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from soap.elastic.places import alive, held_on, node
from soap.elastic.worker import Worker

RESTARTS = 20
"""Ray starts a worker again so often at most on one machine: one that ends at once, for want of memory, would be started for ever."""


class Crew:
    """``actors``: by worker. ``machines``: the address of each worker's machine. Both as they are now; empty before ``start``."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.actors: list[Any] = []
        self.machines: list[str] = []
        self._names: list[str] = []
        self._arguments: tuple[Any, ...] = ()

    def start(self, machines: Sequence[str], *arguments: Any) -> None:
        """A worker on each of these machines, with these arguments. They are held: workers that start again read them again."""
        self.machines, self._arguments = [*machines], arguments
        self._names = [node(self._ray, address) for address in machines]
        self.actors = [self._create(name) for name in self._names]

    def arrival(self, worker: int) -> Any:
        """A reference that is there when the worker is. Its error says that Ray has given the worker up."""
        return self.actors[worker].process.options(max_task_retries=-1).remote()

    def replace(self, worker: int) -> bool:
        """Create a worker anew that Ray has given up, if its machine is why: on that one if it has come back, else on another. False if the
        machine has been there all the time: the worker would only be lost again."""
        there = alive(self._ray)
        if self._names[worker] in there.values():
            return False
        if self.machines[worker] not in there:
            self.machines[worker] = self._least_used(there)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self.actors[worker])  # it may live, out of reach
        self._names[worker] = there[self.machines[worker]]
        self.actors[worker] = self._create(self._names[worker])
        return True

    def close(self) -> None:
        """End all."""
        for actor in self.actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self.actors, self._arguments = [], ()

    def _create(self, name: str) -> Any:
        actor = self._ray.remote(num_cpus=0, max_restarts=RESTARTS, scheduling_strategy=held_on(name))(Worker)
        return actor.remote(*self._arguments)

    def _least_used(self, there: Iterable[str]) -> str:
        """The machine with the fewest workers."""
        used = Counter(self.machines)
        return min(there, key=lambda address: used[address])
