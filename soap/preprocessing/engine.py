"""The whole of it: steps one after the other, each spread over nodes; what is there is kept; the result appears when it is whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from soap.files import reason
from soap.preprocessing import result
from soap.preprocessing.container import PreprocessError, key_of, read_record, write_record
from soap.preprocessing.inputs import GZIP, PARQUET, Chunk, Unit, cut_lines, find_units
from soap.preprocessing.manager import MODES, UNIT, Machine, Manager
from soap.preprocessing.spec import Spec
from soap.preprocessing.work import CONVERT, FORMAT, INDEX, MERGE, OPEN, STEPS, UNITE, WRITE, Done, Task, Work, made_of

FOLDER = ".work"
LOG = "decisions.jsonl"
FINISHED = "finished.json"
ROW_BYTES = 4
"""Of each column in the final arrays."""


class Nodes(Protocol):
    """Several nodes."""

    @property
    def count(self) -> int:
        """How many."""

    def run(self, tasks: Sequence[Sequence[Task]]) -> list[Done]:
        """Do each node's tasks of one step, all nodes at once."""

    def close(self) -> None:
        """End them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How data are preprocessed; none of it but ``on_error`` and ``codec`` changes the result. ``modes``: step -> mode. ``chunk_bytes``:
    None leaves it to the resource manager. ``workers``: tasks at once at most."""

    on_error: str = "stop"
    modes: Mapping[str, str] = field(default_factory=dict)
    chunk_bytes: int | None = None
    workers: int | None = None
    parquet: bool = True
    codec: str = "none"

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise PreprocessError(f"on_error {self.on_error!r}: expected stop, or skip, which leaves wrong lines out")
        for step, mode in self.modes.items():
            if step not in STEPS or mode not in MODES:
                raise PreprocessError(f"mode {step}={mode}: expected a step ({', '.join(STEPS)}) and one of {', '.join(MODES)}")
        for name, value in (("chunk_bytes", self.chunk_bytes), ("workers", self.workers)):
            if value is not None and value < 1:
                raise PreprocessError(f"{name} {value}: expected at least 1")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. ``kept``: tasks that an earlier run had done."""

    rows: int
    skipped: int
    kept: int
    tasks: int
    dictionaries: Mapping[str, int]


Begun = Callable[[str, int, int], None]
"""Told that a step begins: its name, its tasks and their bytes."""
MakeNodes = Callable[[Work], Nodes]


def run(
    spec: Spec, inputs: Sequence[str | Path], out: Path, options: Options, make_nodes: MakeNodes, begun: Begun | None = None
) -> Summary:
    """Preprocess ``inputs`` into the folder ``out``. PreprocessError in one line if that fails; the same call goes on from what is done."""
    units = find_units(inputs)
    key = run_key(spec, units, options)
    with locked(out) as folder:
        there = result.read(out)
        if there is not None and there["key"] == key and not (folder / FINISHED).exists():
            return Summary(there["rows"], there["skipped"], 0, 0, {name: own["rows"] for name, own in there["dictionaries"].items()})
        if there is not None and there["key"] != key:
            raise PreprocessError(f"{str(out)!r} holds the result of another SPEC or other input; choose another folder, or remove it")
        work = Work(str(folder), spec, units, options.on_error == "stop", options.parquet, options.codec)
        nodes = make_nodes(work)
        try:
            return _Run(work, nodes, options, key, begun).whole(out)
        finally:
            nodes.close()


def run_key(spec: Spec, units: Sequence[Unit], options: Options) -> str:
    """Of all that the result depends on, as far as it can be told without reading the input."""
    files = [(unit.path, unit.size, unit.mtime_ns) for unit in units]
    return key_of(FORMAT, spec.hash, files, options.on_error, options.parquet, options.codec)


@contextmanager
def locked(out: Path) -> Iterator[Path]:
    """The folder of a run's own files, which no other run may use at the same time."""
    folder = out / FOLDER
    try:
        if out.exists() and not out.is_dir():
            raise PreprocessError(f"{str(out)!r} is a file; expected a folder: choose another path")
        foreign = [path.name for path in out.iterdir() if path.name not in (FOLDER, LOG)] if out.is_dir() else []
        if foreign and result.read(out) is None and not folder.exists():
            raise PreprocessError(f"{str(out)!r} holds other files ({foreign[0]}); expected a new or empty folder: choose another path")
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as cause:
        raise PreprocessError(f"cannot write {str(out)!r}: {reason(cause)}; choose another folder") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PreprocessError(f"another soap-preprocess is at work on {str(out)!r}; wait for it, or choose another folder") from None
        for left in folder.rglob(".*.tmp"):  # of a run that was killed
            left.unlink(missing_ok=True)
        yield folder
    finally:
        os.close(lock)
        if result.read(out) is not None and not (folder / FINISHED).exists():
            from shutil import rmtree

            rmtree(folder, ignore_errors=True)


