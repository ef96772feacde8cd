"""CSV files of schedules, against torch.distributed.pipelining's own reader, writer and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import PipelineStage

from soap.errors import ScheduleError
from soap.schedules import csv_file
from soap.schedules.checking import check
from soap.schedules.named import parse
from soap.schedules.play import equal, peaks, play
from soap.schedules.table import Action, Table
from tests.extent import MANY
from tests.schedules.tables import changed_tables, tables


def stage_of(stages: int, chunks: int) -> Any:
    """What torch calls a stage, for nobody to run. ``chunks``: of all stages together."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, stages, None, chunks
    return stage


def torch_schedule(kind: type, stages: int, microbatches: int, chunks: int) -> Any:
    """One of torch's schedules of several chunks on each stage."""
    return kind([stage_of(stages, stages * chunks)] * chunks, microbatches)


def flat(orders: dict[int, list[Any]]) -> Table:
    """Torch's own actions, without idle time and communication, and with overlapping ones one behind the other."""

    def of(rank: int) -> Iterator[Action]:
        for action in orders[rank]:
            for one in () if action is None else action.sub_actions or (action,):
                if one.computation_type.value in ("F", "B", "I", "W"):
                    yield Action(one.computation_type.value, one.stage_index, one.microbatch_index)

    return Table.of(of(rank) for rank in sorted(orders))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 9])
def test_our_orders_of_one_chunk_are_torchs(stages: int, microbatches: int) -> None:
    stage = stage_of(stages, stages)
    assert flat(theirs.ScheduleGPipe(stage, microbatches)._get_pipeline_order()) == parse("gpipe").table(stages, microbatches)
    *found, last = flat(theirs.Schedule1F1B(stage, microbatches)._get_pipeline_order()).stages
    *ours, our_last = parse("1f1b").table(stages, microbatches).stages
    assert found == ours
    # Torch's listing (not what it runs) counts the last stage's forward passes from 1.
    assert [a if a.kind == "B" else a._replace(microbatch=a.microbatch - 1) for a in last] == list(our_last)


SHAPES = [(2, 2, 2), (2, 4, 3), (4, 8, 2), (4, 3, 2), (4, 10, 2), (3, 9, 4), (1, 3, 2)]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), SHAPES)
def test_our_interleaved_order_is_torchs(stages: int, microbatches: int, chunks: int) -> None:
    """Where torch's rounds are equal; it refuses others."""
    ours = parse(f"interleaved:{chunks}").table(stages, microbatches)
    assert flat(torch_schedule(theirs.ScheduleInterleaved1F1B, stages, microbatches, chunks).pipeline_order) == ours


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8), (3, 3), (1, 2)])
def test_our_zero_bubble_order_is_torchs(stages: int, microbatches: int) -> None:
    """With one chunk on each stage torch's interleaved zero-bubble schedule is ZB-H1."""
    found = flat(torch_schedule(theirs.ScheduleInterleavedZeroBubble, stages, microbatches, 1).pipeline_order)
    assert found == parse("zb-h1").table(stages, microbatches)


@MANY
@given(st.integers(1, 8), st.integers(0, 12))
def test_our_dualpipe_v_is_torchs(stages: int, more: int) -> None:
    """With whole backward passes in two."""
    whole = flat(torch_schedule(theirs.ScheduleDualPipeV, stages, 2 * stages + more, 2).pipeline_order)
    found = Table.of([part for action in row for part in halves(action)] for row in whole.stages)
    assert found == parse("dualpipe-v").table(stages, 2 * stages + more)


def halves(action: Action) -> list[Action]:
    """A whole backward pass as input and weight gradients."""
    return [action._replace(kind=kind) for kind in ("I", "W")] if action.kind == "B" else [action]


@MANY
@given(st.integers(1, 8), st.integers(1, 24))
def test_our_zb_v_is_as_quick_as_torchs(stages: int, microbatches: int) -> None:
    """Torch's is made for 2 S - 1 micro-batches at least; ours is shorter with fewer. Neither has more in flight than the other may."""
    table = parse("zb-v").table(stages, microbatches)
    other = flat(torch_schedule(theirs.ScheduleZBVZeroBubble, stages, microbatches, 2).pipeline_order)
    assert table.placement == other.placement and {*map(frozenset, table.stages)} == {*map(frozenset, other.stages)}
    durations = equal(2 * stages, forward_ns=1, input_ns=1, weight_ns=1)
    assert play(table, durations).makespan_ns <= play(other, durations).makespan_ns
    ones = [1] * table.chunk_count
    assert max(peaks(table, ones, ones)) == max(peaks(other, ones, ones)) == 2 * min(stages, microbatches)


