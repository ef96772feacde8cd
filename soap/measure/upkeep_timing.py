"""How long a step's work besides the tiles' own takes: the optimizer's update of a tensor, a copy on the device, compressing a gradient,
and the runtime's work around each tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.benchmark import Timer

from soap.cluster.presets import local_topology
from soap.measure.timing import Clock, CpuClock, Sample, clock_for, repeat, sample
from soap.model.graph import DimMap, Factor, FactorKind, Operand, Operator, OperatorGraph, Tensor, TensorKind
from soap.plan.compression.seam import Work
from soap.plan.tiling import Tile
from soap.runtime.compression.peer import exchanged
from soap.runtime.compression.seam import compressor_of
from soap.runtime.trainer import Trainer
from soap.runtime.updates.optimizers import OPTIMIZERS, adam
from soap.strategy.compression import Compression
from soap.strategy.config import OpConfig, Strategy
from soap.tracing.calls import TileContext
from soap.tracing.execute import PlainModel, TracedModel

TOGETHER_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
MOST_TENSORS = {"cpu": 16, "cuda": 128}
"""An optimizer updates so many tensors of a size at once, but no more than ``TOGETHER_BYTES``: its work once per step is then a small
share. On GPUs it does much once per step, as one kernel updates many tensors."""
SECONDS = 0.2
EVICTED_BYTES = 64 * 2**20
"""Bytes written before each update on a processor, because in training an iteration has gone through the caches since the last update.
(Adam takes 0.37 ms for a MiB right behind another update, 0.53 ms behind these; in a step it took as long.)"""
CHAINS = (16, 400)
"""Numbers of tiles of the two chains whose steps are compared."""

_Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
BY_STATES: Mapping[int, _Optimizer] = {
    0: lambda tensors: OPTIMIZERS["sgd"](tensors, 1e-3),
    1: lambda tensors: torch.optim.SGD(tensors, lr=1e-3, momentum=0.9),
    2: lambda tensors: adam(tensors, 1e-3),
}
"""Optimizers by the number of tensors of a parameter's size that they keep."""


