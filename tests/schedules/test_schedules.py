"""What every schedule has to hold, and what each of them is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ScheduleError
from soap.schedules.checking import check
from soap.schedules.contract import Shape
from soap.schedules.dependencies import Barrier
from soap.schedules.interleaved import round_sizes
from soap.schedules.named import SCHEDULES, NamedSchedule, form, forms, parse
from soap.schedules.play import awaiting_weights, in_flight, peaks
from soap.schedules.table import KINDS, SHARES, WORK, Action, Table
from tests.extent import MANY, so_many
from tests.schedules.tables import NAMED, can_be_executed, parsed, tables

named_schedules = pytest.mark.parametrize("named", NAMED, ids=str)


@named_schedules
def test_all_small_shapes_can_be_executed(named: NamedSchedule) -> None:
    """Uneven rounds, fewer micro-batches than stages and single stages included."""
    for stages in range(1, so_many(5, 9)):
        for microbatches in range(1, so_many(10, 26)):
            table = named.table(stages, microbatches)
            check(table)
            assert (table.chunk_count, table.microbatch_count) == (stages * named.chunks, microbatches)
            assert len(table.stages) == stages


@named_schedules
def test_keeps_its_contract(named: NamedSchedule) -> None:
    schedule = named.schedule
    table = named.table(3, 5)
    kinds = {action.kind for actions in table.stages for action in actions}
    assert sorted(share for kind in kinds for share in WORK[kind].shares) == sorted(SHARES)
    every = [Barrier(chunk, "norm") for chunk in range(table.chunk_count)]
    assert can_be_executed(table, every) == schedule.meets_barriers
    shape = Shape(3, 5, named.chunks, named.placement)
    assert table.placement == tuple(_stage_of(shape, chunk) for chunk in range(table.chunk_count))


def _stage_of(shape: Shape, chunk: int) -> int:
    """Written otherwise than ``Shape.chunk``."""
    round_number, position = divmod(chunk, shape.stages)
    return shape.stages - 1 - position if shape.placement == "v" and round_number % 2 else position


@MANY
@given(tables())
def test_each_chunk_takes_micro_batches_in_order(table: Table) -> None:
    """So that messages over a border never overtake each other."""
    for actions in table.stages:
        for chunk in range(table.chunk_count):
            for kind in "FBIW":
                microbatches = [action.microbatch for action in actions if action.chunk == chunk and action.kind == kind]
                assert microbatches in ([], list(range(table.microbatch_count)))


@named_schedules
def test_names_parse_as_they_print(named: NamedSchedule) -> None:
    assert parse(str(named)) == named
    assert parse(str(named)).table(2, 2) == named.table(2, 2)


def test_names_are_these() -> None:
    built = ["zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "dualpipe-v"]
    assert [schedule.name for schedule in SCHEDULES] == ["accumulation", "gpipe", "1f1b", "interleaved", "zb-h1", *built]
    assert forms() == f"accumulation[:N], gpipe[:N], 1f1b, interleaved:N, zb-h1, {', '.join(built)}"
    assert [str(parse(f"zb-v{rest}")) for rest in ("", ":2", ":2:v")] == ["zb-v"] * 3
    assert [form(schedule) for schedule in SCHEDULES[1:4]] == [
        "gpipe or gpipe:N or gpipe:N:v (N chunks on each stage, 1 or more)", "1f1b", "interleaved:N (N chunks on each stage, 2 or more)",
    ]  # fmt: skip
    assert all(schedule.summary for schedule in SCHEDULES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2f2b", "no schedule is named '2f2b'; expected one of accumulation"),
        ("", "no schedule is named ''"),
        ("x" * 100, "no schedule is named 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…'"),
        ("interleaved", "schedule 'interleaved' has 1 chunk on each stage; expected interleaved:N (N chunks on each stage, 2 or more)"),
        ("interleaved:1", "has 1 chunk on each stage"),
        ("interleaved:2:v", "expected interleaved:N"),
        ("interleaved:0", "expected interleaved:N"),
        ("interleaved:two", "expected interleaved:N"),
        ("interleaved:1000000", "expected interleaved:N"),
        ("zb-v:1", "schedule 'zb-v:1' has 1 chunk on each stage; expected zb-v"),
        ("zb-v:2:loop", "schedule 'zb-v:2:loop'; expected zb-v"),
        ("1f1b:2", "schedule '1f1b:2' has 2 chunks on each stage; expected 1f1b"),
        ("gpipe:2:w", "expected gpipe or gpipe:N or gpipe:N:v"),
        ("gpipe:2:v:v", "expected gpipe or gpipe:N or gpipe:N:v"),
        ("gpipe:", "expected gpipe or"),
    ],
)
def test_refuses_other_names_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "microbatches", "said"),
    [
        (0, 1, "0 stages; expected 1 to 4096"),
        (4097, 1, "4097 stages; expected 1 to 4096"),
        (1, 0, "0 micro-batches; expected 1 to 65536"),
        (4096, 65536, "4096 chunks x 65536 micro-batches are too many; expected a product of at most 349525: use fewer micro-batches"),
    ],
)
def test_refuses_shapes_out_of_range(stages: int, microbatches: int, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("gpipe").table(stages, microbatches)
    assert str(caught.value) == said


def test_refuses_shapes_that_a_schedule_does_not_serve() -> None:
    interleaved, one_f_one_b = SCHEDULES[3], SCHEDULES[2]
    with pytest.raises(ScheduleError, match="schedule '1f1b' with 2 chunks on each stage; expected 1"):
        one_f_one_b.table(Shape(2, 2, 2))
    with pytest.raises(ScheduleError, match="schedule 'interleaved' with 1 chunks on each stage; expected 2 to 65536"):
        interleaved.table(Shape(2, 2, 1))
    with pytest.raises(ScheduleError, match="schedule 'interleaved' with placement 'v'; expected loop"):
        interleaved.table(Shape(2, 2, 2, "v"))
    with pytest.raises(ScheduleError, match="placement 'w'; expected one of loop, v"):
        Shape(2, 2, 2, "w")  # type: ignore[arg-type]


def test_small_tables_are_these() -> None:
    grids = {name: str(parse(name).table(2, 3)) for name in ("accumulation", "gpipe", "1f1b", "zb-h1")}
    assert grids == {
        "accumulation": "stage 0 0F0 0B0 0F1 0B1 0F2 0B2\nstage 1 1F0 1B0 1F1 1B1 1F2 1B2",
        "gpipe": "stage 0 0F0 0F1 0F2 0B0 0B1 0B2\nstage 1 1F0 1F1 1F2 1B0 1B1 1B2",
        "1f1b": "stage 0 0F0 0F1 0B0 0F2 0B1 0B2\nstage 1 1F0 1B0 1F1 1B1 1F2 1B2",
        "zb-h1": "stage 0 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\nstage 1 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    }
    assert str(parse("interleaved:2").table(2, 2)) == (
        "stage 0 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nstage 1 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )
    assert str(parse("gpipe:2:v").table(2, 1)) == "stage 0 0F0 3F0 3B0 0B0\nstage 1 1F0 2F0 2B0 1B0"


@given(st.integers(1, 20), st.integers(1, 100))
def test_rounds_are_even_and_at_least_as_long_as_there_are_stages(stages: int, microbatches: int) -> None:
    sizes = round_sizes(stages, microbatches)
    assert sum(sizes) == microbatches and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert sizes[-1] >= min(stages, microbatches) and (microbatches % stages or set(sizes) == {stages})


@given(st.integers(1, 8), st.integers(1, 12))
def test_micro_batches_in_flight(stages: int, microbatches: int) -> None:
    def of(name: str) -> tuple[int, ...]:
        return in_flight(parse(name).table(stages, microbatches))

    assert of("accumulation") == (1,) * stages
    assert of("gpipe") == (microbatches,) * stages
    assert of("gpipe:3") == (3 * microbatches,) * stages
    assert of("1f1b") == of("zb-h1") == tuple(min(microbatches, stages - stage) for stage in range(stages))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4))
def test_micro_batches_in_flight_interleaved(stages: int, rounds: int, chunks: int) -> None:
    """One more than the passes with which a stage begins, unless these are all."""
    table = parse(f"interleaved:{chunks}").table(stages, rounds * stages)
    most = rounds * stages * chunks
    assert in_flight(table) == tuple(min((chunks - 1) * stages + 2 * (stages - 1 - s) + 1, most) for s in range(stages))


@given(st.integers(1, 8), st.integers(0, 6), st.integers(1, 1000), st.data())
def test_zb_h1_keeps_what_its_paper_says(stages: int, more: int, activation: int, data: st.DataObject) -> None:
    """Stage i of p, from 1: (p - i + 1) M_B + (i - 1) M_W (2401.10241, section 2.1), at most p M_B."""
    weights = data.draw(st.integers(0, activation))
    table = parse("zb-h1").table(stages, stages + more)
    expected = [(stages - s) * activation + min(s, stages + more - (stages - s)) * weights for s in range(stages)]
    found = peaks(table, [activation] * stages, [weights] * stages)
    assert list(found) == expected and max(found) <= stages * activation


@given(st.integers(1, 9), st.integers(1, 40))
def test_what_schedules_of_blocks_keep(stages: int, microbatches: int) -> None:
    """From F to the end of W, in parts of a stage's activations of which 1F1B keeps S, or 2 S of half a stage: 2405.15362, section 3.3."""
    limits = {"zb-1p": stages, "zb-2p": 2 * stages, "zb-v": 2 * stages, "v-half": stages + 3, "v-min": 2 * stages / 3 + 3}
    for name, limit in limits.items():
        table = parse(name).table(stages, microbatches)
        ones = [1] * table.chunk_count
        assert max(peaks(table, ones, ones)) <= limit, name


