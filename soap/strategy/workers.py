"""Virtual workers in a strategy: groups of devices, each a pipeline of its own with minibatches of its own, that may be apart.

Each tile of the samples is a minibatch of one worker, so an operator's first tile is on a device of the first worker, and so on; which
stage an operator is in follows from its device there, so that workers may be cut differently. How far they may be apart says
``Strategy.consistency``; ``docs/mixed_machines.md`` says what that means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from soap.errors import StrategyError
from soap.model.batch import sample_factor, samples_of
from soap.model.graph import OperatorGraph
from soap.model.json_text import Schema
from soap.strategy.stages import SETTLED

if TYPE_CHECKING:
    from soap.strategy.config import Strategy

MOST_WORKERS, MOST_IN_FLIGHT = 4096, 1024
Group = Annotated[tuple[Annotated[int, Schema(minimum=0, maximum=2**31)], ...], Schema(minItems=1)]
"""The devices of a worker."""


@dataclass(frozen=True, slots=True)
class Workers:
    """``groups``: the devices of each worker. ``in_flight``: minibatches that are in each worker's pipeline at once, without a flush; so
    many are a wave. StrategyError if a device is in two groups, or numbers are out of range."""

    groups: Annotated[tuple[Group, ...], Schema(minItems=1, maxItems=MOST_WORKERS)]
    in_flight: Annotated[int, Schema(minimum=1, maximum=MOST_IN_FLIGHT)] = 1

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= MOST_IN_FLIGHT:
            raise StrategyError(f"workers with {self.in_flight} minibatches in flight; expected 1 to {MOST_IN_FLIGHT}")
        if not 1 <= len(self.groups) <= MOST_WORKERS or not all(self.groups):
            raise StrategyError(f"{len(self.groups)} workers, or one without devices; expected 1 to {MOST_WORKERS}, each with some")
        twice = [device for device, count in Counter(device for own in self.groups for device in own).items() if count > 1 or device < 0]
        if twice:
            raise StrategyError(f"workers: device {twice[0]} is in several of them, or below 0; expected each worker to have its own")


def said_workers(entry: Mapping[str, Any]) -> str:
    """An entry of a file, for people."""
    groups = "; ".join(" ".join(map(str, own)) for own in entry["groups"])
    return f"{len(entry['groups'])} on devices {groups}, {entry['in_flight']} minibatches in flight"


def require_workers(graph: OperatorGraph, strategy: Strategy, workers: Workers, device_count: int) -> None:
    """StrategyError naming the first thing that keeps a strategy's configurations from being virtual workers'."""
    count, last = len(workers.groups), max(device for own in workers.groups for device in own)
    if last >= device_count:
        raise StrategyError(f"workers: device {last} does not exist; expected 0 to {device_count - 1} on this cluster")
    if strategy.microbatches > 1 or strategy.stages or strategy.schedule is not None:
        raise StrategyError("workers with micro-batches, stages or a schedule; expected none: stages follow from the workers' devices")
    if (samples := samples_of(graph) or 0) % count or not samples:
        raise StrategyError(f"{count} workers for {samples} samples; expected a number that divides them: minibatches are equal")
    used = {device: number for number, own in enumerate(workers.groups) for device in own}
    for op in graph.operators:
        config, factor = strategy.operators[op.name], sample_factor(op)
        if op.kind in SETTLED:
            continue
        wanted = [1] * len(config.degrees)
        if factor is not None:
            wanted[factor] = count
        tiles = [used.get(device) for device in config.devices]
        if [*config.degrees] != wanted or (factor is not None and tiles != [*range(count)]) or None in tiles:
            devices = ", ".join(map(str, config.devices[:6]))
            raise StrategyError(
                f"operator {op.name!r} has degrees {config.degrees} on devices {devices}; expected its samples in {count} parts, one on a "
                "device of each worker in their order, and nothing else split"
            )
