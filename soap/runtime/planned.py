"""Plans for all ranks, made by rank 0. Each rank is handed its part of the program, and knows no other rank's tiles: it does what it would
do in the whole program, in the same order and under the same names.

For batches of another size: same degrees, same devices, same parameter shards. Intervals are balanced anew, and tiles beyond the number of
samples are empty. A batch of one sample has no dimension to split: the first of the tiles that shared that dimension compute it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from soap import collector
from soap.cluster.kinds import run_kind
from soap.cluster.presets import local_topology
from soap.cluster.topology import DeviceKind, Topology
from soap.errors import RuntimeFailure, StrategyError
from soap.model.graph import Factor, FactorKind, Operator, OperatorGraph
from soap.model.regions import contains, intersect, volume
from soap.plan.own_part import OwnUses, Places, PlanParts, by_device
from soap.plan.pass_order import PassOrder
from soap.plan.plan import Plan, ReadRegion, Shard, ShardSync
from soap.plan.planning import PlanBuilder, build_plan
from soap.plan.running.activity import Activity
from soap.plan.running.order import ExecutionOrder, Segment
from soap.plan.tiling import Tile
from soap.runtime.comm.handing_out import packed, unpacked
from soap.runtime.comm.redistribute import Communicator, needed_by
from soap.runtime.program.actions import Action, ActionKind
from soap.runtime.program.program import Program, compile_program
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.shares import shares_of
from soap.strategy.stages import chunks_of, require_stages, stages_of
from soap.tracing.execute import TracedModel

Order = ExecutionOrder | Sequence[int] | None


@dataclass(frozen=True)
class Asked:
    """What ranks were asked to run: a plan, or a strategy on a topology. ``kind``: of the devices."""

    model: TracedModel
    given: Plan | None
    strategy: Strategy
    topology: Topology
    kind: DeviceKind
    order: Order

    @classmethod
    def of(cls, model: TracedModel, plan: Plan | tuple[Strategy, Topology], order: Order, kind: DeviceKind | None) -> Asked:
        """RuntimeFailure if the plan is for another model, StrategyError if the strategy is, or does not fit the topology."""
        if isinstance(plan, Plan):
            if plan.graph.hash != model.graph.hash:
                ours, theirs = f"{model.graph.name!r} ({model.graph.hash})", f"{plan.graph.name!r} ({plan.graph.hash})"
                raise RuntimeFailure(f"plan is for model {theirs}, not {ours}; build it for this model")
            return cls(model, plan, plan.strategy, local_topology(plan.device_count), kind or "cpu", order)
        strategy, topology = plan
        strategy.require_exact()
        strategy.validate(model.graph, topology.device_count)
        return cls(model, None, strategy, topology, kind or run_kind(topology), order)

    @property
    def digest(self) -> str:
        """The same on ranks that were asked to run the same."""
        if self.given is not None:
            asked: object = (self.given.messages, self.given.exchanges, self.given.syncs)
        else:
            named = sorted(self.strategy.operators.items()), sorted(self.strategy.parameters.items())
            asked = (named, replace(self.strategy, operators={}, parameters={}))
        return hashlib.sha256(repr((self.model.graph.hash, self.order, asked)).encode()).hexdigest()

    def plan(self) -> Plan:
        """The plan of all ranks."""
        return self.given or build_plan(self.model.graph, self.strategy, self.topology)


@dataclass(frozen=True)
class Handed:
    """What a rank is handed. ``groups``: the process groups that it makes, by their numbers among ``group_count``. ``unread``: see
    ``TileContext``. ``whole``: the program of all ranks, on rank 0."""

    program: Program
    groups: Mapping[int, tuple[int, ...]]
    group_count: int
    unread: frozenset[str]
    whole: Program | None = None


class Planned:
    """The programs of a trainer; every method is called on all ranks at once."""

    def __init__(self, comm: Communicator, asked: Asked) -> None:
        self._comm, self._asked = comm, asked

    def first(self, check: Callable[[Plan], None]) -> Handed:
        """The program that was asked for. ``check`` is called on rank 0 with the whole plan, and may refuse it."""

        def make() -> Program:
            program = compile_program(self._asked.plan(), self._asked.order)
            check(program.plan)
            return program

        return self._handed(self._asked.model, make)

    def single_tiles(self, model: TracedModel, whole: Program | None) -> Program:
        """The program in which each tile is a segment."""

        def make() -> Program:
            assert whole is not None, "rank 0 keeps it"
            return compile_program(whole.plan, whole.order, single_tiles=True)

        return self._handed(model, make).program

    def resized(self, model: TracedModel, whole: Program | None) -> Handed:
        """The program for batches of another size, for which ``model`` was traced."""

        def make() -> Program:
            assert whole is not None, "rank 0 keeps it"
            return resized_program(whole, model.graph, self._asked.topology)

        return self._handed(model, make)

    def evaluation(self, model: TracedModel, whole: Program | None) -> Handed:
        """The program of another model of the same parameters, split and placed as the one that was asked for."""

        def make() -> Program:
            assert whole is not None, "rank 0 keeps it"
            return other_program(whole, model.graph, self._asked.topology)

        return self._handed(model, make)

    def _handed(self, model: TracedModel, make: Callable[[], Program]) -> Handed:
        strategy = self._asked.strategy
        kept: list[Program] = []

        def parts() -> Iterator[bytes]:
            program = make()
            kept.append(program)
            unread = model.unread(program.plan.tiles)
            ranks, groups = self._comm.world_size, program.device_groups(both_ways=self._comm.messages_apart)
            needed, cut = needed_by(groups, ranks), RankPrograms(program)
            known = {"graph": program.plan.graph, "strategy": strategy}
            yield packed((cut.alike, unread), known)  # under fsdp, by far the most: written once
            for rank in range(ranks):
                part, uses = cut.bare(rank)
                yield packed((Handed(part, needed[rank], len(groups), frozenset()), uses), known)

        with collector.paused():
            shared, own = self._comm.hand_out(parts)
        known = {"graph": model.graph, "strategy": strategy}
        (alike, unread), (handed, uses) = unpacked(shared, known), unpacked(own, known)
        assert isinstance(handed, Handed)
        return replace(handed, program=alike.put_into(handed.program, uses), unread=unread, whole=kept[0] if kept else None)


Numbers = Mapping[int, int]
"""Positions in the whole -> positions in a part."""


@dataclass(frozen=True)
class Alike:
    """What the parts of all ranks have alike: fields of program and plan, shards and synchronizations without uses (``used_alike``)."""

    shards: tuple[Shard, ...]
    syncs: tuple[ShardSync, ...]
    used_alike: tuple[tuple[int, ...], ...]
    order: PassOrder | None
    idle_shards: tuple[int, ...]

    def put_into(self, bare: Program, uses: OwnUses) -> Program:
        """A rank's part, which came without these and without its uses, with both."""
        plan = uses.put_into(replace(bare.plan, shards=self.shards, syncs=self.syncs, order=self.order), self.used_alike)
        return replace(bare, plan=plan, idle_shards=self.idle_shards)


