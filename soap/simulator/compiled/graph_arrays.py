"""A graph and a cluster for compiled code, as arrays of integers and floats. Made once per simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.cluster.host_links import host_link
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.sparse_access import RowAccess
from soap.plan.placement import first_devices, first_readers, first_servers, server_devices
from soap.simulator.communication.offloading import DOWN, ON_HOST, UP, offload_resource
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.servers import first_cores, row_seconds, server_type

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
IntRows = np.ndarray[tuple[int, int], np.dtype[np.int32]]
LongRows = np.ndarray[tuple[int, int], np.dtype[np.int64]]
FloatRows = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""Of two dimensions. Compiled code knows an array of a structure by its annotation."""


class GraphTables(NamedTuple):
    """An operator graph. Pairs of arrays ``x_ptr``, ``x_…`` are lists per operator: operator p's are ``x_…[x_ptr[p]:x_ptr[p + 1]]``.

    - ``read``: activations that an operator reads. ``read_operand``: position among its inputs. ``read_producer``, ``read_output``: whose
      output it is.
    - ``reader``: operators that read an operator's outputs, ascending. ``source``: where an operator itself occurs in ``reader``.
    - ``output``: bytes of an element, and of an element of partial results; whether it has a gradient; number of its dtype; whether
      it has rows of experts (``OperatorGraph.routed``).
    - ``parameter``: parameters that an operator uses, trainable or not, each once, ascending.
    - ``user`` (lists per parameter): operators that use the parameter, ascending. ``user_place``: which of the operator's ``parameter`` it
      is.

    By parameter: ``trainable``, ``parameter_dtype``, ``first_server``, ``first_reader`` (``placement``), and for
    sparse ones ``touched`` from ``touched_ptr`` on: how many rows a batch looks up, how many rows there are, ``RowAccess.touched``.
    ``dtypes``: their number. ``backward``: whether any output has a gradient. ``loss``: operator and output
    that make the loss. ``known``: whether an operator makes the loss or a term of it (``OperatorGraph.known_gradients``). ``epilogue``:
    whether an operator is of the loss's epilogue. ``overlaps``: ``Operator.overlaps``.
    ``solid``: whether at least one replica of every tile has a backward pass under every strategy. ``counts_labels``: whether an operator's
    devices count their own labels (``plan.samples``).
    """

    read_ptr: Ints
    read_operand: Ints
    read_producer: Ints
    read_output: Ints
    reader_ptr: Ints
    reader: Ints
    source_ptr: Ints
    source: Ints
    output_ptr: Ints
    output_itemsize: Longs
    output_partial_itemsize: Longs
    output_gradient: Ints
    output_routed: Ints
    output_dtype: Ints
    parameter_ptr: Ints
    parameter: Ints
    user_ptr: Ints
    user: Ints
    user_place: Ints
    trainable: Ints
    parameter_dtype: Ints
    dtypes: Ints
    first_server: Ints
    first_reader: Longs
    touched_ptr: Ints
    touched: Longs
    backward: Ints
    loss: Ints
    known: Ints
    epilogue: Ints
    solid: Ints
    counts_labels: Ints
    overlaps: Ints


