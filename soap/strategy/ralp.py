"""Layers on servers (Park et al., "Accelerated Training for CNN Distributed Deep Learning through Automatic Resource-Aware Layer
Placement", 2019): the last layers of a convolutional network have most of its parameters and little to compute.

The front of the model is data parallel on the workers, with its parameters on parameter servers. What is behind a cut, the *tail*, runs on
devices of the servers, where its parameters are: workers send activations instead of its gradients, and get the activations' gradients.
Several devices divide the samples of the tail, and sum its gradients among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy, settled
from soap.strategy.grids import device_order, fill
from soap.strategy.sync import fitted, usual_server

RALP = "ralp"


def cut_at(graph: OperatorGraph, topology: Topology, cut: int, tail: Sequence[int]) -> Strategy:
    """The strategy whose operators from ``cut`` on run on the devices ``tail``; with a cut behind all, data parallelism with servers."""
    workers = device_order(topology)
    orders = [workers] * cut + [tuple(tail)] * (len(graph.operators) - cut)
    strategy = settled(graph, fill(graph, orders, {}), topology.device_count)
    sync = usual_server(topology)
    syncs = {tensor: fitted(graph, tensor, sync) for tensor in front_parameters(graph, cut)}
    return strategy.with_changes(parameters=syncs)


def front_parameters(graph: OperatorGraph, cut: int) -> tuple[str, ...]:
    """The trainable parameters that some operator before the cut uses."""
    trainable = [tensor.name for tensor in graph.parameters if tensor.requires_grad]
    return tuple(name for name in trainable if any(position < cut for position, _ in graph.parameter_users.get(name, ())))


def tails(topology: Topology, count: int | None = None) -> Sequence[tuple[int, ...]]:
    """The groups of devices that may have the tail: first devices of servers, one for each host before a second one. ``count``: that many
    alone. StrategyError in one line if the cluster has no servers, or fewer devices of servers."""
    servers = topology.servers
    if not servers:
        raise StrategyError(
            f"{RALP} on cluster {topology.name!r}, none of whose hosts is a server; expected some: say 'server: true' of hosts in the "
            "cluster file, or take emulated:HxD+S"
        )
    hosts = [topology.devices[device].host for device in servers]
    ranked = sorted(range(len(servers)), key=lambda i: (hosts[:i].count(hosts[i]), hosts[i]))
    order = [servers[i] for i in ranked]
    if count is not None and not 1 <= count <= len(order):
        found = f"{RALP}:{count} on cluster {topology.name!r}, whose servers have {len(order)} devices"
        raise StrategyError(f"{found}; expected a number from 1 to {len(order)}")
    return [tuple(order[:n]) for n in (range(1, len(order) + 1) if count is None else (count,))]
