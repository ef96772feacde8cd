"""Any topology as the text of a cluster.yaml: what is read back is compared with it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import yaml

from soap.cluster.build import SERVER
from soap.cluster.kinds import types_of
from soap.cluster.price import CURRENCY, PRICE
from soap.cluster.topology import DeviceType, Topology
from soap.errors import TopologyError
from soap.units import _BYTES, _DECIMAL, _RATES, _SECONDS, Units


def dump_cluster(topology: Topology) -> str:
    """YAML text that lists every device and link. ``parse_cluster`` of it gives a topology of the same hash. TopologyError if the
    devices are not listed host by host, which YAML cannot express."""
    order = [device.host for device in topology.devices]
    if order != sorted(order) or set(order) != set(range(len(topology.hosts))):
        raise TopologyError(f"cluster {topology.name!r}: its devices are not in the order of its hosts; list them host by host")
    hosts = [
        {
            "name": host.name,
            "devices": [{"name": d.name, "type": d.type.name} for d in topology.devices if d.host == i],
            "cpu_cores": host.cpu_cores,
            **({} if host.memory_bytes is None else {"memory": exact_bytes(host.memory_bytes)}),
            **({SERVER: True} if host.server else {}),
        }
        for i, host in enumerate(topology.hosts)
    ]
    links = [
        {
            "name": link.name,
            "from": link.source,
            "to": link.target,
            "bandwidth": exact_bandwidth(link.bandwidth_bytes_per_second),
            "latency": exact_seconds(link.latency_seconds),
            "duplex": False,
            **({"interconnect": link.interconnect} if link.interconnect else {}),
        }
        for link in topology.links
    ]
    types = {kind.name: _type_fields(kind) for kind in types_of(topology)}
    description: dict[str, Any] = {"name": topology.name, "device_types": types, "hosts": hosts}
    if links:
        description |= {"switches": list(topology.switches), "links": links}
    if topology.price is not None:
        description[PRICE] = topology.price.per_hour
        if topology.price.currency:
            description[CURRENCY] = topology.price.currency
    return yaml.safe_dump(description, sort_keys=False, default_flow_style=None, width=140, allow_unicode=True)


def _type_fields(device_type: DeviceType) -> dict[str, Any]:
    return {
        "kind": device_type.kind,
        "flops": {dtype: exact_flops(rate) for dtype, rate in device_type.flops_per_second.items()},
        "memory_bandwidth": exact_bandwidth(device_type.memory_bandwidth_bytes_per_second),
        "memory": exact_bytes(device_type.memory_bytes),
        "kernel_overhead": exact_seconds(device_type.kernel_seconds),
        "source": device_type.source,
    }


def exact_bytes(size_bytes: int) -> str:
    """Text that ``parse_bytes`` reads back to exactly this size."""
    return _exact(size_bytes, _BYTES)


def exact_bandwidth(bytes_per_second: float) -> str:
    """Text that ``parse_bandwidth`` reads back to exactly this bandwidth."""
    return _exact(bytes_per_second, {f"{prefix}B/s": Fraction(factor) for prefix, factor in _DECIMAL.items()})


def exact_seconds(seconds: float) -> str:
    """Text that ``parse_seconds`` reads back to exactly this time."""
    return _exact(seconds, {unit: factor for unit, factor in _SECONDS.items() if unit.isascii()})


def exact_flops(flops_per_second: float) -> str:
    """Text that ``parse_flops`` reads back to exactly this rate."""
    return _exact(flops_per_second, {unit: factor for unit, factor in _RATES.items() if unit.endswith("/s")})


def _exact(value: float, units: Units) -> str:
    """The shortest number of at least 1 that reads back exactly; of equally short ones the one in the largest unit. The base unit always
    reads back exactly."""
    exact = []
    for unit, factor in units.items():
        short = f"{float(value / factor):.10g}"
        if value >= factor and float(Fraction(short) * factor) == value:
            exact.append((len(short), -factor, f"{short} {unit}"))
    base = next(unit for unit, factor in units.items() if factor == 1)
    return min(exact)[2] if exact else f"{value!r} {base}" if value else f"0 {base}"
