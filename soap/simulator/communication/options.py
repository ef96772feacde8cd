"""Ways to sum over one group of devices, of which the fastest is taken. Each is linear in the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.simulator.communication.algorithms import Algorithm
from soap.simulator.costs import nanoseconds


@dataclass(frozen=True, slots=True)
class AllReduceOption:
    """An algorithm over one group of devices. ``links``: numbers of all links that it holds, sorted. ``protocol``: NCCL's name of how bytes
    are handed over, or nothing."""

    algorithm: Algorithm
    latency_seconds: float
    seconds_per_byte: float
    links: tuple[int, ...]
    protocol: str = ""

    def duration_ns(self, reduced_bytes: int) -> int:
        """max(1, ceil((latency_seconds + seconds_per_byte * reduced_bytes) * 1e9)), in this order of operations."""
        return nanoseconds(self.latency_seconds + self.seconds_per_byte * reduced_bytes)


def fastest(options: Sequence[AllReduceOption], reduced_bytes: int) -> AllReduceOption:
    """The option with the smallest ``duration_ns``; the first one if several are equal."""
    return min(options, key=lambda option: option.duration_ns(reduced_bytes))


def undominated(options: Sequence[AllReduceOption]) -> tuple[AllReduceOption, ...]:
    """The options that are the fastest for some number of bytes, in their order; of equal ones the first."""
    chosen = [min(options, key=lambda option: (option.latency_seconds, option.seconds_per_byte))]
    while True:
        last = chosen[-1]
        faster = [option for option in options if option.seconds_per_byte < last.seconds_per_byte]
        if not faster:
            return tuple(option for option in options if any(option is one for one in chosen))
        chosen.append(min(faster, key=lambda option: (_crossing_bytes(last, option), option.seconds_per_byte)))


def _crossing_bytes(slower: AllReduceOption, faster: AllReduceOption) -> float:
    """From how many bytes on the one with fewer seconds per byte is faster."""
    return (faster.latency_seconds - slower.latency_seconds) / (slower.seconds_per_byte - faster.seconds_per_byte)
