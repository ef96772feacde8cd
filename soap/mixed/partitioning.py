"""A virtual worker's stages: layers cut over its devices, in the best order, so that the slowest stage is as fast as memory allows.

The programme is that of pipelines inside a step (``soap.search.stages``); what differs is memory. A worker has ``in_flight`` minibatches
under way without a flush. Stage s keeps what it has made of ``in_flight - s`` of them at most, the last one of a single one, as its
backward pass follows at once: the simulation holds stages to that, and so must what runs. Each minibatch computes both its passes with the
values with which it has begun, so there are as many versions of a stage's parameters as minibatches in flight; beside them the gradient
that is being computed, and the sum of the wave. With one in flight there are values and gradient alone. Sums of waves that servers do not
have yet are on the host, which on processors is the same memory (``copies_on_processors``). Activations that have come wait for their
turn: those of as many minibatches as the stage before may have begun. Gradients that come back wait, too, and a layer's gradients are
there while it is computed.

Which devices make one virtual worker: HetPipe's policies (Park et al., ATC 2020, section 8.1), as generators of allocations.

*NP*, node partition: a worker is a host. *ED*, equal distribution: a worker has one device of each host, so all are alike. *ED-local*: the
same, and a stage's parameters are on the server of its host, which is the same for all workers. *HD*, hybrid distribution: quick and slow
hosts are paired, and a worker has half as many devices of each as ED's would have of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement
from types import MappingProxyType

import numpy as np

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph, TensorKind
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.search.stage_costs import StageCosts, StagePrices
from soap.search.stage_groups import StageGroups, single_devices
from soap.search.stages import Borders, Chain, partition
from soap.simulator.communication.servers import server_type
from soap.simulator.costs import CostModel, nanoseconds
from soap.units import format_bytes

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


MOST_CONSIDERED = 16
"""Minibatches in flight of a worker; HetPipe had up to 7."""
COUNTED_BOUND = 4
"""See ``copies_on_processors``; the bound with which HetPipe was fastest."""
READ_AHEAD = 1
"""Inputs of so many minibatches are read, in a thread of their own, before the one that begins next has begun (``mixed.run.stage``)."""
PASSES_OF_UPDATE, PASSES_OF_STAGE = 3, 13
"""How often memory is passed over for each parameter: by plain SGD (value and gradient read, value written), and by a stage behind each
backward pass (``mixed.run``): 2 for its gradients end to end, 2 for the update made of them, and 3 each for the wave's sum, for the sum of
what the worker has finished, and for the next minibatch's values."""
STEP_COPIES = 2
"""Of trained parameters that ``StageCosts.chain`` counts without an optimizer's states: value and gradient."""


@dataclass(frozen=True)
class Stage:
    """A stage's part of one minibatch. ``first``: its first operator. ``backward_ns``: with what it does with its values. ``sent_bytes``:
    to the next stage, and back. ``parameter_bytes``: one copy of what is trained. ``needed_bytes``: of memory."""

    device: int
    first: int
    forward_ns: int
    backward_ns: int
    sent_bytes: tuple[int, int]
    parameter_bytes: int
    needed_bytes: int

    @property
    def busy_ns(self) -> int:
        """What it computes for a minibatch."""
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True)
class WorkerPlan:
    """The stages of a worker. ``slowest_ns``: the longest stage or message."""

    stages: tuple[Stage, ...]
    in_flight: int
    slowest_ns: int


def kept_minibatches(stages: int, in_flight: int) -> tuple[int, ...]:
    """Of each stage, how many minibatches it may have begun and not finished."""
    return (*(max(1, in_flight - stage) for stage in range(stages - 1)), 1)


def parameter_copies(in_flight: int) -> int:
    """How many copies of its trained parameters a stage holds: values of each minibatch in flight, a gradient, and the sum of a wave."""
    return in_flight + (2 if in_flight > 1 else 1)


def copies_on_processors(in_flight: int, bound: int | None) -> int:
    """The same where devices are processors, so that all that ``mixed.run`` holds is in their memory: of each minibatch in flight its
    values or, behind its backward pass, its update; what was last pulled, and while more is pulled what has come and the same end to end; a
    gradient, and the update that is made of it; the sums of own waves that are not in what was pulled, of which there are ``bound + 1``;
    with more than one in flight also two of the wave that is not complete, one of what the worker has finished and one of what the stage
    has; and what is being pushed, by server. Without a bound nothing limits how many waves there are: then it is as many as with
    ``COUNTED_BOUND``."""
    waves = (COUNTED_BOUND if bound is None else bound) + 1
    return in_flight + 3 + 2 + waves + (2 if in_flight > 1 else 0) + 1


