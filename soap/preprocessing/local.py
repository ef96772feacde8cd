"""Preprocessing on this machine: one node, whose processes are as many as its resource manager allows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from soap.files import reason
from soap.preprocessing import engine
from soap.preprocessing.container import NO_ARROW, PreprocessError
from soap.preprocessing.engine import Begun, Nodes, Options, Summary
from soap.preprocessing.inputs import GZIP, PARQUET, Unit, find_units
from soap.preprocessing.manager import SERIAL, Machine, Manager, State
from soap.preprocessing.node import Executor, InProcess, Node, NodesTogether, Seen
from soap.preprocessing.processes import Processes
from soap.preprocessing.spec import Spec, load_spec
from soap.preprocessing.work import CONVERT, INDEX, OPEN, ROWS_PER_GROUP, WRITE, Work
from soap.units import format_bytes

GZIP_RATIO = 4
"""Bytes of uncompressed lines for each of a ``.gz`` file, about."""


def disk_needed(units: Sequence[Unit], parquet: bool) -> int:
    """About how many bytes a run's files take at most: intermediate ones as the input, the final arrays, uncompressed parts, Parquet."""
    raw = sum(unit.size * (GZIP_RATIO if unit.kind == GZIP else 1) for unit in units)
    inflated = sum(GZIP_RATIO * unit.size for unit in units if unit.kind == GZIP)
    return inflated + round(raw * (1.6 + 0.7 * parquet))


def place_of(out: Path) -> Path:
    """The folder in which ``out`` is or would be made. PreprocessError if nobody lets us look."""
    try:
        place = out
        while not place.exists():
            place = place.parent
        return place
    except OSError as cause:
        raise PreprocessError(f"cannot write {str(out)!r}: {reason(cause)}; choose another folder") from None


def require_disk(units: Sequence[Unit], out: Path, parquet: bool) -> None:
    """PreprocessError if the disk is surely too small. What earlier runs left in ``out`` counts as room."""
    free = Machine(place_of(out)).sample(()).disk_bytes + _held(out)
    needed = disk_needed(units, parquet) // 2
    if free < needed:
        raise PreprocessError(
            f"{str(out)!r} has {format_bytes(free)} free; expected at least {format_bytes(needed)}: make room, choose another folder, "
            "or leave Parquet out: parquet=False (--no-parquet)"
        )


def _held(folder: Path) -> int:
    """Bytes of all files in a folder, some of which a run that is under way may take away meanwhile."""
    found = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(top, name)).st_size
    return found


Told = Callable[[dict[str, Any]], None]


def preprocess(
    spec: str | Path | Spec,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    on_error: str = "stop",
    modes: Mapping[str, str] | None = None,
    chunk_bytes: int | None = None,
    workers: int | None = None,
    parquet: bool = True,
    compress: bool = False,
    ray: str | None = None,
    begun: Begun | None = None,
    seen: Seen | None = None,
) -> Summary:
    """Index, convert and write recommender data; the result is byte-identical whatever runs at once.

    ``spec``: a preset's name, a YAML file or a ``Spec``. ``inputs``: TSV, TSV.gz or Parquet files in chronological order; a folder stands
    for its files by name. ``out``: a new or empty folder, or one of an earlier run, which then goes on. ``on_error``: ``stop`` or ``skip``
    lines that do not fit. ``modes``: step -> serial, unit, chunk or adaptive. ``workers``: tasks at once at most, on each node.
    ``parquet``: write it as well, with ``compress`` by zstd. ``ray``: the address of a Ray cluster (``auto``: the one that this machine
    belongs to) whose nodes all take part. PreprocessError in one line if anything fails.
    """
    given = spec if isinstance(spec, Spec) else load_spec(spec)
    codec = "zstd" if compress else "none"
    options = Options(on_error, modes or {}, chunk_bytes, workers, parquet, codec)
    folder = Path(out)
    units = find_units(inputs)
    _require_arrow(units, parquet)
    require_disk(units, folder, parquet)
    with_log = _Log(folder / engine.LOG)

    def make_nodes(work: Work) -> Nodes:
        if ray is None:
            return local_nodes(work, options, with_log, seen)
        from soap.preprocessing.ray_nodes import RayNodes

        return RayNodes(work, options, ray, told=with_log, seen=seen)

    return engine.run(given, inputs, folder, options, make_nodes, begun)


def local_nodes(work: Work, options: Options, told: Told | None = None, seen: Seen | None = None) -> NodesTogether:
    """This machine as one node. If both steps are serial, this process does everything."""
    serial = all(options.modes.get(step) == SERIAL for step in (INDEX, CONVERT))
    executor: Executor = InProcess(work) if serial else Processes(work)
    return NodesTogether([Node(executor, Manager(options.modes, options.workers, told), Machine(work.path), seen)])


class _Log:
    """Decisions of the resource manager, one JSON document per line, behind those of earlier runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, facts: dict[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(facts) + "\n")
        except OSError as cause:
            raise PreprocessError(f"cannot write {str(self._path)!r}: {reason(cause)}; make room") from None


def plan(spec: Spec, inputs: Sequence[str | Path], out: Path, options: Options) -> dict[str, Any]:
    """What a run would do now, as plain JSON values. Nothing is written. Chunks of compressed inputs are estimated."""
    units = find_units(inputs)
    _require_arrow(units, options.parquet)
    sample = Machine(place_of(out)).sample(())
    manager = Manager(options.modes, options.workers)
    size = options.chunk_bytes or manager.chunk_bytes(sample)
    lengths = {unit: GZIP_RATIO * unit.size if unit.kind == GZIP else unit.size for unit in units}
    chunks = {unit.number: engine.cut(unit, spec, length, size, options) for unit, length in lengths.items()}
    part = ROWS_PER_GROUP * engine.ROW_BYTES * len(spec.columns)
    steps = {}
    for step in (OPEN, INDEX, CONVERT, WRITE):
        if (step == WRITE and not options.parquet) or (step == OPEN and not any(unit.kind == GZIP for unit in units)):
            continue
        waiting = {number: 1 if step == OPEN else len(own) for number, own in chunks.items()}
        largest = part if step == WRITE else max(chunk.size for own in chunks.values() for chunk in own)
        limits = manager.limits(step, State(waiting, 0, 0, 0, largest), sample)
        steps[step] = {
            "mode": manager.mode(step), "units": limits.units, "chunks": limits.chunks, "tasks": limits.tasks,
            "because_of": limits.why, "task_bytes": manager.task_bytes(step, largest),
        }  # fmt: skip
    return {
        "units": [{"name": unit.name, "kind": unit.kind, "size_bytes": unit.size, "chunks": len(chunks[unit.number])} for unit in units],
        "chunk_bytes": size,
        "steps": steps,
        "cores": sample.cores,
        "available_bytes": sample.available_bytes,
        "limit_bytes": sample.limit_bytes,
        "disk_bytes": sample.disk_bytes,
        "disk_needed_bytes": disk_needed(units, options.parquet),
    }


def _require_arrow(units: Sequence[Unit], written: bool) -> None:
    """PreprocessError if pyarrow is needed and not installed: before hours of work, not at their end. ``written``: whether Parquet is."""
    if (written or any(unit.kind == PARQUET for unit in units)) and find_spec("pyarrow") is None:
        raise PreprocessError(NO_ARROW)
