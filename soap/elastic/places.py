"""On which machines of a cluster servers and workers are, and how Ray is told to hold them there."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from soap.elastic.faults import ElasticError


def hosts(ray: Any, servers: int, noted: Sequence[str] | None = None, machines: Sequence[int] | None = None) -> list[str]:
    """The address of each server's machine: the noted ones, or those of these numbers, modulo how many there are, or each one of its own if
    there are enough. ElasticError in one line if a noted one is not there: its server's folder is."""
    there = [*alive(ray)]
    found = list(noted or [there[number % len(there)] for number in machines or range(servers)])
    for number, address in enumerate(found):
        if address not in there and not ip_address(address).is_loopback:
            raise ElasticError(
                f"server {number} has its folder on {address}, which is not in the cluster ({', '.join(there)}); expected Ray there too: "
                "'ray start' on that machine"
            )
    return found


def node(ray: Any, address: str) -> str:
    """Ray's name of a machine; of loopback, as a cluster of our own has it, this one's."""
    return alive(ray).get(address) or str(ray.get_runtime_context().get_node_id())


def alive(ray: Any) -> dict[str, str]:
    """The address of each machine that is there -> Ray's name of it, by address. One that has come back has another name."""
    found = {str(one["NodeManagerAddress"]): str(one["NodeID"]) for one in ray.nodes() if one["Alive"]}
    return dict(sorted(found.items(), key=lambda one: (ip_address(one[0]).version, ip_address(one[0]))))


def held_on(name: str) -> Any:
    """A place for an actor, by Ray's name of a machine: there Ray starts it, and starts it again, or nowhere. To one that an actor may
    leave (``soft``) Ray does not keep even while that machine is there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=name, soft=False)


def is_lost(ray: Any, error: BaseException) -> bool:
    """Whether a call has failed because its actor is gone, or cannot be where it is held. Not if the actor itself has met such an error."""
    gone = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
    return isinstance(error, gone) and not isinstance(error, ray.exceptions.RayTaskError)
