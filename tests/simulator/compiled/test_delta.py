"""Proposals on the compiled simulator against simulations from the ground up: every task after every edit that is accepted or rejected."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import benchmarks.simulator
from benchmarks.agreement import compare
from soap import api, zoo
from soap.cluster.overheads import Port
from soap.model.sparse_access import scaled
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.profiles.roofline import RooflineCosts
from soap.simulator import chunks
from soap.simulator.compiled.task_keys import FORWARD
from soap.simulator.draws import Draws, Risk
from soap.simulator.lowering import build_plan
from soap.strategy.classical import random_config
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.marks import OFFLOADED, with_mark
from soap.strategy.named import named
from soap.strategy.recomputation import ALL_LEVELS, LIGHT, RECOMPUTED, STAYS, repeatable, with_marks
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from tests.extent import ALL, MANY, USUAL
from tests.graph_builder import GraphBuilder, mlp
from tests.simulator.compiled.agreement import reference_tasks, synchronized, task_key
from tests.simulator.compiled.walks import Edit, Walk, check, walks
from tests.simulator.examples import ExampleSpreads, batch_split, beside_a_barrier
from tests.strategies import CPU, cluster, mixed

TRAININGS = (PLAIN, PlannedTraining(clips=True))
"""Whether ranks clip their gradients before they send them, if some are compressed."""


@pytest.mark.slow
@settings(MANY, suppress_health_check=list(HealthCheck))
@given(walks(), st.booleans(), st.sampled_from((1, 1_000, chunks.GPU_CHUNK_NS)), st.sampled_from(TRAININGS))
def test_random_walks(walk: Walk, launched: bool, shortest_ns: int, training: PlannedTraining) -> None:
    """``shortest_ns``: of chunks of sums between GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "GPU_CHUNK_NS", shortest_ns)
        check(walk, afresh=True, launched=launched, training=training)


@settings(USUAL, suppress_health_check=list(HealthCheck))
@given(walks(max_edits=3), st.booleans(), st.integers(1, 9), st.sampled_from(Risk), st.sampled_from(TRAININGS))
def test_random_walks_under_draws(walk: Walk, launched: bool, count: int, risk: Risk, training: PlannedTraining) -> None:
    """Every draw of every proposal, too."""
    check(walk, afresh=True, launched=launched, draws=Draws(ExampleSpreads(), count, seed=count, risk=risk), training=training)


LARGE = {"inception_v3", "resnet101", "resnet152", "vgg16", "vgg19"}
OFTEN = {4: {*zoo.names()} - LARGE, 16: {"nmt"}, 64: {"nmt"}}
"""Nearly all models on 4 devices (``resnet50`` and ``alexnet`` have the parts of the others); on more the one whose tables are served, tied
and read by unrolled steps."""
SIZES = [
    pytest.param(devices, model, marks=pytest.mark.slow if model in OFTEN[devices] else pytest.mark.long)
    for devices in OFTEN
    for model in zoo.names()
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster_name"),
    [
        *((model, "p100-4x4") for model in ("alexnet", "dlrm", "rnnlm")),
        pytest.param("nmt", "p100-4x4", marks=pytest.mark.long),  # ``test_zoo`` has it three times
        ("alexnet", "v100-8"),
        ("rnnlm", "h100-2x4"),
    ],
)
def test_walks_over_models(model: str, cluster_name: str) -> None:
    """Data parallelism as the start, most parameters synchronized in any way, then a dozen edits."""
    graph, topology = api.load(f"zoo:{model}:tiny", plan_only=True).graph, api.load_cluster(cluster_name)
    draw = random.Random(0)
    start = api.classical("data_parallel", graph, topology)
    strategy = synchronized(start, graph, draw, 0.8)
    edits = []
    for _ in range(12):
        ops = draw.sample(graph.operators, draw.choice((1, 1, 2, 4)))
        configs = {op.name: random_config(op, topology.device_count, draw) for op in ops}
        changed = synchronized(start, graph, draw, 0.1).parameters
        edits.append(Edit(configs, dict(changed), draw.random() < 0.5))
    check((graph, topology, strategy, edits), afresh=True, launched=model in ("alexnet", "rnnlm"))


