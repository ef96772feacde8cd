"""Plans that gather values for their uses: in which groups and order, what waits for what, what is held, what is lowered."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan, backward_name, forward_name, update_name
from soap.plan.syncs.bucketing import gather_limit, gradient_bytes
from soap.plan.syncs.gathering import gathers
from soap.plan.syncs.seam import Phase, method_for
from soap.plan.syncs.sharded import regather_name
from soap.plan.syncs.sharded_state import gather_name, scatter_name
from soap.profiles.roofline import RooflineCosts
from soap.simulator.communication.synchronizing import of_every_iteration
from soap.simulator.lowering import build_plan, lower
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, fsdp, zero1
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS
from tests.graph_builder import GraphBuilder, transformer
from tests.simulator.examples import batch_split, chain
from tests.simulator.reference_memory.any_order import memory_use
from tests.strategies import CPU, GPU, cluster
from tests.test_pass_order import chain as coupled

FOUR = cluster([2, 2], CPU)


def layers(count: int = 8, width: int = 16, samples: int = 8) -> OperatorGraph:
    """Equal layers, each a group of its own."""
    g = GraphBuilder()
    x = g.input("x", samples, width)
    for i in range(count):
        x = g.linear(x, width, bias=False, name=f"l{i}")
    return g.build(g.mean(x))


def before(plan: Plan) -> dict[str, set[str]]:
    """Task name -> the names of its predecessors."""
    tasks = lower(plan, FOUR, RooflineCosts(FOUR)).tasks
    return {task.name: {tasks[other].name for other in task.predecessors} for task in tasks}


def passes(plan: Plan, layer: int, *, back: bool = False) -> set[str]:
    """Names of a layer's passes on all devices."""
    op = plan.graph.operators[layer]
    return {(backward_name if back else forward_name)(op, tile) for tile in plan.tiles if tile.operator == layer}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_gather_waits_for_what_lies_so_many_groups_before_it(prefetch: int) -> None:
    graph = layers()
    plan = build_plan(graph, replace(fsdp(graph, FOUR), prefetch=prefetch), FOUR)
    assert [sync.parameter for sync in reversed(plan.syncs)] == [f"l{i}.weight" for i in range(8)]
    named = {sync.parameter: sync for sync in plan.syncs}
    found, ahead = before(plan), prefetch + 1
    for i in range(8):
        sync = named[f"l{i}.weight"]
        assert found[gather_name(sync)] == (passes(plan, i - ahead) if i >= ahead else set())
        assert all(gather_name(sync) in found[name] for name in passes(plan, i))
        later = i + ahead
        last = passes(plan, later, back=True) if later < 8 else passes(plan, 15 - later)
        assert found[regather_name(sync)] == passes(plan, i) | last
        assert all(regather_name(sync) in found[name] for name in passes(plan, i, back=True))
        assert found[scatter_name(sync)] == passes(plan, i, back=True)
        assert all(scatter_name(sync) in found[update_name(device)] for device in plan.owners(sync))
    assert not any(update_name(0) in names for names in found.values())  # nothing is gathered behind updates


