"""Several machines: on every node of a Ray cluster an actor, which runs that node's tasks in processes of its own under a resource manager
of its own. Inputs and output lie in folders that all nodes share; tasks and what they did travel by Ray.

Each dictionary merges on one node, in the order of units, and lies in the shared folder: converting a chunk reads what belongs to its unit
alone, which is much less than a copy of all dictionaries for each node.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from uuid import uuid4

from soap.elastic.faults import ElasticError
from soap.elastic.session import AUTO, join, module, shown
from soap.files import write_text_atomically
from soap.preprocessing.container import PreprocessError
from soap.preprocessing.engine import Options
from soap.preprocessing.manager import Limits, Machine, Manager
from soap.preprocessing.node import TICK_S, Node, Seen
from soap.preprocessing.processes import Processes
from soap.preprocessing.work import Done, Task, Work

NEWS = "news"
"""Calls of an actor that are answered while its tasks run."""
CLOSE_S = 10.0
TOKEN = "token"

Told = Callable[[dict[str, Any]], None]


class Member:
    """One node; in an actor on it."""

    def __init__(self, work: Work, options: Options, number: int) -> None:
        self._work, self._number = work, number
        self._lock = Lock()
        self._seen: list[tuple[Done | None, Limits]] = []
        self._told: list[dict[str, Any]] = []
        manager = Manager(options.modes, options.workers, self._tell)
        self._node = Node(Processes(work), manager, Machine(work.path), self._see)

    def fault(self, token: str) -> str | None:
        """Why this node cannot take part. ``token``: what the first one wrote into the run's folder."""
        try:
            if (self._work.path / TOKEN).read_text(encoding="ascii") != token:
                raise OSError
        except OSError:
            return f"node {socket.gethostname()!r} does not see the output's folder {self._work.folder!r}"
        for unit in self._work.units:
            if not os.path.exists(unit.path) or os.path.getsize(unit.path) != unit.size:
                return f"node {socket.gethostname()!r} does not see the input {unit.path!r} ({unit.size} bytes)"
        return None

    def run(self, tasks: Sequence[Task]) -> tuple[list[Done], str | None]:
        """What was done, or the error in one line."""
        try:
            return self._node.run(tasks), None
        except PreprocessError as error:
            return [], str(error)

    def news(self) -> tuple[list[tuple[Done | None, Limits]], list[dict[str, Any]]]:
        """What was seen and decided since the last call."""
        with self._lock:
            found = self._seen, self._told
            self._seen, self._told = [], []
        return found

    def close(self) -> None:
        """End all processes."""
        self._node.close()

    def _see(self, done: Done | None, limits: Limits) -> None:
        with self._lock:
            if done is None and self._seen and self._seen[-1][0] is None:
                self._seen.pop()
            self._seen.append((done, limits))

    def _tell(self, facts: dict[str, Any]) -> None:
        with self._lock:
            self._told.append({**facts, "node": self._number})


class RayNodes:
    """The nodes of the cluster at ``address``, or ``count`` spread over them. A node that is lost leaves its tasks to the others.
    PreprocessError if there is no cluster, or a node does not see input and output."""

    def __init__(
        self,
        work: Work,
        options: Options,
        address: str = AUTO,
        *,
        count: int | None = None,
        told: Told | None = None,
        seen: Seen | None = None,
    ) -> None:
        self._told, self._seen = told, seen
        self._members: list[Any] = []
        try:
            self._ray = module()
            self._joined = join(address)
        except ElasticError as cause:
            raise PreprocessError(str(cause)) from None
        try:
            self._start(work, options, count)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many are left."""
        return len(self._members)

    def run(self, tasks: Sequence[Sequence[Task]]) -> list[Done]:
        """All nodes at once. The first error ends the run."""
        ray = self._ray
        under_way = {member.run.remote(own): (member, own) for member, own in zip(self._members, tasks, strict=True) if own}
        found: list[Done] = []
        while under_way:
            ready, _ = ray.wait([*under_way], num_returns=1, timeout=TICK_S)
            for reference in ready:
                member, own = under_way.pop(reference)
                try:
                    done, error = ray.get(reference)
                except ray.exceptions.RayActorError as lost:
                    again = self._without(member, lost)
                    under_way[again.run.remote(own)] = (again, own)  # what it had done is kept, and found
                    continue
                if error is not None:
                    raise PreprocessError(error)
                found += done
            self._tell()
        return found

    def close(self) -> None:
        """End all actors and their processes; leave the cluster, if this joined it."""
        with suppress(self._ray.exceptions.RayError):
            closing = [member.close.options(concurrency_group=NEWS).remote() for member in self._members]
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S) if closing else None
        for member in self._members:
            self._ray.kill(member)
        self._members = []
        if self._joined:
            self._ray.shutdown()

    def _start(self, work: Work, options: Options, count: int | None) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._ray
        places = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        actor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={NEWS: 1})(Member)
        token = uuid4().hex
        write_text_atomically(work.path / TOKEN, token, error=PreprocessError)
        for number in range(count or len(places)):
            place = NodeAffinitySchedulingStrategy(node_id=places[number % len(places)], soft=False)
            self._members.append(actor.options(scheduling_strategy=place).remote(work, options, number))
        try:
            faults = ray.get([member.fault.remote(token) for member in self._members])
        except ray.exceptions.RayError as cause:
            raise PreprocessError(f"a node of the Ray cluster cannot take part: {shown(cause)}; is SOAP installed on it?") from None
        for fault in filter(None, faults):
            raise PreprocessError(f"{fault}; expected all nodes to share inputs and output, at the same paths")

    def _without(self, member: Any, lost: Exception) -> Any:
        """A node is lost: who does its tasks."""
        self._members.remove(member)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(member)  # it may live, out of reach
        if not self._members:
            why = f"all nodes of the Ray cluster are lost: {shown(lost)}"
            raise PreprocessError(f"{why}; the same command goes on from what is done") from None
        return self._members[-1]

    def _tell(self) -> None:
        """Show what the nodes have seen and decided."""
        with suppress(self._ray.exceptions.RayError):  # a lost node is met where its tasks are
            for seen, told in self._ray.get([member.news.options(concurrency_group=NEWS).remote() for member in self._members]):
                for done, limits in seen if self._seen is not None else ():
                    self._seen(done, limits)  # type: ignore[misc]
                for facts in told if self._told is not None else ():
                    self._told(facts)  # type: ignore[misc]
