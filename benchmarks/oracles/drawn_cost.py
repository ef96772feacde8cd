"""The cost of a strategy under draws, from its times: the oracle of ``soap.simulator.compiled.draws``."""

from __future__ import annotations

from collections.abc import Sequence

from soap.simulator.draws import Risk


def cost_ns(times_ns: Sequence[int], risk: Risk) -> int:
    """One cost of a strategy's times under all draws, in ns, rounded down."""
    ascending, count = sorted(map(int, times_ns)), len(times_ns)
    match risk:
        case Risk.WORST:
            return ascending[-1]
        case Risk.Q80:
            return ascending[count - 1 - count // 5]
        case Risk.MEAN:
            return sum(ascending) // count
        case Risk.TAIL:
            quarter = max(1, count // 4)
            return (sum(ascending) // count + sum(ascending[-quarter:]) // quarter) // 2
