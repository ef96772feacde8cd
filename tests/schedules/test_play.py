from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ScheduleError
from soap.schedules.dependencies import Barrier
from soap.schedules.named import parse
from soap.schedules.play import Durations, Played, equal, in_flight, least_ns, play
from soap.schedules.table import KINDS, Action, Table
from tests.extent import MANY
from tests.schedules.tables import barriers_of, can_be_executed, parsed, tables

times = st.integers(0, 50)


def played(name: str, stages: int, microbatches: int, forward_ns: int = 1, input_ns: int = 1, weight_ns: int = 1) -> Played:
    table = parse(name).table(stages, microbatches)
    return play(table, equal(table.chunk_count, forward_ns=forward_ns, input_ns=input_ns, weight_ns=weight_ns))


@MANY
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 20), st.integers(1, 50), times, times)
def test_bubble_of_gpipe_and_1f1b(name: str, stages: int, microbatches: int, forward_ns: int, input_ns: int, weight_ns: int) -> None:
    """(S - 1) / (M + S - 1): GPipe, 1811.06965, section 2.3."""
    found = played(name, stages, microbatches, forward_ns, input_ns, weight_ns)
    each_ns = forward_ns + input_ns + weight_ns
    assert found.makespan_ns == (microbatches + stages - 1) * each_ns
    assert found.busy_ns == (microbatches * each_ns,) * stages
    assert found.bubble == Fraction(stages - 1, microbatches + stages - 1)


@MANY
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 50), times)
def test_bubble_of_interleaved_and_breadth_first(stages: int, rounds: int, chunks: int, forward_ns: int, input_ns: int) -> None:
    """(S - 1) / (v M + S - 1): Megatron-LM, 2104.04473, section 2.2.2, where it is (1 / v) (S - 1) / M of the ideal time."""
    microbatches = stages * rounds
    for name in (f"interleaved:{chunks}", f"gpipe:{chunks}") if chunks > 1 else ("1f1b",):
        found = played(name, stages, microbatches, forward_ns, input_ns)
        each_ns = forward_ns + input_ns + 1
        assert found.makespan_ns == (chunks * microbatches + stages - 1) * each_ns
        assert found.bubble == Fraction(stages - 1, chunks * microbatches + stages - 1)
        ideal_ns = chunks * microbatches * each_ns
        assert Fraction(found.makespan_ns - ideal_ns, ideal_ns) == Fraction(1, chunks) * Fraction(stages - 1, microbatches)


@MANY
@given(st.integers(1, 9), st.integers(0, 12), times, times, times)
def test_bubble_of_zb_h1(stages: int, more: int, weight_ns: int, forward_more_ns: int, input_more_ns: int) -> None:
    """(p - 1)(T_F + T_B - T_W), where T_W is the least of the three and there are p micro-batches at least: 2401.10241, table 2."""
    forward_ns, input_ns = weight_ns + forward_more_ns + 1, weight_ns + input_more_ns
    found = played("zb-h1", stages, stages + more, forward_ns, input_ns, weight_ns)
    assert found.idle_ns == ((stages - 1) * (forward_ns + input_ns - weight_ns),) * stages
    less_ns = played("1f1b", stages, stages + more, forward_ns, input_ns, weight_ns).makespan_ns - found.makespan_ns
    assert less_ns == 2 * (stages - 1) * weight_ns


def idle_between(found: Played) -> int:
    """The longest that a stage is idle between its own first start and its own last end."""
    pairs = zip(found.starts_ns, found.ends_ns, found.busy_ns, strict=True)
    return max(ends[-1] - starts[0] - busy_ns for starts, ends, busy_ns in pairs)


@MANY
@given(st.integers(1, 9), st.integers(1, 40))
def test_bubbles_of_zb_1p_and_zb_2p(stages: int, microbatches: int) -> None:
    """With equal times: as ZB-H1 in 1F1B's memory, and none between a stage's first and last action in twice of it (ZB-H2), if there are
    enough micro-batches: 2401.10241, section 2."""
    less, more, by_hand = (played(name, stages, microbatches) for name in ("zb-1p", "zb-2p", "zb-h1"))
    assert more.makespan_ns <= less.makespan_ns <= by_hand.makespan_ns
    if microbatches >= stages:
        assert less.makespan_ns == more.makespan_ns == 3 * microbatches + stages - 1
    if microbatches >= 2 * stages - 1:
        assert idle_between(more) == 0


