"""DualPipeV: DualPipe (DeepSeek-V3, 2412.19437, section 3.2.1) cut in half (github.com/deepseek-ai/DualPipe), as torch has it.

DualPipe feeds a pipeline from both ends, and has each parameter on two stages. Folded, its two ends are on one stage: two chunks on each
of S stages, laid out like a V, and each parameter once. In its main part forward and backward passes take turns, so that the messages of
one travel while the other computes. A whole backward pass is I and W, one behind the other. With fewer than 2 S micro-batches the table is
that of 2 S without those that are missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from soap.schedules.contract import Schedule, Shape, stage_by_stage
from soap.schedules.table import Action


def _passes(stages: int, microbatches: int, stage: int) -> Iterator[str]:
    """Each with the round of its chunk. ``B``: I, and its W. ``W``: the weight gradient that has waited longest."""
    later, own = stages - 1 - stage, stage + 1
    yield from ["F0"] * (2 * later)
    yield from ["F0", "F1"] * own
    yield from ["I1", "W", "F1"] * later
    yield from ["F0", "B1", "F1", "B0"] * (microbatches - 2 * stages + own)
    yield from ["B1", "F1", "B0"] * later
    rounds = ["1", "0"] * own
    yield from [f"B{number}" for number in rounds[:own]] + [f"I{number}" for number in rounds[own:]]
    yield from ["W", "I0"] * later
    yield from ["W"] * own


def _actions(shape: Shape, stage: int) -> Iterator[Action]:
    for action in _all_actions(shape, stage):
        if action.microbatch < shape.microbatches:
            yield action


def _all_actions(shape: Shape, stage: int) -> Iterator[Action]:
    done, waiting = Counter[tuple[bool, int]](), deque[Action]()
    for text in _passes(shape.stages, max(shape.microbatches, 2 * shape.stages), stage):
        kind, number = text[:1], text[1:]
        if kind == "W":
            yield waiting.popleft()
            continue
        own, chunk = kind == "F", shape.chunk(stage, int(number))
        action = Action("F" if own else "I", chunk, done[own, chunk])
        done[own, chunk] += 1
        yield action
        if kind == "B":
            yield action._replace(kind="W")
        elif kind == "I":
            waiting.append(action._replace(kind="W"))


SCHEDULE = Schedule(
    name="dualpipe-v",
    summary="two chunks on each stage, like a V: forward and backward passes take turns, so that the messages of one travel meanwhile",
    actions=stage_by_stage(_actions),
    fewest_chunks=2,
    most_chunks=2,
    placements=("v",),
)
