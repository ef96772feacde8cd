"""Memory: numbers worked out by hand, and an allocator that plays a training step and must stay below the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from math import ceil

from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import Box, volume
from soap.plan.plan import Plan
from soap.plan.samples import given_bytes
from soap.plan.tiling import iteration_points
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory import sizes
from soap.simulator.reference import execution_order, simulate
from soap.strategy.config import Strategy
from soap.strategy.sync import parameter_server
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import PointCosts, batch_split, chain, finish, on, pairwise_cluster, strategy
from tests.simulator.reference_memory import any_order
from tests.simulator.reference_memory.any_order import MemoryUse, memory_use, peak_bytes
from tests.simulator.reference_memory.sizes import tile_sizes
from tests.strategies import cases

TWO = pairwise_cluster(1, 1)


def test_data_parallel_by_hand() -> None:
    graph = chain(8, 2, 3)
    use = MemoryUse(
        parameters=24,
        gradients=24,
        optimizer=48,
        # half of l1 with as much saved, the loss with its half of the saved bytes and its sum; all of x, of which half is read in its place
        activations=(48 + 48) + (4 + 2 + 4) + 64,
        # l1's gradient at the producer and at the consumer; l1's tile (outputs, saved); adding two of l1's gradients; its weight's
        # gradient as autograd makes it, in one piece and in shards; the sum of these over the devices
        buffers=(48 + 48) + (48 + 48) + 2 * 48 + (24 + 24) + 24,
    )
    assert memory_use(build_plan(graph, batch_split(graph, [0, 1]), TWO)) == (use, use)


def test_columns_of_the_batch_are_copied_and_rows_are_not() -> None:
    rows, columns = (strategy(l1=on(0, 0, degrees=d), loss=on(0, degrees=(1,))) for d in ((2, 1, 1), (1, 2, 1)))
    graph = chain(4, 6, 3)
    assert any_order._read_bytes(build_plan(graph, rows, TWO)) == [96, 96]
    assert any_order._read_bytes(build_plan(graph, columns, TWO)) == [96 + 2 * 48, 96]


def test_optimizer_states_count_per_trainable_parameter() -> None:
    plan = build_plan(chain(8, 2, 3), batch_split(chain(8, 2, 3), [0, 1]), TWO)
    assert [use.optimizer for use in memory_use(plan, 0)] == [0, 0]
    assert [b - a for a, b in zip(peak_bytes(plan, 0), peak_bytes(plan, 3), strict=True)] == [72, 72]


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    g = GraphBuilder()
    frozen = g.parameter("w", 3, 2, frozen=True)
    x = g.linear(g.input("x", 4, 2), 3, weight=frozen, bias=False, name="l1")
    graph = finish(g, g.linear(x, 5, bias=False, name="l2"))
    use = memory_use(build_plan(graph, batch_split(graph, [0]), TWO))[0]
    assert (use.parameters, use.gradients, use.optimizer) == (24 + 60, 60, 120)


def test_an_idle_device_holds_the_batch_alone() -> None:
    graph = chain(8, 2, 3)
    assert peak_bytes(build_plan(graph, batch_split(graph, [1]), TWO))[0] == 64


def test_devices_that_are_given_their_own_samples_hold_no_others() -> None:
    graph, topology = chain(8, 2, 3), replace(TWO, own_samples=True)
    whole, own = (memory_use(build_plan(graph, batch_split(graph, [0, 1]), given)) for given in (TWO, topology))
    assert [a.activations - b.activations for a, b in zip(whole, own, strict=True)] == [32, 32]  # half of x
    idle, all_of_it = peak_bytes(build_plan(graph, batch_split(graph, [1]), topology))
    assert (idle, all_of_it) == (0, peak_bytes(build_plan(graph, batch_split(graph, [1]), TWO))[1])
    columns = strategy(l1=on(0, 1, degrees=(1, 2, 1)), loss=on(0, degrees=(1,)))
    assert sizes.batch_bytes(build_plan(graph, columns, topology)) == [64, 64]  # each reads a part of every sample


def test_inputs_of_no_sample_and_those_that_name_rows_are_given_whole() -> None:
    g = GraphBuilder()
    ids, bias = g.input("ids", 8, dtype="int64"), g.input("bias", 3)
    x = g.linear(g.input("x", 8, 3), 3)
    graph, topology = g.build(g.mean(g.elementwise(g.embedding(ids, 20, 3, name="find"), x, bias))), replace(TWO, own_samples=True)
    split = batch_split(graph, [0, 1])
    by_rows = split.with_parameter("find.weight", parameter_server(rows=True))
    found = [given_bytes(build_plan(graph, own, topology)) for own in (split, by_rows)]
    assert found == [[64 + 12 + 48] * 2, [32 + 12 + 48] * 2]  # ids, bias, half of x


def test_splitting_a_weight_splits_its_memory() -> None:
    chosen = strategy(l1=on(0, 1, degrees=(1, 1, 2)), loss=on(0, degrees=(1,)))
    first, second = memory_use(build_plan(chain(4, 2, 6), chosen, TWO))
    assert (first.parameters, second.parameters) == (24, 24)
    assert first.activations - second.activations == 4 + 4 + 48 + 96  # the loss and what it saves; half of l1 received, and l1 joined


def test_replicas_are_paid_for_on_their_devices() -> None:
    chosen = strategy(l1=on(0, 1, degrees=(1, 1, 1), replicas=2), loss=on(0, degrees=(1,)))
    first, second = memory_use(build_plan(chain(4, 2, 6), chosen, TWO))
    assert first.parameters == second.parameters == 48
    assert first.activations - second.activations == 8


def test_a_parameter_put_together_from_shards_is_a_copy() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 6, bias=False, name="l1")
    graph = finish(g, g.linear(x, 6, weight="l1.weight", bias=False, name="l2"))
    whole = strategy(l1=on(0, degrees=(1, 1, 1)), l2=on(0, degrees=(1, 1, 1)), loss=on(0, degrees=(1,)))
    cut = whole.with_operator("l2", on(0, 0, degrees=(1, 1, 2)))
    plain, assembled = (memory_use(build_plan(graph, chosen, TWO))[0] for chosen in (whole, cut))
    assert plain.parameters == assembled.parameters == 144
    assert assembled.activations - plain.activations == 144 + 4 * 6 * 4  # l1's copy of the weight; l2's parts joined for the loss


@given(cases(max_moves=5))
def test_a_training_step_stays_below_the_bound(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    tasks = lower(plan, topology, PointCosts())
    played = Step(plan)
    played.run(execution_order(tasks, simulate(tasks)).forward)
    for most, bound in zip(played.most, peak_bytes(plan, 2), strict=True):
        assert most <= bound


def test_recurrent_layers_keep_their_weights_in_another_order_where_a_library_packs_them() -> None:
    graph = chain(4, 2, 6)
    recurrent = replace(graph, operators=tuple(replace(op, kind="lstm") if op.name == "l1" else op for op in graph.operators))
    for kind, copies in (("cuda", 2), ("cpu", 0)):
        cluster = replace(TWO, devices=tuple(replace(device, type=replace(device.type, kind=kind)) for device in TWO.devices))
        plain, packed = (memory_use(build_plan(g, batch_split(g, [0, 0]), cluster))[0] for g in (graph, recurrent))
        assert packed.activations - plain.activations == copies * 48


def test_padding_is_a_copy_only_where_a_tile_lacks_more_on_one_side() -> None:
    g = GraphBuilder()
    graph = finish(g, g.elementwise(g.conv(g.input("x", 2, 3, 8), 4, kernel=3, padding=1, name="c"), name="e"))
    unpadded = GraphBuilder()
    other = finish(unpadded, unpadded.elementwise(unpadded.conv(unpadded.input("x", 2, 3, 10), 4, kernel=3, padding=0, name="c"), name="e"))
    one, two = (sum(own.kept for own in tile_sizes(build_plan(made, batch_split(made, [0]), TWO))) for made in (graph, other))
    assert one == two
    thirds = strategy(c=on(0, 1, 0, degrees=(1, 1, 1, 3)), e=on(0, degrees=(1, 1, 1)), loss=on(0, degrees=(1,)))
    plan = build_plan(graph, thirds, TWO)
    assert [own.padded for own in tile_sizes(plan)[:2]] == [2 * 3 * 5 * 4, 0]  # the second sees no border
    halves = strategy(c=on(0, 1, degrees=(1, 1, 1, 2)), e=on(0, degrees=(1, 1, 1)), loss=on(0, degrees=(1,)))
    outputs = 2 * 4 * 4 * 4
    assert tile_sizes(build_plan(graph, halves, TWO))[1].kept == outputs + outputs + 2 * 3 * 6 * 4


def test_what_is_sent_is_kept() -> None:
    half = strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(0, 1, degrees=(2,)))
    first, second = memory_use(build_plan(chain(4, 2, 6), half, TWO))
    # Gradients of l1: all of it here, of the half that is read here, and of the half that comes back; l1's tile with what it saves;
    # adding two; the weight's twice; the half of l1 that is sent (cut out, so copied); the loss, summed.
    assert first.buffers == (96 + 48 + 48) + (96 + 96) + 2 * 96 + (48 + 48) + 48 + 4
    # The other device: the half that it reads; the tile of the loss; adding two losses; the gradient sent back; the loss, summed.
    assert second.buffers == 48 + (48 + 4 + 2) + 2 * 4 + 48 + 4


class Step:
    """Allocates and frees what a training step with two optimizer states holds, tile by tile; autograd frees what is done with."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.live: dict[Hashable, tuple[int, int]] = {}
        self.now: Counter[int] = Counter()
        self.most = [0] * plan.device_count
        for place, shard in enumerate(plan.shards):
            for device in shard.devices:
                self.hold(("shard", place, device), device, self.size(shard.parameter, shard.box) * (4 if shard.trainable else 1))

    def size(self, tensor: str, box: Box) -> int:
        return volume(box) * self.plan.graph.tensors[tensor].itemsize

    def hold(self, what: Hashable, device: int, size: int) -> None:
        if what not in self.live:
            self.live[what] = (device, size)
            self.now[device] += size
            self.most[device] = max(self.most[device], self.now[device])

    def free(self, what: Hashable) -> None:
        device, size = self.live.pop(what, (0, 0))
        self.now[device] -= size

    def run(self, order: list[int]) -> None:
        fetches: dict[int, list[int]] = {}
        for place, fetch in enumerate(self.plan.fetches):
            for tile, _ in fetch.consumers:
                fetches.setdefault(tile, []).append(place)
        for tile in order:
            self.forward(tile, fetches.get(tile, []))
        for tile in reversed(order):
            if self.plan.graph.needs_backward(self.plan.operator(self.plan.tiles[tile])):
                self.backward(tile, fetches.get(tile, []))

    def forward(self, index: int, fetches: list[int]) -> None:
        plan, tile = self.plan, self.plan.tiles[index]
        op, device = plan.operator(tile), tile.device
        for place in fetches:
            fetch = plan.fetches[place]
            pieces = [plan.holdings[piece.holding] for piece in fetch.pieces]
            if len(pieces) > 1 or pieces[0].device != device:
                self.hold(("fetch", place), device, self.size(fetch.tensor, fetch.box))
        for operand, box in zip(op.inputs, tile.inputs, strict=True):
            if plan.graph.tensors[operand.tensor].kind is not TensorKind.ACTIVATION:
                self.hold(("read", device, operand.tensor, box), device, self.size(operand.tensor, box))
        shards = {(shard.parameter, shard.box) for shard in plan.shards}
        for operand, box in zip(op.parameters, tile.parameters, strict=True):
            if (operand.tensor, box) not in shards:
                self.hold(("assembled", device, operand.tensor, box), device, self.size(operand.tensor, box))
        self.hold(("saved", index), device, ceil(op.saved_bytes * tile.size / iteration_points(op)))
        for k, (operand, box) in enumerate(zip(op.outputs, tile.outputs, strict=True)):
            self.hold(("output", index, k), device, self.size(operand.tensor, box))
        for place, reduction in enumerate(plan.reductions):
            if index in reduction.tiles:
                self.hold(("sum", place, device), device, self.size(op.outputs[reduction.output].tensor, reduction.box))

    def backward(self, index: int, fetches: list[int]) -> None:
        plan, tile = self.plan, self.plan.tiles[index]
        op, device = plan.operator(tile), tile.device
        operands = zip((*op.inputs, *op.parameters, *op.outputs), (*tile.inputs, *tile.parameters, *tile.outputs), strict=True)
        for k, (operand, box) in enumerate(operands):
            if plan.graph.tensors[operand.tensor].requires_grad:
                self.hold(("transient", k), device, self.size(operand.tensor, box))
        for place in fetches:
            fetch = plan.fetches[place]
            if plan.graph.tensors[fetch.tensor].requires_grad:
                self.hold(("gradient of fetch", place), device, self.size(fetch.tensor, fetch.box))
                for piece in fetch.pieces:
                    holding = plan.holdings[piece.holding]
                    self.hold(("gradient", piece.holding), holding.device, self.size(holding.tensor, holding.box))
        for k in range(len(op.inputs) + len(op.parameters) + len(op.outputs)):
            self.free(("transient", k))
        for place in fetches:
            if all(tile == index or ("saved", tile) not in self.live for tile, _ in plan.fetches[place].consumers):
                self.free(("gradient of fetch", place))
        for place, holding in enumerate(plan.holdings):
            if holding.reduction is None and holding.tile == index:
                self.free(("gradient", place))
        self.free(("saved", index))
        for k in range(len(op.outputs)):
            self.free(("output", index, k))
