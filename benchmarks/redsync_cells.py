"""What ``benchmarks.redsync`` keeps of each cell: a net on so many devices of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import kept
from soap.plan.compression.seam import layout_of
from soap.strategy.compression import Compression, Rgc, RgcAsq

METHODS: dict[str, Compression] = {"RGC": Rgc(), "ASQ": RgcAsq()}
RADIX_PASSES = 16 + 2
"""Of a radix select over all elements: for digits of 2 bits of 32, and to collect what is larger and what is equal. PyTorch's ``topk``."""
TRIMMED, MEASURED = 64 * 2**20, 38.13
"""Elements of which the paper (section 2.1) has measured that trimmed top-k is so many times as fast as a radix select."""


def measured_passes() -> float:
    """As many passes over all elements as that makes of our price of trimmed top-k."""
    how = Rgc(0.001, "trimmed")
    layout = layout_of(how, (TRIMMED,), 4, 2)
    return MEASURED * layout.effort(how, "select", on_host=False).moved_bytes(on_host=False) / layout.whole_bytes


NAIVE: dict[str, Callable[[], float]] = {"naive": measured_passes, "naive, whole GPU": lambda: RADIX_PASSES}
"""Exact selection among all elements: how many passes it takes."""
VERSION = 1

_CELL = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("net", "cluster")},
        "devices": {"type": "integer", "minimum": 1},
        "times_ns": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "required": ["dense", *METHODS, *NAIVE]},
        "shares": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 4, "maxItems": 4},
    },
    "required": ["net", "cluster", "devices", "times_ns", "shares"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Cell:
    """A net on so many devices. ``times_ns``: of a step, dense and by each method. ``shares``: of RGC's step: select, send (on the links),
    restore, update."""

    net: str
    cluster: str
    devices: int
    times_ns: dict[str, int]
    shares: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is of."""
        return self.net, self.cluster, self.devices

    def gain(self, method: str) -> float:
        """How many times as fast as dense a method is."""
        return self.times_ns["dense"] / self.times_ns[method]


def read(path: Path) -> list[Cell]:
    """The cells of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [Cell(**{**own, "shares": tuple(own["shares"])}) for own in kept.read(path, _CELL, VERSION, "benchmarks.redsync")]


def write(path: Path, cells: Iterable[Cell]) -> None:
    """Write them, as a whole or not at all."""
    kept.write(path, map(asdict, cells), VERSION)
