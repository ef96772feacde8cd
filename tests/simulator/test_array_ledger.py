"""A ledger over arrays has what one has that takes pieces one by one: the same rows, curves and peaks."""

from __future__ import annotations

import random

import numpy as np

from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan
from soap.simulator.lowering import build_plan
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.memory.transit import SENT_BYTES
from tests.simulator.examples import batch_split, chain, pairwise_cluster
from tests.simulator.memory_rows import rows_of
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.moving import Stay

END = 60
SIZES = (1, 7, SENT_BYTES // 5, SENT_BYTES, SENT_BYTES + 1)


def both(plan: Plan, rng: random.Random) -> tuple[Ledger, ArrayLedger]:
    """Two ledgers that took the same: many things at few moments, many of them alike."""
    one, many = Ledger(plan, END), ArrayLedger(plan.device_count, plan.accelerators, END)
    for _ in range(rng.randrange(40)):
        device, start, end = rng.randrange(2), *sorted(rng.choices(range(END), k=2))
        size, kind = rng.choice((-3, *SIZES)), rng.choice(list(MemoryKind))
        kind = MemoryKind.WORKSPACE if size < 0 else kind
        order = {name: rng.random() < 0.3 for name in ("early", "late", "leaves", "freed", "made", "over")}
        one.hold(device, start, end, size, kind, **order)
        many.hold(device, start, end, size, kind, **order)
    lasting = [(rng.randrange(END), rng.choice(SIZES)) for _ in range(3)]
    for _ in range(rng.choice((3, 30, 150))):
        device, start, size = rng.randrange(2), rng.randrange(END), rng.choice(SIZES)
        answer, own, sums = rng.randrange(start, END + 1), rng.sample(range(3), rng.choice((0, 0, 1, 2))), rng.choice((0, size))
        if rng.random() < 0.6:
            held, flags = rng.choice((0, size)), {name: rng.random() < 0.5 for name in ("copied", "made")}
            one.send(device, start, answer, size, held=held, **flags, stays=[Stay(of, *lasting[of], of) for of in own])
            numbers = many.send(device, start, answer, size, held=held, **flags)
            for of in own:
                many.stay(numbers, of, *lasting[of], of)
        else:
            few = rng.random() < 0.5
            one.receive(device, start, answer, size, few=few, sum_bytes=sums)
            many.receive(device, start, answer, size, few=few, sum_bytes=sums)
    return one, many


def test_as_pieces_one_by_one() -> None:
    graph, rng = chain(4, 2, 3), random.Random(7)
    plan = build_plan(graph, batch_split(graph, (0, 1)), pairwise_cluster(1, 1))
    for _ in range(40):
        one, many = both(plan, rng)
        expected, found = one.curves(), many.curves()
        assert many.peaks().tolist() == [curve.peak_bytes for curve in expected]
        for a, b in zip(expected, found, strict=True):
            assert _lists(a) == _lists(b)
            assert sum(b.at_peak.values()) == b.peak_bytes
        assert rows_of(one) == rows_of(many)


def _lists(curve: MemoryCurve) -> tuple[object, ...]:
    by_kind = {kind: np.asarray(sizes).tolist() for kind, sizes in curve.by_kind.items()}
    return curve.times_ns.tolist(), curve.bytes_held.tolist(), dict(curve.at_peak), by_kind