class Partitioner:
    """Cuts one model on one cluster, devices that are alike once. ``graph``: of one minibatch. ``bound``: D, or None, for processors."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel, bound: int | None = 0) -> None:
        from soap.simulator.shared import Shared  # compiled code, which takes long to import

        self.graph, self.topology, self.bound = graph, topology, bound
        self._prices = StagePrices(Shared(graph, topology, costs), 0)
        self._costs: dict[Hashable, StageCosts] = {}
        self._found: dict[Hashable, WorkerPlan | None] = {}

    @cached_property
    def _whole(self) -> MicroBatches:
        return MicroBatches(self.graph, 1)

    def plan(self, devices: Sequence[int], in_flight: int) -> WorkerPlan | None:
        """The best stages on these devices, one on each, in the best order; None if none fit into memory, or there are too few layers."""
        groups = self._groups(devices)
        key = self._look(groups), in_flight
        if key not in self._found:
            self._found[key] = self._cut(groups, in_flight)
        found = self._found[key]
        return None if found is None else _placed_like(found, groups, self.topology)

    def most_in_flight(self, devices: Sequence[int], most: int = MOST_CONSIDERED) -> int:
        """Maxm: with how many minibatches in flight, up to ``most``, stages fit; 0 if they never do."""
        return max((count for count in range(1, most + 1) if self.plan(devices, count) is not None), default=0)

    def require_fits(self, devices: Sequence[int]) -> None:
        """ElasticError in one line, with the layer that needs most and how much, if nothing fits on these devices."""
        if self.plan(devices, 1) is not None:
            return
        groups = self._groups(devices)
        costs, names = self._priced(groups), ", ".join(self.topology.devices[device].name for device in devices)
        chain = self._chain(costs, groups, (1,) * len(devices), 1)
        if len(devices) > chain.layer_count:
            raise ElasticError(f"a worker on {names}: {len(devices)} stages of {chain.layer_count} layers; expected as many layers")
        passing = np.zeros((chain.layer_count + 1,) * 2, np.int64) if chain.borders is None else chain.borders.needed_bytes(0, 1)
        layers = (chain.kept_bytes + chain.activation_bytes).min(axis=0)
        alone, together = layers + passing.diagonal(1), int(layers.sum() + passing[0, -1])
        layer, limits = int(alone.argmax()), sum(self.topology.memory_limits[device] for device in devices)
        first = self.graph.operators[costs.firsts[layer]].name
        raise ElasticError(
            f"a worker on {names} fits no stages into memory, even with one minibatch in flight: all layers together need "
            f"{format_bytes(together)}, the devices have {format_bytes(limits)}; the largest layer alone, from {first!r} on, needs "
            f"{format_bytes(int(alone[layer]))}, the largest device has {format_bytes(int(chain.limit_bytes.max()))}; expected more or "
            "larger devices, or a smaller minibatch"
        )

    def _groups(self, devices: Sequence[int]) -> StageGroups:
        """In an order that is the same for all devices of the same kinds."""
        return single_devices(self.topology, sorted(devices, key=lambda device: (_kind(self.topology, device), device)))

    def _look(self, groups: StageGroups) -> Hashable:
        """All that decides the stages but the devices' numbers."""
        return tuple(_kind(self.topology, device) for (device,) in groups.devices)

    def _priced(self, groups: StageGroups) -> StageCosts:
        key = self._look(groups)
        if key not in self._costs:
            own = self._prices.costs(groups, 1, self._whole)
            upkeep_ns = own.upkeep_ns * PASSES_OF_STAGE // PASSES_OF_UPDATE
            chain = replace(own.chain, layer_ns=own.forward_ns + own.backward_ns + upkeep_ns)
            self._costs[key] = replace(own, upkeep_ns=upkeep_ns, chain=chain)
        return self._costs[key]

    def _chain(self, costs: StageCosts, groups: StageGroups, kept: Sequence[int], in_flight: int) -> Chain:
        """With the copies of parameters for so many minibatches in flight, and what passes between stages. ``kept``: by stage."""
        copies = np.full(len(costs.trained_bytes), parameter_copies(in_flight))
        for (device,), kind in zip(groups.devices, groups.kinds, strict=True):
            if self.topology.devices[device].type.kind == "cpu":
                copies[kind] = copies_on_processors(in_flight, self.bound)
        more = (copies - STEP_COPIES)[:, None] * costs.trained_bytes
        always = costs.chain.kept_bytes + np.asarray(more, np.int64)
        return replace(costs.chain, kept_bytes=always, borders=self._borders(costs, kept))

    def _borders(self, costs: StageCosts, kept: Sequence[int]) -> Borders:
        """Each stage reads a minibatch's inputs by itself, so they are there once more in each, and those that are read ahead. A layer's
        gradients are of what it reads and makes, each at most as large as its largest tensor; inputs have none, but are copied where a
        kernel wants another layout."""
        graph = self.graph
        parts = {name: tensor.bytes * (1 if tensor.kind is TensorKind.INPUT else 2) for name, tensor in graph.tensors.items()}
        largest = [max((parts[own.tensor] for own in (*op.inputs, *op.outputs)), default=0) for op in graph.operators]
        inputs = sum(tensor.bytes for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT)
        most = np.maximum.reduceat(np.array(largest, np.int64), costs.firsts)
        forward, back = (np.array([first, *row, 0], np.int64) for first, row in zip((inputs, 0), costs.sent_bytes, strict=True))
        return Borders((kept[0] + READ_AHEAD, *kept[:-1]), forward, back, most, (1 + READ_AHEAD) * inputs)

    def _cut(self, groups: StageGroups, in_flight: int) -> WorkerPlan | None:
        costs, kept = self._priced(groups), kept_minibatches(len(groups.devices), in_flight)
        chain = self._chain(costs, groups, kept, in_flight)
        found = partition(chain, groups.kinds, kept, any_order=True)
        if found is None:
            return None
        devices = [device for (device,) in groups.in_order(found.kinds)]
        return WorkerPlan(_priced_stages(costs, chain, devices, found.kinds, found.firsts, kept), in_flight, found.slowest_ns)

    def given(self, stages: Sequence[tuple[int, int]], in_flight: int) -> WorkerPlan:
        """The given stages, (device, first operator) of each, whether they fit or not. ElasticError if one begins where none may."""
        groups = self._groups([device for device, _ in stages])
        costs, kept = self._priced(groups), kept_minibatches(len(stages), in_flight)
        for device, first in stages:
            if first not in costs.firsts:
                name = self.graph.operators[first].name
                raise ElasticError(
                    f"the stage on {self.topology.devices[device].name} begins with operator {name!r}; expected one "
                    "with which a layer begins, where little is sent: search again"
                )
        chain, devices = self._chain(costs, groups, kept, in_flight), [device for device, _ in stages]
        kinds = tuple(groups.kinds[groups.devices.index((device,))] for device in devices)
        firsts = tuple(costs.firsts.index(first) for _, first in stages)
        made = _priced_stages(costs, chain, devices, kinds, firsts, kept)
        messages = [int(chain.message_ns[kinds[s], kinds[s + 1], firsts[s + 1] - 1]) for s in range(len(stages) - 1)]
        return WorkerPlan(made, in_flight, max([own.busy_ns for own in made] + messages))


