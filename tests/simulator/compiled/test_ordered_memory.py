"""The bound of memory for an order of micro-batches: never below what the reference holds, near it, and it decides without a plan."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soap import api
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator import simulate as simulating
from soap.simulator.engine import Engine
from soap.simulator.folded_bound import folded_engine
from soap.simulator.folding import fold
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.lowering import PlanBuilder, build_plan, lower
from soap.simulator.memory import bound
from soap.simulator.memory.bound import MemoryBound
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulator
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.stages import chunks_of, devices_of_stages, stages_of_chunks
from tests.extent import FEW, so_many
from tests.graph_builder import transformer
from tests.micro_batches import by_hand, drawn_pipeline
from tests.simulator.copied import Case, copied, with_parts
from tests.simulator.test_micro_batches import COUNT, ENTERED, STAGES, pipeline
from tests.strategies import CPU, cases, cluster

SCHEDULES = ("accumulation", "gpipe", "1f1b", "interleaved:2", "zb-h1", "gpipe:2:v")


def loaded(graph: OperatorGraph, topology: Topology, strategy: Strategy, limit: int = 1 << 60) -> MemoryBound:
    """Bounds of a strategy's memory."""
    engine = Engine(graph, topology, RooflineCosts(topology))
    engine.load(strategy)
    return MemoryBound(engine, [limit] * topology.device_count)


def held(graph: OperatorGraph, topology: Topology, strategy: Strategy, rng: random.Random) -> list[int]:
    """By device, the most that the reference holds over time, with durations of any length."""
    tasks = lower(build_plan(graph, strategy, topology), topology, RooflineCosts(topology))
    drawn = tuple(replace(task, duration_ns=int(10 ** rng.uniform(0, 7))) for task in tasks.tasks)
    peaks = [0] * topology.device_count
    for own in (tasks, replace(tasks, tasks=drawn)):
        curves = memory_over_time(own, simulate(own))
        peaks = [max(most, curve.peak_bytes) for most, curve in zip(peaks, curves, strict=True)]
    return peaks


def check(graph: OperatorGraph, topology: Topology, strategy: Strategy, seed: int) -> None:
    memory = loaded(graph, topology, strategy)
    in_order, any_order = memory.in_order_bytes(), memory.bound_bytes()
    for device, most in enumerate(held(graph, topology, strategy, random.Random(seed))):
        assert min(in_order[device], any_order[device]) >= min(most, any_order[device]), device
    simulation = Simulator(graph, topology, RooflineCosts(topology)).run(strategy)
    for device, peak in enumerate(simulation.peak_bytes):
        assert memory_needed(memory, device) >= peak


def memory_needed(memory: MemoryBound, device: int) -> int:
    return memory.expected_bytes()[device]


@settings(suppress_health_check=list(HealthCheck))
@given(case=cases(max_moves=6, max_tiles=4, servers=True), seed=st.integers(0, 2**16))
def test_never_below_what_is_held(case: tuple[OperatorGraph, Topology, Strategy], seed: int) -> None:
    assume(case[2].microbatches > 1)
    check(*case, seed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_never_below_what_a_pipeline_holds(schedule: str) -> None:
    """Borders, devices and splits inside stages at random."""
    graph, topology = transformer(), cluster([2, 2], CPU)
    for seed in range(so_many(2, 4)):
        check(graph, topology, drawn_pipeline(graph, schedule, 4, random.Random(seed), 4), seed)


@settings(FEW, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**16), schedule=st.sampled_from(SCHEDULES))
def test_of_proposals_as_of_what_is_loaded(seed: int, schedule: str) -> None:
    """Whether they are taken or not, and whatever was held before."""
    graph, topology, draw = transformer(), cluster([2, 2], CPU), random.Random(seed)
    strategy = drawn_pipeline(graph, schedule, 4, draw, 4)
    engine = Engine(graph, topology, RooflineCosts(topology))
    engine.load(strategy)
    engine.simulate()
    memory, devices = MemoryBound(engine, [1 << 60] * 4), devices_of_stages(graph, strategy)
    stage_of = stages_of_chunks(max(strategy.stages.values()) + 1, schedule)
    for _ in range(6):
        position = draw.randrange(len(graph.operators))
        op = graph.operators[position]
        own = sorted(devices[stage_of[chunks_of(graph, strategy.stages)[position]]])
        config = OpConfig((1,) * len(op.factors), (draw.choice(own),))
        proposed = strategy.with_operator(op.name, config)
        engine.propose(op.name, config)
        assert memory.in_order_bytes() == loaded(graph, topology, proposed).in_order_bytes()
        if draw.random() < 0.5:
            engine.accept()
            strategy = proposed
        else:
            engine.reject()
        assert memory.in_order_bytes() == loaded(graph, topology, strategy).in_order_bytes()


