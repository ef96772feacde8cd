"""Rows of the two ledgers of memory, to compare them: when which device takes and frees how many bytes of which kind."""

from __future__ import annotations

from collections import Counter

import numpy as np

from soap.plan.plan import Plan
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.plan_arrays import PlanArrays, plan_arrays
from soap.simulator.memory.spans import NEVER, Spans
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.task_spans import Span, TaskSpans

Rows = Counter[tuple[int, int, int, int, bool]]
"""(device, ns, order, place of the kind, whether bytes are taken) -> bytes."""


def rows_of(ledger: Ledger | ArrayLedger) -> Rows:
    """All rows of a ledger, what is sent and received included. It can be asked once."""
    found: Rows = Counter()
    ledger.curves()
    if isinstance(ledger, ArrayLedger):
        for device, time, order, size, kind in np.concatenate([np.zeros((5, 0), np.int64), *ledger.changes], axis=1).T.tolist():
            found[device, time, order, kind, size > 0] += size
    else:
        for device, changes in enumerate(ledger._changes):
            for time, order, size, kind in np.array(changes, np.int64).reshape(-1, 4).tolist():
                found[device, time, order, kind, size > 0] += size
    return found


def new_ledger(plan: Plan, spans: Spans) -> ArrayLedger:
    """An empty ledger of arrays."""
    return ArrayLedger(plan.device_count, plan.accelerators, spans.end)


def arrays_and_spans(own: TaskSpans) -> tuple[PlanArrays, Spans]:
    """A plan's arrays, and its spans as ``TaskSpans`` has them: the oracle of those that are made otherwise."""
    plan, arrays, tiles = own.plan, plan_arrays(own.plan), range(len(own.plan.tiles))

    def both(name: str, spans: list[Span | None]) -> dict[str, np.ndarray]:
        pairs = np.array([(NEVER, NEVER) if span is None else span for span in spans], np.int64).reshape(-1, 2)
        return {f"{name}_start": pairs[:, 0].copy(), f"{name}_end": pairs[:, 1].copy()}

    fields: dict[str, np.ndarray] = {}
    by_tile = {"forward": own.forward, "backward": own.backward, "weights": own.weights, "again": own.second}
    for name, spans in (by_tile | {"away": own.away, "back": own.back}).items():
        fields |= both(name, [spans.get(tile) for tile in tiles])
    parts = []
    for pattern, number in zip(arrays.carriers.pattern.tolist(), arrays.carriers.number.tolist(), strict=True):
        parts.append((plan.messages[number] if pattern == 0 else plan.exchanges[number]).parts[0])
    fields |= both("brought", [own.brought.get(part) for part in parts]) | both("returned", [own.returned.get(part) for part in parts])
    from soap.plan.plan import reduce_name

    names = [reduce_name(plan.graph.operators[one.operator], one, gradient=True) for one in plan.reductions]
    fields |= both("summed", [own.summed_from(one) for one in plan.reductions]) | both("summed_back", [own.named.get(one) for one in names])
    del fields["summed_back_end"]
    return arrays, Spans(
        end=own.end_ns,
        again_work_end=np.array([own.second_work.get(tile, (0, NEVER))[1] for tile in tiles], np.int64),
        segment=np.array([own.segment[tile] for tile in tiles], np.int64),
        begun=np.array([own.begun.get(own.segment[tile], NEVER) for tile in tiles], np.int64),
        light=np.array([tile in own.recomputation.light for tile in tiles], np.bool_),
        unread=np.array([tile in own.unread for tile in tiles], np.bool_),
        named=own.named,
        ready=own.ready,
        **fields,
    )
