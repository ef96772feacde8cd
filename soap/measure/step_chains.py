"""Chains of tiles whose steps are timed on one device and across several (``step_timing``). The difference is the cost of what goes
from one tile to the next. Each operator hands on what it gets, and may compute something else meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from soap.measure.link_probes import CHANNELS, LAYERS, ROWS, SAMPLES, SIDE, STEP_BYTES, WIDTH, WINDOW, Operation
from soap.measure.upkeep_timing import TileChain
from soap.model.graph import WHOLE, DimMap, Factor, FactorKind, Operand, OperatorGraph
from soap.plan.tiling import Tile
from soap.strategy.config import OpConfig, Strategy
from soap.tracing.model import TileContext


class _Block(NamedTuple):
    """Operands of one part of a tile's work. Several kinds of calls are mixed: with a single kind the processor would still have the
    code at hand after a wait."""

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
    """Operators that read what the one before made, and the one before that, as residual connections and norms do. So a segment begins
    from several values, of which one comes from another device."""

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
    """``parts``: how many tiles an operator may be split into, whose outputs are summed. The last operator is whole. ``blocks``: amount
    of work of each tile, none for a tile that only hands on."""

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
