"""A rank's part of a program does what the rank does in the whole one, and knows nothing of what others do alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.own_part import Places, PlanParts
from soap.plan.plan import remote_parts
from soap.plan.planning import build_plan
from soap.plan.running.activity import ValueKey
from soap.plan.running.order import ExecutionOrder
from soap.runtime.comm.handing_out import packed, unpacked
from soap.runtime.comm.redistribute import needed_by
from soap.runtime.planned import RankPrograms
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.prepared import Fetched, PreparedTile, PreparedTiles
from soap.runtime.program.program import Program, compile_program, task_name
from soap.runtime.step.step import sync_schedule
from soap.runtime.sync.shards import ShardStore
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, random_order, split
from tests.strategies import cases, cluster

LISTS = ("forward", "backward", "after_update", "interleaved")


@given(cases(), st.randoms(use_true_random=False), st.booleans())
def test_parts_are_the_whole_as_ranks_see_it(
    case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random, single_tiles: bool
) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, strategy, topology)
    whole = compile_program(plan, ExecutionOrder(tuple(random_order(plan, rng))), single_tiles=single_tiles)
    parts, cut = RankPrograms(whole), PlanParts(plan)
    for rank in range(plan.device_count):
        part, places = parts.of(rank), cut.of(rank, (min(whole.losses.values()),))[1]
        assert [named(part, own, rank) for own in LISTS] == [named(whole, own, rank) for own in LISTS]
        numbers = {"holding": places.holdings, "fetch": places.fetches}
        for counted in ("readers", "second_readers", "takers"):
            expected: dict[ValueKey, int] = getattr(whole, counted)(rank)
            assert getattr(part, counted)(rank) == {(kind, numbers[kind][i]): n for (kind, i), n in expected.items()}
        assert [*prepared(part, rank)] == [*prepared(whole, rank)]
        for early in (False, True):
            own, same = (sync_schedule(program, rank, early, messages_apart=True) for program in (part, whole))
            assert own.contributions == same.contributions and [*own.follow.values()] == [*same.follow.values()]
        assert [*moved(part, rank)] == [*moved(whole, rank)]
        assert (part.loss_count, rank in part.losses) == (len(whole.losses), rank in whole.losses)
        bare = parts.bare(rank)[0]
        assert not (bare.plan.shards or bare.plan.syncs or bare.plan.order or bare.idle_shards)  # they travel once for all ranks
        assert (part.plan.order, part.idle_shards) == (plan.order, whole.idle_shards)


def named(program: Program, actions: str, rank: int) -> list[tuple[str, str]]:
    """A rank's actions by name: of segments, those of all their tiles."""
    found = []
    for action in part_of(getattr(program, actions), rank):
        found.append((action.kind.name, task_name(program, action.kind.name, action.subject)))
        if action.kind.name in ("SEGMENT", "WEIGHTS", "RECOMPUTE"):
            tiles = [task_name(program, "TILE", tile) for tile in program.segments[action.subject].tiles]
            found.append(("of tiles", " ".join(tiles)))
    return found


def prepared(program: Program, rank: int) -> Iterator[object]:
    """The rank's tiles, made ready to run, without numbers."""
    tiles = PreparedTiles(program, ShardStore(program.plan, rank), rank, lambda _: torch.float64).tiles.values()
    for tile in tiles:
        yield tile.name, tile.tile, tile.active, tile.again, tile.mark, tile.empty, tile.made, tile.light
        yield [(own.tensor, own.box, own.empty, own.part, _fetched(own.fetch)) for own in tile.inputs], tile.parameters, tile.rows
        yield [(own.output, own.read, own.kept, own.takes_gradient, own.late, own.answered, own.seed) for own in tile.held]
        yield [(own.output, own.answered, own.seed) for own in tile.summands], tile.gathered, tile.needs, tile.frees
        yield list(map(_fetched, tile.leaves)), _segment(tiles, tile)


def _segment(tiles: Sequence[PreparedTile], tile: PreparedTile) -> list[str]:
    return [other.name for other in tiles if other.segment == tile.segment]


def _fetched(fetch: Fetched | None) -> object:
    return fetch and (fetch.tensor, fetch.box, fetch.carried, [piece.box for piece in fetch.pieces], len(fetch.holdings))