class ClusterTables(NamedTuple):
    """A cluster of n devices.

    - By pair of devices (s, t): ``distance[s, t]`` (0, 1 or 2, as ``Topology.distance``). The route holds the resources ``route[route_ptr[s
      * n + t]:route_ptr[s * n + t + 1]]`` (device count + link number). ``latency_seconds[s, t]``: of the whole route;
      ``message_latency_seconds[s, t]`` with ``call_seconds``, those of a call. ``seconds_per_byte[s, t]``: of its slowest link. A message
      keeps devices busy for ``message_ns[s, t]`` plus ``message_permille[s, t]`` thousandths of the time for which it holds links.
    - By link: ``link_bandwidth``, bytes per second.
    - By device: ``memory_bandwidth`` in bytes per second, ``device_type``, ``row_seconds`` (``servers.row_seconds``). Of its host: the
      lowest device (``host_device``), the first core (``core``, a resource), the number of cores (``cores``). Of the server beside it:
      whether the device does the work (``serves_itself``) rather than a core, ``core_bandwidth`` of what does it in bytes per second, and
      the first host whose server has the same type (``core_host``).
    - By device, of what it offloads: ``offload_owner`` of the update's price (``ShardTables.price``); ``lift_bandwidth`` in bytes/second
      and ``lift_latency`` in seconds of copies; the copy down, the update and the copy up hold the resources ``lift[lift_ptr[3 * d +
      place]:lift_ptr[3 * d + place + 1]]``.
    - ``server``: devices beside which servers are. ``hosts``: number of hosts.
    - By the number of messages that a device has in an exchange (the last entry also for larger numbers): ``latency_factor``
      (``Topology.latency_factor``), ``exchange_ns`` and ``exchange_permille`` (``Topology.cpu_overhead``).
    - By the number of devices, less one: ``tree_latency_factor``, ``sum_ns``, ``sum_permille``.
    """

    distance: np.ndarray[tuple[int, int], np.dtype[np.int8]]
    route_ptr: Longs
    route: Ints
    latency_seconds: FloatRows
    message_latency_seconds: FloatRows
    call_seconds: Floats
    seconds_per_byte: FloatRows
    link_bandwidth: Floats
    memory_bandwidth: Floats
    device_type: Ints
    host_device: Ints
    core: Ints
    cores: Ints
    server: Ints
    serves_itself: Ints
    hosts: Ints
    core_bandwidth: Floats
    core_host: Ints
    row_seconds: Floats
    offload_owner: Ints
    lift_bandwidth: Floats
    lift_latency: Floats
    lift_ptr: Ints
    lift: Ints
    message_ns: LongRows
    message_permille: LongRows
    latency_factor: Floats
    exchange_ns: Longs
    exchange_permille: Longs
    tree_latency_factor: Floats
    sum_ns: Longs
    sum_permille: Longs


def graph_tables(graph: OperatorGraph, topology: Topology) -> GraphTables:
    """The arrays of a graph. Servers on this cluster may own its parameters."""
    readers = [sorted({r for out in op.outputs for r, _ in graph.consumers.get(out.tensor, ())}) for op in graph.operators]
    routed = (graph.copies_of or graph).routed
    dtypes = {name: i for i, name in enumerate(sorted({t.dtype for t in graph.tensors.values()}))}
    numbers = {tensor.name: i for i, tensor in enumerate(graph.parameters)}
    reads: list[list[tuple[int, ...]]] = []
    outputs: list[list[tuple[int, ...]]] = []
    uses: list[list[tuple[int]]] = []
    for op in graph.operators:
        reads.append([])
        for k, operand in enumerate(op.inputs):
            if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
                producer, output = graph.producers[operand.tensor]
                reads[-1].append((k, producer, output))
        tensors = [graph.tensors[out.tensor] for out in op.outputs]
        outputs.append([(t.itemsize, t.partial_itemsize, int(t.requires_grad), dtypes[t.dtype], int(t.name in routed)) for t in tensors])
        uses.append([(number,) for number in sorted({numbers[o.tensor] for o in op.parameters})])
    read_ptr, read_table = _joined(reads, 3)
    reader_ptr, reader_table = _joined([[(r,) for r in own] for own in readers], 1)
    places: list[list[tuple[int]]] = [[] for _ in graph.operators]
    for place, operator in enumerate(r for own in readers for r in own):
        places[operator].append((place,))
    source_ptr, source_table = _joined(places, 1)
    output_ptr, output_table = _joined(outputs, 5)
    parameter_ptr, parameter_table = _joined(uses, 1)
    users = [sorted({position for position, _ in graph.parameter_users.get(t.name, ())}) for t in graph.parameters]
    places_of = [{number: place for place, (number,) in enumerate(own)} for own in uses]
    user_ptr, user_table = _joined([[(op, places_of[op][number]) for op in own] for number, own in enumerate(users)], 2)
    servers, first_reader = first_servers(graph, len(server_devices(topology))), first_readers(graph)
    touched = [_touched(graph.sparse.get(t.name)) for t in graph.parameters]
    read_operand, read_producer, read_output = _columns(read_table)
    output_itemsize, output_partial_itemsize, output_gradient, output_dtype, output_routed = _columns(output_table)
    user, user_place = _columns(user_table)
    return GraphTables(
        read_ptr=read_ptr,
        read_operand=read_operand,
        read_producer=read_producer,
        read_output=read_output,
        reader_ptr=reader_ptr,
        reader=reader_table.ravel(),
        source_ptr=source_ptr,
        source=source_table.ravel(),
        output_ptr=output_ptr,
        output_itemsize=output_itemsize.astype(np.int64),
        output_partial_itemsize=output_partial_itemsize.astype(np.int64),
        output_gradient=output_gradient,
        output_routed=output_routed,
        output_dtype=output_dtype,
        parameter_ptr=parameter_ptr,
        parameter=parameter_table.ravel(),
        user_ptr=user_ptr,
        user=user,
        user_place=user_place,
        trainable=np.array([t.requires_grad for t in graph.parameters], np.int32),
        parameter_dtype=np.array([dtypes[t.dtype] for t in graph.parameters], np.int32),
        dtypes=np.array([len(dtypes)], np.int32),
        first_server=np.array([servers[t.name] for t in graph.parameters], np.int32),
        first_reader=np.array([first_reader[t.name] for t in graph.parameters], np.int64),
        touched_ptr=np.cumsum([0, *map(len, touched)]).astype(np.int32),
        touched=np.array([count for own in touched for count in own], np.int64),
        backward=np.array([graph.needs_backward(op) for op in graph.operators], np.int32),
        loss=np.array(graph.producers.get(graph.loss, (-1, 0)), np.int32),
        known=np.array([position in graph.known_gradients for position in range(len(graph.operators))], np.int32),
        epilogue=np.array([position in graph.epilogue for position in range(len(graph.operators))], np.int32),
        solid=np.array(_solid(graph), np.int32),
        overlaps=np.array([op.overlaps for op in graph.operators], np.int32),
        counts_labels=np.array([bool(op.own_inputs) and topology.own_samples for op in graph.operators], np.int32),
    )