def _priced_stages(
    costs: StageCosts, chain: Chain, devices: Sequence[int], kinds: Sequence[int], firsts: Sequence[int], kept: Sequence[int]
) -> tuple[Stage, ...]:
    """``firsts``: the first layer of each stage; ``kept``: of how many minibatches each keeps activations."""
    ends, stages = (*firsts[1:], chain.layer_count), []
    for number, (device, kind, first, end) in enumerate(zip(devices, kinds, firsts, ends, strict=True)):
        span = slice(first, end)
        needed = chain.kept_bytes[kind, span].sum() + kept[number] * chain.activation_bytes[kind, span].sum()
        if chain.borders is not None:
            needed += chain.borders.needed_bytes(number, kept[number])[first, end]
        sent = (0, 0) if end == chain.layer_count else (int(costs.sent_bytes[0, end - 1]), int(costs.sent_bytes[1, end - 1]))
        forward_ns = int(costs.forward_ns[kind, span].sum())
        backward_ns = int((costs.backward_ns + costs.upkeep_ns)[kind, span].sum())
        trained = int(costs.trained_bytes[kind, span].sum())
        stages.append(Stage(device, costs.firsts[first], forward_ns, backward_ns, sent, trained, int(needed)))
    return tuple(stages)


def _placed_like(plan: WorkerPlan, groups: StageGroups, topology: Topology) -> WorkerPlan:
    """The same stages on devices of the same kinds."""
    left: dict[object, list[int]] = {}
    for (device,) in groups.devices:
        left.setdefault(_kind(topology, device), []).append(device)
    return replace(plan, stages=tuple(replace(own, device=left[_kind(topology, own.device)].pop(0)) for own in plan.stages))