class RankPrograms:
    """Cuts ranks' parts out of a program, each in time in proportion to the part. ``alike``: what they share, and so do not hold."""

    def __init__(self, program: Program) -> None:
        self._parts = parts = PlanParts(program.plan)
        self.alike = Alike(parts.shards, parts.syncs, parts.used_alike, program.plan.order, program.idle_shards)
        self._program = replace(program, idle_shards=())
        lists = (program.forward, program.backward, program.after_update, program.interleaved)
        self._actions = [_Actions(own) for own in lists]
        self._segments = by_device((segment.device,) for segment in program.segments)
        self._sums = by_device(program.plan.reductions[own[0]].devices for own in program.number_sums)
        tiles = program.plan.tiles
        self._forward = _OfDevice(program.order.forward, [tiles[tile].device for tile in program.order.forward])
        self._backward = _OfDevice(program.order.backward, [tiles[tile].device for tile in program.order.backward])

    def of(self, rank: int) -> Program:
        """The part of a rank; of one without a device, what all ranks do."""
        return self.alike.put_into(*self.bare(rank))

    def bare(self, rank: int) -> tuple[Program, OwnUses]:
        """The part of a rank without what is alike, and its uses of shards and synchronizations (``Alike.put_into``)."""
        whole, told = self._program, min(self._program.losses.values())
        plan, places, uses = self._parts.of(rank, (told,))
        tiles, holdings = places.tiles, places.holdings
        segments = {number: place for place, number in enumerate(self._segments.get(rank, ()))}
        sums = {number: place for place, number in enumerate(self._sums.get(rank, ()))}
        subjects = _subjects(places, segments, sums)
        forward, backward, after_update, interleaved = (
            [_moved(action, subjects, rank) for action in actions.of(rank)] for actions in self._actions
        )
        own = replace(
            whole,
            plan=plan,
            activity=_activity(whole.activity, places),
            order=ExecutionOrder(_placed(self._forward.of(rank), tiles), _placed(self._backward.of(rank), tiles)),
            segments=tuple([_segment(whole.segments[number], tiles) for number in segments]),
            segment_of={tiles[tile]: segments[number] for number in segments for tile in whole.segments[number].tiles},
            kept=_known(whole.kept, holdings),
            answered=_known(whole.answered, holdings),
            recomputed=_known(whole.recomputed, tiles),
            dropped=_known(whole.dropped, holdings),
            come_back_with=_own_tiles(whole.come_back_with, plan, places, rank),
            losses={rank: holdings[whole.losses[rank]]} if rank in whole.losses else {},
            number_sums=tuple([tuple([places.reductions[i] for i in whole.number_sums[number]]) for number in sums]),
            forward=tuple(forward),
            backward=tuple(backward),
            after_update=tuple(after_update),
            interleaved=tuple(interleaved),
        )
        return own, uses