def _touched(access: RowAccess | None) -> tuple[int, ...]:
    return () if access is None else (access.weighed, access.rows, *access.touched)


def _solid(graph: OperatorGraph) -> list[bool]:
    """For each operator, whether it is solid (``GraphTables``): it makes the loss, or a term of it, or a solid operator reads the whole of
    an output, and every tile makes a part of that output. The loss's epilogue has no backward pass with micro-batches."""
    solid = [False] * len(graph.operators)
    for position in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[position]
        whole = [(0, factor.size) for factor in op.factors]
        for out in op.outputs:
            tensor = graph.tensors[out.tensor]
            made = out.box(whole, tensor.shape) == tuple((0, size) for size in tensor.shape)
            made &= all(dim.exact or (dim.factor is None and dim.scale != 0) for dim in out.dims)
            if not (made and tensor.requires_grad):
                continue
            solid[position] |= out.tensor in (graph.loss_terms or (graph.loss,))
            for reader, k in graph.consumers.get(out.tensor, ()):
                other = graph.operators[reader]
                read = other.inputs[k].box([(0, factor.size) for factor in other.factors], tensor.shape)
                solid[position] |= solid[reader] and read == tuple((0, size) for size in tensor.shape)
    return solid


def cluster_tables(communication: Communication) -> ClusterTables:
    """The arrays of a cluster."""
    topology = communication.topology
    count = topology.device_count
    pairs = np.arange(count * count)
    routes = topology.routes((pairs // count).tolist(), (pairs % count).tolist())
    bandwidths, latencies = topology.link_figures
    latencies, per_byte = np.append(latencies, 0.0), np.append(1 / bandwidths, 0.0)  # the last entry means: no link
    latency = np.zeros(len(pairs))
    for column in routes.T:  # added up in the order of the route
        latency += latencies[column]
    types = device_types(topology)
    places, first_core = [device.host for device in topology.devices], first_cores(topology)
    cores = {topology.devices[first].host: server_type(topology, first) for first in first_devices(topology)}
    host = np.array(places)
    message_shares = np.zeros((2, count, count), np.int64)
    if topology.ports:
        shares = [communication.message_share(*divmod(pair, count)) for pair in range(len(pairs))]
        message_shares[:] = np.array(shares).T.reshape(2, count, count)
    sum_shares = np.array([topology.cpu_overhead.of_all_reduce(devices) for devices in range(1, count + 1)], np.int64).T.copy()
    exchange_shares = np.array([topology.cpu_overhead.of_exchange(1 + messages) for messages in range(count + 1)], np.int64).T.copy()
    tree_latency_factor = [topology.latency_factor.of_tree(devices, (devices - 1).bit_length()) for devices in range(1, count + 1)]
    return ClusterTables(
        distance=np.where(host[:, None] == host, 1 - np.eye(count, dtype=np.int8), 2).astype(np.int8),
        route_ptr=np.append(0, np.cumsum((routes >= 0).sum(axis=1))),
        route=(count + routes[routes >= 0]).astype(np.int32),
        latency_seconds=latency.reshape(count, count),
        message_latency_seconds=np.where((routes >= 0).any(axis=1), latency + topology.call_seconds, 0.0).reshape(count, count),
        call_seconds=np.array([topology.call_seconds]),
        seconds_per_byte=per_byte[routes].max(axis=1, initial=0.0).reshape(count, count),
        link_bandwidth=bandwidths,
        memory_bandwidth=np.array([device.type.memory_bandwidth_bytes_per_second for device in topology.devices], np.float64),
        device_type=np.array([types.index(device.type.name) for device in topology.devices], np.int32),
        host_device=np.array([places.index(host) for host in places], np.int32),
        core=np.array([first_core[host] for host in places], np.int32),
        cores=np.array([topology.hosts[host].cpu_cores for host in places], np.int32),
        server=np.array(server_devices(topology), np.int32),
        serves_itself=np.array([device.type.kind == "cpu" for device in topology.devices], np.int32),
        hosts=np.array([len(topology.hosts)], np.int32),
        core_bandwidth=np.array([cores[host].memory_bandwidth_bytes_per_second for host in places], np.float64),
        core_host=np.array([next(h for h, kind in cores.items() if kind == cores[host]) for host in places], np.int32),
        row_seconds=np.array([row_seconds(topology, device) for device in range(count)], np.float64),
        **_lifts(topology),
        message_ns=message_shares[0],
        message_permille=message_shares[1],
        latency_factor=np.array([topology.latency_factor.of_exchange(1 + messages) for messages in range(count + 1)], np.float64),
        exchange_ns=exchange_shares[0],
        exchange_permille=exchange_shares[1],
        tree_latency_factor=np.array(tree_latency_factor, np.float64),
        sum_ns=sum_shares[0],
        sum_permille=sum_shares[1],
    )


def _lifts(topology: Topology) -> dict[str, Any]:
    """What ``ClusterTables`` has of offloading."""
    types, hosts, count = device_types(topology), len(topology.hosts), topology.device_count
    links = [host_link(topology, device) for device in range(count)]
    held: list[list[int]] = []
    for device, link in enumerate(links):
        for place, beside in ((DOWN, link.down), (ON_HOST, ()), (UP, link.up)):
            held.append([offload_resource(topology, device, place), *(count + own for own in beside)])
    owners = [
        hosts + types.index(own.type.name) if own.type.kind == "cpu" else 2 * (hosts + len(types)) + own.host for own in topology.devices
    ]
    return {
        "offload_owner": np.array(owners, np.int32),
        "lift_bandwidth": np.array([link.bandwidth_bytes_per_second for link in links], np.float64),
        "lift_latency": np.array([link.latency_seconds for link in links], np.float64),
        "lift_ptr": np.cumsum([0, *map(len, held)]).astype(np.int32),
        "lift": np.array([resource for own in held for resource in own], np.int32),
    }


def device_types(topology: Topology) -> list[str]:
    """Names of the kinds of devices, in a fixed order."""
    return sorted({device.type.name for device in topology.devices})


def _joined(lists: Sequence[Sequence[Sequence[int]]], width: int) -> tuple[Ints, Ints]:
    pointers = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    rows = [row for own in lists for row in own]
    return pointers, np.array(rows, np.int32).reshape(len(rows), width)


def _columns(table: Ints) -> list[Ints]:
    return [np.ascontiguousarray(table[:, i]) for i in range(table.shape[1])]