@dataclass
class _Run:
    work: Work
    nodes: Nodes
    options: Options
    key: str
    begun: Begun | None
    all: list[Done] = field(default_factory=list)

    def whole(self, out: Path) -> Summary:
        """All steps, and the result in its place."""
        finished = self.work.path / FINISHED
        record = read_record(finished, self.key)
        if record is None or not result.is_there(self.work, out, record["meta"]):
            finished.unlink(missing_ok=True)  # of another input or SPEC, whose arrays are written over now
            record = write_record(finished, self.key, meta=self._steps())
        result.put(self.work, out, record["meta"])
        finished.unlink()
        meta = record["meta"]
        kept = sum(done.kept for done in self.all)
        rows = {name: own["rows"] for name, own in meta["dictionaries"].items()}
        return Summary(meta["rows"], meta["skipped"], kept, len(self.all), rows)

    def _steps(self) -> dict[str, Any]:
        work = self.work
        opened = self._step([Task(OPEN, i, u.number, u.size) for i, u in enumerate(work.units) if u.kind == GZIP])
        sizes = {done.task.unit: done.rows for done in opened}
        chunks = self._cut(sizes)
        indexed = self._step([Task(INDEX, i, c.unit, c.size, c) for i, c in enumerate(chunks)])
        by_unit = {unit.number: [done for done in indexed if done.task.unit == unit.number] for unit in work.units}
        united = self._step([self._unite(number, own) for number, own in by_unit.items()])
        whole, sizes_of = made_of(united), self._dictionary_bytes()
        merged = self._step(
            [Task(MERGE, i, 0, sizes_of[name], name=name, made_of=whole) for i, name in enumerate(work.spec.dictionaries)], apart=True
        )
        rows = sum(done.rows for done in indexed)
        result.make_arrays(work, rows)
        mapped = made_of([*united, *merged])
        tasks, first = [], 0
        for done in indexed:
            own = key_of(mapped, done.made)
            tasks.append(replace(done.task, step=CONVERT, first_row=first, rows=done.rows, made_of=own))
            first += done.rows
        converted = self._step(tasks)
        if work.parquet:
            self._step(self._parts(rows, made_of(converted)))
        return result.document(work, self.key, by_unit)

    def _dictionary_bytes(self) -> dict[str, int]:
        """What the units' dictionaries hold, by name: a merge reads all of it. Some are a thousand times as large as others."""
        from soap.preprocessing.container import read_arrays

        found = dict.fromkeys(self.work.spec.dictionaries, 0)
        for unit in self.work.units:
            for key, array in read_arrays(self.work.united(unit.number)).items():
                found[key.partition(":")[2]] += array.nbytes
        return found

    def _cut(self, sizes: Mapping[int, int]) -> list[Chunk]:
        """Chunks of all units, in chronological order, as an earlier run cut them if there was one."""
        path = self.work.path / "chunks.json"
        record = read_record(path, self.key)
        size = self.options.chunk_bytes or (record or {}).get("chunk_bytes") or self._chunk_bytes()
        write_record(path, self.key, chunk_bytes=size)
        cuts = (cut(unit, self.work.spec, sizes.get(unit.number, unit.size), size, self.options) for unit in self.work.units)
        return [chunk for own in cuts for chunk in own]

    def _chunk_bytes(self) -> int:
        return Manager(most=self.options.workers).chunk_bytes(Machine(self.work.path).sample(()))

    def _unite(self, unit: int, indexed: Sequence[Done]) -> Task:
        chunks = tuple(done.task.chunk for done in indexed if done.task.chunk is not None)
        sizes = sum(self.work.indexed(chunk).stat().st_size for chunk in chunks)
        entries = max(0, sizes - sum(done.rows for done in indexed) * ROW_BYTES * len(self.work.spec.columns) // 2)
        return Task(UNITE, unit, unit, entries, made_of=made_of(indexed), others=chunks)

    def _parts(self, rows: int, made: str) -> list[Task]:
        each = self.work.rows_per_group
        begins = range(0, rows, each)
        size = each * ROW_BYTES * len(self.work.spec.columns)
        return [
            Task(WRITE, i, i, size, first_row=begin, rows=min(each, rows - begin), made_of=key_of(made, i))
            for i, begin in enumerate(begins)
        ]

    def _step(self, tasks: Sequence[Task], *, apart: bool = False) -> list[Done]:
        """Do the tasks of a step; what they did, in the order of the tasks. ``apart``: each on any node, not all of a unit on one."""
        if not tasks:
            return []
        if self.begun is not None:
            self.begun(tasks[0].step, len(tasks), sum(task.size for task in tasks))
        by_unit: dict[int, list[Task]] = {}
        for task in tasks:
            by_unit.setdefault(task.number if apart else task.unit, []).append(task)
        spread = spread_over([*by_unit.values()], self.nodes.count)
        found = sorted(self.nodes.run(spread), key=lambda done: done.task.number)
        self.all += found
        return found


def cut(unit: Unit, spec: Spec, size: int, chunk_bytes: int, options: Options) -> tuple[Chunk, ...]:
    """Chunks of a unit, in order. ``size``: bytes of its lines. PreprocessError if it has not all columns."""
    most = 2**62 if options.modes.get(INDEX) == UNIT else chunk_bytes
    if unit.kind == PARQUET:
        from soap.preprocessing.parsing import cut_row_groups  # numba, which this process does without else

        return cut_row_groups(unit, spec, most)
    return cut_lines(unit.number, size, most)


def spread_over(groups: Sequence[Sequence[Task]], nodes: int) -> list[list[Task]]:
    """Each group's tasks to the node with the least so far, the largest first (Graham 1969). A node's own keep their order."""
    sizes = [sum(max(1, task.size) for task in group) for group in groups]
    node_of, filled = [0] * len(groups), [0] * nodes
    for number in sorted(range(len(groups)), key=lambda one: -sizes[one]):
        node_of[number] = min(range(nodes), key=lambda one: (filled[one], one))
        filled[node_of[number]] += sizes[number]
    found: list[list[Task]] = [[] for _ in range(nodes)]
    for node, group in zip(node_of, groups, strict=True):
        found[node] += [replace(task, node=node) for task in group]
    return found
