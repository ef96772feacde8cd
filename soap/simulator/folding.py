"""Folding: a strategy of D data-parallel copies is simulated with two of them, exactly to the nanosecond and the byte.

Copies are those of ``soap.plan.copies``. Copy j > 1 does what copy 1 does, on corresponding devices and local links. Copy 0 may do more
(start the backward pass of what follows a summed loss, keep what no tile reads), so it is simulated as it is. A task is *local* to one
copy, or *common*: a sum over all copies. ``fold`` checks these conditions, and names the one that fails:

1. corresponding devices have the same type and share hosts in the same way; routes inside a copy use corresponding links of equal
   bandwidth and latency, which lead between hosts or do not; no two copies share such a local link;
2. activations without a folded dimension are read on the device that holds them, so only common sums travel between copies;
3. if a common sum (by any algorithm) holds a local link of copy 1, it holds the corresponding link of every copy j > 1, and vice versa;
4. what keeps parameters in step is rows (``plan.syncs``) of which each either is a common sum, or a collective of equal parts of all
   copies, or moves everything inside copies, on corresponding devices of all of them;
5. no device of the cluster is idle if the training clips: the sum for the norm, a common one, is over all of them;
6. what readers own in parts all of them share (``syncs.represented``), or those of each copy among themselves.

Why the result is exact. Let F be the simulation of two copies, in which a common sum takes as long as it takes over the devices of all D.
The claim: a task of copy j > 1 is ready, starts and ends when the corresponding task of copy 1 does in F; every other task when it does
itself in F. The proof is by induction on the ready time.

- A task is ready when its predecessors end. They correspond to the predecessors in F; a common sum has more of them, which are copies of
  those in F and end at the same times.
- Durations are at least 1, so tasks are taken in the order of (ready time, id).
- A task starts when its resources are free. By 3, the tasks on a device or local link of copy j correspond to those on copy 1's, and have
  the same ready times. Ids order them alike: tiles are numbered row by row, so those of one copy are in the same order as in F; the sums of
  one operator are all local or all common; and the rest of an id is a place in the operator, parameter or fetch.
- Links that are local to no copy are held by common sums alone. Links that the same sums hold are free at the same times, so one of them
  represents all.
- With micro-batches a pass also waits for the one before it on its device. Which one that is follows from the order of passes, which both
  have from the same stages, schedule and barriers, and inside an action from the places of tiles in their operator: those of one copy come
  micro-batch by micro-batch, in the same order as in F.

If what is owned in parts does not divide evenly among readers, copy 1 owns more of some regions than others do, by a row or so. Then it may
hold more than they, by that, and update and communicate longer: the folding is no longer *exact*, but says no less than the whole.

Common sums of activations are never reduce-scatters: at least half of the devices would want the same cell, or nothing. Buckets hold the
same shards, because distinct sets of devices of two copies correspond to distinct sets of devices of all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, permutations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from soap.cluster.overheads import NO_COLD_PENALTY
from soap.cluster.topology import Device, Host, Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.copies import LEFT, Copies, UnfoldableError, candidates, find_copies
from soap.plan.marks.seam import marked
from soap.plan.placement import are_even
from soap.plan.plan import Plan
from soap.plan.planning import PlanBuilder
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.keeping import serving
from soap.plan.syncs.represented import Represented
from soap.plan.syncs.seam import Flow, How, Row, Setting, method_of
from soap.simulator.chunks import shortest_chunk_ns
from soap.simulator.communication.algorithms import AllReduceOption
from soap.simulator.communication.allreduce import allreduce_options, parted_options
from soap.simulator.communication.prices import Communication
from soap.simulator.draws import links_between_hosts
from soap.strategy.config import Strategy, SyncConfig


@dataclass(frozen=True)
class CommonSums:
    """Sums over all copies. ``devices``: those of the cluster, ascending. ``options``: of all-reduces, with the cluster's links. ``small``:
    with the links of the small topology that represent these. ``parted``: the same of collectives of equal parts; none if there are none.
    """

    devices: tuple[int, ...]
    options: tuple[AllReduceOption, ...]
    small: tuple[AllReduceOption, ...]
    parted: tuple[AllReduceOption, ...] = ()


class FoldedCommunication(Communication):
    """Prices of communication on the small topology. A sum over both copies costs what the sum over all copies does.

    ``common``: devices of the small topology -> the sum over all copies. ``represented``: the devices for which those of the small
    topology stand.
    """

    def __init__(
        self,
        topology: Topology,
        common: Mapping[tuple[int, ...], CommonSums],
        groups: Sequence[tuple[int, ...]],
        represented: Represented,
    ) -> None:
        super().__init__(topology)
        self.common, self.groups, self.represented = common, groups, represented

    def allreduce_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for an all-reduce over these devices of the small topology."""
        common = self.common.get(devices)
        return super().allreduce_options(devices) if common is None else common.small

    def parted_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for a collective of equal parts over these devices of the small topology."""
        common = self.common.get(devices)
        return super().parted_options(devices) if common is None else common.parted

    def members(self, devices: tuple[int, ...]) -> int:
        """How many devices of all copies sum where these do."""
        common = self.common.get(devices)
        return len(devices if common is None else common.devices)

    def places(self, sharing: tuple[int, ...]) -> Sequence[Sequence[int]]:
        """For each of the devices that share what they own in parts, the places of those for which it stands among all that do."""
        return [own.tolist() for own in self.represented.places(sharing)] if sharing in self.common else super().places(sharing)


MOST_BUILDERS = 8
"""So many divisions of operators among copies are remembered."""
MOST_FOLDINGS = 4
"""And so many foldings."""

DECIDING = tuple(field.name for field in fields(Strategy) if field.name not in ("operators", "prefetch"))
"""Fields of a strategy that decide about its copies, as do the places of its operators."""

Ints = NDArray[np.int64]
T = TypeVar("T")
Devices = tuple[int, ...]
Options = tuple[AllReduceOption, ...]


@dataclass(frozen=True)
class Folding:
    """A strategy reduced to two of its copies.

    ``graph``, ``whole``: the whole graph and cluster. ``topology``: the small one: the devices of both copies, the links between them, and
    one link for each set of links that the same common sums hold. ``lowering.lower`` takes ``plan`` with ``topology`` and
    ``communication``; an ``Engine`` takes ``copies.graph`` and ``copies.strategy`` instead. ``local[copy, number]``:
    links of the cluster; one column has corresponding links. ``alike``: link of the cluster -> the link of the small topology that
    represents it, -1 if it is never held. ``between_hosts``: by link of the small topology, whether any of those that it represents leads
    from one host to others (``draws.links_between_hosts`` of the whole cluster). ``builder``: of plans of two copies. ``exact``:
    whether the others do exactly as copy 1: what readers own in parts are equal ones. ``syncs``: by which methods, of those that were asked
    for, parameters may be kept in step instead, on the same devices and links.
    """

    graph: OperatorGraph
    whole: Topology
    copies: Copies
    topology: Topology
    builder: PlanBuilder
    exact: bool
    communication: FoldedCommunication
    local: Ints
    alike: Ints
    between_hosts: NDArray[np.bool_]
    syncs: Collection[SyncConfig] = ()

    def holding(self, strategy: Strategy) -> Folding:
        """This with another strategy of two copies, which places everything as its own."""
        return replace(self, copies=replace(self.copies, strategy=strategy))

    @property
    def plan(self) -> Plan:
        """The plan of two copies, with the whole graph, made whenever it is asked for."""
        builder, strategy = self.builder, self.copies.strategy
        if strategy.microbatches > 1:  # whose plans are large, and nothing of them is kept
            own = builder.graph, builder.topology, builder.training, strategy.microbatches
            builder = PlanBuilder(*own, represented=self.communication.represented)
        return replace(builder.build(strategy), graph=self.graph)

    @staticmethod
    def with_an_idle_device(plan: Plan) -> Plan:
        """A plan of two copies with one more device, which represents all idle devices."""
        return replace(plan, device_count=plan.device_count + 1)

    def for_all(self, values: Sequence[T]) -> list[T]:
        """One value per device of the cluster. ``values``: one per device of the small topology, then one for idle devices."""
        found = [values[-1]] * self.whole.device_count
        rank = {device: i for i, device in enumerate(self.copies.devices)}
        for copy, devices in enumerate(self.copies.images.tolist()):
            for device, alike in zip(devices, self.copies.images[min(copy, 1)].tolist(), strict=True):
                found[device] = values[rank[alike]]
        return found

    @property
    def count(self) -> int:
        """Number of copies."""
        return len(self.copies.images)


class CopiesBuilders:
    """The builders of plans of two copies of one graph on one cluster, the last ones: strategies that divide operators alike share one, and
    so what their plans have in common. And the last foldings, for strategies that differ in what does not decide about copies."""

    def __init__(self, graph: OperatorGraph, topology: Topology, training: PlannedTraining = PLAIN) -> None:
        self.graph, self.topology, self.training = graph, topology, training
        self._known: list[tuple[Ints, PlanBuilder]] = []
        self._folded: list[tuple[Strategy, Folding]] = []

    def add(self, strategy: Strategy, folding: Folding) -> None:
        """Remember a folding of a strategy."""
        self._folded = [(strategy, folding), *self._folded][:MOST_FOLDINGS]

    def again(self, strategy: Strategy) -> Folding | None:
        """The folding of a strategy that places everything as one that was added, and has other marks or another prefetch; else None."""
        for known, folding in self._folded:
            same = all(getattr(known, name) == getattr(strategy, name) for name in DECIDING)
            changed = {name: config for name, config in strategy.operators.items() if config is not known.operators[name]}
            if same and all(config.placed_like(known.operators[name]) is config for name, config in changed.items()):
                own = folding.copies.strategy.operators
                placed = {**own, **{name: config.placed_like(own[name]) for name, config in changed.items()}}
                return folding.holding(replace(strategy, operators=placed))
        return None

    def builder(self, copies: Copies, before: Topology) -> PlanBuilder:
        """The builder for two copies on ``before``, these devices' part of the cluster."""
        for images, builder in self._known:
            if np.array_equal(images, copies.images) and builder.topology == before and builder.graph == copies.graph:
                return builder
        made = PlanBuilder(copies.graph, before, self.training, represented=Represented(copies.images, copies.devices))
        self._known = [(copies.images, made), *self._known][:MOST_BUILDERS]
        return made