def _kind(topology: Topology, device: int) -> tuple[int, str, int]:
    own = topology.devices[device]
    return own.host, own.type.name, topology.memory_limits[device]


COPY_TRAFFIC = 2
"""Bytes that a server reads and writes for each byte of values that it gives away."""


@dataclass(frozen=True)
class Placement:
    """``shares``: [worker][stage]: by host, bytes of the stage's parameters on its server."""

    shares: tuple[tuple[Mapping[int, int], ...], ...]


def placed(topology: Topology, allocation: Allocation, plans: Sequence[WorkerPlan]) -> Placement:
    """Where these stages' parameters are. ElasticError if they are to be on their stage's host, and workers' stages differ in that."""
    hosts = sorted({topology.devices[stage.device].host for plan in plans for stage in plan.stages})
    if not allocation.local:
        return Placement(tuple(tuple(_even(stage.parameter_bytes, hosts) for stage in plan.stages) for plan in plans))
    looks = {tuple((topology.devices[stage.device].host, stage.first) for stage in plan.stages) for plan in plans}
    if len(looks) > 1:
        raise ElasticError(
            f"allocation {allocation.name!r}: parameters are to be on their stage's host, but workers' stages differ; expected the same "
            "layers on the same host in each worker"
        )
    beside = [tuple({topology.devices[stage.device].host: stage.parameter_bytes} for stage in plan.stages) for plan in plans]
    return Placement(tuple(beside))


def _even(size: int, hosts: Sequence[int]) -> Mapping[int, int]:
    return {host: size * (k + 1) // len(hosts) - size * k // len(hosts) for k, host in enumerate(hosts)}


def host_bytes(topology: Topology, plans: Sequence[WorkerPlan], placement: Placement, bound: int | None) -> tuple[int, ...]:
    """By host, what it holds at most of parameters, for any order of events: its servers versions that may be asked for, pushes of waves
    that not all have pushed, a question and an answer of each worker; of stages on accelerators, sums of own waves that are in no pulled
    values. Without a bound as with ``COUNTED_BOUND``."""
    ahead, found = (COUNTED_BOUND if bound is None else bound) + 2, [0] * len(topology.hosts)
    copies = ahead + 2 + (len(plans) - 1) * ahead + 2 * len(plans)
    for host, size in ((host, size) for shares in placement.shares[0] for host, size in shares.items()):
        found[host] += copies * size
    for stage in (stage for plan in plans for stage in plan.stages):
        device = topology.devices[stage.device]
        found[device.host] += 0 if device.type.kind == "cpu" else ahead * stage.parameter_bytes
    return tuple(found)


def require_room(topology: Topology, plans: Sequence[WorkerPlan], placement: Placement, bound: int | None) -> None:
    """ElasticError in one line if a host's memory, where it is known, is less than ``host_bytes``."""
    for host, size in zip(topology.hosts, host_bytes(topology, plans, placement, bound), strict=True):
        if host.memory_bytes is not None and size > host.memory_bytes:
            raise ElasticError(
                f"servers and waiting updates of {len(plans)} workers need {format_bytes(size)} on host {host.name!r}, which has "
                f"{format_bytes(host.memory_bytes)}; expected a tighter bound, fewer workers, or more memory"
            )


def count_ns(topology: Topology, device: int, size: int) -> int:
    """What the server beside a device takes to add so many bytes of a wave to its values."""
    return _moving_ns(topology, device, REDUCE_TRAFFIC * size)


def copy_ns(topology: Topology, device: int, size: int) -> int:
    """What it takes to give away so many bytes of values."""
    return _moving_ns(topology, device, COPY_TRAFFIC * size)


def _moving_ns(topology: Topology, device: int, moved_bytes: int) -> int:
    kind = server_type(topology, device)
    return nanoseconds(moved_bytes / kind.memory_bandwidth_bytes_per_second + kind.kernel_seconds)
