"""Tables for tests: every schedule of any shape, changed ones, and a slow account of which tables can be executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from soap.schedules.dependencies import Barrier
from soap.schedules.named import SCHEDULES, NamedSchedule
from soap.schedules.table import IDLE, KINDS, Action, Table, parse_action

NAMED = [
    NamedSchedule(schedule, chunks, placement)
    for schedule in SCHEDULES
    for placement in schedule.placements
    for chunks in range(schedule.fewest_chunks, min(schedule.most_chunks, 3) + 1)
]
"""Every schedule in every placement, with up to three chunks on each stage."""


def parsed(text: str) -> Table:
    """The table that prints as ``text``."""
    return Table.of([parse_action(cell) for cell in line.split()[2:] if cell != IDLE] for line in text.splitlines() if line)


@st.composite
def tables(draw: st.DrawFn, *, most_stages: int = 5, most_microbatches: int = 8) -> Table:
    """What a schedule makes of a small shape."""
    named = draw(st.sampled_from(NAMED))
    return named.table(draw(st.integers(1, most_stages)), draw(st.integers(1, most_microbatches)))


@st.composite
def changed_tables(draw: st.DrawFn) -> Table:
    """A table in which actions were swapped, moved, dropped, doubled, or made of another kind; some are still right."""
    stages = [list(actions) for actions in draw(tables(most_stages=4, most_microbatches=5)).stages]
    for _ in range(draw(st.integers(1, 3))):
        stage = draw(st.integers(0, len(stages) - 1))
        actions = stages[stage]
        i, j = draw(st.integers(0, len(actions) - 1)), draw(st.integers(0, len(actions) - 1))
        change = draw(st.sampled_from(["swap", "swap", "neighbours", "neighbours", "move", "drop", "double", "kind", "part", "elsewhere"]))
        if change == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif change == "neighbours" and i:
            actions[i - 1], actions[i] = actions[i], actions[i - 1]
        elif change == "move":
            actions.insert(j, actions.pop(i))
        elif change == "drop" and len(actions) > 1:
            del actions[i]
        elif change == "double":
            actions.insert(j, actions[i])
        elif change == "kind":
            actions[i] = actions[i]._replace(kind=draw(st.sampled_from(KINDS)))
        elif change == "part" and actions[i].kind == "B":  # legal: a whole backward pass in two parts
            _, chunk, microbatch = actions[i]
            actions[i] = Action("I", chunk, microbatch)
            actions.insert(max(i + 1, j), Action("W", chunk, microbatch))
        elif change == "elsewhere" and len(actions) > 1:
            stages[draw(st.integers(0, len(stages) - 1))].append(actions.pop(i))
    return Table.of(stages)


@st.composite
def barriers_of(draw: st.DrawFn, table: Table) -> list[Barrier]:
    """Up to three, several of a chunk included."""
    chunks = draw(st.lists(st.integers(0, table.chunk_count - 1), max_size=3))
    return [Barrier(chunk, f"norm{i}") for i, chunk in enumerate(chunks)]


def can_be_executed(table: Table, barriers: Sequence[Barrier] = ()) -> bool:
    """Whether a table is complete, and stages that do their actions one after the other come to the end of it."""
    chunks, microbatches = range(table.chunk_count), range(table.microbatch_count)
    count = Counter(action for actions in table.stages for action in actions)
    for chunk in chunks:
        homes = {stage for stage, actions in enumerate(table.stages) for action in actions if action.chunk == chunk}
        if len(homes) != 1:
            return False
        for microbatch in microbatches:
            if [count[Action(kind, chunk, microbatch)] for kind in KINDS] not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                return False
    coupled = {barrier.chunk for barrier in barriers}
    done: set[Action] = set()
    heads = [0] * len(table.stages)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(table.stages):
            while heads[stage] < len(actions) and _may_begin(actions[heads[stage]], done, chunks, microbatches, coupled):
                done.add(actions[heads[stage]])
                heads[stage] += 1
                moved = True
    return all(head == len(actions) for head, actions in zip(heads, table.stages, strict=True))


def _may_begin(action: Action, done: set[Action], chunks: range, microbatches: range, coupled: set[int]) -> bool:
    kind, chunk, microbatch = action

    def forward(of: int) -> bool:
        """Whether a micro-batch has left a chunk on its way forward."""
        return all(Action("F", of, m) in done for m in (microbatches if of in coupled else [microbatch]))

    def backward(of: int) -> bool:
        """Whether a micro-batch has left a chunk on its way back."""
        return all({Action("B", of, m), Action("I", of, m)} & done for m in (microbatches if of in coupled else [microbatch]))

    if kind == "F":
        return chunk == 0 or forward(chunk - 1)
    if kind == "W":
        return Action("I", chunk, microbatch) in done and backward(chunk)
    return forward(chunk) and (chunk == chunks[-1] or backward(chunk + 1))