@pytest.mark.parametrize(("devices", "model"), SIZES)
def test_zoo(devices: int, model: str) -> None:
    """What ``benchmarks.agreement`` does with thousands of proposals."""
    graph = api.load(f"zoo:{model}:tiny", plan_only=True).graph
    found = compare(graph, benchmarks.simulator.cluster(devices // 4), 20, beta=3.0)
    assert found.proposals == 20
    assert found.accepted > 0
    assert found.different == 0
    assert found.compared > 20 * len(graph.operators)


def test_equal_lookups_of_which_other_numbers_of_rows_are_known() -> None:
    """On rows their tiles take other times."""
    g = GraphBuilder()
    found = [g.embedding(g.input(f"ids{i}", 8, 16, dtype="int64"), 4096, 64, weight=g.parameter(f"table{i}", 4096, 64)) for i in range(2)]
    graph = g.build(g.mean(g.elementwise(*found)))
    graph = replace(graph, sparse={**graph.sparse, "table1": scaled(graph.sparse["table1"], 0.005)})
    topology = cluster([2, 1], CPU)
    start = api.classical("data_parallel", graph, topology)
    gather, server = SPARSE_ALL_GATHER, parameter_server(2, rows=True)
    syncs = [{"table0": gather}, {"table1": server}, {"table0": server, "table1": gather}, {"table0": SyncConfig(), "table1": SyncConfig()}]
    edits = [Edit({}, own, accepted) for own in syncs for accepted in (False, True)]
    moved = {graph.operators[1].name: OpConfig((1, 2, 1, 1), (2, 0))}
    check((graph, topology, start, [*edits, Edit(moved, {"table1": gather}, True), Edit({}, {"table1": SyncConfig()}, True)]), afresh=True)
    both = start.with_parameter("table0", gather).with_parameter("table1", gather)
    firsts = [task_key(FORWARD, position, 1, 0, 0, 0) for position in range(2)]
    for strategy, alike in ((start, True), (both, False)):
        tasks = reference_tasks(graph, topology, RooflineCosts(topology), strategy)
        assert (tasks[firsts[0]][0] == tasks[firsts[1]][0]) is alike


def test_what_runs_again_for_readers_on_both_sides_of_a_barrier() -> None:
    """In micro-batches the reader whose backward pass comes first may have the lower position. Readers on other devices, and sums, too."""
    graph, topology = beside_a_barrier(), cluster([2, 1], CPU)
    start = replace(with_marks(batch_split(graph, [0]), ("v", "behind"), True), microbatches=2)
    own = start.operators
    moved = {name: replace(own[name], devices=(1,)) for name in ("behind", "before")}
    summed = OpConfig((1, 2, 1), (0, 1), recompute=RECOMPUTED)
    configs: list[dict[str, OpConfig]] = [
        {"before": with_mark(own["before"], RECOMPUTED)},
        {"before": moved["before"]},
        {"behind": moved["behind"]},
        {"v": summed},
        {"v": summed, **moved},
        {"v": with_mark(own["v"], LIGHT)},
        {"v": replace(own["v"], devices=(2,)), "m1": with_mark(own["m1"], RECOMPUTED)},
        {"behind": with_mark(own["behind"], STAYS)},
        {name: with_mark(own[name], OFFLOADED) for name in ("v", "behind")},
    ]
    edits = [Edit(config, {}, accepted) for accepted in (False, True) for config in configs]
    check((graph, topology, start, edits), afresh=True)


def test_update_comes_to_wait() -> None:
    """Nobody reads what device 3 makes of ``first``: its update waits for nothing, until a tile of another operator comes there."""
    g = GraphBuilder()
    graph = g.build(g.mean(g.slice(g.linear(g.input("x", 1, 1, 2), 2, name="first"), 2, 0, 1)))
    first, middle, last = (op.name for op in graph.operators)
    there, here = OpConfig((1, 1, 1), (3,)), OpConfig((1, 1, 1), (0,))
    start = Strategy({first: OpConfig((1, 1, 1, 2), (0, 3)), middle: here, last: here})
    edits = [Edit({last: there}, {}, False), Edit({last: there}, {}, True), Edit({last: here}, {}, True)]
    check((graph, cluster([1, 3], CPU, 1e8, 0.0), start, edits), afresh=True)


def test_a_device_without_work_is_not_late() -> None:
    """What others send keeps device 1 busy, which has a port at a link of theirs, until long after the iteration's end."""
    g = GraphBuilder()
    graph = g.build(g.mean(g.linear(g.input("x", 1, 1, 2), 2, name="first")))
    first, last = (op.name for op in graph.operators)
    topology = cluster([1, 2], CPU, 1e8, 0.0)
    link = topology.route(2, 0)[0]
    start = Strategy({first: OpConfig((1,) * 4, (2,)), last: OpConfig((1,) * 3, (0,))})
    edits = [Edit({}, {"first.weight": SyncConfig()}, False), Edit({last: OpConfig((1,) * 3, (0,))}, {}, True)]
    for fixed_ns in (0, 90_000):
        check((graph, replace(topology, ports=(Port(link, 1, fixed_ns, 0), Port(0, 0, 0, 0))), start, edits), afresh=True)


def test_hosts_update_for_a_gpu_beside_a_cpu() -> None:
    """The host's share of cores does it, though the host's first device is a CPU, which updates by itself."""
    graph, topology = mlp(), mixed(cluster([2, 1], CPU), [1, 2], 1)
    assert [device.type.kind for device in topology.devices] == ["cpu", "cuda", "cuda"]
    first = graph.operators[0]
    moved = Edit({first.name: OpConfig((1,) * len(first.factors), (1,))}, {}, True)
    check((graph, topology, named("data_parallel+offload", graph, topology), [moved]), afresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10 if ALL else 1))
def test_many_short_walks(part: int) -> None:
    """Each part has a seed of its own: without, hypothesis draws the same for all of them where it is derandomized."""

    @seed(part)
    @settings(MANY, suppress_health_check=list(HealthCheck))
    @given(walks(max_moves=2, max_tiles=4, max_edits=2))
    def all_agree(walk: Walk) -> None:
        check(walk, afresh=False)

    all_agree()


@pytest.mark.parametrize("name", ["sequence_parallel:4+recompute", "megatron:2x2+recompute+microbatches:2"])
def test_walks_of_what_is_gathered_and_summed_again(name: str) -> None:
    """Edits of marks alone, and of where operators are."""
    graph, topology = api.load("zoo:gpt:tiny", plan_only=True).graph, api.load_cluster("v100-8")
    draw, able = random.Random(len(name)), [op for op in graph.operators if op.name in repeatable(graph)]
    start, other = (named(own, graph, topology) for own in (f"{name}+gather_again", "megatron:2"))
    current, edits, travels = start, list[Edit](), [0, 0]
    for _ in range(5):
        changes = {op.name: current.operators[op.name].marked("recompute", draw.choice(ALL_LEVELS)) for op in draw.sample(able, 3)}
        if not start.stages and draw.random() < 0.4:
            changes = {own: config.placed_like(other.operators[own]) for own, config in changes.items()}
        edits.append(Edit(changes, {}, draw.random() < 0.7))
        edited = edits[-1].of(current)
        plan = build_plan(graph, edited, topology)
        travels = [travels[0] + bool(plan.gathered_again), travels[1] + bool(plan.summed_again)]
        current = edited if edits[-1].accepted else current
    assert travels[1] and (travels[0] or start.stages)
    check((graph, topology, start, edits), afresh=True)