@MANY
@given(st.integers(1, 9), st.integers(1, 40))
def test_bubbles_of_schedules_like_a_v(stages: int, microbatches: int) -> None:
    """In units of half a stage, of which a micro-batch takes 6: none of ZB-V (2401.10241, section 6), about half of 1F1B's 6 (S - 1) of
    V-Half and two thirds of V-Min (2405.15362, section 3.3), however many micro-batches there are."""
    best, half, least = (played(name, stages, microbatches) for name in ("zb-v", "v-half", "v-min"))
    if microbatches >= stages:
        assert best.makespan_ns == 6 * microbatches + stages - 1
        assert half.makespan_ns - 6 * microbatches <= 3 * stages
        assert least.makespan_ns - 6 * microbatches <= 4 * stages
    if microbatches >= 2 * stages - 1:
        assert idle_between(best) == 0


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 50), times)
def test_accumulation_works_on_one_stage_at_a_time(stages: int, microbatches: int, forward_ns: int, input_ns: int) -> None:
    found = played("accumulation", stages, microbatches, forward_ns, input_ns, 0)
    assert found.makespan_ns == microbatches * stages * (forward_ns + input_ns)
    assert found.bubble == 1 - Fraction(1, stages)


def test_an_uneven_pipeline_by_hand() -> None:
    """Stage 1 is the slower one; a message takes 2 forward, 3 back, and they go one after the other."""
    table = parsed("stage 0 0F0 0F1 0B0 0B1\nstage 1 1F0 1F1 1B0 1B1")
    durations = Durations(actions_ns={"F": [1, 4], "B": [2, 1]}, forward_ns=[2], backward_ns=[3])
    found = play(table, durations)
    assert found.starts_ns == ((0, 1, 15, 18), (3, 7, 11, 12))  # 0F1 ends at 2, its message leaves at 3; 1B1's waits from 13 to 15
    assert found.ends_ns == ((1, 2, 17, 20), (7, 11, 12, 13))
    assert (found.makespan_ns, found.busy_ns, found.idle_ns) == (20, (6, 10), (14, 10))
    assert found.bubble == Fraction(24, 40)
    assert found.in_flight(0) == [(0, 1), (1, 2), (17, 1), (20, 0)]
    assert found.in_flight(1) == [(3, 1), (7, 2), (12, 1), (13, 0)]


def test_neighbours_on_one_stage_send_nothing() -> None:
    table = parse("gpipe:2:v").table(2, 1)
    found = play(table, Durations(actions_ns={"F": [1] * 4, "B": [1] * 4}, forward_ns=[5, 100, 7], backward_ns=[11, 100, 13]))
    assert found.makespan_ns == 8 + 5 + 7 + 11 + 13


def test_messages_of_a_barrier_leave_when_all_have_reached_it() -> None:
    table = parse("gpipe").table(2, 2)
    durations = Durations(actions_ns={"F": [10, 1], "B": [1, 1]}, forward_ns=[3], backward_ns=[0])
    assert play(table, durations).starts_ns[1][:2] == (13, 23)
    assert play(table, durations, [Barrier(0, "norm")]).starts_ns[1][:2] == (23, 26)


@MANY
@given(tables(), st.data())
def test_micro_batches_in_flight_over_time_have_the_peak_of_the_order(table: Table, data: st.DataObject) -> None:
    chunks = table.chunk_count
    one = st.lists(st.integers(1, 9), min_size=chunks, max_size=chunks)
    found = play(table, Durations(actions_ns={kind: data.draw(one) for kind in KINDS}))
    for stage, most in enumerate(in_flight(table)):
        over_time = found.in_flight(stage)
        assert max(count for _, count in over_time) == most and over_time[-1][1] == 0
        assert [when_ns for when_ns, _ in over_time] == sorted({when_ns for when_ns, _ in over_time})


@MANY
@given(tables(most_stages=4, most_microbatches=5), st.data())
def test_is_what_a_clock_that_ticks_sees(table: Table, data: st.DataObject) -> None:
    chunks = table.chunk_count
    barriers = data.draw(barriers_of(table))
    barriers = barriers if can_be_executed(table, barriers) else []
    one = st.lists(st.integers(1, 4), min_size=chunks, max_size=chunks)
    border = st.lists(st.integers(1, 4), min_size=chunks - 1, max_size=chunks - 1)
    durations = Durations(
        actions_ns={kind: data.draw(one) for kind in KINDS}, forward_ns=data.draw(border), backward_ns=data.draw(border)
    )
    found = play(table, durations, barriers)
    assert found.ends_ns == ticked(table, durations, {barrier.chunk for barrier in barriers})


