"""What a message, or a sum, takes within a training step: steps of chains of tiles, on one device and across.

By itself a message is quicker. Within a step a tile ends before it and another begins behind it, each in a segment of its own. And a
processor that has waited computes more slowly at first: what a tile that computes takes longer behind a sum is a *restart*. (Between
emulated hosts a sum delays a step by 1.3 ms, and by 2.2 where tiles of 2.3 ms are behind it, but takes 0.6 in a loop.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from soap.graph import Factor, FactorKind
from soap.presets import local_topology
from soap.profiles.link_probes import (
    BLOCK_BYTES,
    CHANNELS,
    LAYERS,
    ROWS,
    SAMPLES,
    SIDE,
    WIDTH,
    WINDOW,
    LinkTiming,
    Operation,
    Probe,
)
from soap.runtime.redistribute import Communicator
from soap.runtime.trainer import Trainer
from soap.runtime.upkeep_timing import Chain
from soap.simulator.tiling import Tile
from soap.strategy import OpConfig, Strategy
from soap.tracing.model import TileContext

CHAINS = (3, 11)
"""Tiles of the two chains whose steps are compared."""
STEPS, WARM_UP_STEPS = 8, 3
TURNS = 3
"""How often all chains are run, one after the other: what slows the machine down for a while does not hit one of them alone."""

Busy = Callable[[], float]
"""Seconds for which this rank's device has computed so far."""


class _Block(NamedTuple):
    """Operands of a part of a tile's work. Of one kind of call alone, a processor would have the code at hand behind a wait as well."""

    weights: list[torch.Tensor]
    image: torch.Tensor
    kernel: torch.Tensor

    @classmethod
    def drawn(cls) -> _Block:
        weights = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
        return cls(weights, torch.randn(SAMPLES, CHANNELS, SIDE, SIDE), torch.randn(CHANNELS, CHANNELS, WINDOW, WINDOW))


class _Work(torch.autograd.Function):
    """Hands on what it gets, and computes something else meanwhile, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, blocks: Sequence[_Block]) -> torch.Tensor:
        ctx.blocks = blocks
        _compute(blocks)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _compute(ctx.blocks)
        return gradients[0], None


def _compute(blocks: Sequence[_Block]) -> None:
    """What tiles do: products, a convolution, its channels normalised, and elementwise functions."""
    with torch.no_grad():
        for block in blocks:
            values = torch.ones(ROWS, WIDTH)
            for weight in block.weights:
                values = torch.tanh(values @ weight)
            image = F.conv2d(block.image, block.kernel, padding=WINDOW // 2)
            mean, square = (one.mean((0, 2, 3), keepdim=True) for one in (image, image * image))
            torch.relu((image - mean) * torch.rsqrt(square - mean * mean + 1)) + block.image


class WorkingChain(Chain):
    """``parts``: how many tiles an operator may be split into, whose outputs are summed. The last operator is whole. ``blocks``: of each
    tile's work, none for what only hands on."""

    def __init__(self, count: int, parts: int, blocks: int = 0) -> None:
        super().__init__(count)
        *others, last = self.graph.operators
        parted = Factor("k", parts, FactorKind.REDUCTION, summed=True)
        operators = [replace(op, factors=(*op.factors, parted)) for op in others]
        self.graph = replace(self.graph, operators=(*operators, last))
        self._blocks = [_Block.drawn() for _ in range(blocks)]

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """The input, or the parameter of the first, behind the work."""
        return (_Work.apply(*super().run_tile(tile, inputs, parameters, context), self._blocks),)  # type: ignore[no-untyped-call]


class _PerTile(NamedTuple):
    """Seconds: of a tile of a chain on one device, how much longer it takes across them in each step, and for how long that keeps a
    device busy, at one of a message's two ends."""

    alone: float
    longer: list[float]
    busier: float


def measure_in_steps(comm: Communicator, probe: Probe, busy: Busy) -> LinkTiming:
    """The time of such a probe, on every rank; all ranks take part. ``seconds``: how much longer one message (or sum) makes a step;
    ``cpu_seconds``: for how long it keeps a device busy, at one of a message's two ends. Of a restart: how much longer still if tiles
    compute, and how long such a tile takes on one device."""
    turns = [_turn(comm, probe, busy, 0) for _ in range(TURNS)]
    if probe.operation is not Operation.STEP_RESTART:
        seconds = [one for turn in turns for one in turn.longer]
        return _timing(probe, seconds, median(turn.busier for turn in turns))
    itself = median(one for turn in turns for one in turn.longer)
    turns = [_turn(comm, probe, busy, round(probe.size_bytes / BLOCK_BYTES)) for _ in range(TURNS)]
    return _timing(probe, [one - itself for turn in turns for one in turn.longer], median(turn.alone for turn in turns))


def _timing(probe: Probe, seconds: Sequence[float], cpu_seconds: float) -> LinkTiming:
    return LinkTiming(probe, tuple(max(1e-9, one) for one in seconds), max(0.0, cpu_seconds))


def _turn(comm: Communicator, probe: Probe, busy: Busy, blocks: int) -> _PerTile:
    summed, tiles = probe.operation is not Operation.STEP_MESSAGE, CHAINS[1] - CHAINS[0]

    def chains(across: bool) -> list[tuple[list[float], float]]:
        models = [WorkingChain(count, len(probe.devices) if summed else 1, blocks) for count in CHAINS]
        return [_steps(comm, model, chain_strategy(model, probe.devices, summed=summed, across=across), busy) for model in models]

    (few, few_busy), (many, many_busy) = chains(across=False)
    tile, tile_busy = (median(many) - median(few)) / tiles, (many_busy - few_busy) / tiles
    (few, few_busy), (many, many_busy) = chains(across=True)
    own_tiles, ends = (tiles, 2) if summed else (tiles / len(probe.devices), 4)
    own_busy = ((many_busy - few_busy) / own_tiles - tile_busy) / ends
    longer = [((one - median(few)) / tiles - tile) / 2 for one in many]  # forward and backward
    return _PerTile(tile / 2, longer, own_busy)


def chain_strategy(model: WorkingChain, devices: Sequence[int], *, summed: bool, across: bool) -> Strategy:
    """All on the first device, or across them: each operator's parts, or one operator after the other."""
    last, chosen = len(model.graph.operators) - 1, {}
    for number, op in enumerate(model.graph.operators):
        if across and summed and number < last:
            chosen[op.name] = OpConfig((1, len(devices)), tuple(devices))
        else:
            place = devices[number % len(devices)] if across and not summed else devices[0]
            chosen[op.name] = OpConfig((1,) * len(op.factors), (place,))
    return Strategy(chosen)


def _steps(comm: Communicator, model: WorkingChain, strategy: Strategy, busy: Busy) -> tuple[list[float], float]:
    """Seconds of each step of the slowest rank, and for how many of them the busiest rank's device computes, on all ranks."""
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
