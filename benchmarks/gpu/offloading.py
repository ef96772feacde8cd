"""Optimizer states, and what operators keep, in the host's memory, on a GPU: training is the same, what is copied is pinned there, and the
GPU's memory is free of it."""

from __future__ import annotations

import gc
from typing import Any, Literal

import torch

import soap
from soap.runtime.updates.optimizers import adam
from soap.simulator.memory.sizes import away_bytes
from soap.strategy.named import OFFLOAD_KEPT, named

STEPS = 4


def beside_usual(device: Literal["cpu", "cuda"], tiny: bool) -> dict[str, Any]:
    """One rank trains with and without: the largest difference of a value, bytes on the device behind the last step, where states are, and
    whether they are pinned. ``ok`` says whether all is as it should be."""
    model = "zoo:gpt:tiny" if tiny else "zoo:gpt"
    runs = {name: _run(model, name, device) for name in ("single_device", "single_device+offload")}
    usual, away = runs.values()
    states, difference = away["states_bytes"], _difference(usual["values"], away["values"])
    saved = usual["held_bytes"] - away["held_bytes"]
    on_gpu = device == "cuda"
    ok = difference < 1e-4 and away["on"] == ["cpu"] and (not on_gpu or (away["pinned"] and saved >= 0.9 * states))
    return {
        "model": model,
        "largest_difference": difference,
        "states_bytes": states,
        "saved_bytes": saved if on_gpu else None,
        "left_bytes": away["left_bytes"],
        "states_on": away["on"],
        "pinned": away["pinned"],
        "ok": ok,
    }


def kept_beside_usual(device: Literal["cpu", "cuda"], tiny: bool) -> dict[str, Any]:
    """The same of what operators keep: the largest difference of a value, the bytes that a step copies in each direction beside those
    planned, and by how much the peak of the GPU's memory is lower."""
    model = "zoo:gpt:tiny" if tiny else "zoo:gpt"
    runs = {name: _run(model, name, device) for name in ("single_device", f"single_device+{OFFLOAD_KEPT}")}
    usual, away = runs.values()
    difference, saved = _difference(usual["values"], away["values"]), usual["peak_bytes"] - away["peak_bytes"]
    copied, planned = away["copied_bytes"], away["planned_bytes"]
    ok = difference < 1e-4 and copied[0] == copied[1] > 0 and copied[0] <= planned and (device == "cpu" or saved > 0)
    return {
        "model": model,
        "largest_difference": difference,
        "copied_bytes": copied,
        "planned_bytes": planned,
        "saved_bytes": saved if device == "cuda" else None,
        "ok": ok,
    }


def _run(name: str, strategy: str, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    gc.collect()  # trainers are in cycles
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = soap.load(name)
    topology = soap.load_cluster("local:1")
    plan = (named(strategy, model.graph, topology), topology)
    with soap.Trainer(model, plan, optimizer=lambda tensors: adam(tensors, 1e-3), device_kind=device, seed=1) as trainer:
        for _ in range(STEPS):
            trainer.step(*model.example_inputs)
        traffic, graph = trainer.traffic, trainer.plan.graph
        kept = [tile for tile in trainer.plan.tiles if tile.operator in trainer.plan.marked]
        held = torch.cuda.memory_allocated() - before if device == "cuda" else 0
        assert trainer.optimizer is not None
        states = [value for own in trainer.optimizer.state.values() for value in own.values() if torch.is_tensor(value) and value.dim()]
        masters = [part.tensor for number, part in trainer.parts.items() if number in trainer.plan.offloaded]
        return {
            "values": {key: value.detach().double().cpu() for key, value in trainer.state_dict().items()},
            "held_bytes": held,
            "peak_bytes": torch.cuda.max_memory_allocated() - before if device == "cuda" else 0,
            "left_bytes": before,
            "copied_bytes": [traffic.offloaded_bytes // STEPS, traffic.restored_bytes // STEPS],
            "planned_bytes": sum(away_bytes(graph, tile) for tile in kept),
            "states_bytes": sum(state.nbytes for state in states),
            "on": sorted({state.device.type for state in states}),
            "pinned": bool(masters) and all(master.is_pinned() for master in masters) if device == "cuda" else None,
        }


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[key]).abs().max()) for key, value in one.items() if value.numel())