class _OfDevice:
    """Items of a list by their device, in order."""

    def __init__(self, items: Sequence[int], devices: Sequence[int]) -> None:
        self._items, self._places = items, by_device((device,) for device in devices)

    def of(self, device: int) -> list[int]:
        return [self._items[place] for place in self._places.get(device, ())]


class _Actions:
    """A list of actions by rank."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._everyone = [place for place, action in enumerate(actions) if action.devices is None]
        self._places = by_device(action.devices or () for action in actions)

    def of(self, rank: int) -> list[Action]:
        return [self._actions[place] for place in sorted((*self._places.get(rank, ()), *self._everyone))]


def _subjects(places: Places, segments: Numbers, sums: Numbers) -> dict[ActionKind, Numbers]:
    """Kind of action -> where its subjects are; the others' subjects are synchronizations, which keep their numbers."""
    kind = ActionKind
    return {
        kind.TILE: places.tiles,
        kind.LOSS: places.holdings,
        kind.REDUCE_NUMBERS: sums,
        **dict.fromkeys((kind.TRANSFER, kind.TRANSFER_AGAIN, kind.RETURN), places.messages),
        **dict.fromkeys((kind.EXCHANGE, kind.EXCHANGE_AGAIN, kind.RETURN_EXCHANGE), places.exchanges),
        **dict.fromkeys((kind.REDUCE, kind.REDUCE_AGAIN, kind.REDUCE_GRADIENT), places.reductions),
        **dict.fromkeys((kind.SEGMENT, kind.WEIGHTS, kind.RECOMPUTE), segments),
    }


def _moved(action: Action, subjects: Mapping[ActionKind, Numbers], rank: int) -> Action:
    subject = subjects[action.kind][action.subject] if action.kind in subjects else action.subject
    return Action(action.kind, subject, None if action.devices is None else (rank,))


def _segment(segment: Segment, tiles: Numbers) -> Segment:
    return replace(segment, tiles=_placed(segment.tiles, tiles))


def _activity(whole: Activity, places: Places) -> Activity:
    found = ((whole.tiles, places.tiles), (whole.fetches, places.fetches), (whole.holdings, places.holdings))
    tiles, fetches, holdings = (set(_known(own, numbers)) for own, numbers in found)
    return Activity(tiles, fetches, holdings, set(_known(whole.reductions, places.reductions)), set(_known(whole.seeds, places.tiles)))


def _own_tiles(found: Numbers, plan: Plan, places: Places, rank: int) -> dict[int, int]:
    """Those of a mapping from tiles to tiles that are the rank's own."""
    own = ((tile, place) for tile, place in places.tiles.items() if tile in found and plan.tiles[place].device == rank)
    return {place: places.tiles[found[tile]] for tile, place in own}


