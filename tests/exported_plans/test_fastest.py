"""Of the configurations near a plan the fastest that fits is written, and its price is that of the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import soap
from soap.api.exported_plans import AS_FAST, ExportedPlan, export_plan
from soap.api.predictions import simulator_for
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.exported_plans.layers import Layers
from soap.exported_plans.named import TARGETS
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PlannedTraining
from soap.plan.syncs.gathering import gathers as gathers_of
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.sync import ALL_REDUCE, SHARDED_STATE
from soap.strategy.wrapped import Wrapped

each = pytest.mark.parametrize("target", [target.name for target in TARGETS])
BLOCKS = ("blocks.0", "blocks.1")


@cache
def graph() -> OperatorGraph:
    return soap.load("zoo:gpt:tiny@16", plan_only=True).graph


@cache
def cluster() -> Topology:
    return soap.load_cluster("h100-8")


def fsdp(prefetch: int = 1) -> Strategy:
    return replace(soap.classical("fsdp", graph(), cluster()), prefetch=prefetch)


@cache
def exported(target: str, prefetch: int, autocast: str | None = None) -> ExportedPlan:
    return export_plan(fsdp(prefetch), graph(), cluster(), target, autocast=autocast, nearest_only=True)


def predicted(strategy: Strategy, wrapped: Wrapped) -> Simulation:
    usual = simulator_for(graph(), cluster())
    return Simulator(graph(), cluster(), usual.costs, usual.optimizer_states, PlannedTraining(wrapped=wrapped)).run(strategy)


def gathers(simulation: Simulation) -> dict[str, int]:
    """Task -> bytes that it moves."""
    return {task.name: task.bytes for task in simulation.tasks.tasks if "gather " in task.name}


def parameters(modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in graph().parameters if tensor.name.rpartition(".")[0].startswith(tuple(modules)))


@each
def test_the_fastest_that_fits_is_written_or_what_is_nearer_and_as_fast(target: str) -> None:
    found = export_plan(fsdp(), graph(), cluster(), target)
    times = [one.predicted.makespan_ns for one in found.compared]
    assert len({one.configuration for one in found.compared}) == len(times) > 2
    assert found.compared[0].configuration == exported(target, 1).configuration
    as_fast = [one for one, time in zip(found.compared, times, strict=True) if time <= AS_FAST * min(times)]
    assert found.chosen is as_fast[0] and found.configuration.sharing == "none"  # next to nothing is computed: each message costs
    assert found.exported.makespan_ns < times[0]
    assert {one.configuration.sharing for one in found.compared} == {"none", "zero1", "fsdp"}


@pytest.mark.slow
@each
def test_what_does_not_fit_is_not_written(target: str) -> None:
    """Data parallelism is the fastest of these, and takes most memory."""
    found = export_plan(fsdp(), graph(), cluster(), target)
    whole, peaks = found.chosen, sorted(one.predicted.peak_bytes for one in found.compared)
    assert whole.predicted.peak_bytes == peaks[-1] > 1.3 * peaks[0]
    tight = with_memory_budget(cluster(), f"{(peaks[0] + peaks[-1]) // 2} B")
    other = export_plan(fsdp(), graph(), tight, target)
    assert other.exported.fits and other.configuration.sharing != "none"
    assert [one.predicted.fits for one in other.compared if one.configuration.sharing == "none"] == [False]


@each
def test_a_plan_that_shares_one_table_otherwise_keeps_its_way_of_sharing(target: str) -> None:
    plan = fsdp().with_parameter("token_embedding.weight", SHARDED_STATE)
    found = export_plan(plan, graph(), cluster(), target, nearest_only=True)
    assert found.configuration.sharing == "fsdp"
    assert [name for name, _, _ in found.comparison.parameters] == ["token_embedding.weight"]
    assert len(found.compared) == 1


@each
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_the_price_is_the_simulation_of_what_the_file_says(target: str, autocast: str | None) -> None:
    """Modules that are gathered at once, and how wide values travel."""
    modules = {
        "fsdp2": (("token_embedding",), ("position_embedding",), ("blocks.0",), ("blocks.1",), ("norm",), ("head",)),
        "torchtitan": (("token_embedding", "position_embedding"), ("blocks.0",), ("blocks.1",), ("norm", "head")),
        "megatron": (("token_embedding",), ("position_embedding",), ("blocks.0",), ("blocks.1",), ("norm",), ("head",)),
        "deepspeed": (),
    }[target]
    prefetch = 1 if target == "torchtitan" else 3
    kept = {"fsdp2": ("head.weight",), "torchtitan": parameters(("norm", "head"))}.get(target, ())
    wrapped = Wrapped(tuple(parameters(group) for group in modules), frozenset(kept), 0 if autocast is None else 2)
    found = exported(target, 3, autocast)
    assert found.chosen.wrapped == wrapped and found.configuration.prefetch == prefetch
    assert found.exported.makespan_ns == predicted(fsdp(prefetch), wrapped).makespan_ns


def test_a_module_is_gathered_at_once_and_narrow() -> None:
    wide = predicted(fsdp(), Wrapped((parameters(BLOCKS[:1]), parameters(BLOCKS[1:]))))
    narrow = predicted(fsdp(), Wrapped((parameters(BLOCKS[:1]), parameters(BLOCKS[1:])), itemsize=2))
    groups = [{region.parameter for region in sync.regions} for sync in wide.plan.syncs]
    assert groups.count(set(parameters(BLOCKS[:1]))) == groups.count(set(parameters(BLOCKS[1:]))) == 1
    assert all(len({name.split(".")[1] for name in own if name.startswith("blocks")}) <= 1 for own in groups)
    assert gathers(wide).keys() == gathers(narrow).keys()
    assert [2 * size for size in gathers(narrow).values()] == list(gathers(wide).values())
    assert [t.bytes for t in wide.tasks.tasks if "scatter" in t.name] == [t.bytes for t in narrow.tasks.tasks if "scatter" in t.name]


def test_what_stays_is_gathered_once_and_waits_for_earlier_uses() -> None:
    again, once = (predicted(fsdp(), Wrapped(kept=frozenset(kept))) for kept in ((), parameters([""])))
    assert len(gathers(again)) == 2 * len(gathers(once)) > 10
    assert not any("regather" in name for name in gathers(once))
    assert max(once.peak_bytes) > max(again.peak_bytes)
    after = [gather.after_forward for gather in gathers_of(once.plan)]
    assert after == [gather.after_forward for gather in gathers_of(again.plan) if not gather.backward] and any(after)


def test_one_module_may_stay() -> None:
    modules = (parameters(("norm", "head")),)
    again, once = (predicted(fsdp(), Wrapped(modules, frozenset(kept))) for kept in ((), modules[0]))
    gone = gathers(again).keys() - gathers(once).keys()
    assert len(gone) == 1 and "regather head.weight[0]+2" in gone.pop()


def test_folded_over_copies_it_is_equal() -> None:
    """Rows divide among four, but for those of two tables, which are summed."""
    four = soap.load_cluster("h100-4")
    tables = dict.fromkeys(("token_embedding.weight", "head.weight"), ALL_REDUCE)
    usual, plan = simulator_for(graph(), four), soap.classical("fsdp", graph(), four).with_changes(parameters=tables)
    wrapped = Wrapped((parameters(BLOCKS[:1]), parameters(("norm",))), frozenset(parameters(("norm",))), 2)
    told = Simulator(graph(), four, usual.costs, usual.optimizer_states, PlannedTraining(wrapped=wrapped))
    folded, whole = told.run_folded(plan), told.run(plan)
    assert not isinstance(folded, str)
    assert (folded.makespan_ns, folded.bytes_moved, folded.peak_bytes) == (whole.makespan_ns, whole.bytes_moved, whole.peak_bytes)


def test_engines_refuse_what_they_do_not_know() -> None:
    usual = simulator_for(graph(), cluster())
    told = Simulator(graph(), cluster(), usual.costs, training=PlannedTraining(wrapped=Wrapped(itemsize=2)))
    with pytest.raises(ValueError, match="another trainer wraps"):
        _ = told.shared


def test_files_say_how_far_ahead() -> None:
    """A block of the tiny model has 12,704 parameters, a group of values an eighth of all."""
    block = sum(volume for volume in _sizes(parameters(BLOCKS[:1])))
    all_of_them, largest = sum(_sizes(parameters([""]))), max(_sizes(parameters([""])))
    assert "\nPREFETCH = 3  #" in exported("fsdp2", 3).text
    assert "order[place : place + PREFETCH]" in exported("fsdp2", 3).text
    assert f"--suggested-communication-unit-size {2 * 3 * block}\n" in exported("megatron", 3).text
    zero = json.loads(exported("deepspeed", 3).text)["zero_optimization"]
    group = -(-4 * all_of_them // 8) // 4
    told = {key: zero[f"stage3_{key}"] for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    assert told == {"prefetch_bucket_size": group, "max_live_parameters": 3 * group + max(largest, group), "max_reuse_distance": 0}
    assert zero["reduce_bucket_size"] == group
    assert tomllib.loads(exported("torchtitan", 3).text)["parallelism"]["fsdp_reshard_after_forward"] == "default"


def test_values_that_stay() -> None:
    plan = soap.classical("zero1", graph(), cluster())
    found: dict[str, Any] = {own.name: export_plan(plan, graph(), cluster(), own.name, nearest_only=True) for own in TARGETS}
    every = {name: frozenset(parameters([""])) for name in ("torchtitan", "fsdp2", "megatron")}
    assert {name: own.chosen.wrapped.kept for name, own in found.items()} == {**every, "deepspeed": frozenset()}
    assert "reshard_after_forward=True" not in found["fsdp2"].text and "PREFETCH = 1" in found["fsdp2"].text
    assert "--ddp-bucket-size " in found["megatron"].text
    assert found["deepspeed"].exported.makespan_ns == found["deepspeed"].planned.makespan_ns


def test_tied_weights_and_what_owns_others_stay_with_the_model() -> None:
    tied = soap.load("zoo:rnnlm:tiny", plan_only=True).graph
    layers = Layers(graph())
    assert layers.before == ("token_embedding", "position_embedding") and layers.after == ("norm", "head")
    assert Layers(tied).before == Layers(tied).after == ()  # it has no layers with numbers
    *others, head, loss = graph().operators
    assert head.name == "head"
    read = tuple(replace(own, tensor="token_embedding.weight") for own in head.parameters)
    shared = replace(graph(), operators=(*others, replace(head, parameters=read), loss))
    assert Layers(shared).before == ("position_embedding",) and Layers(shared).after == ("norm",)
    assert "token_embedding.weight" in Layers(shared).wrapped([("blocks.0",)])[-1]


def _sizes(names: Sequence[str]) -> list[int]:
    return [tensor.bytes // tensor.itemsize for tensor in graph().parameters if tensor.name in names]