def even_pipeline(schedule: str) -> tuple[OperatorGraph, Topology, Strategy]:
    """Stages of equal layers, each on one device."""
    return ENTERED, cluster([STAGES], CPU), pipeline(schedule, graph=ENTERED)


def test_what_is_in_flight_counts_and_no_more() -> None:
    """Stage s keeps min(M, S - s) micro-batches under 1F1B, all with GPipe, and one in the usual order."""
    found = {}
    for schedule in ("1f1b", "gpipe", "accumulation"):
        graph, topology, strategy = even_pipeline(schedule)
        found[schedule] = np.array(loaded(graph, topology, strategy).in_order_bytes())
    made_bytes = 4 * 2 * 4 * (12 // COUNT)  # of a layer, for a micro-batch, in float32
    for stage in range(1, STAGES - 1):
        for schedule, count, times in (("1f1b", min(COUNT, STAGES - stage), 1), ("gpipe", COUNT, 2)):
            more = found[schedule][stage] - found["accumulation"][stage]
            others = (count - 1) * 2 * made_bytes  # each keeps its input as well; what comes early or leaves late are a few such tensors,
            assert others <= more <= times * others + 6 * made_bytes, (schedule, stage)  # with GPipe as many as there are


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.5), ("interleaved:2", 0.5), ("zb-h1", 0.5), ("gpipe", 1.0)])
def test_near_what_a_pipeline_of_a_model_holds(schedule: str, share: float) -> None:
    """A part of the bound for any order, though what is sent counts as if all of it were there, which is less than 64 MiB."""
    graph, topology = transformer(32, 32, 32, layers=6), cluster([2, 2])
    strategy = replace(gpt_pipeline(graph, schedule), microbatches=8)
    memory = loaded(graph, topology, strategy)
    in_order, any_order = memory.in_order_bytes(), memory.bound_bytes()
    exact = [curve.peak_bytes for curve in Simulator(graph, topology, RooflineCosts(topology)).run(strategy).memory_over_time]
    assert all(peak <= own <= 1.6 * peak for own, peak in zip(in_order, exact, strict=True))
    assert all(own <= share * most for own, most in zip(in_order, any_order, strict=True))


def gpt_pipeline(graph: OperatorGraph, schedule: str, devices: int = 4) -> Strategy:
    """Two stages of a GPT, of two devices each, in 4 micro-batches."""
    chunks = 4 if schedule == "interleaved:2" else 2
    places = [chunk * len(graph.operators) // chunks for chunk in range(1, chunks)]
    borders = [graph.operators[place].name for place in places]
    half = devices // 2
    return replace(by_hand(graph, borders, [tuple(range(half)), tuple(range(half, devices))], schedule), microbatches=4)


def test_large_plans_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to see that they fit, nor that they do not."""
    graph = api.load("zoo:gpt:tiny", plan_only=True).graph
    strategy = gpt_pipeline(graph, "1f1b")
    most = max(loaded(graph, cluster([2, 2]), strategy).in_order_bytes())
    for limit, fits in ((2 * most, True), (most // 2, False)):
        topology = replace(cluster([2, 2]), limits=(limit,) * 4)
        simulator = Simulator(graph, topology, RooflineCosts(topology))
        exact = simulator.overflow_bytes(strategy)
        assert (exact == 0) == fits
        evaluator = IncrementalSimulator(simulator)
        with monkeypatch.context() as patched:
            patched.setattr(PlanBuilder, "build", lambda *_: pytest.fail("a plan is made"))
            patched.setattr(simulating, "MOST_PLANNED_TILES", 0)
            for own in (strategy, replace(strategy)):  # an equal one that is not the last that was simulated
                evaluator.makespan_ns(own)
                found = evaluator.overflow_bytes(own)
                assert found == 0 if fits else found >= exact > 0


def test_without_knowledge_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table of it would be too large the bound is higher, and still one."""
    monkeypatch.setattr(bound, "MOST_KNOWN", 0)
    graph, topology, strategy = even_pipeline("1f1b")
    check(graph, topology, strategy, 0)
    rough = loaded(graph, topology, strategy).in_order_bytes()
    monkeypatch.undo()
    assert all(least <= most for least, most in zip(loaded(graph, topology, strategy).in_order_bytes(), rough, strict=True))


@settings(suppress_health_check=list(HealthCheck))
@given(copied().flatmap(with_parts))
def test_folded_never_below_what_all_copies_lack(case: Case) -> None:
    graph, topology, strategy = case
    assume(not isinstance(fold(graph, topology, strategy), str))
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    outcome = simulator.run_folded(strategy, nearly=True)
    assert not isinstance(outcome, str)
    folding = fold(graph, topology, strategy)
    assert not isinstance(folding, str)
    engine = folded_engine(folding, simulator.costs)
    engine.load(folding.copies.strategy)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulating, "MOST_PLANNED_TILES", 0)
        found = simulator.expected_folded(folding, engine)
    assert all(peak <= most for peak, most in zip(outcome.peak_bytes, found, strict=True))
