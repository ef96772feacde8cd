"""What compression of a shard takes, as numbers for compiled code: worked out once by the plan's layouts and the cost model."""

from __future__ import annotations

from collections.abc import Sequence

from soap.cluster.topology import DeviceType
from soap.model.graph import OperatorGraph
from soap.plan.compression.policy import settled
from soap.plan.compression.seam import WORKS, layout_of
from soap.plan.compression.training import PlannedTraining
from soap.plan.syncs.compressed import amounts
from soap.simulator.compiled.syncs.codes import SyncCodes
from soap.simulator.costs import CostModel

MESSAGES, WHOLE, SETTINGS, OF_TYPES = 0, 2, 3, 4
"""Columns of ``ShardTables.effort``: the message's bytes of both exchanges; bytes of all elements in the type in which they are summed; the
number of the settings that suit the layer; then those of each type of device."""
PEER_HOLDS, TYPE_COLUMNS = len(WORKS), len(WORKS) + 1
"""Columns of a type of device: the works in ns, and the bytes that a peer holds."""


def effort_row(
    codes: SyncCodes,
    graph: OperatorGraph,
    costs: CostModel,
    types: Sequence[DeviceType],
    training: PlannedTraining,
    shape: tuple[int, ...],
    key: tuple[int, ...],
) -> list[int]:
    """The columns for a shard of this shape. ``key``: an entry of ``ShardTables.compressed``."""
    code, parameter, _, peers = key
    how, tensor = codes.sync(code).compression, graph.parameters[parameter]
    assert how is not None  # the code is that of a compression
    how = settled(graph, tensor.name, how)
    layout = layout_of(how, shape, tensor.itemsize, peers)
    messages = [each.message_bytes for each in layout.exchanges]
    row = [*messages, *([0] * (WHOLE - len(messages))), layout.whole_bytes, codes.settings_number(how)]
    for kind in types:
        row += [costs.compression_ns(how, layout, work, kind) for work in WORKS]
        row.append(sum(amounts(how, layout, tensor.itemsize, training, on_host=kind.kind == "cpu")))
    return row
