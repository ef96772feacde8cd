"""The sparse lookups of a rank: which tiles read rows of which regions, which rows, and compact tables of these rows for the tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from soap.model.regions import Box, whole
from soap.plan.plan import Plan
from soap.plan.tiling import tiles_of
from soap.runtime.comm.packing import assemble, cut
from soap.runtime.program.prepared import PreparedTile, PreparedTiles, RowsRead, StepInputs
from soap.runtime.sync.row_update import common_rows
from soap.runtime.sync.shards import ShardStore
from soap.runtime.sync.sparse_rows import RowSync
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel

Asked = dict[tuple[int, int], torch.Tensor]
"""(tile, parameter position) -> the rows that it looks up, ascending."""


class LookUps:
    """All sparse lookups of a rank in one program."""

    def __init__(self, prepared: PreparedTiles, plan: Plan, rank: int) -> None:
        self._reads = [(tile, own) for tile in prepared.tiles.values() if not tile.empty for own in tile.rows]
        self._boxes = {i: sync.box for i, sync in enumerate(plan.syncs) if sync.contract.by_rows and rank in sync.readers}

    def asked(self, model: TracedModel, given: StepInputs, context: TileContext) -> Asked:
        """The rows that each tile looks up in its own part of a parameter."""
        found: Asked = {}
        for tile, own in self._reads:
            inputs = [_known(tile, place, given) for place in range(len(tile.inputs))]
            found[tile.number, own.place] = model.rows_asked_for(tile.tile, own.place, inputs, context)
        return found

    def by_sync(self, asked: Asked, device: torch.device) -> dict[int, torch.Tensor]:
        """Synchronization by rows that this rank reads -> all rows that its tiles look up, ascending."""
        parts: dict[int, list[torch.Tensor]] = {number: [] for number in self._boxes}
        for tile, own in self._reads:
            for number in own.syncs.values():
                parts[number].append(_within(asked[tile.number, own.place], self._boxes[number]))
        return {
            number: common_rows(rows) if rows else torch.empty(0, dtype=torch.int64, device=device) for number, rows in parts.items()
        }


def note_rows(
    found: dict[str, torch.Tensor], names: Iterable[str], model: TracedModel, tensors: Mapping[str, torch.Tensor], context: TileContext
) -> None:
    """Add to ``found`` the rows of these sparse parameters that the whole batch looks up, on any rank; ascending."""
    graph = model.graph
    for name in names:
        rows = [found[name]] if name in found else []
        for use in graph.sparse[name].lookups if name in graph.sparse else ():
            op = graph.operators[use.operator]
            (tile,) = tiles_of(graph, use.operator, OpConfig((1,) * len(op.factors), (0,)))
            whole_inputs = [tensors.get(operand.tensor) for operand in op.inputs]
            inputs = [None if t is None else cut(t, whole(t.shape), box) for t, box in zip(whole_inputs, tile.inputs, strict=True)]
            rows.append(model.rows_asked_for(tile, use.parameter, inputs, context))
        if rows:
            found[name] = common_rows(rows)


def rows_for(
    number: int, own: RowsRead, asked: Asked, syncs: Mapping[int, RowSync], shards: ShardStore
) -> tuple[torch.Tensor, torch.Tensor]:
    """The compact table (rows, ...) that a tile reads of a sparse parameter, and its row numbers, ascending. ``syncs``: by position."""
    if own.sole is not None:
        return syncs[own.sole].leaf(own.sole), syncs[own.sole].rows(own.sole)
    rows, region = asked[number, own.place], own.region
    boxes, parts = [], []
    for piece in region.pieces:
        box = shards.boxes[piece]
        wanted = _within(rows, box)
        first = int(torch.searchsorted(rows, box[0][0]))
        sync = own.syncs.get(piece)
        there = wanted - box[0][0] if sync is None else torch.searchsorted(syncs[sync].rows(sync), wanted)
        parts.append((shards.leaves[piece] if sync is None else syncs[sync].leaf(sync)).index_select(0, there))
        boxes.append(((first, first + len(wanted)), *box[1:]))
    return assemble(((0, len(rows)), *region.box[1:]), boxes, parts), rows


def _known(tile: PreparedTile, place: int, given: StepInputs) -> torch.Tensor | None:
    """An input of a tile if it is known before the step begins, else None."""
    source = tile.inputs[place]
    if source.fetch is not None or source.empty:
        return None
    return given.read(source)


def _within(rows: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of some ascending rows that lies in a region."""
    first, stop = torch.searchsorted(rows, torch.tensor(box[0], dtype=rows.dtype, device=rows.device)).tolist()
    return rows[first:stop]
