"""Executes a strategy's tiles in one process: the rules and fusion apart from the runtime.

Every tile gets its regions cut from whole tensors, its outputs are put together to whole tensors (summed where they are partial), and
autograd runs through all of it, so that loss and gradients can be compared with the plain program.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from soap.model.dtypes import is_differentiable
from soap.model.graph import Operator, OperatorGraph, TensorKind
from soap.model.regions import Box, relative, whole
from soap.plan.tiling import tiles_of
from soap.runtime.step.routed import Ids, RoutedRows
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel


def random_degrees(op: Operator, rng: random.Random, most: int = 3) -> OpConfig:
    """Random degrees with all tiles on one device."""
    degrees = [1] * len(op.factors)
    for i in rng.sample(range(len(degrees)), k=min(len(degrees), rng.choice([0, 1, 1, 2]))):
        degrees[i] = rng.randint(1, min(most, op.factors[i].size))
    tiles = 1
    for degree in degrees:
        tiles *= degree
    return OpConfig(tuple(degrees), (0,) * tiles)


def draw_configs(graph: OperatorGraph, rng: random.Random) -> dict[str, OpConfig]:
    """Random degrees for every operator."""
    return {op.name: random_degrees(op, rng) for op in graph.operators}


def _rows(graph: OperatorGraph, tensors: Mapping[str, torch.Tensor], name: str) -> RoutedRows:
    """Where the rows of all experts are."""
    shape = graph.tensors[name].shape
    return RoutedRows(Ids(tensors[graph.routed[name]], 0), whole(shape), shape[0])


def _place(graph: OperatorGraph, tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> Any:
    """An index of a region of a whole tensor."""
    if name not in graph.routed:
        return relative(box, whole(graph.tensors[name].shape))
    found = _rows(graph, tensors, name).within(box)
    return (slice(None) if found is None else found, *(slice(*own) for own in box[2:]))


def _region(graph: OperatorGraph, tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    return tensors[name][_place(graph, tensors, name, box)]


def emulated_loss(
    model: TracedModel,
    configs: Mapping[str, OpConfig],
    inputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    context: TileContext,
) -> torch.Tensor:
    """The loss by tiles."""
    graph = model.graph
    tensors: dict[str, torch.Tensor] = {**dict(zip(model.input_names, inputs, strict=True)), **model.constants, **parameters}
    for position, op in enumerate(graph.operators):
        made: list[torch.Tensor | None] = [None] * len(op.outputs)
        for tile in tiles_of(graph, position, configs[op.name]):
            local = [
                _region(graph, tensors, o.tensor, box).clone()
                for o, box in zip((*op.inputs, *op.parameters), (*tile.inputs, *tile.parameters), strict=True)
            ]
            results = model.run_tile(tile, local[: len(op.inputs)], local[len(op.inputs) :], context)
            for k, (operand, result, box) in enumerate(zip(op.outputs, results, tile.outputs, strict=True)):
                shape = graph.tensors[operand.tensor].shape
                place = _place(graph, tensors, operand.tensor, box)
                if operand.tensor in graph.routed:
                    shape = (_rows(graph, tensors, operand.tensor).count, *shape[2:])
                else:
                    assert tuple(result.shape) == tuple(b - a for a, b in box)
                so_far = made[k]
                if so_far is None:
                    so_far = torch.zeros(shape, dtype=result.dtype)
                placed = torch.zeros(shape, dtype=result.dtype)
                placed[place] = result
                made[k] = so_far + placed
        for operand, tensor in zip(op.outputs, made, strict=True):
            assert tensor is not None
            assert graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION
            tensors[operand.tensor] = tensor.to(getattr(torch, graph.tensors[operand.tensor].dtype))  # partial results are in float32
    return tensors[graph.loss]


Graded = tuple[torch.Tensor, dict[str, torch.Tensor | None]]


def graded(model: TracedModel, configs: Mapping[str, OpConfig] | None, seed: int = 0) -> Graded:
    """Loss and gradients of the parameters: by tiles, or, without configurations, of the plain program."""
    parameters = {n: p.detach().clone().requires_grad_(is_differentiable(p.dtype)) for n, p in model.parameters.items()}
    context = TileContext(seed, 0, {n: b.clone() for n, b in model.buffers.items()})
    if configs is not None:
        context.update_buffers = False
        loss = emulated_loss(model, configs, model.example_inputs, parameters, context)
    else:
        loss = model.reference_loss(model.example_inputs, parameters, context)
    loss.sum().backward()
    return loss.detach(), {n: p.grad for n, p in parameters.items()}


def compare(
    model: TracedModel,
    configs: Mapping[str, OpConfig],
    tolerance: float = 1e-9,
    seed: int = 0,
    floor: float = 1e-6,
    reference: Graded | None = None,
) -> float:
    """Assert that loss and gradients by tiles equal the plain program's (``reference``); returns the largest relative error.

    ``floor``: gradients smaller than this part of the model's largest are compared with that instead. Some are zero but for rounding
    (a bias before batch norm), and torch's own two ways to compute them differ by as much as they are.
    """
    expected, grads = reference if reference is not None else graded(model, None, seed)
    found, tiled_grads = graded(model, configs, seed)
    scale = max((float(g.abs().max()) for g in grads.values() if g is not None and g.numel()), default=1.0)
    worst = float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-12))
    for name, grad in grads.items():
        other = tiled_grads[name]
        grad = torch.zeros_like(model.parameters[name]) if grad is None else grad
        other = torch.zeros_like(grad) if other is None else other
        size = max(float(grad.abs().max()), floor * scale) if grad.numel() else 1.0
        error = float((grad - other).abs().max()) / size if grad.numel() else 0.0
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
        worst = max(worst, error)
    assert worst <= tolerance, f"loss: {float(expected)} expected, {float(found)} by tiles"
    return worst


def kept_bytes(model: TracedModel) -> tuple[int, int]:
    """What autograd keeps when the whole program runs on one device, and the graph's upper bound for it.

    The bound: what the operators say, with all inputs, constants, parameters and activations.
    """
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    graph = model.graph
    parameters = {n: p.detach().clone().requires_grad_(graph.tensors[n].requires_grad) for n, p in model.parameters.items()}
    whole_ops = {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in graph.operators}
    tensors = {**dict(zip(model.input_names, model.example_inputs, strict=True)), **model.constants, **parameters}
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()}, update_buffers=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for position, op in enumerate(graph.operators):
            (tile,) = tiles_of(graph, position, whole_ops[op.name])
            regions = [
                tensors[o.tensor][relative(box, whole(graph.tensors[o.tensor].shape))]
                for o, box in zip((*op.inputs, *op.parameters), (*tile.inputs, *tile.parameters), strict=True)
            ]
            results = model.run_tile(tile, regions[: len(op.inputs)], regions[len(op.inputs) :], context)
            tensors.update(zip((o.tensor for o in op.outputs), results, strict=True))
    bound = sum(op.saved_bytes for op in graph.operators) + sum(t.bytes for t in graph.tensors.values())
    return sum(size for _, size in storages.values()), bound