MULTI = [
    (theirs.ScheduleInterleaved1F1B, 4, 8, 2),
    (theirs.ScheduleLoopedBFS, 3, 5, 2),
    (theirs.ScheduleInterleavedZeroBubble, 2, 4, 3),
    (theirs.ScheduleZBVZeroBubble, 4, 3, 2),
    (theirs.ScheduleDualPipeV, 4, 10, 2),
]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("kind", "stages", "microbatches", "chunks"), MULTI)
def test_reads_what_torch_writes(kind: type, stages: int, microbatches: int, chunks: int, form: str, tmp_path: Path) -> None:
    schedule = torch_schedule(kind, stages, microbatches, chunks)
    path = tmp_path / "schedule.csv"
    schedule._dump_csv(str(path), format=form)
    table = csv_file.load(path)
    assert table == flat(schedule.pipeline_order)
    check(table)


@MANY
@given(tables())
def test_torch_reads_what_we_write(table: Table) -> None:
    text = csv_file.dumps(table)
    stages = len(table.stages)
    schedule = torch_schedule(theirs._PipelineScheduleRuntime, stages, table.microbatch_count, table.chunk_count // stages)
    with mock.patch("builtins.open", mock.mock_open(read_data=text)):
        schedule._load_csv("schedule.csv", "compute_only")
    assert flat(schedule.pipeline_order) == table
    assert schedule.stage_index_to_group_rank == dict(enumerate(table.placement))
    traffic = {rank: [a for a in order if str(a)[-1].isdigit()] for rank, order in schedule.pipeline_order_with_comms.items()}
    steps = theirs._simulate_comms_compute(traffic, lambda chunk: table.placement[chunk], table.chunk_count)
    assert flat(steps) == table  # it raises if ranks wait for each other for ever


@MANY
@given(changed_tables())
def test_reads_what_it_writes(table: Table) -> None:
    assert csv_file.loads(csv_file.dumps(table)) == table
    assert csv_file.loads(csv_file.dumps(table).replace("\r\n", "\n").replace(",", " ,, ")) == table


def test_writes_what_torch_would(tmp_path: Path) -> None:
    schedule = torch_schedule(theirs.ScheduleInterleaved1F1B, 2, 4, 2)
    schedule.pipeline_order = {rank: [a for a in actions if a is not None] for rank, actions in schedule.pipeline_order.items()}
    schedule._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    csv_file.dump(tmp_path / "ours.csv", parse("interleaved:2").table(2, 4))
    assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "theirs.csv").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,,1X0", "row 2, column 3: '1X0' is no action; expected chunk, one of F, B, I, W, and micro-batch, such as 2F0"),
        ("0F0junk", "row 1, column 1: '0F0junk' is no action"),
        ("0F0;0B0", "row 1, column 1: '0F0;0B0' is no action"),
        ("(0F1;3B0)F", "is no action"),
        ("(0F1;)OVERLAP_F_B", "is no action"),
        ("0SEND_F", "is no action"),
        ("0F0\n\n1F0", "stage 1 has no action"),
        ("", "a table with 0 stages"),
        ("0UNSHARD,0SEND_F0", "stage 0 has no action"),
        ('0F0,"0B0', "row 1: unexpected end of data; expected cells such as 2F0"),
        ('0F0,"0B0"x', "row 1: ',' expected after '\"'"),
        ("0F" + "9" * 100_000, "row 1, column 1: '0F99"),
        ("0F" + "9" * 200_000, "row 1: field larger than field limit"),
        ("0F0\n" * 5000, "row 4097: too long; expected at most 4096 rows"),
        ("0F0\x00", "row 1"),
        ("0F70000", "expected chunks from 0 to 65535"),
    ],
)
def test_refuses_other_text_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        csv_file.loads(text)
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 250


@MANY
@given(st.text(alphabet='0129FBIW,;()\n\r" \x00._OVERLAPSENDU', max_size=60))
def test_any_text_is_a_table_or_a_clear_error(text: str) -> None:
    try:
        csv_file.loads(text)
    except ScheduleError as error:
        assert "\n" not in str(error)


def test_errors_of_files_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"schedule '.*missing.csv' cannot be read: no such file or directory; check the path"):
        csv_file.load(tmp_path / "missing.csv")
    (tmp_path / "wrong.csv").write_text("0X0")
    with pytest.raises(ScheduleError, match=r"schedule '.*wrong.csv': row 1, column 1: '0X0' is no action"):
        csv_file.load(tmp_path / "wrong.csv")
    with pytest.raises(ScheduleError, match="does not exist"):
        csv_file.dump(tmp_path / "no" / "folder.csv", parse("gpipe").table(1, 1))