def fold(
    graph: OperatorGraph,
    topology: Topology,
    strategy: Strategy,
    training: PlannedTraining = PLAIN,
    *,
    builders: CopiesBuilders | None = None,
    syncs: Iterable[SyncConfig] = (),
) -> Folding | str:
    """The strategy folded over as many copies as possible, perhaps not exactly, or the reason why it cannot be folded, in one line. It must
    be legal. ``builders``: of the same graph, cluster and training. ``syncs``: those of them that its parameters may have, too, are
    ``Folding.syncs``."""
    for sync in dict.fromkeys(strategy.parameters.values()):
        if refused := _refused(sync):
            return refused
    if any(marked(config).on_hosts for config in strategy.operators.values()):
        return "what operators keep is offloaded"
    if topology.ports:
        return "communication costs the devices CPU overhead"
    if topology.cold_penalty != NO_COLD_PENALTY:
        return "devices have a cold penalty after a wait"
    builders, syncs = builders or CopiesBuilders(graph, topology, training), [own for own in syncs if not _refused(own)]
    if not syncs and (known := builders.again(strategy)) is not None:
        return known
    no_copies: list[str] = []
    unlike_copies: list[str] = []
    for count in candidates(strategy):
        reasons = no_copies
        try:
            copies = find_copies(graph, strategy, count)
            reasons = unlike_copies
            found = _Folding(copies, builders).fold(syncs)
            builders.add(strategy, found)
            return found
        except UnfoldableError as error:
            reasons.append(str(error))
    return next(iter(unlike_copies + no_copies), f"at most {LEFT} devices in use")