def moved(program: Program, rank: int) -> Iterator[object]:
    """What the rank sends and receives: messages with their tags, the parts of exchanges, and how many of its tiles each sum adds up."""
    plan = program.plan
    for message, tag in zip(plan.messages, program.tags, strict=True):
        if rank in (message.source, message.target):
            answered = [fetch in program.activity.fetches for fetch, _ in message.parts]
            yield tag, [own[:3] for own in remote_parts(plan, message.parts)], answered
    for exchange in plan.exchanges:
        if rank in exchange.devices:
            parts = [own for own in remote_parts(plan, exchange.parts) if rank in own[:2]]
            yield exchange.pattern, exchange.tensor, exchange.devices, [own[:3] for own in parts]
    for number, reduction in enumerate(plan.reductions):
        if rank in reduction.devices:
            own_tiles = [plan.tiles[tile] for tile in reduction.tiles if plan.tiles[tile].device == rank]
            yield reduction.box, reduction.devices, reduction.cells, own_tiles, number in program.activity.reductions


@given(cases(servers=True))
def test_shards_and_synchronizations_have_the_device_s_own_uses(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, strategy, topology)
    cut = PlanParts(plan)
    for device in range(plan.device_count):
        bare, places, uses = cut.of(device)
        part = uses.put_into(replace(bare, shards=cut.shards, syncs=cut.syncs), cut.used_alike)

        def own(uses: Sequence[tuple[int, int]], device: int = device, places: Places = places) -> tuple[tuple[int, int], ...]:
            return tuple((places.tiles[tile], operand) for tile, operand in uses if plan.tiles[tile].device == device)

        assert part.shards == tuple(replace(shard, uses=own(shard.uses)) for shard in plan.shards)
        for found, sync in zip(part.syncs, plan.syncs, strict=True):
            assert found == replace(sync, regions=tuple(replace(region, uses=own(region.uses)) for region in sync.regions))


def test_a_part_does_not_grow_with_the_cluster() -> None:
    sizes = []
    for count in (4, 32):
        graph, topology = mlp(batch=2 * count), cluster([count])
        plan = build_plan(graph, CLASSICAL["data_parallel"](graph, topology), topology)
        part = RankPrograms(compile_program(plan)).of(1)
        own = part.plan
        sizes.append([len(own.tiles), len(own.holdings), len(own.fetches), len(part.forward), len(part.backward), len(own.syncs[0].uses)])
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == len(mlp().operators) + 1  # that on rank 0 which makes the loss is named, too


def test_ranks_without_a_device_do_what_all_do() -> None:
    part = RankPrograms(compile_program(plan_of(mlp(), split((0, 1), b=2)))).of(7)
    assert [action.kind.name for action in (*part.forward, *part.backward)] == ["LOSS"]
    assert (len(part.plan.tiles), part.losses) == (1, {})


def test_what_all_ranks_have_does_not_travel() -> None:
    graph, value = mlp(), [1.5, "text"]
    data = packed({"graph": graph, "also": [value, graph]}, {"graph": graph})
    again = unpacked(data, {"graph": value})
    assert again == {"graph": value, "also": [value, value]} and again["graph"] is value
    assert len(data) < 200


def test_what_travels_comes_as_it_was() -> None:
    program = compile_program(plan_of(mlp(), split((0, 1), b=2)))
    known = {"graph": program.plan.graph}
    bare, uses = RankPrograms(program).bare(1)
    data = packed((bare, uses, ActionKind.TILE, other := mlp(batch=4)), known)
    again = unpacked(data, known)
    assert again == (bare, uses, ActionKind.TILE, other)  # what is known is known by itself, not by its type
    assert again[0].plan.graph is program.plan.graph and again[3] is not other


def test_groups_are_needed_by_their_members_alone() -> None:
    assert needed_by([(0, 1), (0, 2), (1, 2, 3)], 5) == [
        {0: (0, 1), 1: (0, 2)},
        {0: (0, 1), 2: (1, 2, 3)},
        {1: (0, 2), 2: (1, 2, 3)},
        {2: (1, 2, 3)},
        {},
    ]
