"""On which machines of a cluster servers are: where their folders are, also when the same run is called again."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from soap.elastic.faults import ElasticError


def hosts(ray: Any, servers: int, noted: Sequence[str] | None = None, machines: Sequence[int] | None = None) -> list[str]:
    """The address of each server's machine: the noted ones, or those of these numbers, modulo how many there are, or each one of its own if
    there are enough. ElasticError in one line if a noted one is not there: its server's folder is."""
    there = sorted(_nodes(ray), key=lambda address: (ip_address(address).version, ip_address(address)))
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
    return _nodes(ray).get(address) or str(ray.get_runtime_context().get_node_id())


def _nodes(ray: Any) -> dict[str, str]:
    return {str(one["NodeManagerAddress"]): str(one["NodeID"]) for one in ray.nodes() if one["Alive"]}
