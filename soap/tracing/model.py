"""A traced model: the operator graph together with what is needed to compute it with real tensors, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from soap.graph import OperatorGraph
from soap.simulator.tiling import Tile


@dataclass
class TileContext:
    """What a tile's computation may depend on besides its operands.

    ``seed`` and ``step`` make random numbers (dropout) a function of the global element position, equal on every tiling. ``buffers``: this rank's
    full-size copies by state-dict name; tiles update their region in place. ``training`` False leaves buffers alone.
    """

    seed: int
    step: int
    buffers: dict[str, torch.Tensor]
    update_buffers: bool = True


class TracedModel(Protocol):
    """What the runtime and the tools need of a model."""

    graph: OperatorGraph
    parameters: Mapping[str, torch.Tensor]
    """Full tensors by canonical state-dict name; fake or meta tensors if the model was traced for planning only."""
    buffers: Mapping[str, torch.Tensor]
    """Full tensors by state-dict name."""
    constants: Mapping[str, torch.Tensor]
    """Full tensors of the graph's CONSTANT tensors, by tensor name."""
    input_names: Sequence[str]
    """The graph's INPUT tensors in the order of the user's flattened tensor arguments."""
    example_inputs: Sequence[torch.Tensor]

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """Compute a tile's outputs from exactly the regions ``tile.inputs`` and ``tile.parameters``; differentiable.

        Returns one tensor of the shape of ``tile.outputs[k]`` per output k; where the operator has summed factors that are split,
        these are partial results. Inputs must not be modified by the caller before the backward pass.
        """

    def reference_loss(
        self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], context: TileContext
    ) -> torch.Tensor:
        """The scalar loss by running the whole exported program in this process, call by call: the oracle for checks. Differentiable."""

    def end_step(self, context: TileContext) -> None:
        """Apply the updates of buffers that belong to no tile (step counters); once per rank and training step."""
