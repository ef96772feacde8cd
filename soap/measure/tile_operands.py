"""Operands on which tiles are timed: regions of what the model computes from its example inputs, so that indices are in range. They
have memory of their own and are laid out as the operator before leaves them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.model.dtypes import is_differentiable
from soap.model.graph import TensorKind
from soap.model.regions import Box, relative, volume, whole
from soap.plan.row_counts import parameters_held
from soap.plan.tiling import Tile, whole_tile
from soap.tracing.model import TileContext, TracedModel

Operands = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Inputs and parameters of a tile."""


class TileOperands:
    """Operands of one model's tiles on one device. ``bytes``: of all values of a forward pass, which it keeps."""

    def __init__(self, model: TracedModel, device: torch.device) -> None:
        self.model, self.graph, self.device = model, model.graph, device
        self._buffers = {name: tensor.detach().to(device, copy=True) for name, tensor in model.buffers.items()}
        self._values = self._all_values()
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._values.values())

    def is_active(self, tile: Tile) -> bool:
        """Whether a step computes a gradient of this tensor."""
        return tile.operator in self.graph.backward_operators

    def context(self, tile: Tile) -> TileContext:
        """The context of a first step."""
        return TileContext(0, 0, self._buffers, unread=self._unread(tile))

    def bytes_of(self, tile: Tile) -> int:
        """What the tile reads and makes."""
        op = self.graph.operators[tile.operator]
        held = (tile.inputs, parameters_held(self.graph, tile), tile.outputs)
        groups = zip((op.inputs, op.parameters, op.outputs), held, strict=True)
        pairs = [(operand, box) for operands, boxes in groups for operand, box in zip(operands, boxes, strict=True)]
        return sum(volume(box) * self.graph.tensors[operand.tensor].itemsize for operand, box in pairs)

    def sparse_tables(self, tile: Tile) -> dict[int, torch.Tensor]:
        """By parameter (position), the tile's region of each parameter of which it takes rows."""
        operands = enumerate(zip(self.graph.operators[tile.operator].parameters, tile.parameters, strict=True))
        own = [(place, o.tensor, box) for place, (o, box) in operands if tile.sparse_lookup and o.tensor in self.graph.sparse]
        return {place: self._region(name, box).contiguous() for place, name, box in own}

    def copy(self, tile: Tile, tables: Mapping[int, torch.Tensor]) -> Operands:
        """Operands in memory of their own, without ``tables``. The model's inputs and constants are read where they are, as by all
        tiles of a step."""
        op, active = self.graph.operators[tile.operator], self.is_active(tile)
        inputs, parameters = [], []
        for operand, box in zip(op.inputs, tile.inputs, strict=True):
            region = self._region(operand.tensor, box)
            if self.graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
                region = _dense(region, self._values[operand.tensor])
                region.requires_grad_(active and self.graph.tensors[operand.tensor].requires_grad and is_differentiable(region.dtype))
            inputs.append(region)
        for place, (operand, box) in enumerate(zip(op.parameters, tile.parameters, strict=True)):
            if place in tables:
                parameters.append(tables[place])
                continue
            region = self._region(operand.tensor, box).clone(memory_format=torch.contiguous_format)
            parameters.append(region.requires_grad_(active and self.graph.tensors[operand.tensor].requires_grad))
        return inputs, parameters

    def _region(self, name: str, box: Box) -> torch.Tensor:
        value = self._values[name]
        return value[relative(box, whole(value.shape))]

    def _unread(self, tile: Tile) -> frozenset[str]:
        """Whether batch norm's statistics can be left out: nobody reads them if the operators behind are cut alike. For part of the
        channels that is not known, so they are made."""
        op, tiles = self.graph.operators[tile.operator], [tile]
        shapes = (self.graph.tensors[operand.tensor].shape for operand in op.inputs)
        if all(box == whole(shape) for box, shape in zip(tile.inputs, shapes, strict=True)):
            readers = {reader for out in op.outputs for reader, _ in self.graph.consumers.get(out.tensor, ())}
            tiles += [whole_tile(self.graph, reader) for reader in sorted(readers)]
        return self.model.unread(tiles)

    def _all_values(self) -> dict[str, torch.Tensor]:
        """Every tensor of the graph, from the example inputs."""
        given = dict(zip(self.model.input_names, self.model.example_inputs, strict=True))
        values = {
            name: tensor.detach().to(self.device) for name, tensor in {**self.model.parameters, **self.model.constants, **given}.items()
        }
        context = TileContext(0, 0, self._buffers, update_buffers=False)
        with torch.no_grad():
            for position, op in enumerate(self.graph.operators):
                tile = whole_tile(self.graph, position)
                inputs, parameters = (
                    [values[operand.tensor][relative(box, whole(values[operand.tensor].shape))] for operand, box in zip(*pair, strict=True)]
                    for pair in ((op.inputs, tile.inputs), (op.parameters, tile.parameters))
                )
                outputs = self.model.run_tile(tile, inputs, parameters, context)
                values.update({operand.tensor: output for operand, output in zip(op.outputs, outputs, strict=True)})
        return values


def _dense(region: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy without gaps whose dimensions are in the same order in memory as those of the tensor that it is cut from."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return region.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)