def _placed(positions: Iterable[int], numbers: Numbers) -> tuple[int, ...]:
    return tuple([numbers[position] for position in positions])


def _known(positions: Collection[int], numbers: Numbers) -> frozenset[int]:
    return frozenset([place for position, place in numbers.items() if position in positions])


def resized_program(program: Program, graph: OperatorGraph, topology: Topology) -> Program:
    """The program for the same model traced at another batch size. It shares shards and synchronizations with ``program``.

    Raises RuntimeFailure if the strategy cannot be carried over.
    """
    plan = resized_plan(program.plan, graph, topology)
    if len(plan.tiles) == len(program.order.forward):
        try:
            return compile_program(plan, program.order)
        except RuntimeFailure:
            pass  # at this size tiles may depend on each other differently: fall back to the graph's order
    return compile_program(plan)


def other_program(program: Program, graph: OperatorGraph, topology: Topology) -> Program:
    """The program of another model of the same parameters, such as the same module in evaluation mode, whose operators are split and placed
    as their namesakes; those without one, as what they read from. It shares shards and synchronizations with ``program``.

    Raises RuntimeFailure if operators then do not find their parameters.
    """
    places = _places_of_others(program.plan.graph, graph)
    return compile_program(_replanned(program.plan, graph, topology, places))


def resized_plan(plan: Plan, graph: OperatorGraph, topology: Topology) -> Plan:
    """The plan at another batch size (see the module's docstring). What does not depend on the batch size stays: who owns which shard, and
    how each parameter is synchronized. Raises RuntimeFailure as ``resized_program``."""
    return _replanned(plan, graph, topology, [plan.graph.index[_namesake(op, plan.graph.operators)] for op in graph.operators])


def _replanned(plan: Plan, graph: OperatorGraph, topology: Topology, places: Sequence[int]) -> Plan:
    """The plan of another graph. ``places``: by operator, the operator whose configuration it takes over."""
    configs = {}
    for op, place in zip(graph.operators, places, strict=True):
        old = plan.graph.operators[place]
        configs[op.name] = _carried_over(old, plan.strategy.operators[old.name], op)
    strategy = _in_stages(plan, graph, places, replace(plan.strategy, operators=configs))
    built = PlanBuilder(graph, topology).build(strategy, empty_tiles=True)
    shards = _with_uses(plan, built)
    return replace(
        plan,
        graph=graph,
        strategy=strategy,
        tiles=built.tiles,
        first_tile=built.first_tile,
        holdings=built.holdings,
        fetches=built.fetches,
        messages=built.messages,
        exchanges=built.exchanges,
        reductions=built.reductions,
        order=built.order,
        shards=shards,
        syncs=tuple(_with_new_uses(sync, shards, built.tiles) for sync in plan.syncs),
        sparse_lookups=frozenset(position for position, place in enumerate(places) if place in plan.sparse_lookups),
        deliveries=built.deliveries,
    )


def _in_stages(plan: Plan, graph: OperatorGraph, places: Sequence[int], strategy: Strategy) -> Strategy:
    """The strategy with operators in their namesakes' chunks (``places``); without stages if calls are fused across borders."""
    if not strategy.stages:
        return strategy
    chunks = chunks_of(plan.graph, strategy.stages)
    stages = stages_of(graph, [chunks[place] for place in places])
    try:
        require_stages(graph, stages, strategy.schedule, strategy.operators)
    except StrategyError:
        return replace(strategy, stages={}, schedule=None)
    return replace(strategy, stages=stages)


def _places_of_others(graph: OperatorGraph, other: OperatorGraph) -> list[int]:
    """For each operator of the other graph: that of ``graph`` with the same parameters, else its namesake, else that of what it reads."""
    readers = {name: position for name, uses in graph.parameter_users.items() for position, _ in uses[:1]}
    places: list[int] = []
    for op in other.operators:
        makers = [places[other.producers[operand.tensor][0]] for operand in op.inputs if operand.tensor in other.producers]
        read = [readers[operand.tensor] for operand in op.parameters if operand.tensor in readers]
        known = _most_calls(op, graph.operators)
        places.append(next(iter([*read, *([] if known is None else [graph.index[known]]), *makers]), 0))
    return places