def time_update(optimizer_states: int, size_bytes: int, device: torch.device, threads: int = 1, share: float = 1.0) -> Sample:
    """Time of the update of one float32 tensor of so many bytes, as one of several."""
    count = max(1, min(MOST_TENSORS[device.type], TOGETHER_BYTES[device.type] // size_bytes))
    tensors = [torch.zeros(max(1, size_bytes // 4), device=device) for _ in range(count)]
    for tensor in tensors:
        tensor.requires_grad_().grad = torch.full_like(tensor, 1e-3)
    step = BY_STATES[optimizer_states](tensors).step
    if device.type == "cuda":
        return timed(step, device, threads, share, count)
    clock, others = clock_for(device, threads, share), torch.zeros(EVICTED_BYTES // 4)
    step()
    return sample(repeat(lambda: clock.times_ns([lambda: others.add_(1.0), step])[1:], SECONDS)[0], count)


def time_copy(size_bytes: int, device: torch.device, threads: int = 1, share: float = 1.0) -> Sample:
    """Time of a copy of so many bytes."""
    source = torch.ones(max(1, size_bytes // 4), device=device)
    target = torch.zeros_like(source)
    return timed(lambda: target.copy_(source), device, threads, share, 1)


def time_runtime(device: torch.device, threads: int = 1, share: float = 1.0) -> Sample:
    """The processor's time of a tile in a step besides its calls, both passes together: steps of two chains of empty tiles."""
    clock = clock_for(device, threads, share) if device.type == "cpu" else CpuClock(threads)
    few, many = (_steps(clock, device, count) for count in CHAINS)
    tiles = CHAINS[1] - CHAINS[0]
    return Sample(max(1.0, (many.ns - few.ns) / tiles), (many.spread_ns + few.spread_ns) / tiles, min(many.repetitions, few.repetitions))


def timed(action: Callable[[], Any], device: torch.device, threads: int, share: float, parts: int) -> Sample:
    """Time of an action of so many equal parts, a part each, in blocks of calls that are long beside the clock's resolution."""

    clock = clock_for(device, threads, share, ahead=False)
    action()
    block = Timer("action()", globals={"action": action}, num_threads=threads or torch.get_num_threads())
    number = block.blocked_autorange(min_run_time=SECONDS / 10).number_per_run
    times = repeat(lambda: clock.times_ns([lambda: [action() for _ in range(number)]]), SECONDS)[0]
    return sample(times, parts * number)


def _steps(clock: Clock, device: torch.device, count: int) -> Sample:
    model = TileChain(count)
    strategy = Strategy({op.name: OpConfig((1,), (0,)) for op in model.graph.operators})
    with Trainer(model, (strategy, local_topology(1)), device_kind="cuda" if device.type == "cuda" else "cpu") as trainer:
        for _ in range(3):
            trainer.step(*model.example_inputs)
        return sample(repeat(lambda: clock.times_ns([lambda: trainer.step(*model.example_inputs)]), SECONDS)[0])


class TileChain(PlainModel):
    """Operators one after the other, each of which hands its input on."""

    def __init__(self, count: int) -> None:
        factor = Factor("b", 1, FactorKind.SAMPLE)
        names = ["x", *(f"pass{i}" for i in range(count))]
        tensors = {"x": Tensor("x", (1,), "float32", 4, TensorKind.INPUT), "w": Tensor("w", (1,), "float32", 4, TensorKind.PARAMETER, True)}
        tensors |= {name: Tensor(name, (1,), "float32", 4, TensorKind.ACTIVATION, True) for name in names[1:]}
        dims = (DimMap(0),)
        operators = []
        for before, after in pairwise(names):
            parameters = (Operand("w", dims),) if before == "x" else ()
            operators.append(Operator(after, "pass", (factor,), (Operand(before, dims),), parameters, (Operand(after, dims),)))
        self.graph = OperatorGraph("chain", tuple(operators), tensors, names[-1])
        self.parameters = {"w": torch.zeros(1)}
        self.buffers: dict[str, torch.Tensor] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.state: dict[str, str] = {}
        self.transient: frozenset[str] = frozenset()
        self.unchanged: dict[str, torch.Tensor] = {}
        self.input_names = ["x"]
        self.example_inputs = [torch.zeros(1)]

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """The input, or the parameter of the first operator."""
        return (parameters[0] if parameters else inputs[0],)

    def is_pure(self, operator: int) -> bool:
        """True: there are no random numbers."""
        return True

    def reference_loss(self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], context: TileContext) -> torch.Tensor:
        """The value that is handed on."""
        return parameters["w"]

    def resized(self, shapes: Sequence[Sequence[int]]) -> TracedModel:
        """The same model: sizes do not matter here."""
        return self


SPREAD = 1e-2
"""Standard deviation of the elements of the gradients that are compressed, which are normal."""


def matrix_of(elements: int) -> tuple[int, int]:
    """Sides of the matrix that stands for parameters of so many elements, a power of two."""
    power = elements.bit_length() - 1
    return 2 ** (power // 2), 2 ** (power - power // 2)


def time_compression(
    how: Compression, work: Work, elements: int, peers: int, device: torch.device, threads: int = 1, share: float = 1.0
) -> Sample:
    """Time of one work on a gradient of so many elements, a power of two, with so many peers; on processors with cold caches."""
    step = _step(how, work, matrix_of(elements), peers, device)
    step()
    if device.type == "cuda":
        return timed(step, device, threads, share, 1)
    clock, others = clock_for(device, threads, share), torch.zeros(EVICTED_BYTES // 4)
    return sample(repeat(lambda: clock.times_ns([lambda: others.add_(1.0), step])[1:], SECONDS)[0], 1)


def _step(how: Compression, work: Work, shape: tuple[int, int], peers: int, device: torch.device) -> Callable[[], object]:
    """What is timed, on the first peer. The others' messages are made once, one after the other."""
    ranks = [compressor_of(how, shape, torch.float32, place, peers) for place in range(peers)]
    states = [own.fresh(device) for own in ranks]
    gradients = [SPREAD * torch.randn(shape, device=device) for _ in range(min(peers, 2))]
    if work == "select":
        return lambda: ranks[0].compress(states[0], gradients[0])
    messages = [own.compress(states[place], gradients[place % len(gradients)]) for place, own in enumerate(ranks)]
    first, *others = ranks[0].layout.exchanges
    received = exchanged(first.kind, messages)
    if work == "combine":
        return lambda: ranks[0].answer(states[0], received[0])
    for exchange in others:
        messages = [own.answer(state, got) for own, state, got in zip(ranks, states, received, strict=True)]
        received = exchanged(exchange.kind, messages)
    handed_on = dict(states[0].step)

    def restore() -> torch.Tensor:
        states[0].step = dict(handed_on)
        return ranks[0].total(states[0], received[0])

    return restore
