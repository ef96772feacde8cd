"""Runs probes of links between the real ranks, through the communicator that training uses.

Collectives are timed as they come in training: behind a computation, when caches are cold and some ranks are later than others. The
time for which each rank waits for the last one is included, since in a simulation equal tiles end at the same time. (A small sum over
four emulated hosts takes 2 ms in a tight loop, and 3 ms so.) Messages and exchanges are timed in a loop: the simulation itself knows
who is late for them.

Chains time messages as they come in a step; by itself a message is quicker. Within a step a tile ends before it and another begins behind
it, each in a segment of its own. And a processor that has waited computes more slowly at first: how much longer a tile takes behind a sum
is its *cold penalty*. (Between emulated hosts a sum delays a step by 1.3 ms, and by 2.2 where tiles of 2.3 ms are behind it, but takes 0.6
in a loop.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from soap.cluster.presets import local_topology
from soap.cluster.topology import DeviceKind
from soap.measure.link_probes import (
    BLOCK_BYTES,
    CHANNELS,
    COLD_PENALTIES,
    IN_STEPS,
    LAYERS,
    MOST_TIMES,
    ROWS,
    SAMPLES,
    SIDE,
    STEP_BYTES,
    WIDTH,
    WINDOW,
    LinkTiming,
    Operation,
    Probe,
)
from soap.measure.upkeep_timing import TileChain
from soap.model.graph import WHOLE, DimMap, Factor, FactorKind, Operand, OperatorGraph
from soap.plan.tiling import Tile
from soap.runtime.comm import signs
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.system import clock
from soap.runtime.trainer import Trainer
from soap.strategy.config import OpConfig, Strategy
from soap.tracing.calls import TileContext


class _Block(NamedTuple):
    """Operands of one part of a tile's work, of mixed kinds of calls: of a single kind the code would be at hand after a wait."""

    weights: list[torch.Tensor]
    image: torch.Tensor
    kernel: torch.Tensor

    @classmethod
    def drawn(cls) -> _Block:
        weights = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
        return cls(weights, torch.randn(SAMPLES, CHANNELS, SIDE, SIDE), torch.randn(CHANNELS, CHANNELS, WINDOW, WINDOW))


class _Work(torch.autograd.Function):
    """Hands on its input, and computes something else meanwhile, forward and backward."""

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
    """The work of a tile: products, a convolution, normalisation of its channels, and elementwise functions."""
    with torch.no_grad():
        for block in blocks:
            values = torch.ones(ROWS, WIDTH)
            for weight in block.weights:
                values = torch.tanh(values @ weight)
            image = F.conv2d(block.image, block.kernel, padding=WINDOW // 2)
            mean, square = (one.mean((0, 2, 3), keepdim=True) for one in (image, image * image))
            torch.relu((image - mean) * torch.rsqrt(square - mean * mean + 1)) + block.image


class StepChain(TileChain):
    """Operators that read what the two before made, as residual connections do: a segment begins from several values."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        operators = list(self.graph.operators)
        for i in range(2, count):
            earlier = Operand(operators[i - 2].outputs[0].tensor, operators[i].inputs[0].dims)
            operators[i] = replace(operators[i], inputs=(*operators[i].inputs, earlier))
        self.graph = replace(self.graph, operators=tuple(operators))

    def handed_on(self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inputs' sum, or the parameter of the first operator."""
        return parameters[0] if parameters else inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]


class WorkingChain(StepChain):
    """``parts``: tiles of an operator at most, whose outputs are summed; the last one is whole. ``blocks``: amount of work of each tile."""

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
        """The value that is handed on, after the work is done."""
        return (_Work.apply(self.handed_on(tile, inputs, parameters), self._blocks),)  # type: ignore[no-untyped-call]


