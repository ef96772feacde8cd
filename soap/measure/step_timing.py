"""What a message, a sum or an exchange takes within a training step: steps of chains of tiles, on one device and across several.

By itself a message is quicker. Within a step a tile ends before it and another begins behind it, each in a segment of its own. And a
processor that has waited computes more slowly at first: how much longer a tile takes behind a sum is its *cold penalty*. (Between emulated
hosts a sum delays a step by 1.3 ms, and by 2.2 where tiles of 2.3 ms are behind it, but takes 0.6 in a loop.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from soap.cluster.presets import local_topology
from soap.measure.link_probes import BLOCK_BYTES, COLD_PENALTIES, STEP_BYTES, LinkTiming, Operation, Probe
from soap.measure.step_chains import chain_model, chain_strategy
from soap.measure.upkeep_timing import TileChain
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.system import clock
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy

CHAINS = (3, 11)
"""Numbers of tiles of the two chains whose steps are compared."""
STEPS, WARM_UP_STEPS = 6, 2
TURNS = 3
"""How often all chains are run, one after the other, so that a slow phase of the machine does not hit one of them alone. Those with
tiles that compute take longer, and are run once less."""

Busy = Callable[[], float]
"""Seconds for which this rank's device has computed so far."""


class _PerTile(NamedTuple):
    """Seconds: of a tile of a chain on one device; how much longer it takes across devices in each step; and how long that keeps a
    device busy, at one of a message's two ends."""

    alone: float
    longer: list[float]
    busier: float


def measure_in_steps(comm: Communicator, probe: Probe, busy: Busy, known: Sequence[LinkTiming] = (), turns: int = TURNS) -> LinkTiming:
    """The time of such a probe, on every rank; all ranks take part. ``turns``: how often, at least twice. ``seconds``: how much longer one
    operation makes a step. ``cpu_seconds``: how long it keeps a device busy, at one of a message's two ends. Of a cold penalty: how much
    longer tiles that compute make a step, beyond the sum itself (taken from ``known`` if it is there), and how long such a tile takes on
    one device."""
    if probe.operation not in COLD_PENALTIES:
        plain = [_turn(comm, probe, busy, 0) for _ in range(turns)]
        return _timing(probe, [one for turn in plain for one in turn.longer], median(turn.busier for turn in plain))
    idle_seconds = _idle_seconds(comm, probe, busy, known, turns)
    working = [_turn(comm, probe, busy, round(probe.size_bytes / BLOCK_BYTES)) for _ in range(turns - 1)]
    longer = [one - idle_seconds for turn in working for one in turn.longer]
    return _timing(probe, longer, median(turn.alone for turn in working))


def _idle_seconds(comm: Communicator, probe: Probe, busy: Busy, known: Sequence[LinkTiming], turns: int) -> float:
    """What a step of such a chain takes longer for each tile if these compute nothing."""
    if probe.operation is Operation.STEP_WAIT:
        return median(one for _ in range(turns - 1) for one in _turn(comm, probe, busy, 0).longer)
    summed = Probe(Operation.STEP_SUM, probe.devices, STEP_BYTES)
    own = next((timing for timing in known if timing.probe == summed), None) or measure_in_steps(comm, summed, busy, turns=turns)
    return own.typical_seconds


def _timing(probe: Probe, seconds: Sequence[float], cpu_seconds: float) -> LinkTiming:
    return LinkTiming(probe, tuple(max(1e-9, one) for one in seconds), max(0.0, cpu_seconds))


def _turn(comm: Communicator, probe: Probe, busy: Busy, blocks: int) -> _PerTile:
    alternating, tiles = probe.operation is Operation.STEP_MESSAGE, CHAINS[1] - CHAINS[0]

    def chains(across: bool) -> list[tuple[list[float], float]]:
        parts = 1 if across or alternating else len(probe.devices)  # on one device it does its share of what is exchanged
        models = [chain_model(probe.operation, count, len(probe.devices), blocks, probe.size_bytes // parts) for count in CHAINS]
        return [_steps(comm, model, chain_strategy(model, probe.operation, probe.devices, across=across), busy) for model in models]

    (few, few_busy), (many, many_busy) = chains(across=False)
    tile, tile_busy = (median(many) - median(few)) / tiles, (many_busy - few_busy) / tiles
    (few, few_busy), (many, many_busy) = chains(across=True)
    own_tiles, ends = (tiles / len(probe.devices), 4) if alternating else (tiles, 2)
    own_busy = ((many_busy - few_busy) / own_tiles - tile_busy) / ends
    longer = [((one - median(few)) / tiles - tile) / 2 for one in many]  # forward and backward
    return _PerTile(tile / 2, longer, own_busy)


def _steps(comm: Communicator, model: TileChain, strategy: Strategy, busy: Busy) -> tuple[list[float], float]:
    """Seconds of each step of the slowest rank, and seconds of computing of the busiest rank's device, on all ranks."""
    with clock.paused():  # the first step imports modules
        trainer = Trainer(model, (strategy, local_topology(comm.world_size)), device_kind="cpu")
    walls, own_busy = [], []
    for step in range(WARM_UP_STEPS + STEPS):
        comm.barrier()
        before, start = busy(), time.perf_counter()
        trainer.step(*model.example_inputs)
        after = busy()
        if step >= WARM_UP_STEPS:
            walls.append(time.perf_counter() - start)
            own_busy.append(after - before)
    comm.barrier()
    trainer.comm.close()
    gathered = comm.gather((walls, median(own_busy)))
    return [max(own) for own in zip(*(own for own, _ in gathered), strict=True)], max(own for _, own in gathered)
