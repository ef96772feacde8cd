"""Which devices make one virtual worker: HetPipe's policies (Park et al., ATC 2020, section 8.1), as generators of allocations.

*NP*, node partition: a worker is a host. *ED*, equal distribution: a worker has one device of each host, so all are alike. *ED-local*: the
same, and a stage's parameters are on the server of its host, which is the same for all workers. *HD*, hybrid distribution: quick and slow
hosts are paired, and a worker has half as many devices of each as ED's would have of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from types import MappingProxyType

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError

MOST_ALLOCATIONS = 20_000
"""No more divisions into workers are looked at, and none of clusters that have more."""


@dataclass(frozen=True)
class Allocation:
    """``workers``: the devices of each, in any order. ``local``: parameters are on the server of their stage's host, else on all evenly."""

    name: str
    workers: tuple[tuple[int, ...], ...]
    local: bool = False

    def __post_init__(self) -> None:
        taken = [device for own in self.workers for device in own]
        twice = [device for device, count in Counter(taken).items() if count > 1]
        if not self.workers or not all(self.workers) or twice:
            what = f"device {twice[0]} is in two workers" if twice else f"{len(self.workers)} workers, or one without devices"
            raise ElasticError(f"allocation {self.name!r}: {what}; expected workers with devices of their own, at least one each")


def node_partition(topology: Topology) -> Allocation:
    """NP: each host is a worker."""
    return Allocation("NP", tuple(_hosts(topology)))


def equal_distribution(topology: Topology) -> Allocation:
    """ED: a worker has one device of each host. ElasticError if hosts have unequal numbers of them."""
    return Allocation("ED", tuple(zip(*_equal_hosts(topology, "ED"), strict=True)))


def local_distribution(topology: Topology) -> Allocation:
    """ED-local: as ED, parameters beside their stages."""
    return Allocation("ED-local", equal_distribution(topology).workers, local=True)


def hybrid_distribution(topology: Topology) -> Allocation:
    """HD: the quickest host with the slowest, the next with the last but one, by their devices' rates; two workers of each pair. A host
    that is left over is two workers of its own. ElasticError if hosts have unequal or odd numbers of devices, or there is one alone."""
    hosts = sorted(_equal_hosts(topology, "HD"), key=lambda own: -topology.devices[own[0]].type.flops("float32"))
    width = len(hosts[0])
    if len(hosts) < 2 or width % 2:
        raise ElasticError(f"HD on {len(hosts)} hosts with {width} devices; expected two hosts at least, with an even number of devices")
    pairs = [(hosts[i], hosts[-1 - i]) if i != len(hosts) - 1 - i else (hosts[i],) for i in range((len(hosts) + 1) // 2)]
    halves = (slice(0, width // 2), slice(width // 2, width))
    return Allocation("HD", tuple(tuple(device for host in pair for device in host[half]) for pair in pairs for half in halves))


POLICIES: Mapping[str, Callable[[Topology], Allocation]] = MappingProxyType(
    {"NP": node_partition, "ED": equal_distribution, "ED-local": local_distribution, "HD": hybrid_distribution}
)
"""By name."""


def policies(topology: Topology) -> list[Allocation]:
    """All that suit a cluster."""
    found = []
    for make in POLICIES.values():
        try:
            found.append(make(topology))
        except ElasticError:
            continue
    return found


def allocations(topology: Topology) -> Iterator[Allocation]:
    """All divisions of all devices into workers with equal numbers of them, but for the order of workers and of devices that are alike: of
    one type on one host. None if there are more than ``MOST_ALLOCATIONS``."""
    kinds = _kinds(topology)
    counts, total = tuple(map(len, kinds)), topology.device_count
    for width in range(1, total + 1):
        if total % width:
            continue
        left = MOST_ALLOCATIONS
        for parts in _divisions(counts, width, total // width):
            left -= 1
            if left < 0:
                break
            yield Allocation(f"{total // width} workers: {_named(topology, kinds, parts)}", _placed(kinds, parts))


Composition = tuple[int, ...]
"""How many devices of each kind a worker has."""


def _divisions(counts: Composition, width: int, workers: int, least: Composition = ()) -> Iterator[tuple[Composition, ...]]:
    """Workers in ascending order of their compositions."""
    if not workers:
        yield ()
        return
    for own in _compositions(counts, width):
        if own >= least:
            left = tuple(count - used for count, used in zip(counts, own, strict=True))
            for others in _divisions(left, width, workers - 1, own):
                yield (own, *others)


def _compositions(counts: Composition, width: int) -> list[Composition]:
    """Of so many devices, at most those that there are, ascending."""
    found = set()
    for chosen in combinations_with_replacement(range(len(counts)), width):
        own = tuple(chosen.count(kind) for kind in range(len(counts)))
        if all(used <= count for used, count in zip(own, counts, strict=True)):
            found.add(own)
    return sorted(found)


def _placed(kinds: Sequence[Sequence[int]], parts: Sequence[Composition]) -> tuple[tuple[int, ...], ...]:
    """Devices of each kind in turn."""
    left = [iter(own) for own in kinds]
    return tuple(tuple(next(left[kind]) for kind, count in enumerate(own) for _ in range(count)) for own in parts)


def _named(topology: Topology, kinds: Sequence[Sequence[int]], parts: Sequence[Composition]) -> str:
    names = [topology.hosts[topology.devices[own[0]].host].name for own in kinds]
    words = [" + ".join(f"{count} {name}" for count, name in zip(own, names, strict=True) if count) for own in parts]
    return ", ".join(f"{count} of {word}" if count > 1 else word for word, count in Counter(words).items())


def _kinds(topology: Topology) -> list[tuple[int, ...]]:
    """Devices of one type, with equal memory, on one host."""
    return alike(topology, kind_of)


def kind_of(topology: Topology, device: int) -> tuple[int, str, int]:
    """What is the same of devices that are alike: host, type, memory."""
    own = topology.devices[device]
    return own.host, own.type.name, topology.memory_limits[device]


def alike(topology: Topology, key: Callable[[Topology, int], object]) -> list[tuple[int, ...]]:
    """The devices, those with equal keys together."""
    found: dict[object, list[int]] = {}
    for device in range(topology.device_count):
        found.setdefault(key(topology, device), []).append(device)
    return [tuple(own) for own in found.values()]


def _hosts(topology: Topology) -> list[tuple[int, ...]]:
    return alike(topology, lambda topology, device: topology.devices[device].host)


def _equal_hosts(topology: Topology, policy: str) -> list[tuple[int, ...]]:
    hosts = _hosts(topology)
    if len({*map(len, hosts)}) > 1:
        raise ElasticError(f"{policy} on hosts with {', '.join(str(len(own)) for own in hosts)} devices; expected equal numbers of them")
    return hosts
