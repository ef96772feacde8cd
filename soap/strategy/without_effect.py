"""Names of strategies that divide nothing on a cluster, or less than they say: one device has nothing to share."""

from __future__ import annotations

import warnings

from soap.cluster.topology import Topology
from soap.errors import SoapWarning
from soap.strategy.classical import RECOMPUTED, SYNCHRONIZED
from soap.strategy.named import DATA_PARALLEL, HSDP, JOIN, UNEVEN, base_of
from soap.strategy.ralp import RALP
from soap.strategy.served import SERVED
from soap.strategy.sync import host_count, shares_in_hosts

MEANT = ("single_device", DATA_PARALLEL, *RECOMPUTED, RALP, *SERVED)
"""What is asked for on one device as well: the first two are the same there. Without servers the last ones are refused."""
ON_TOP = (*SYNCHRONIZED, UNEVEN)
"""Of what is put on top of others: all that needs several devices."""


def warn_without_effect(name: str, topology: Topology) -> None:
    """Warn in one line if a strategy of this legal name divides less on this cluster than the name says."""
    why = without_effect(name, topology)
    if why:
        warnings.warn(f"strategy {name!r} on cluster {topology.name!r}: {why}", SoapWarning, stacklevel=3)


def without_effect(name: str, topology: Topology) -> str:
    """What of a strategy has no effect on this cluster, in words; empty if all of it has."""
    parts = [base_of(name)[0], *name.split(JOIN)[1:]]
    if len(topology.workers) == 1:
        idle = [part for place, part in enumerate(parts) if (part in ON_TOP if place else part not in MEANT)]
        return f"one device has nothing to divide, which is what {' and '.join(map(repr, idle))} would do" if idle else ""
    if HSDP in parts and not shares_in_hosts(topology):
        if host_count(topology) == 1:
            return f"{HSDP!r} is 'fsdp' on one host"
        return f"{HSDP!r} shares nothing where each host has one device: gradients are summed as under {DATA_PARALLEL!r}"
    return ""
