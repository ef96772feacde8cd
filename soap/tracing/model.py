"""A traced model: the operator graph, and everything that is needed to compute it with real tensors, tile by tile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from soap.errors import ModelError
from soap.model.graph import OperatorGraph
from soap.model.regions import Interval
from soap.plan.tiling import Tile


@dataclass
class TileContext:
    """What a tile's computation may depend on besides its operands; one per rank and training step.

    ``seed`` and ``step`` make random numbers (dropout) a function of the global element position, equal on every tiling. ``buffers``:
    this rank's full-size copies by state-dict name. Tiles note what they found in ``statistics``, by call: (channels, mean, unbiased
    variance). ``end_step`` updates the buffers from it, each channel once however many tiles have met it. ``update_buffers`` False
    leaves buffers alone. ``unread``: the answer of ``TracedModel.unread`` for the plan. ``tiles``: the plan's tiles, for the reference:
    local batch norm normalises by tile; None at all: by the whole batch. ``state``: the buffers' values at the end of the step, by
    name, as the forward pass has found them. ``drawn_by_torch``: ``reference_loss`` draws random numbers from torch's own generators,
    as eager PyTorch does, to be compared with it. ``counts``: if tiles of a mean over labels are given their own labels alone
    (``Operator.own_inputs``), by call the number that it divides by, in float64; None for other calls: they are given all labels, and
    count.
    """

    seed: int = 0
    step: int = 0
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    update_buffers: bool = True
    unread: frozenset[str] = frozenset()
    tiles: Sequence[Tile] = ()
    drawn_by_torch: bool = False
    statistics: dict[str, list[tuple[Interval, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: Callable[[str], torch.Tensor | None] | None = None

    def random_seed(self, call: str) -> int:
        """63 bits from (seed, step, call): random numbers do not depend on how the operator is split."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{call}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def note_statistics(self, call: str, channels: Interval, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Keep what a tile found for some channels, unless another tile of this rank has found the same."""
        found = self.statistics.setdefault(call, [])
        if self.update_buffers and all(known != channels for known, _, _ in found):
            found.append((channels, mean, variance))

    def note_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the buffers' values at the end of the step, by name."""
        if self.update_buffers:
            self.state.update(values)