def test_tables_of_blocks_by_hand() -> None:
    """The last chunk of V-Min has one micro-batch in flight, so that its W goes before its next F."""
    assert str(parse("zb-2p").table(2, 3)) == "stage 0 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\nstage 1 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"
    assert str(parse("v-min").table(2, 2)) == (
        "stage 0 0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1\nstage 1 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1"
    )


def test_what_is_kept_by_hand() -> None:
    table = parsed("stage 0 0F0 1F0 1I0 0B0 1W0\nstage 1 2F0 2B0")
    assert in_flight(table) == (2, 1) and awaiting_weights(table) == (1, 0)
    assert peaks(table, [10, 4, 1], [0, 3, 0]) == (14, 1)
    assert peaks(table, [10, 4, 1], [0, 9, 0]) == (19, 1)  # more for the weights than for the inputs: kept while these are computed


@given(tables(), st.data())
def test_what_is_kept_is_what_lies_between(table: Table, data: st.DataObject) -> None:
    activation = data.draw(st.lists(st.integers(0, 9), min_size=table.chunk_count, max_size=table.chunk_count))
    weights = [min(a, w) for a, w in zip(activation, data.draw(st.permutations(activation)), strict=True)]
    for actions, most in zip(table.stages, peaks(table, activation, weights), strict=True):
        place = {action: i for i, action in enumerate(actions)}
        at = [0] * len(actions)
        for action, start in place.items():
            if action.kind == "F":
                _, chunk, microbatch = action
                own = {kind: place[Action(kind, chunk, microbatch)] for kind in KINDS if Action(kind, chunk, microbatch) in place}
                inputs = next((i for kind, i in own.items() if "inputs" in WORK[kind].shares), -1)
                for i in range(start, inputs + 1):
                    at[i] += activation[chunk]
                for i in range(inputs + 1, max(own.values()) + 1):
                    at[i] += weights[chunk]
        assert max(at) == most
