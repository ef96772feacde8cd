"""Workers are held on their machines, and created anew elsewhere when these are gone: before Ray itself is asked (``test_two_hosts``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra 'elastic'")

from ray import exceptions  # noqa: E402

from soap.elastic.launcher import (  # noqa: E402
    RESTARTS,
    Crew,
    is_lost,
)


class Machines:
    """Ray as a crew sees it: machines by address, each with a name, and the actors that were created and killed."""

    exceptions = exceptions

    def __init__(self, *addresses: str) -> None:
        self.names = {address: f"{number:056x}" for number, address in enumerate(addresses)}
        self.created: list[tuple[str, tuple[Any, ...]]] = []
        self.killed: list[int] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": address, "NodeID": name, "Alive": True} for address, name in self.names.items()]

    def remote(self, *, num_cpus: int, max_restarts: int, scheduling_strategy: Any) -> Any:
        assert (num_cpus, max_restarts, scheduling_strategy.soft) == (0, RESTARTS, False)

        def create(*arguments: Any) -> int:
            self.created.append((scheduling_strategy.node_id, arguments))
            return len(self.created) - 1

        return lambda _: SimpleNamespace(remote=create)

    def kill(self, actor: int) -> None:
        self.killed.append(actor)


def crew(machines: Machines, *addresses: str) -> Crew:
    made = Crew(machines)
    made.start(addresses, "model", "data")
    return made


def test_each_worker_is_held_on_its_machine() -> None:
    machines = Machines("10.0.0.1", "10.0.0.2")
    made = crew(machines, "10.0.0.2", "10.0.0.1", "10.0.0.2")
    first, second = machines.names.values()
    assert machines.created == [(name, ("model", "data")) for name in (second, first, second)] and made.actors == [0, 1, 2]
    assert not made.replace(1) and made.actors == [0, 1, 2], "its machine is there: it would be lost again"


def test_a_worker_whose_machine_is_gone_goes_where_the_fewest_are() -> None:
    machines = Machines("10.0.0.1", "10.0.0.2", "10.0.0.10")
    made = crew(machines, "10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2")
    del machines.names["10.0.0.2"]
    assert made.replace(1) and made.replace(3)
    assert made.machines == ["10.0.0.1", "10.0.0.10", "10.0.0.1", "10.0.0.10"]
    assert made.actors == [0, 4, 2, 5] and machines.killed == [1, 3]
    assert machines.created[4:] == 2 * [(machines.names["10.0.0.10"], ("model", "data"))]
    made.close()
    assert machines.killed == [1, 3, 0, 4, 2, 5] and not made.actors


def test_a_machine_that_has_come_back_has_its_worker_again() -> None:
    """Under another name: to Ray it is another machine."""
    machines = Machines("10.0.0.1", "10.0.0.2")
    made = crew(machines, "10.0.0.1", "10.0.0.2")
    machines.names["10.0.0.2"] = f"{7:056x}"
    assert made.replace(1) and made.machines == ["10.0.0.1", "10.0.0.2"] and machines.created[-1][0] == f"{7:056x}"
    assert not made.replace(1)


def test_what_a_worker_meets_is_not_its_own_loss() -> None:
    """An error within an actor is of its class and of the kind that it has met."""
    lost = exceptions.ActorUnschedulableError("no such node")
    met = exceptions.RayTaskError("work", "a traceback", lost).as_instanceof_cause()
    assert isinstance(met, exceptions.ActorUnschedulableError)
    assert is_lost(ray, lost) and is_lost(ray, exceptions.ActorDiedError()) and not is_lost(ray, met)