def _namesake(op: Operator, others: Sequence[Operator]) -> str:
    """The operator that makes the same calls, or most of them: with a size of 1, calls may be fused differently."""
    name = _most_calls(op, others)
    if name is None:
        raise RuntimeFailure(f"operator {op.name!r} exists for this batch size only; expected at least 2 samples: drop the last batch")
    return name


def _most_calls(op: Operator, others: Sequence[Operator]) -> str | None:
    """The operator that makes most of the same calls; None if there is none."""
    common = Counter({other.name: len({*op.calls} & {*other.calls}) + (other.name == op.name) / 2 for other in others})
    name, shared = common.most_common(1)[0]
    return name if shared else None


def _carried_over(old: Operator, config: OpConfig, new: Operator) -> OpConfig:
    """The configuration on the factors that remain. Of a factor that disappears, the first interval's devices stay."""
    places = _same_factors(old.factors, new.factors)
    degrees = tuple(1 if place is None else config.degrees[place] for place in places)
    devices = []
    for replica, cell in product(range(config.replicas), product(*map(range, degrees))):
        index = [0] * len(old.factors)
        for part, place in zip(cell, places, strict=True):
            if place is not None:
                index[place] = part
        number = replica
        for part, degree in zip(index, config.degrees, strict=True):
            number = number * degree + part
        devices.append(config.devices[number])
    weights = [(1,) if place is None else config.weights[place] for place in places]
    return config.placed(degrees, tuple(devices), config.replicas, shares_of(degrees, weights))


def _same_factors(old: Sequence[Factor], new: Sequence[Factor]) -> list[int | None]:
    """For each new factor the place of the old one: the same name and kind, else the same kind and size. None if there is none."""
    result: list[int | None] = []
    for factor in new:
        found = [i for i, f in enumerate(old) if f.name == factor.name and f.kind is factor.kind and _fits(f, factor) and i not in result]
        found = found or [i for i, f in enumerate(old) if (f.kind, f.size) == (factor.kind, factor.size) and i not in result]
        result.append(found[0] if found else None)
    return result


def _fits(old: Factor, new: Factor) -> bool:
    return old.kind is not FactorKind.PARAMETER or old.size == new.size


def _with_new_uses(sync: ShardSync, shards: Sequence[Shard], tiles: Sequence[Tile]) -> ShardSync:
    """A synchronization with the uses of ``shards``, those of its micro-batch if it is for one. Each part of a region lists all uses of the
    region."""

    def uses(region: ReadRegion) -> tuple[tuple[int, int], ...]:
        return tuple([use for use in shards[region.shards[0]].uses if sync.part is None or tiles[use[0]].part == sync.part])

    return replace(sync, regions=tuple(replace(region, uses=uses(region)) for region in sync.regions))


def _with_uses(old: Plan, plan: Plan) -> tuple[Shard, ...]:
    """The old shards with the new plan's uses. RuntimeFailure if a tile needs a region that its device neither owns nor is sent."""
    shards = old.shards
    readers = {number: sync.readers for sync in old.syncs for number in sync.shards}
    of_parameter: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        of_parameter.setdefault(shard.parameter, []).append(number)
    uses: dict[int, list[tuple[int, int]]] = {}
    for tile_number, tile in enumerate(plan.tiles):
        op = plan.operator(tile)
        for place, (operand, box) in enumerate(zip(op.parameters, tile.parameters, strict=True)):
            held = [
                number
                for number in of_parameter.get(operand.tensor, ())
                if tile.device in readers.get(number, shards[number].devices) and intersect(shards[number].box, box) is not None
            ]
            whole = all(contains(box, shards[number].box) for number in held)
            if not whole or sum(volume(shards[number].box) for number in held) != volume(box):
                raise RuntimeFailure(
                    f"operator {op.name!r} is split in another way for this batch size, and its device {tile.device} does not keep what it "
                    f"needs of {operand.tensor!r}; drop the last batch, or make it larger"
                )
            for number in held:
                uses.setdefault(number, []).append((tile_number, place))
    return tuple(replace(shard, uses=tuple(uses.get(number, ()))) for number, shard in enumerate(shards))
