"""Stages of a pipeline in a strategy: which chunk each operator is in, and whether a schedule can take micro-batches through them.

A *chunk* is a set of operators, a *stage* a group of devices with one chunk or several. ``Strategy.stages`` names the operators with which
chunks begin: an operator's chunk is that of the nearest named operator before it in the graph's order, or itself. Those before the first
named one are in chunk 0. So ``{"layers.4": 1}`` is two chunks, and a chunk may have several runs of operators.

No operator may read from a chunk behind its own. Each device belongs to one stage, whose operators may use all of its devices or some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from soap.errors import StrategyError
from soap.model.graph import KEEP_STATE, NEXT_STATE, OperatorGraph
from soap.model.json_text import Schema
from soap.schedules.contract import Shape
from soap.schedules.named import NamedSchedule, parse
from soap.schedules.table import MOST_CHUNKS

if TYPE_CHECKING:
    from soap.strategy.config import OpConfig, Strategy

SETTLED = (NEXT_STATE, KEEP_STATE)
"""Kinds of operators whose devices follow from the cluster, and so do not count as a stage's."""
Chunk = Annotated[int, Schema(minimum=0, maximum=MOST_CHUNKS - 1)]
"""A chunk's number."""


def said_stages(stages: Mapping[str, int]) -> str:
    """``Strategy.stages`` for people."""
    return ", ".join(f"{chunk} from {name}" for name, chunk in stages.items())


def chunks_of(graph: OperatorGraph, stages: Mapping[str, int]) -> tuple[int, ...]:
    """By operator: its chunk."""
    found, chunk = [], 0
    for op in graph.operators:
        chunk = stages.get(op.name, chunk)
        found.append(chunk)
    return tuple(found)


def stages_of(graph: OperatorGraph, chunks: Sequence[int]) -> dict[str, int]:
    """The reverse of ``chunks_of``, with as few names as possible, in the graph's order."""
    before = [0, *chunks[:-1]]
    return {op.name: chunk for op, chunk, last in zip(graph.operators, chunks, before, strict=True) if chunk != last}


def stage_count(chunks: Sequence[int], schedule: NamedSchedule | None) -> int:
    """How many stages these chunks of operators are. StrategyError if the schedule does not divide them."""
    count, each = max(chunks, default=0) + 1, 1 if schedule is None else schedule.chunks
    if count % each:
        raise StrategyError(
            f"schedule '{schedule}' with {count} chunk{'s' * (count > 1)}; expected a multiple of {each}, which is what each stage has: "
            "change stages or the schedule"
        )
    return count // each


def stages_of_chunks(count: int, schedule: str | None) -> tuple[int, ...]:
    """By chunk: its stage. ``count``: of chunks. StrategyError if the schedule does not divide them."""
    named = None if schedule is None else parse(schedule)
    stages = stage_count(range(count), named)
    shape = Shape(stages, 1) if named is None else Shape(stages, 1, named.chunks, named.placement)
    stage_of = {chunk: stage for stage in range(stages) for chunk in shape.chunks_of(stage)}
    return tuple(stage_of[chunk] for chunk in range(count))


def devices_of_stages(graph: OperatorGraph, strategy: Strategy) -> tuple[frozenset[int], ...]:
    """By stage: the devices that its operators use."""
    chunks = chunks_of(graph, strategy.stages)
    stage_of = stages_of_chunks(max(chunks, default=0) + 1, strategy.schedule)
    found: list[set[int]] = [set() for _ in range(max(stage_of) + 1)]
    for op, chunk in zip(graph.operators, chunks, strict=True):
        found[stage_of[chunk]].update(() if op.kind in SETTLED else strategy.operators[op.name].devices)
    return tuple(map(frozenset, found))


def require_numbers(stages: Mapping[str, int]) -> None:
    """StrategyError if a number of ``Strategy.stages`` is out of range."""
    for name, chunk in stages.items():
        if not 0 <= chunk < MOST_CHUNKS:
            raise StrategyError(f"stages: operator {name!r} begins chunk {chunk}; expected 0 to {MOST_CHUNKS - 1}")


def require_stages(graph: OperatorGraph, stages: Mapping[str, int], schedule: str | None, operators: Mapping[str, OpConfig]) -> None:
    """StrategyError if the stages do not fit the graph, the schedule or the devices. ``operators``: configurations."""
    unknown = next((name for name in stages if name not in graph.index), None)
    if unknown is not None:
        raise StrategyError(f"stages: model {graph.name!r} has no operator {unknown!r}; expected the first operator of each chunk")
    chunks = chunks_of(graph, stages)
    empty = next((chunk for chunk in range(max(chunks, default=0)) if chunk not in chunks), None)
    if empty is not None:
        raise StrategyError(f"stages: chunk {empty} of {max(chunks) + 1} has no operator; expected one at least in each")
    stage_of = stages_of_chunks(max(chunks, default=0) + 1, schedule)
    _require_forward(graph, chunks)
    _require_devices(graph, [stage_of[chunk] for chunk in chunks], operators)


def _require_forward(graph: OperatorGraph, chunks: Sequence[int]) -> None:
    for position, op in enumerate(graph.operators):
        for operand in op.inputs:
            maker = graph.producers[operand.tensor][0] if operand.tensor in graph.producers else position
            if chunks[maker] > chunks[position]:
                raise StrategyError(
                    f"stages: operator {op.name!r} of chunk {chunks[position]} reads what {graph.operators[maker].name!r} of chunk "
                    f"{chunks[maker]} makes; expected it in the same chunk or behind it"
                )


def _require_devices(graph: OperatorGraph, stages: Sequence[int], operators: Mapping[str, OpConfig]) -> None:
    """Each device is of one stage. Operators with changed buffers, which may run in one way only, do not count."""
    first: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()  # operators of a stage mostly share one tuple of devices
    for position, op in enumerate(graph.operators):
        devices = operators[op.name].devices
        if op.kind in SETTLED or (id(devices), stages[position]) in seen:
            continue
        seen.add((id(devices), stages[position]))
        for device in devices:
            other = first.setdefault(device, position)
            if stages[other] != stages[position]:
                raise StrategyError(
                    f"stages: operator {op.name!r} of stage {stages[position]} runs on device {device}, as "
                    f"{graph.operators[other].name!r} of stage {stages[other]} does; expected each stage to have devices of its own"
                )