def _refused(sync: SyncConfig) -> str:
    """Why parameters that are synchronized so keep a strategy from being folded, in one line; empty if they do not."""
    if sync.offload:
        return "optimizer states are offloaded"
    rows = method_of(sync.contract).template((0, 1), (0, 1), Setting(even=True, exchanges=("all_gather",))).rows
    moves = any(row.work or row.rounds for row in rows)
    return f"synchronization by {sync.word} moves more than sums between copies" if moves else ""


class _Folding:
    """Checks the conditions of the module's docstring, and builds the small problem."""

    def __init__(self, copies: Copies, builders: CopiesBuilders) -> None:
        self.graph, self.topology, self.copies, self.training = builders.graph, builders.topology, copies, builders.training
        self._builders = builders
        self.images, self._represented = copies.images, Represented(copies.images, copies.devices)
        self._between = links_between_hosts(self.topology)
        self._known: dict[object, tuple[Ints, Options]] = {}

    def fold(self, syncs: Iterable[SyncConfig]) -> Folding:
        self._check_devices()
        local = self._local_links()
        near = set(local[:LEFT].ravel().tolist())
        bridge = {*self._route(0, 1), *self._route(1, 0)}
        before = self._small_topology(near | bridge)
        builder = self._builders.builder(self.copies, before)
        self._check_fetches(builder)
        sums = builder.sums(replace(self.copies.strategy, microbatches=1))  # who sums together does not depend on micro-batches
        used = dict.fromkeys((sync, readers) for sync, (_, readers, _) in sums.regions)
        rows = [row for sync, readers in used for row in self._rows(before, sync, readers)]
        regions, possible = dict.fromkeys(readers for _, readers in used), []
        for sync in syncs:
            if (own := self._rows_of_all(before, sync, regions)) is not None:
                possible.append(sync)
                rows += own
        parted = {group for row in rows if row.how in (How.GATHER, How.SCATTER) for group in row.groups}
        owned = {cell[:2]: None for sync, cell in sums.regions if sync.contract.owned_in_parts and cell[1] in parted}
        every = dict.fromkeys([readers for _, readers in used] + [*sums.groups] + [group for row in rows for group in row.groups])
        groups = self._common_groups(every)
        if self.training.clips and not any(sync.compression for sync, _ in sums.regions):
            if len(np.unique(self.images)) < self.topology.device_count:
                raise UnfoldableError("gradients are clipped by a norm that idle devices wait for, too")
            groups.append(tuple(range(before.device_count)))
        over_all = {devices: self._sum_over_all(devices, parted=devices in parted) for devices in groups}
        signatures = self._signatures((*own.options, *own.parted) for own in over_all.values())
        if (signatures[local[2:]] != signatures[local[1]]).any():
            raise UnfoldableError(f"sums over {len(self.images)} copies do not hold corresponding links in all of them")
        kept, alike = self._stand_ins(local, signatures, near | bridge)
        small = self._small_topology(kept)
        common = {
            devices: replace(
                own,
                small=tuple(_on_small(option, alike) for option in own.options),
                parted=tuple(_on_small(option, alike) for option in own.parted),
            )
            for devices, own in over_all.items()
        }
        between = np.zeros(len(small.links), bool)
        represented = alike >= 0
        np.logical_or.at(between, alike[represented], self._between[represented])
        exact = all(are_even(box, len(self._represented.everyone(readers))) for box, readers in owned)
        communication = FoldedCommunication(small, common, tuple(every), self._represented)
        return Folding(self.graph, self.topology, self.copies, small, builder, exact, communication, local, alike, between, possible)

    def _check_devices(self) -> None:
        devices = self.topology.devices
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(device.type for device in devices))}
        types = np.array([kinds[device.type] for device in devices])[self.images]
        if (types != types[0]).any():
            raise UnfoldableError(f"{len(self.images)} copies on devices of different types")
        hosts = np.array([device.host for device in devices])[self.images]
        if any(_pattern(own) != _pattern(hosts[0]) for own in hosts):
            raise UnfoldableError(f"{len(self.images)} copies are spread over hosts in different ways")

    def _rows(self, before: Topology, sync: SyncConfig, readers: Group) -> Sequence[Row]:
        """The rows by which these devices of both copies keep a region in step, which are those of all copies."""
        everyone, found = self._represented.everyone(readers), []
        even = not any(before.devices[reader].type.kind == "cpu" for reader in readers)
        for topology, devices in ((before, readers), (self.topology, everyone)):
            used, leaders = serving(topology, sync, devices)
            found.append(method_of(used.contract).template(devices, leaders, Setting(even, used.partitions)).rows)
            flows = [flow for row in found[0] for own, _ in row.rounds for flow in own]
            if any(len(group) > 2 for source, target, _ in flows for group in self._represented.copies((source, target))):
                raise UnfoldableError(f"{len(self.images)} copies of which devices send each other what they synchronize")
        if [self._over_all(row) for row in found[0]] != [_among(row.groups, row.rounds) for row in found[1]]:
            raise UnfoldableError(f"{len(self.images)} copies of which some synchronize parameters apart from others")
        return found[0]

    def _rows_of_all(self, before: Topology, sync: SyncConfig, regions: Iterable[Group]) -> list[Row] | None:
        """``_rows`` by this method, of the readers of all regions; None if that cannot be folded."""
        try:
            return [row for readers in regions for row in self._rows(before, sync, readers)]
        except UnfoldableError:
            return None

    def _over_all(self, row: Row) -> object:
        """``_among`` of the row of all copies to which one of both copies corresponds."""
        copies = self._represented.copies
        groups = [group for own in row.groups for group in copies(own)]
        rounds = [([(a, b, size) for *ends, size in flows for a, b in copies(ends)], summed) for flows, summed in row.rounds]
        return _among(groups, rounds)

    def _common_groups(self, groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Sets of devices, of both copies, that take part in a common sum."""
        first = set(self.images[0].tolist())
        own = {i for i, device in enumerate(self.copies.devices) if device in first}
        return [group for group in groups if own.intersection(group) and own.union(group) != own]

    def _route(self, source_copy: int, target_copy: int) -> tuple[int, ...]:
        return self.topology.route(int(self.images[source_copy, 0]), int(self.images[target_copy, 0]))

    def _local_links(self) -> Ints:
        """[copy, number]: the links of all routes inside a copy; one column has corresponding links. In a tree, the routes from and to
        one device use all of them."""
        members = range(self.images.shape[1])
        pairs = [(0, i) for i in members if i] + [(i, 0) for i in members if i]
        if not self.topology.is_tree:
            pairs = list(permutations(members, 2))
        self._check_direct_links(pairs)
        ends = self.images[:, np.array(pairs, np.int64).reshape(-1, 2)]
        routes = self.topology.routes(ends[..., 0].ravel(), ends[..., 1].ravel())
        if (np.diff(routes < 0, axis=1) & (routes[:, 1:] >= 0)).any():
            routes = np.take_along_axis(routes, np.argsort(routes < 0, axis=1, kind="stable"), axis=1)  # all links first
        routes = routes.reshape(len(self.images), -1)
        if ((routes >= 0) != (routes[0] >= 0)).any():
            raise UnfoldableError(f"{len(self.images)} copies have different routes")
        links = routes[:, routes[0] >= 0]
        _, first, inverse = np.unique(links[0], return_index=True, return_inverse=True)
        local = links[:, first]
        if not np.array_equal(local[:, inverse.ravel()], links):
            raise UnfoldableError(f"{len(self.images)} copies have different routes")
        if len(np.unique(local)) < local.size:
            raise UnfoldableError(f"{len(self.images)} copies share links")
        if any((figures[local] != figures[local[0]]).any() for figures in self.topology.link_figures):
            raise UnfoldableError(f"{len(self.images)} copies have links of different bandwidth or latency")
        if (self._between[local] != self._between[local[0]]).any():
            raise UnfoldableError(f"{len(self.images)} copies have links of which some lead between hosts")
        return local

    def _check_direct_links(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Sums take the links that join two GPUs, which are local links only if messages take them as well."""
        direct = self.topology.direct_links
        for own in self.images.tolist() if direct else ():
            for a, b in pairs:
                link = direct.get((own[a], own[b]))
                if link is not None and self.topology.route(own[a], own[b]) != (link,):
                    raise UnfoldableError(f"{len(self.images)} copies in which sums and messages take different links")

    def _small_topology(self, links: Iterable[int]) -> Topology:
        """A topology of both copies' devices and these links of the cluster. Links keep their order, so routes stay the same."""
        chosen = [self.topology.devices[device] for device in self.copies.devices]
        hosts = sorted({device.host for device in chosen})
        place = {host: i for i, host in enumerate(hosts)}
        devices = tuple(Device(i, device.name, place[device.host], device.type) for i, device in enumerate(chosen))
        own = tuple(replace(self.topology.links[link], index=i) for i, link in enumerate(sorted(links)))
        whole = self.topology
        described = own if whole.described else ()  # which says that links were measured
        made = Topology(whole.name, devices, _hosts(whole, hosts), own, measured=whole.measured, described=described)
        if _ways(made) != _ways(whole):
            raise UnfoldableError(f"{len(self.images)} copies without links or devices that change what communication costs")
        return replace(made, latency_factor=whole.latency_factor, own_samples=whole.own_samples, limits=self._limits())

    def _limits(self) -> tuple[int, ...]:
        """For each device the least that those for which it stands may use, and those that are idle; nothing if each may use all it has."""
        limits, images = np.array(self.topology.memory_limits), self.images
        if not self.topology.limits:
            return ()
        first, others = limits[images[0]].tolist(), limits[images[1:]].min(axis=0).tolist()
        least = {**dict(zip(images[0].tolist(), first, strict=True)), **dict(zip(images[1].tolist(), others, strict=True))}
        idle = np.delete(limits, np.unique(images)).tolist()
        return tuple([min(least[device], *idle) if idle else least[device] for device in self.copies.devices])

    def _check_fetches(self, builder: PlanBuilder) -> None:
        folded = self.copies.folded
        for position, op in enumerate(self.graph.operators):
            if all(out.tensor in folded for out in op.outputs):
                continue
            found = builder.delivery(position, self.copies.strategy)
            for fetch in found.fetches:
                if fetch.tensor not in folded and any(found.holdings[place].device != fetch.device for _, place in fetch.pieces):
                    raise UnfoldableError(
                        f"tensor {fetch.tensor!r} is the same in {len(self.images)} copies, but is read on a device that does not hold it"
                    )

    def _sum_over_all(self, devices: tuple[int, ...], *, parted: bool) -> CommonSums:
        """Sums over the devices of all copies that correspond to these of both copies; what represents their links is not known yet.
        ``parted``: they also gather and scatter equal parts."""
        everyone = self._represented.everyone(devices)
        of_parts = self._options(parted_options, everyone) if parted else ()
        return CommonSums(everyone, self._options(allreduce_options, everyone), (), of_parts)

    def _options(self, of: Callable[[Topology, Devices], Options], devices: Devices) -> Options:
        """The options, found once for devices of one type that lie alike."""
        alike, types = self.topology.alike_hosts, {self.topology.devices[device].type for device in devices}
        form = alike.form(devices) if alike is not None and len(types) == 1 else None
        if alike is None or form is None:
            return of(self.topology, devices)
        lying, hosts = form
        key = of, lying, *types
        if key not in self._known:
            self._known[key] = hosts, of(self.topology, devices)
        theirs, found = self._known[key]
        return tuple([replace(option, links=alike.moved(option.links, theirs, hosts)) for option in found])

    def _signatures(self, sums: Iterable[Sequence[AllReduceOption]]) -> Ints:
        """Link -> a number, equal for links that the same options of common sums hold; 0 if none holds the link."""
        signatures, known = np.zeros(len(self.topology.links), np.int64), 0
        for option in chain.from_iterable(sums):
            links = list(option.links)
            before, own = np.unique(signatures[links], return_inverse=True)
            signatures[links] = known + 1 + own
            known += len(before)
        return signatures

    def _stand_ins(self, local: Ints, signatures: Ints, near: set[int]) -> tuple[set[int], Ints]:
        """The links of the small topology, and ``Folding.alike``."""
        outside = signatures > 0
        outside[local.ravel()] = False
        _, first, inverse = np.unique(signatures[outside], return_index=True, return_inverse=True)
        chosen = np.flatnonzero(outside)[first]
        kept = near | set(chosen.tolist())
        number = np.full(len(signatures), -1, np.int64)
        number[sorted(kept)] = np.arange(len(kept))
        alike = np.full(len(signatures), -1, np.int64)
        alike[local[:LEFT]] = number[local[:LEFT]]
        alike[outside] = number[chosen][inverse.ravel()]
        return kept, alike


def _among(groups: Sequence[Group], rounds: Sequence[tuple[Sequence[Flow], bool]]) -> object:
    """Which devices move or sum something together in a row."""
    return {tuple(sorted(group)) for group in groups}, [({*flows}, summed) for flows, summed in rounds if flows]


def _on_small(option: AllReduceOption, alike: Ints) -> AllReduceOption:
    links = np.unique(alike[list(option.links)])
    return replace(option, links=tuple(links[links >= 0].tolist()))


def _pattern(hosts: Ints) -> list[int]:
    """Which devices share a host: hosts numbered in the order of their first devices."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in hosts.tolist()]


def _hosts(topology: Topology, numbers: Sequence[int]) -> tuple[Host, ...]:
    return tuple(topology.hosts[number] for number in numbers)


def _ways(topology: Topology) -> tuple[object, ...]:
    """Figures of the whole cluster that prices of communication follow from."""
    return topology.gpu_library, topology.call_seconds, shortest_chunk_ns(topology)