def test_groups_are_filled_up_to_a_limit() -> None:
    graph = transformer()
    plan = build_plan(graph, fsdp(graph, FOUR), FOUR)
    limit, total = gather_limit(graph), sum(tensor.bytes for tensor in graph.parameters)
    assert limit == -(-total // 8)
    assert 4 < len(plan.syncs) <= 8 and sum(gradient_bytes(plan, sync) for sync in plan.syncs) == total
    for sync in plan.syncs[:-1]:
        assert gradient_bytes(plan, sync) >= limit


def test_values_and_gradients_move_three_times() -> None:
    graph = transformer()
    plan = build_plan(graph, fsdp(graph, FOUR), FOUR)
    size = sum(tensor.bytes for tensor in graph.parameters)
    moved = Counter[Phase]()
    for sync in plan.syncs:
        for step in method_for(sync).steps(plan, sync):
            moved[step.phase] += sum(size for flows, _ in step.rounds for *_, size in flows)
    assert moved == {Phase.BEFORE_FORWARD: 3 * size, Phase.BEFORE_BACKWARD: 3 * size, Phase.AFTER_BACKWARD: 3 * size}


def test_what_is_used_early_and_late_keeps_no_gather_waiting() -> None:
    """A tied matrix, whose last use needs all other groups: they do not wait for it."""
    g = GraphBuilder()
    x, tied = g.input("x", 8, 16), g.parameter("tied", 16, 16)
    x = g.linear(x, 16, weight=tied, bias=False, name="first")
    for i in range(6):
        x = g.linear(x, 16, bias=False, name=f"l{i}")
    graph = g.build(g.mean(g.linear(x, 16, weight=tied, bias=False, name="last")))
    for prefetch in range(8):
        plan = build_plan(graph, replace(fsdp(graph, FOUR), prefetch=prefetch), FOUR)
        found = before(plan)  # lowering fails if a gather waits for itself
        assert len(gathers(plan)) == 2 * len(plan.syncs)
        if prefetch == 0:
            (tied_sync,) = (sync for sync in plan.syncs if sync.parameter == "tied")
            (other,) = (sync for sync in plan.syncs if sync.parameter == "l0.weight")
            assert found[gather_name(other)] == passes(plan, 0)
            assert found[regather_name(other)] >= passes(plan, 2, back=True)
            assert all(gather_name(tied_sync) in found[name] for name in passes(plan, 0) | passes(plan, 7))


def test_one_reader_keeps_what_it_reads() -> None:
    graph = chain(8, 4, 4)
    strategy = Strategy({op.name: OpConfig((1,) * len(op.factors), (0,)) for op in graph.operators}, {"l1.weight": SHARDED})
    plan = build_plan(graph, strategy, FOUR)
    assert gathers(plan) == () and {sync.method for sync in plan.syncs} == {"all_reduce"}


def test_readers_have_groups_of_their_own() -> None:
    """What other devices read is gathered apart, and each device waits for its own uses alone."""
    graph = layers(4)
    strategy = fsdp(graph, FOUR)
    for i in (1, 3):
        strategy = strategy.with_operator(f"l{i}", batch_split(graph, (2, 3)).operators[f"l{i}"])
    plan = build_plan(graph, replace(strategy, prefetch=0), FOUR)
    assert [sync.readers for sync in reversed(plan.syncs)] == [(0, 1, 2, 3), (2, 3), (0, 1, 2, 3), (2, 3)]
    found, named = before(plan), {sync.parameter: sync for sync in plan.syncs}
    on = {tile.device: forward_name(plan.operator(tile), tile) for tile in plan.tiles if tile.operator == 0}
    after = {forward_name(plan.operator(tile), tile) for tile in plan.tiles if tile.operator == 1}
    assert found[gather_name(named["l1.weight"])] == {on[2], on[3]}
    assert found[gather_name(named["l2.weight"])] == {on[0], on[1], *after}


def test_devices_hold_their_parts_and_some_groups() -> None:
    graph, topology = layers(16, 512), cluster([4], GPU)
    size = sum(tensor.bytes for tensor in graph.parameters)
    simulator = Simulator(graph, topology, RooflineCosts(topology), optimizer_states=2)
    peaks = {}
    for name, strategy in (("usual", data_parallel(graph, topology)), ("zero1", zero1(graph, topology)), ("fsdp", fsdp(graph, topology))):
        peaks[name] = max(curve.peak_bytes for curve in simulator.run(strategy).memory_over_time)
    group = 2 * size // 16
    assert peaks["usual"] > 4 * size and peaks["zero1"] > 1.5 * size
    # values and states of a quarter; sums of its gradients; some groups that are gathered, and some whose gradients leave
    assert 3 * size / 4 + size / 4 < peaks["fsdp"] < size + 8 * group
    by_prefetch = [
        max(curve.peak_bytes for curve in simulator.run(replace(fsdp(graph, topology), prefetch=prefetch)).memory_over_time)
        for prefetch in (0, 1, 2, 4096)
    ]
    assert by_prefetch == sorted(by_prefetch) and by_prefetch[-1] > by_prefetch[1]


def test_gathers_of_every_micro_batch_take_time() -> None:
    graph, topology = layers(), cluster([1, 1], CPU)
    simulation = Simulator(graph, topology, RooflineCosts(topology)).run(fsdp(graph, topology))
    plain = Simulator(graph, topology, RooflineCosts(topology)).run(data_parallel(graph, topology))
    gathered = simulation.step_ns(3) - simulation.step_ns(2)
    assert gathered > plain.step_ns(3) - plain.step_ns(2)


def test_each_micro_batch_gathers_values_and_scatters_gradients() -> None:
    """In its turn, as a step without micro-batches does; gathers also wait for uses in the micro-batch before."""
    graph, count, ahead = layers(samples=12), 3, 2
    plan = build_plan(graph, replace(fsdp(graph, FOUR), microbatches=count), FOUR)
    found, named = before(plan), {(int(sync.parameter[1]), sync.part): sync for sync in plan.syncs}
    assert named.keys() == {(layer, part) for layer in range(8) for part in range(count)}

    def own(layer: int, part: int, *, back: bool = False) -> set[str]:
        return {name for name in passes(plan, layer, back=back) if name.endswith(f" of micro-batch {part}")}

    for (layer, part), sync in named.items():
        turn = [own(i, part) for i in range(8)] + [own(i, part, back=True) for i in reversed(range(8))]
        earlier = [own(i, part - 1, back=True) for i in reversed(range(8))][-ahead:] if part else [set[str]()] * ahead
        waited = [*earlier, *turn]  # for the uses of the group so many places before
        assert len(turn[layer]) == 4
        assert found[gather_name(sync)] == waited[layer] | (own(layer, part - 1, back=True) if part else set())
        assert found[regather_name(sync)] == turn[layer] | waited[15 - layer]
        assert all(gather_name(sync) in found[name] for name in turn[layer])
        assert all(regather_name(sync) in found[name] for name in turn[15 - layer])
        assert found[scatter_name(sync)] == turn[15 - layer]
        assert all(scatter_name(sync) in found[update_name(device)] for device in plan.owners(sync))


def test_micro_batches_hold_no_more_values_and_gradients_than_a_step_without() -> None:
    """But for the sums of gradients, which are there from the first one on. If they do not pass one by one, all of both stay."""
    graph, count = layers(16, 512, 16), 4
    simulator, size = Simulator(graph, FOUR, RooflineCosts(FOUR), optimizer_states=0), sum(tensor.bytes for tensor in graph.parameters)
    ways = {"once": {}, "each": {"microbatches": count}, "stays": {"microbatches": count, "schedule": "gpipe"}}
    runs = {name: simulator.run(replace(fsdp(graph, FOUR), **fields)) for name, fields in ways.items()}
    most = {name: max(curve.peak_bytes for curve in run.memory_over_time) for name, run in runs.items()}
    assert most["each"] < most["once"] + size / 4 and most["each"] < 1.5 * size < 2.25 * size < most["stays"], (size, most)
    for run in runs.values():
        assert all(use.total >= curve.peak_bytes for use, curve in zip(memory_use(run.plan), run.memory_over_time, strict=True))


def test_owners_add_up_the_gradients_of_all_micro_batches() -> None:
    graph, count = layers(samples=12), 3
    plan = build_plan(graph, replace(fsdp(graph, FOUR), microbatches=count), FOUR)
    for sync in plan.syncs:
        updates = method_for(sync).updates(plan, sync)
        assert len(updates) == (4 if sync.part == count - 1 else 0)
        assert all(own.added_bytes == (4 * count - 1) * own.updated_bytes for own in updates)


def test_what_leaves_with_micro_batches_does_so_in_every_iteration_of_a_step() -> None:
    """But for sums between hosts, which are made once."""
    graph = layers()
    for count in (1, 2):
        strategy = replace(fsdp(graph, FOUR), microbatches=count)
        plan = build_plan(graph, strategy.with_changes(parameters={t.name: SHARDED_IN_HOSTS for t in graph.parameters}), FOUR)
        always, sums = of_every_iteration(plan), 0
        for sync in plan.syncs:
            assert {gather_name(sync), regather_name(sync)} < always
            assert (scatter_name(sync) in always) == (count > 1)
            steps = [step for step in method_for(sync).steps(plan, sync) if step.summed_bytes]
            assert bool(steps) == plan.completes(sync) and always.isdisjoint(step.name for step in steps)
            sums += len(steps)
        assert sums == 2 * len(graph.parameters)


def test_before_a_barrier_each_micro_batch_gathers_and_behind_it_values_stay() -> None:
    """All pass it together: first all gather for forward passes, then all for backward passes. A group waits for its uses before that."""
    graph, count = coupled(12, centered=True), 3
    assert MicroBatches(graph, count).barriers
    plan = build_plan(graph, replace(fsdp(graph, FOUR), microbatches=count), FOUR)
    own = {sync.part: sync for sync in plan.syncs if sync.parameter == "first.weight"}
    behind = {sync.part for sync in plan.syncs for region in sync.regions if region.parameter in ("second.weight", "third.weight")}
    assert [*own] == [0, 1, 2] and behind == {None}
    found = before(plan)

    def of(part: int, *, back: bool = False) -> set[str]:
        return {name for name in passes(plan, 0, back=back) if name.endswith(f" of micro-batch {part}")}

    for part, sync in own.items():
        assert found[scatter_name(sync)] == of(part, back=True) and len(of(part)) == 4
        assert found[gather_name(sync)] == (of(part - 1) if part else set())
        assert of(part) | (of(part - 1, back=True) if part else of(count - 1)) <= found[regather_name(sync)]


def test_with_other_orders_values_are_gathered_once_and_stay() -> None:
    """All gathers begin with the step; gradients are scattered behind the last micro-batch."""
    graph, count = layers(16, 512), 2
    strategy = replace(fsdp(graph, FOUR), microbatches=count, schedule="gpipe")
    plan = build_plan(graph, strategy, FOUR)
    found = before(plan)
    for sync in plan.syncs:
        own = {plan.tiles[tile].operator for tile, _ in sync.uses}
        forward, backward = ({name for layer in own for name in passes(plan, layer, back=back)} for back in (False, True))
        assert len(forward) == len(backward) == 4 * count * len(own)
        assert found[gather_name(sync)] == set() and regather_name(sync) not in found
        assert all(gather_name(sync) in found[name] for name in forward)
        assert found[scatter_name(sync)] == backward


def test_what_is_read_once_for_all_micro_batches_stays() -> None:
    """Parameters of an operator without samples are in groups of their own, which are gathered once."""
    graph = transformer()
    plan = build_plan(graph, replace(fsdp(graph, FOUR), microbatches=2), FOUR)
    parts = {region.parameter: sync.part for sync in plan.syncs for region in sync.regions}
    once = {plan.shards[sync.shards[0]].parameter for sync in plan.syncs if sync.part is None}
    uncut = {name for name, users in graph.parameter_users.items() if any(MicroBatches(graph, 2).parts(user) == 1 for user, _ in users)}
    assert once == uncut and set(parts) > once
    assert all(regather_name(sync) not in before(plan) for sync in plan.syncs if sync.part is None)


@pytest.mark.parametrize("prefetch", [-1, 5000])
def test_a_prefetch_that_cannot_be_is_refused(prefetch: int) -> None:
    with pytest.raises(StrategyError, match=rf"^prefetch {prefetch}: expected 0 to 4096"):
        replace(Strategy({}), prefetch=prefetch)


def adapted() -> OperatorGraph:
    """Two frozen layers, of which the first has nothing before it to train, and trained ones between and behind."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 8, 16), 16, weight=g.parameter("low", 16, 16, frozen=True), bias=False, name="l0")
    x = g.linear(x, 16, bias=False, name="l1")
    x = g.linear(x, 16, weight=g.parameter("high", 16, 16, frozen=True), bias=False, name="l2")
    return g.build(g.mean(g.linear(x, 16, bias=False, name="l3")))


def test_frozen_values_are_gathered_and_nothing_of_them_is_scattered() -> None:
    graph = adapted()
    plan = build_plan(graph, replace(fsdp(graph, FOUR), prefetch=0), FOUR)
    named = {sync.parameter: sync for sync in plan.syncs}
    assert {name for name, sync in named.items() if plan.is_frozen(sync)} == {"low", "high"}
    assert all(len(plan.shards[number].devices) == 1 for sync in plan.syncs for number in sync.shards)
    phases = {name: [step.phase for step in method_for(sync).steps(plan, sync)] for name, sync in named.items()}
    both = [Phase.BEFORE_FORWARD, Phase.BEFORE_BACKWARD]
    assert phases == {"low": both[:1], "high": both, "l1.weight": [*both, Phase.AFTER_BACKWARD], "l3.weight": [*both, Phase.AFTER_BACKWARD]}
    found = before(plan)
    assert found[gather_name(named["low"])] == set() and found[gather_name(named["l1.weight"])] == passes(plan, 0)
    assert found[regather_name(named["high"])] == passes(plan, 2) | passes(plan, 3, back=True)
    assert found[regather_name(named["l1.weight"])] == passes(plan, 1) | passes(plan, 2, back=True)
    assert plan.synchronized == {i for sync in plan.syncs if not plan.is_frozen(sync) for i in sync.shards}


def test_of_frozen_values_a_device_holds_its_part_alone() -> None:
    """Neither gradients nor states: what a frozen layer takes beside its part is there for a while only."""
    topology = cluster([4], GPU)
    g = GraphBuilder()
    x = g.input("x", 8, 512)
    for i in range(16):
        x = g.linear(x, 512, weight=g.parameter(f"w{i}", 512, 512, frozen=i < 15), bias=False, name=f"l{i}")
    graph = g.build(g.mean(x))
    simulator = Simulator(graph, topology, RooflineCosts(topology), optimizer_states=2)
    usual, dealt = (simulator.run(make(graph, topology)) for make in (data_parallel, fsdp))
    size, layer = sum(tensor.bytes for tensor in graph.parameters), 512 * 512 * 4
    assert all(curve.peak_bytes >= size for curve in usual.memory_over_time)
    assert all(size / 4 < curve.peak_bytes < size / 4 + 8 * layer for curve in dealt.memory_over_time)
    assert all(curve.peak_bytes <= use.total for curve, use in zip(dealt.memory_over_time, memory_use(dealt.plan), strict=True))


def test_frozen_values_stay_whole_unless_they_are_gathered() -> None:
    graph = adapted()
    for make in (zero1, data_parallel):
        plan = build_plan(graph, make(graph, FOUR), FOUR)
        assert [shard.devices for shard in plan.shards if not shard.trainable] == [(0, 1, 2, 3)] * 2