def ticked(table: Table, durations: Durations, coupled: set[int]) -> tuple[tuple[int, ...], ...]:
    """Ends of all actions, found tick by tick: stages and messages count down what is left of them, and begin what may begin."""
    home, chunks, microbatches = table.placement, table.chunk_count, range(table.microbatch_count)
    there: set[tuple[str, int, int]] = set()  # what is at the chunk that waits for it: ("F", c, m) from c - 1, ("B", c, m) from c + 1
    done: set[Action] = set()
    queues: dict[tuple[str, int], list[tuple[int, int]]] = {}
    heads, left = [0] * len(table.stages), [0] * len(table.stages)
    begun = [False] * len(table.stages)
    ends: list[list[int]] = [[] for _ in table.stages]
    sent: set[tuple[str, int, int]] = set()
    now = 0

    def back(chunk: int, m: int) -> bool:
        return bool({Action("B", chunk, m), Action("I", chunk, m)} & done)

    def out(kind: str, chunk: int, m: int) -> bool:
        """Whether a chunk has made what it passes on of a micro-batch."""
        which: Sequence[int] = microbatches if chunk in coupled else [m]
        return all(Action("F", chunk, k) in done if kind == "F" else back(chunk, k) for k in which)

    def ready(action: Action) -> bool:
        kind, chunk, m = action
        if kind == "F":
            return chunk == 0 or ("F", chunk, m) in there
        if kind == "W":
            return out("B", chunk, m)
        return out("F", chunk, m) and (chunk == chunks - 1 or ("B", chunk, m) in there)

    while any(head < len(actions) for head, actions in zip(heads, table.stages, strict=True)):
        for stage, actions in enumerate(table.stages):  # what ends now
            left[stage] -= left[stage] > 0
            if heads[stage] < len(actions) and begun[stage] and not left[stage]:
                done.add(actions[heads[stage]])
                ends[stage].append(now)
                heads[stage] += 1
                begun[stage] = False
        for (kind, chunk), queue in queues.items():
            if queue:
                m, rest = queue[0]
                queue[0] = (m, rest - 1)
                if rest == 1:
                    there.add((kind, chunk, m))
                    queue.pop(0)
        for kind, step in (("F", 1), ("B", -1)):  # what is sent now, in the order in which its stage made it
            for actions in table.stages:
                for action in actions:
                    to, m = action.chunk + step, action.microbatch
                    mine = action.kind == "F" if kind == "F" else action.kind in ("B", "I")
                    if mine and action in done and 0 <= to < chunks and out(kind, action.chunk, m) and (kind, to, m) not in sent:
                        sent.add((kind, to, m))
                        border = min(action.chunk, to)
                        takes = (durations.forward_ns if kind == "F" else durations.backward_ns)[border]
                        if home[to] == home[action.chunk]:
                            there.add((kind, to, m))
                        else:
                            queues.setdefault((kind, to), []).append((m, takes))
        for stage, actions in enumerate(table.stages):
            if not begun[stage] and heads[stage] < len(actions) and ready(actions[heads[stage]]):
                begun[stage] = True
                left[stage] = durations.actions_ns[actions[heads[stage]].kind][actions[heads[stage]].chunk]
        now += 1
    return tuple(map(tuple, ends))


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        (Durations(actions_ns={"F": [1, 1]}), "0 durations of B; expected 2, one for each"),
        (Durations(actions_ns={"F": [1], "B": [1, 1]}), "1 durations of F; expected 2"),
        (Durations(actions_ns={"F": [1, -5], "B": [1, 1]}), "duration -5 ns of F; expected none below 0"),
        (Durations(actions_ns={"F": [1, 1], "B": [1, 1]}, forward_ns=[1, 1]), "2 durations of forward messages; expected 1"),
        (Durations(actions_ns={"F": [1, 1], "B": [1, 1]}, backward_ns=[-1]), "duration -1 ns of backward messages"),
    ],
)
def test_refuses_durations_that_do_not_fit(durations: Durations, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        play(parse("1f1b").table(2, 2), durations)
    assert said in str(caught.value)


def test_refuses_what_cannot_be_executed() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        play(parsed("stage 0 0F0 0B0 0F1 0B1\nstage 1 1F0 1F1 1B0 1B1"), equal(2, forward_ns=1, input_ns=1, weight_ns=1))


def test_a_table_that_takes_no_time_has_no_bubble() -> None:
    found = played("1f1b", 2, 2, 0, 0, 0)
    assert (found.makespan_ns, found.bubble) == (0, 0)


@MANY
@given(tables(), st.data())
def test_no_table_is_over_before_its_least_time(table: Table, data: st.DataObject) -> None:
    """And tables of equal stages without messages end just then: GPipe, 1F1B."""
    if not can_be_executed(table):
        return
    chunks = table.chunk_count
    each = st.lists(times, min_size=chunks, max_size=chunks)
    borders = st.lists(times, min_size=chunks - 1, max_size=chunks - 1)
    durations = Durations(
        actions_ns={kind: data.draw(each) for kind in KINDS}, forward_ns=data.draw(borders), backward_ns=data.draw(borders)
    )
    assert max(least_ns(table, durations)) <= play(table, durations).makespan_ns


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_their_least_time(name: str) -> None:
    table = parse(name).table(4, 6)
    durations = equal(4, forward_ns=3, input_ns=2, weight_ns=2)
    assert max(least_ns(table, durations)) == play(table, durations).makespan_ns == (6 + 3) * 7
