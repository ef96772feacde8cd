"""Starts with tensor parallelism, stages, micro-batches and states in parts, where data parallelism lacks memory."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.errors import InfeasibleError
from soap.model.batch import MAX_MICROBATCHES
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search import all_starts, chains
from soap.search.grid import Mixture, by_other_schedules, mixtures, pipelines_may_pay
from soap.search.options import SearchOptions
from soap.search.pipeline_moves import MICROBATCHES, pipeline_moves
from soap.search.rough_costs import RoughCosts
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.named import RECOMPUTE, named
from soap.strategy.stages import devices_of_stages
from tests.graph_builder import mlp, transformer
from tests.strategies import CPU, GPU, cluster
from tests.test_expert_parallel import experts

GRAPH, TOPOLOGY = transformer(batch=16, layers=4), cluster([4, 4], GPU)


def grid(topology: Topology = TOPOLOGY, *, recompute: bool = True, graph: OperatorGraph = GRAPH) -> dict[str, Mixture]:
    rough = RoughCosts(Shared(graph, topology, RooflineCosts(topology)))
    return {own.name: own for own in mixtures(graph, topology, rough, 2, recompute=recompute)}


def test_no_more_micro_batches_than_a_strategy_may_have() -> None:
    """Of more samples than that for each device, neither in the grid nor by a pipeline's moves."""
    graph, topology = mlp(batch=4 * MAX_MICROBATCHES), cluster([1, 1], GPU)
    counts = [int(name.rpartition(":")[2]) for name in grid(topology, graph=graph) if "microbatches" in name]
    assert max(counts) == MAX_MICROBATCHES
    name = next(name for name in grid(topology, graph=graph) if name.endswith(f":{MAX_MICROBATCHES}"))
    moves = pipeline_moves(graph, named(name, graph, topology))
    assert {move.strategy.microbatches for move in moves if move.move == MICROBATCHES} == {MAX_MICROBATCHES // 2}


def test_names_are_those_that_users_may_give() -> None:
    """Micro-batches leave each copy a sample; values in parts where nothing is in micro-batches; nothing in parts without copies. There are
    no fewer micro-batches than stages."""
    found = grid()
    usual = {name: own for name, own in found.items() if not own.again}
    assert {*usual} == {
        "zero1+microbatches:2",
        "megatron:1x2+zero1+microbatches:2", "megatron:1x2+zero1+microbatches:4", "megatron:1x4+zero1+microbatches:8",
        "megatron:1x4+zero1+microbatches:4", "megatron:1x8+microbatches:16", "megatron:1x8+microbatches:8",
        "sequence_parallel:2+fsdp", "sequence_parallel:2+zero1+microbatches:2", "sequence_parallel:2+zero1+microbatches:4",
        *(f"sequence_parallel:2x2+zero1+microbatches:{parts}" for parts in (2, 4, 8)),
        *(f"sequence_parallel:2x4+microbatches:{parts}" for parts in (4, 8, 16)),
        "sequence_parallel:4+fsdp",
        *(f"sequence_parallel:4+zero1+microbatches:{parts}" for parts in (2, 4, 8)),
        *(f"sequence_parallel:4x2+microbatches:{parts}" for parts in (2, 4, 8, 16)),
    }  # fmt: skip
    assert grid(recompute=False) == usual and len(found) == 3 * len(usual)
    for name, own in found.items():
        strategy = named(name, GRAPH, TOPOLOGY)
        strategy.validate(GRAPH, TOPOLOGY.device_count)
        assert len(devices_of_stages(GRAPH, strategy)) == own.stages
        assert any(c.recompute for c in strategy.operators.values()) == bool(own.again)
    first, more = found["megatron:1x4+zero1+microbatches:4"], found["megatron:1x4+zero1+microbatches:8"]
    assert first.expected_ns > more.expected_ns > more.least_ns  # fewer micro-batches fill stages later
    again = found["megatron:1x4+zero1+recompute+microbatches:4"]
    but_for_products = found["megatron:1x4+zero1+selective+microbatches:4"]
    assert again.expected_ns > but_for_products.expected_ns > first.expected_ns
    assert found["zero1+microbatches:2"].expected_ns == found["zero1+microbatches:2"].least_ns  # nothing waits for other stages


def test_what_fits_comes_first_then_what_is_fast() -> None:
    held = sorted(own.lacking_bytes + 1 for own in grid(replace(TOPOLOGY, limits=(1,) * TOPOLOGY.device_count)).values())
    found = [*grid(replace(TOPOLOGY, limits=(held[len(held) // 2],) * TOPOLOGY.device_count)).values()]
    assert [(own.lacking_bytes, own.expected_ns) for own in found] == sorted((own.lacking_bytes, own.expected_ns) for own in found)
    assert {bool(own.lacking_bytes) for own in found} == {False, True}
    assert grid(cluster([1, 1], CPU)).keys() == {
        f"{base}{again}+microbatches:{parts}"
        for again in ("", "+selective", "+recompute")
        for base, counts in (("megatron:1x2", (2, 4, 8, 16)), ("zero1", (2, 4, 8)))
        for parts in counts
    }  # no host has several devices


def test_without_stages_values_are_in_parts_too_where_states_in_parts_lack_memory() -> None:
    found = grid(replace(TOPOLOGY, limits=(1,) * TOPOLOGY.device_count))
    assert {"fsdp+microbatches:2", "sequence_parallel:4+fsdp+recompute+microbatches:8", "megatron:1x2+zero1+microbatches:2"} < found.keys()
    assert not {name for name in found if "zero1" in name and found[name].stages == 1}
    with_pipeline, without = (found[name].lacking_bytes for name in ("megatron:1x2+zero1+microbatches:2", "fsdp+microbatches:2"))
    assert without < with_pipeline


def test_schedules_that_are_less_idle_come_by_how_idle_they_are() -> None:
    """Eight stages are idle for 21 passes that all take one unit by 1F1B, for a share of them by chunks (Narayanan et al. 2021), for 7 if
    passes for weights fill in, and for none in two chunks like a V (Qi et al. 2023, 2024)."""
    found = by_other_schedules(Mixture("sequence_parallel:2x8", 8, 64, "", 100, 80, 0, 1))
    assert [name for name in found if not name.startswith("v-")] == ["zb-v", "interleaved:4", "zb-1p", "interleaved:2"]
    assert by_other_schedules(Mixture("sequence_parallel:2x64", 64, 64, "", 100, 80, 0, 1)) == []
    for name in found:
        strategy = named(f"sequence_parallel:2x2+{name}+microbatches:8", GRAPH, TOPOLOGY)
        strategy.validate(GRAPH, TOPOLOGY.device_count)
        assert strategy.schedule == name and len(devices_of_stages(GRAPH, strategy)) == 2


def test_experts_are_divided_among_a_host_s_devices_or_all() -> None:
    graph = experts(8)
    found = grid(graph=graph)
    mappings = {next((part for part in name.split("+") if part.startswith("experts")), "") for name in found}
    assert mappings == {"", "experts:4", "experts:8"}
    assert found["megatron:1+experts:8+zero1+microbatches:2"].lacking_bytes <= found["zero1+microbatches:2"].lacking_bytes
    for name, own in found.items():
        if "experts" in name:
            strategy = named(name, graph, TOPOLOGY)
            strategy.validate(graph, TOPOLOGY.device_count)
            assert len(devices_of_stages(graph, strategy)) == own.stages


def test_pipelines_may_pay_where_one_that_keeps_everything_fits_and_is_fast() -> None:
    fits = Mixture("megatron:1x2", 2, 2, "", 100, 80, 0, 1)
    assert pipelines_may_pay(TOPOLOGY, [fits], 80) and not pipelines_may_pay(TOPOLOGY, [fits], 79)
    for other in (replace(fits, again="selective"), replace(fits, stages=1), replace(fits, lacking_bytes=1)):
        assert not pipelines_may_pay(TOPOLOGY, [other], 80)
    mixed = replace(TOPOLOGY, devices=(*TOPOLOGY.devices[:-1], replace(TOPOLOGY.devices[-1], type=CPU)))
    assert pipelines_may_pay(mixed, [], 80)  # the grid says nothing of those


@pytest.mark.slow
@pytest.mark.parametrize("fits", [False, True])
def test_only_what_is_expected_to_be_faster_than_what_fits_is_evaluated(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits all of it is; and a pipeline that keeps everything is not looked for where none may pay."""
    needed = max(Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY)).run(named("data_parallel", GRAPH, TOPOLOGY)).peak_bytes)
    topology = replace(TOPOLOGY, limits=(int(0.9 * needed) if fits else 100,) * TOPOLOGY.device_count)
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    names = "sequence_parallel:2x2+zero1+recompute+microbatches:4", "megatron:1x2+zero1+recompute+microbatches:2"
    known = [Mixture(names[0], 2, 4, RECOMPUTE, 1, 1, 0, 1), Mixture(names[1], 2, 2, RECOMPUTE, 2**60, 2**60, 0, 1)]
    monkeypatch.setattr(all_starts, "mixtures", lambda *own, **options: known)
    asked = list[bool | None]()
    monkeypatch.setattr(all_starts, "pipeline_start", lambda *own, wanted, named: asked.append(wanted))
    found = list[str]()
    evaluated = chains.evaluated
    monkeypatch.setattr(chains, "evaluated", lambda evaluator, name, own: (found.append(name), evaluated(evaluator, name, own))[1])
    monkeypatch.setattr(chains._Run, "everything", lambda self: None)
    with nullcontext() if fits else pytest.raises(InfeasibleError) as refused:
        chains.search(GRAPH, topology, IncrementalSimulator(simulator), SearchOptions(budget=1, risk=None, cores=1), polish_up_to=0)
    if refused is not None:  # what is best of those in stages, and what that lacks
        said = re.search(r"(?:all starts: |; in stages, )(\S+)(?:; most of that|, lacks .* in all, .* a device)", str(refused.value))
        assert said is not None and said[1] in names, str(refused.value)
    assert [name for name in found if name in names] == [*names[: 1 if fits else 2]] and asked == [False]


def test_a_pipeline_that_only_another_schedule_makes_fast_is_evaluated_by_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = max(Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY)).run(named("data_parallel", GRAPH, TOPOLOGY)).peak_bytes)
    topology = replace(TOPOLOGY, limits=(int(0.9 * needed),) * TOPOLOGY.device_count)
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    first = "sequence_parallel:2x2+zero1+recompute+microbatches:4"
    known = [Mixture(first, 2, 4, RECOMPUTE, 1, 1, 0, 1), Mixture("megatron:1x4+zero1+microbatches:8", 4, 8, "", 2**60, 1, 0, 1)]
    monkeypatch.setattr(all_starts, "mixtures", lambda *own, **options: known)
    monkeypatch.setattr(chains._Run, "everything", lambda self: None)
    found = list[str]()
    evaluated = chains.evaluated
    monkeypatch.setattr(chains, "evaluated", lambda evaluator, name, own: (found.append(name), evaluated(evaluator, name, own))[1])
    chains.search(GRAPH, topology, IncrementalSimulator(simulator), SearchOptions(budget=1, risk=None, cores=1), polish_up_to=0)
    (soonest, *_) = by_other_schedules(known[1])
    piped = [name for name in found if "megatron:1x4" in name]
    assert piped[0] == f"megatron:1x4+zero1+microbatches:8+{soonest}" and len(found) == len({*found})
