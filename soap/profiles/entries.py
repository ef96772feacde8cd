"""Measurements as data: the times of one computation, and how they are written as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, ClassVar

from soap.model.json_text import Form, Schema, read_as, record, schema_of
from soap.plan.compression.seam import Work
from soap.profiles.keys import TileKey, Word
from soap.profiles.work import Kernel, Scores
from soap.strategy.compression import Compression, written_settings

UPDATE, COPY, RUNTIME, COMPRESSION = "update", "copy", "runtime", "compression"
"""Kinds of entries that belong to no operator: the optimizer's update of one tensor, a copy on a device (both by bytes), what the runtime
adds to each tile, and a work of compressing or decompressing a gradient (by elements). Angle brackets in their families keep them apart
from operators, whose families are hexadecimal digits."""
LAUNCH = "launch_ns"
"""Only entries of GPUs have launch times."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Nanoseconds of one pass: the median, and the interquartile range around it."""

    ns: float
    spread_ns: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One computation as it was measured. ``backward`` is None if it has no backward pass. ``forward_work``, ``backward_work``: the
    work that was done, so that an estimate can be compared with it; empty if the computation was left out, as statistics are that
    nobody reads. ``measured_at``: ISO 8601, UTC. ``launch_ns``: on GPUs, the processor's time to launch the forward and the backward
    pass."""

    kind: str
    key: TileKey
    forward: Timing
    backward: Timing | None
    repetitions: int
    forward_work: tuple[Kernel, ...] = ()
    backward_work: tuple[Kernel, ...] = ()
    measured_at: str = ""
    launch_ns: tuple[float, float] | None = None
    json_form: ClassVar[Form]

    @property
    def points(self) -> int:
        """Points of the iteration space, or bytes."""
        points = 1
        for length in self.key.lengths:
            points *= length
        return points


def typical(entries: Sequence[Entry]) -> Entry:
    """One entry of several measurements of one computation, oldest first, with the median times; of two, their mean. All other fields
    are the last one's."""
    last = entries[-1]
    launches = [own.launch_ns for own in entries if own.launch_ns is not None]
    return replace(
        last,
        forward=_typical([own.forward for own in entries]),
        backward=None if last.backward is None else _typical([own.backward for own in entries if own.backward is not None]),
        launch_ns=(median(own[0] for own in launches), median(own[1] for own in launches)) if launches else None,
    )


def _typical(timings: Sequence[Timing]) -> Timing:
    return Timing(median(own.ns for own in timings), median(own.spread_ns for own in timings))


def apart(entries: Sequence[Entry]) -> float:
    """How far measurements of one computation are apart, relative to the least; the larger figure of its two passes."""
    passes = [own.forward for own in entries], [own.backward for own in entries if own.backward is not None]
    return max(max(own.ns for own in one) / min(own.ns for own in one) - 1 for one in passes if one)


def update_family(optimizer_states: int) -> str:
    """The family of updates by an optimizer that keeps so many tensors of a parameter's size."""
    return f"<{UPDATE}-{optimizer_states}>"


def update_key(optimizer_states: int, size_bytes: int) -> TileKey:
    """The key of the update of one tensor of so many bytes by an optimizer that keeps so many tensors of its size."""
    return TileKey(update_family(optimizer_states), (size_bytes,), (), True)


def copy_key(size_bytes: int) -> TileKey:
    """The key of a copy of so many bytes from one place of a device to another."""
    return TileKey(f"<{COPY}>", (size_bytes,), (), True)


def compression_key(how: Compression, work: Work, elements: int, peers: int) -> TileKey:
    """The key of a work of a method of compression on a gradient of so many elements, as one of so many peers."""
    said = "-".join(f"{name}={value}" for name, value in written_settings(how).items())
    return TileKey(f"<{COMPRESSION} {said} {work} {peers}>", (elements,), (), True)


def runtime_key() -> TileKey:
    """The key of what the runtime adds to each tile."""
    return TileKey(f"<{RUNTIME}>", (), (), True)


def encode(entry: Entry) -> dict[str, Any]:
    """The entry as plain JSON values, which ``decode`` reads."""
    return {
        "kind": entry.kind,
        "family": entry.key.family,
        "lengths": list(entry.key.lengths),
        "regions": list(entry.key.regions),
        "entire": entry.key.entire,
        "forward_ns": [entry.forward.ns, entry.forward.spread_ns],
        "backward_ns": None if entry.backward is None else [entry.backward.ns, entry.backward.spread_ns],
        "repetitions": entry.repetitions,
        "forward_work": [_kernel(kernel) for kernel in entry.forward_work],
        "backward_work": [_kernel(kernel) for kernel in entry.backward_work],
        "measured_at": entry.measured_at,
        **({} if entry.launch_ns is None else {LAUNCH: list(entry.launch_ns)}),
    }


def decode(given: Mapping[str, Any]) -> Entry:
    """Read an entry from values that its schema allows."""
    backward = given["backward_ns"]
    return Entry(
        given["kind"],
        TileKey(given["family"], tuple(given["lengths"]), tuple(given["regions"]), given["entire"]),
        Timing(*given["forward_ns"]),
        None if backward is None else Timing(*backward),
        given["repetitions"],
        tuple(_decode_kernel(kernel) for kernel in given["forward_work"]),
        tuple(_decode_kernel(kernel) for kernel in given["backward_work"]),
        given["measured_at"],
        tuple(given[LAUNCH]) if LAUNCH in given else None,
    )


def _kernel(kernel: Kernel) -> list[Any]:
    own = [kernel.dtype, kernel.flops, kernel.traffic_bytes, kernel.calls, kernel.inner_calls]
    scores = () if kernel.scores is None else map(int, kernel.scores)
    widened = [int(kernel.widened)] if kernel.widened or kernel.scores else []
    more = [kernel.apart_bytes, kernel.fused_bytes, int(kernel.unaligned), *widened, *scores]
    return [*own, *more] if any(more) else own


def _decode_kernel(values: Sequence[Any]) -> Kernel:
    kernel, scores = Kernel(*values[:7], *map(bool, values[7:9])), values[9:]
    return replace(kernel, scores=Scores(scores[0], scores[1], bool(scores[2]))) if scores else kernel


LARGEST = 2**62
Moment = Annotated[str, Schema(maxLength=40)]
Count = Annotated[int, Schema(minimum=1, maximum=LARGEST)]
Positive = Annotated[float, Schema(exclusiveMinimum=0, maximum=LARGEST)]
_Size = Annotated[int, Schema(minimum=0, maximum=LARGEST)]
_Sizes = Annotated[tuple[_Size, ...], Schema(maxItems=1000)]
_NotNegative = Annotated[float, Schema(minimum=0, maximum=LARGEST)]
_Times = tuple[Positive, _NotNegative]
_Kernel = Annotated[tuple[Word, _NotNegative, _Size, _Size, _Size, _Size, _Size, _Size, _Size, _Size, _Size, _Size], Schema(minItems=5)]
_Work = Annotated[tuple[_Kernel, ...], Schema(maxItems=10)]
_RECORD = record(
    (LAUNCH,), kind=Word, family=Word, lengths=_Sizes, regions=_Sizes, entire=bool, forward_ns=_Times, backward_ns=None | _Times,
    repetitions=Count, forward_work=_Work, backward_work=_Work, measured_at=Moment, launch_ns=tuple[_NotNegative, _NotNegative],
)  # fmt: skip
Entry.json_form = Form(lambda: schema_of(_RECORD), lambda given: decode(read_as(_RECORD, given)), encode)