class WideChain(StepChain):
    """A graph of these operators. What is handed on has a shape, and ``dims``; the last operator adds up. ``factors``: of all
    operators, None for their own. For an exchange, operators are split by one of two factors in turns. ``blocks``: as in
    ``WorkingChain``; the last operator does no work."""

    def __init__(
        self,
        count: int,
        shape: tuple[int, ...],
        dims: tuple[DimMap, ...],
        factors: Sequence[Factor] | None = None,
        blocks: int = 0,
    ) -> None:
        super().__init__(count)
        self._blocks = [_Block.drawn() for _ in range(blocks)]
        *others, last = self.graph.operators

        def wide(operands: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(replace(one, dims=dims) for one in operands)

        chosen = tuple(factors or last.factors)
        summed = tuple(replace(factor, kind=FactorKind.REDUCTION, summed=True) for factor in chosen)
        operators = [
            replace(op, factors=chosen, inputs=wide(op.inputs), parameters=wide(op.parameters), outputs=wide(op.outputs)) for op in others
        ]
        ending = replace(last, factors=summed, inputs=wide(last.inputs), outputs=(replace(last.outputs[0], dims=(WHOLE,)),))
        tensors = {name: one if name == self.graph.loss else replace(one, shape=shape) for name, one in self.graph.tensors.items()}
        self.graph = OperatorGraph("chain", (*operators, ending), tensors, self.graph.loss)
        self.parameters = {"w": torch.zeros(shape)}
        self.example_inputs = [torch.zeros(shape)]

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """What is handed on, after the work is done; for the last operator its sum."""
        made = self.handed_on(tile, inputs, parameters)
        if tile.operator == len(self.graph.operators) - 1:
            return (made.sum().reshape(1),)
        return (_Work.apply(made, self._blocks) if self._blocks else made.clone(),)  # type: ignore[no-untyped-call]


def chain_model(operation: Operation, count: int, devices: int, blocks: int = 0, size_bytes: int = STEP_BYTES) -> TileChain:
    """So many operators that hand on messages, sums or exchanges. ``size_bytes``: of a message, or from each device to each."""
    depth = max(1, size_bytes // STEP_BYTES)
    if operation is Operation.STEP_MESSAGE:
        return WideChain(count, (1, depth), (DimMap(0), WHOLE))
    if operation is Operation.STEP_WAIT:
        return WideChain(count, (devices, 1), (DimMap(0), WHOLE), [Factor("devices", devices, FactorKind.ATTRIBUTE)], blocks)
    if operation is Operation.STEP_EXCHANGE:
        factors = [Factor(name, devices, FactorKind.ATTRIBUTE) for name in ("rows", "columns")]
        return WideChain(count, (devices, devices, depth), (DimMap(0), DimMap(1), WHOLE), factors)
    return WorkingChain(count, devices, blocks)


def chain_strategy(model: TileChain, operation: Operation, devices: Sequence[int], *, across: bool) -> Strategy:
    """All operators on the first device, or spread over the devices: each operator's parts, or one operator after the other."""
    last, chosen, count = len(model.graph.operators) - 1, {}, len(devices)
    for number, op in enumerate(model.graph.operators):
        degrees, place = [1] * len(op.factors), [devices[0]]
        if across and operation is Operation.STEP_MESSAGE:
            place = [devices[number % count]]
        elif across and operation is Operation.STEP_WAIT and number < last:
            degrees, place = [count], _swapped(devices) if number % 2 else [*devices]
        elif across and number < last:
            degrees[number % 2 if operation is Operation.STEP_EXCHANGE else 1], place = count, [*devices]
        chosen[op.name] = OpConfig(tuple(degrees), tuple(place))
    return Strategy(chosen)


def _swapped(devices: Sequence[int]) -> list[int]:
    """Devices 0 and 1 in each other's place, 2 and 3, and so on. The last of an odd number stays."""
    found = [*devices]
    for first in range(0, len(found) - 1, 2):
        found[first], found[first + 1] = found[first + 1], found[first]
    return found


CHAINS = (3, 11)
"""Numbers of tiles of the two chains whose steps are compared."""
STEPS, WARM_UP_STEPS = 6, 2
TURNS = 3
"""How often all chains are run, one after the other, so that a slow phase of the machine does not hit one of them alone. Those with
tiles that compute take longer, and are run once less."""

Busy = Callable[[], float]
"""Seconds for which this rank's device has computed so far."""


class _PerTile(NamedTuple):
    """Seconds: of a tile on one device; how much longer it takes across devices in a step; how long that keeps a device busy."""

    alone: float
    longer: list[float]
    busier: float


def measure_in_steps(comm: Communicator, probe: Probe, busy: Busy, known: Sequence[LinkTiming] = (), turns: int = TURNS) -> LinkTiming:
    """The time of such a probe, on every rank; all ranks take part. ``turns``: at least two. ``seconds``: how much longer one operation
    makes a step. ``cpu_seconds``: how long it keeps a device busy. Of a cold penalty: how much longer tiles that compute make a step,
    beyond the sum itself (taken from ``known`` if it is there), and how long one takes on one device."""
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


LEAST_ROUNDS, MOST_ROUNDS = 5, 400
SECONDS_PER_PROBE = 0.3
"""Seconds for which a probe is repeated, in at most ``MOST_ROUNDS`` rounds. More seconds allow more rounds in proportion."""
FLOAT_BYTES = 4
COMPUTED_SECONDS = 1e-3
"""Processor time of the computation before a collective, on each rank."""
COMPUTED_FLOATS = 2**19


def measure_links(
    probes: Sequence[Probe],
    device_count: int,
    kind: DeviceKind = "cpu",
    backend: str = "auto",
    seconds_per_probe: float = SECONDS_PER_PROBE,
    on_probe: Callable[[LinkTiming], None] | None = None,
    when_open: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
    turns: int = TURNS,
) -> list[LinkTiming]:
    """The times of all probes, on every rank; an entry for ``launch``. A probe is repeated for about so long; its first round warms up.
    Others wait at a barrier. ``probes``: rank 0's list counts. ``on_probe``: called on rank 0 with each probe that is done. ``when_open``:
    called on every rank as soon as all groups have their threads. ``enough``: called on rank 0 before each probe; True leaves the rest.
    ``turns``: of probes within steps."""
    world = open_world(device_count, kind, backend)
    comm = Communicator(world.device, (), world.timeout)
    try:
        todo: tuple[Probe, ...] = comm.gather(tuple(probes))[0]
        comm.open_groups({probe.devices for probe in todo})
        when_open()
        found: list[LinkTiming] = []
        for probe in todo:
            if comm.gather_late(comm.rank == 0 and enough())[0]:
                break
            in_steps = probe.operation in IN_STEPS
            if in_steps:
                found.append(measure_in_steps(comm, probe, _busy_seconds, found, turns))
            else:
                found.append(_measure(comm, probe, seconds_per_probe))
            if on_probe is not None and comm.rank == 0:
                on_probe(found[-1])
        return found
    finally:
        comm.close()
        close_world(world)


def _measure(comm: Communicator, probe: Probe, seconds_per_probe: float) -> LinkTiming:
    """Time one probe. All ranks take the same number of rounds, which follows from the slowest rank's second trial."""
    here = comm.rank in probe.devices
    once = _round(comm, probe) if here else None
    collective = probe.operation in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL)
    before = _compute_on(torch.zeros(COMPUTED_FLOATS)) if collective and comm.device.type == "cpu" else None
    comm.barrier()
    trial = max(_timed(comm, once, before)[0] for _ in range(2)) if once else 0.0
    slowest = max(comm.gather(trial))
    most = min(MOST_TIMES, MOST_ROUNDS * max(1, round(seconds_per_probe / SECONDS_PER_PROBE)))
    rounds = min(most, max(LEAST_ROUNDS, int(seconds_per_probe / max(slowest, 1e-9))))
    comm.barrier()
    own_rounds = [_timed(comm, once, before) for _ in range(rounds)] if once else [(0.0, 0.0)] * rounds
    signs.meet()  # those without a part in it are here long before
    comm.barrier()
    gathered = comm.gather(([wall for wall, _ in own_rounds], median(busy for _, busy in own_rounds)))
    ways = 2 if probe.operation is Operation.MESSAGE else 1  # there and back
    walls = zip(*(gathered[rank][0] for rank in probe.devices), strict=True)  # by round
    seconds = tuple(sum(own) / len(own) if collective else max(own) / ways for own in walls)
    return LinkTiming(probe, seconds, median(gathered[rank][1] for rank in probe.devices) / ways)


def _compute_on(values: torch.Tensor) -> Callable[[], None]:
    """Additions to all of these values, for ``COMPUTED_SECONDS``."""

    def compute() -> None:
        end = time.thread_time() + COMPUTED_SECONDS
        while time.thread_time() < end:
            values.add_(1.0)
        clock.catch_up()

    return compute


def _timed(comm: Communicator, once: Callable[[], None], before: Callable[[], None] | None) -> tuple[float, float]:
    """Seconds of a round, and of these the seconds in which this device could not compute. ``before`` is not included."""
    if before is not None:
        before()
    busy, start = _busy_seconds(), time.perf_counter()
    once()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    busy = _busy_seconds() - busy
    return max(time.perf_counter() - start, 1e-9), busy


def _busy_seconds() -> float:
    """Seconds that this process has computed so far, with the backend's threads, except on a device of an emulated cluster."""
    paced = clock.busy_ns()
    return time.process_time() if paced is None else paced / 1e9


def _round(comm: Communicator, probe: Probe) -> Callable[[], None]:
    """One round of a probe: this rank's part of it."""
    devices, count = probe.devices, max(1, probe.size_bytes // FLOAT_BYTES)
    data, landing = (torch.zeros(count, device=comm.device) for _ in range(2))
    place = devices.index(comm.rank)
    other = devices[1 - place] if len(devices) == 2 else comm.rank

    def message() -> None:
        for sender in (0, 1):
            if place == sender:
                comm.send(data, other, tag=sender)
                comm.finish_sends()
            else:
                comm.receive(landing, other, tag=sender).wait()

    def exchange() -> None:
        coming = comm.receive(landing, other, tag=1 - place)  # first, as in a step's program: see Communicator.all_to_all
        comm.send(data, other, tag=place)
        coming.wait()
        comm.finish_sends()

    def all_reduce() -> None:
        comm.all_reduce(data, devices).wait()

    peers = len(devices) - 1
    parcels = [[] if device == comm.rank else [data] for device in devices]
    sizes = [0 if device == comm.rank else count for device in devices]
    gathered = torch.zeros(count * peers, device=comm.device) if probe.operation is Operation.ALL_TO_ALL else landing

    def all_to_all() -> None:
        comm.all_to_all(parcels, gathered, sizes, devices).wait()
        comm.finish_sends()

    rounds = {
        Operation.MESSAGE: message,
        Operation.EXCHANGE: exchange,
        Operation.ALL_REDUCE: all_reduce,
        Operation.ALL_TO_ALL: all_to_all,
    }
    return rounds[probe.operation]