class TracedModel(Protocol):
    """What the runtime and the tools need of a model."""

    graph: OperatorGraph
    parameters: Mapping[str, torch.Tensor]
    """Full tensors by canonical state-dict name; fake or meta tensors if the model was traced for planning only."""
    buffers: Mapping[str, torch.Tensor]
    """Full tensors by state-dict name."""
    constants: Mapping[str, torch.Tensor]
    """Full tensors of the graph's CONSTANT tensors, by tensor name; for ``state`` their first values."""
    state: Mapping[str, str]
    """Buffers that the forward pass changes, of which all ranks keep the same copy: name of the graph's CONSTANT tensor, if there is
    one, with the buffer's value when the step begins -> state-dict name."""
    transient: frozenset[str]
    """Buffers that are no entries of the state dict (``persistent=False``)."""
    unchanged: Mapping[str, torch.Tensor]
    """The rest of the state dict, which training leaves as it is: buffers that are only read, parameters and buffers that nothing uses."""
    input_names: Sequence[str]
    """The graph's INPUT tensors in the order of the user's flattened tensor arguments."""
    example_inputs: Sequence[torch.Tensor]

    @property
    def element_inputs(self) -> frozenset[str]:
        """Integer inputs of which each element can be drawn by itself: indices of lookups and class labels, and nothing else."""

    @property
    def read_apart(self) -> frozenset[str]:
        """Parameters that may still be read when their gradients are complete, because something reads them without a gradient."""

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        """Compute a tile's outputs from exactly the regions ``tile.inputs`` and ``tile.parameters``; differentiable.

        Returns one tensor of the shape of ``tile.outputs[k]`` per output k; where the operator has summed factors that are split,
        these are partial results. Inputs must not be modified by the caller before the backward pass.
        """

    def rows_asked_for(self, tile: Tile, parameter: int, inputs: Sequence[torch.Tensor | None], context: TileContext) -> torch.Tensor:
        """The different rows (dimension 0, in the whole parameter's numbers) that a tile looks up of its part of a sparse parameter,
        ascending. ``inputs``: those that exist before the tile runs; None for others. ModelError if there is no such row."""

    def run_sparse_lookup(
        self,
        tile: Tile,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        rows: Mapping[int, torch.Tensor],
        context: TileContext,
    ) -> tuple[torch.Tensor, ...]:
        """``run_tile`` with parameters of which only some rows are there. ``rows``: by parameter (position), which rows, ascending; at
        least those that the tile looks up. Its tensor has just these, one below the other."""

    def labels_counted(self, tile: Tile, inputs: Sequence[torch.Tensor | None]) -> tuple[str, torch.Tensor]:
        """For a tile of an operator with ``own_inputs``: the call that divides, and what the tile's own labels are of the number that it
        divides by, in float64. ``inputs``: regions as ``own_inputs`` say; None for activations."""

    def unread(self, tiles: Sequence[Tile]) -> frozenset[str]:
        """Values that no tile of a plan reads, for ``TileContext``: batch norm's statistics if each tile sees all of its channels."""

    def is_pure(self, operator: int) -> bool:
        """Whether tiles of an operator are functions of their operands alone: no random numbers, nothing noted for the end of the step."""

    def let_go(self, names: Sequence[str]) -> None:
        """Free the values of these parameters and constants; meta tensors take their places."""

    def reference_loss(self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], context: TileContext) -> torch.Tensor:
        """The scalar loss by running the whole exported program in this process, call by call: the oracle for checks. Differentiable."""

    def end_step(self, context: TileContext) -> None:
        """Update the buffers by noted statistics, found state and step counters; once per rank and training step."""

    def resized(self, shapes: Sequence[Sequence[int]]) -> TracedModel:
        """The same model for inputs of these shapes, without parameters. ModelError in one line if it cannot be traced for them."""

    def with_state(self, values: Mapping[str, torch.Tensor]) -> TracedModel:
        """The same model with other values of buffers that it only reads, by state-dict name; names that it does not have are ignored.
        ModelError if it cannot be traced again."""

    def in_type(self, dtype: torch.dtype) -> TracedModel:
        """This model with this type in place of all floating-point types that calls name. ModelError if it cannot be traced again."""

    def widened(self) -> TracedModel | None:
        """The same model in float64, without parameters, to judge rounding by; None if it cannot be traced again."""


class PlainModel(TracedModel):
    """A model whose tiles are computed by ``run_tile`` and nothing else: without look-ups, and for one size and type alone.

    What stands here is the careful answer to what may be known of operators beside that: nothing.
    """

    element_inputs: frozenset[str] = frozenset()

    @property
    def read_apart(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self.parameters)

    def let_go(self, names: Sequence[str]) -> None:
        """Nobody else has them."""
        for own in (self.parameters, self.constants):
            assert isinstance(own, dict)
            own.update({name: own[name].detach().to("meta") for name in names if name in own})

    def rows_asked_for(self, tile: Tile, parameter: int, inputs: Sequence[torch.Tensor | None], context: TileContext) -> torch.Tensor:
        """Nothing is looked up."""
        raise NotImplementedError

    def run_sparse_lookup(
        self,
        tile: Tile,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        rows: Mapping[int, torch.Tensor],
        context: TileContext,
    ) -> tuple[torch.Tensor, ...]:
        """Nothing is looked up."""
        raise NotImplementedError

    def labels_counted(self, tile: Tile, inputs: Sequence[torch.Tensor | None]) -> tuple[str, torch.Tensor]:
        """Nothing is counted."""
        raise NotImplementedError

    def unread(self, tiles: Sequence[Tile]) -> frozenset[str]:
        """All is looked at."""
        return frozenset()

    def is_pure(self, operator: int) -> bool:
        """Not that anybody knows."""
        return False

    def end_step(self, context: TileContext) -> None:
        """There are no buffers."""

    def resized(self, shapes: Sequence[Sequence[int]]) -> TracedModel:
        """There is no program to be traced again."""
        raise ModelError("made by hand for one size")

    def with_state(self, values: Mapping[str, torch.Tensor]) -> TracedModel:
        """There are no buffers."""
        return self

    def in_type(self, dtype: torch.dtype) -> TracedModel:
        """Nothing is known of calls."""
        return self

    def widened(self) -> TracedModel | None:
        """There is no program to be traced again."""
        return None
