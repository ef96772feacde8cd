"""What is told of ranks that failed: which error is a rank's own, which of several was first, and where ranks are; without processes."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from soap.errors import ModelError
from soap.plan.syncs.sharded_state import sum_name
from soap.plan.syncs.sharing import holders
from soap.profiles.roofline import RooflineCosts
from soap.runtime.comm import position
from soap.runtime.comm.failures import MOST_CHARACTERS, Desk, Folder, Kind, RankLost, kind_of, message_of, told_positions
from soap.runtime.comm.position import HERE, LIBRARIES, PACKAGE, telling_line
from soap.runtime.program.actions import ActionKind
from soap.runtime.program.program import Program, compile_program, task_name
from soap.simulator.lowering import build_plan, lower
from tests.graph_builder import convnet, mlp, transformer
from tests.runtime.sparse_plans import random_synchronized
from tests.strategies import CPU, cluster

ALONE = (ActionKind.TILE, ActionKind.SEGMENT)

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:2954. This is typically caused by a remote worker crashing."
WAITED = f"{GLOO}unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"


@pytest.fixture(autouse=True)
def nowhere() -> Iterator[None]:
    HERE.enter(0)
    yield
    HERE.enter(0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(CLOSED), Kind.AFTERMATH),
        (RuntimeError(WAITED), Kind.LATE),
        (RuntimeError("Application timeout caused pair closure"), Kind.LATE),
        (RuntimeError(f"{GLOO}pair.cc:547] Application timeout caused pair closure"), Kind.LATE),
        (dist.DistBackendError("NCCL communicator was aborted on rank 0. Original reason: collective operation timeout"), Kind.LATE),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), Kind.AFTERMATH),
        (dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cuda//0"), Kind.LATE),
        (dist.DistBackendError("NCCL error in: x.cpp:94, remote process exited or there was a network error"), Kind.AFTERMATH),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), Kind.AFTERMATH),
        (RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), Kind.LATE),
        (dist.DistBackendError("NCCL error in: x.cpp:94, unhandled cuda error"), Kind.OWN),
        (RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"), Kind.OWN),
        (ValueError("x"), Kind.OWN),
        (ModelError("the run timed out"), Kind.OWN),
        (RuntimeError("Connection closed by peer"), Kind.OWN),  # a user's words, of no backend of ours
        (ConnectionResetError("Connection reset by peer"), Kind.OWN),
        (BrokenPipeError("Broken pipe"), Kind.OWN),
        (TimeoutError("timed out: socket of the user's"), Kind.OWN),
        (MemoryError(), Kind.OWN),
        (SystemExit(3), Kind.OWN),
    ],
)
def test_kind_of_an_error(error: BaseException, kind: Kind) -> None:
    assert kind_of(error) is kind


def test_what_is_raised_in_the_course_of_an_aftermath_is_one() -> None:
    try:
        try:
            raise RuntimeError(CLOSED)
        except RuntimeError as cause:
            raise ModelError("no answer") from cause
    except ModelError as error:
        assert kind_of(error) is Kind.AFTERMATH
    try:
        try:
            raise KeyError("x")
        except KeyError:
            raise RuntimeError(WAITED) from None
    except RuntimeError as error:
        assert kind_of(error) is Kind.LATE


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModelError("operator 'x' has\nno rule"), "operator 'x' has no rule"),
        (ValueError("a\n  b"), "ValueError: a b"),
        (MemoryError(), "MemoryError: is there enough memory?"),
        (KeyError(), "KeyError"),
        (SystemExit("why"), "it ended itself by sys.exit('why')"),
        (RuntimeError("bad\nException raised from f at g.cpp:3 (most recent call first):\nframe #0: h"), "RuntimeError: bad"),
    ],
)
def test_message_is_one_line(error: BaseException, text: str) -> None:
    assert message_of(error) == text


class _Odd(Exception):
    """What it equals, and what it says of itself, cannot be relied on."""

    def __str__(self) -> str:
        raise KeyError("x")

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_odd_errors_are_told_as_well(tmp_path: Path) -> None:
    assert message_of(_Odd()) == "_Odd" and kind_of(_Odd()) is Kind.OWN
    error = _Odd()
    error.__context__ = RuntimeError(CLOSED)
    assert kind_of(error) is Kind.AFTERMATH
    assert str(_tell(tmp_path, (1, _Odd())).first_cause(_end(0, -64))) == "rank 1 failed: _Odd"
    assert str(Folder(tmp_path / "none", 2).first_cause(_end(0, -99))) == "rank 0 failed: killed by signal 99"


def test_message_is_bounded_and_names_the_users_line() -> None:
    try:
        raise ValueError("x" * 10**6)
    except ValueError as error:
        told = message_of(error)
    assert len(told) < MOST_CHARACTERS + 300
    assert told.endswith("test_message_is_bounded_and_names_the_users_line)") and f"{__file__}:" in told


def _end(rank: int, exit_code: int) -> dict[int, ProcessFailure]:
    return {rank: ProcessFailure(rank, 1, exit_code, "")}


def _tell(folder: Path, *errors: tuple[int, BaseException]) -> Folder:
    """Each rank's error, in this order, under other ranks' names: as they would write it."""
    place = Folder(folder, 4)
    for rank, error in errors:
        desk = object.__new__(Desk)
        desk.folder, desk.rank, desk._told = place, rank, None
        desk.tell(error)
    return place


def test_own_errors_come_first_whoever_was_seen_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = (0, RuntimeError(CLOSED)), (2, RuntimeError(WAITED)), (3, ValueError("first")), (1, ValueError("second"))
    plain = _tell(tmp_path, *errors).first_cause(_end(0, 1))
    assert str(plain) == "rank 3 failed: ValueError: first" and not hasattr(plain, "__notes__")
    monkeypatch.setenv("SOAP_DEBUG", "1")
    told = _tell(tmp_path, *errors).first_cause(_end(0, 1))
    assert str(told) == str(plain) and told.__notes__ == ["rank's own:\nValueError: first\n"]


def test_a_silent_end_comes_before_aftermaths_and_behind_own_errors(tmp_path: Path) -> None:
    assert str(Folder(tmp_path, 4).first_cause(_end(1, 7))) == "rank 1 failed: it ended with exit code 7 and did not say why"
    folder = _tell(tmp_path, (0, RuntimeError(CLOSED)), (2, RuntimeError(WAITED)))
    assert str(folder.first_cause(_end(1, -9))) == "rank 1 failed: killed by SIGKILL; is there enough memory?"
    _tell(tmp_path, (3, ValueError("own")))
    assert str(folder.first_cause(_end(1, -6))) == "rank 3 failed: ValueError: own"


def test_where_a_signal_ended_a_rank(tmp_path: Path) -> None:
    calls = (f"{LIBRARIES[0]}/ctypes/x.py", 3, "string_at"), ("/home/u/data.py", 12, "<lambda>"), (f"{PACKAGE}/cli/batches.py", 7, "_next")
    frames = "".join(f'  File "{file}", line {number} in {name}\n' for file, number, name in calls)
    text = 'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "/a.py", line 1 in wait\n\n'
    (tmp_path / "crash-2").write_text(f"{text}Current thread 0x2 (most recent call first):\n{frames}\nExtension modules: numpy\n")
    failure = Folder(tmp_path, 4).first_cause(_end(2, -11))
    assert str(failure) == "rank 2 failed: killed by SIGSEGV at /home/u/data.py:12 in <lambda>"


def test_only_aftermaths_say_so(tmp_path: Path) -> None:
    folder = _tell(tmp_path, (1, RuntimeError(CLOSED)), (0, RuntimeError(CLOSED)))
    assert str(folder.first_cause(_end(0, 1))) == (
        "rank 1 lost another rank, which did not say why: RuntimeError: Connection closed by peer [127.0.0.1]:2954."
    )


def test_a_rank_that_has_waited_in_vain_tells_where_all_are(tmp_path: Path) -> None:
    HERE.step, HERE.task = 3, "update @1"
    told = str(_tell(tmp_path, (1, RuntimeError(WAITED))).first_cause(_end(1, 1)))
    assert told == (
        "rank 1 has waited in vain: ranks 0, 2, 3: no answer; rank 1: step 3, update @1 "
        "(RuntimeError: Timed out waiting 6000ms for recv operation to complete)"
    )


def test_positions_are_told_together_and_bounded() -> None:
    assert told_positions({0: "a", 1: "b", 2: "a"}, 4) == "ranks 0, 2: a; rank 1: b; rank 3: no answer"
    assert told_positions({rank: str(rank) for rank in range(20)}, 20).endswith("rank 7: 7; and 12 more")


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_a_rank_answers_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faulthandler.enable", lambda file: None)
    folder = Folder(tmp_path, 2)
    Desk(folder, 1)
    HERE.step, HERE.task = 2, "update @1"
    assert [folder.ask() for _ in range(3)] == 3 * [{1: "step 2, update @1"}]  # rank 0 has not begun
    HERE.enter(0)
    (where,) = folder.ask().values()
    assert re.fullmatch(r"soap/runtime/comm/failures\.py:\d+ in (_?ask|<genexpr>)", where), where


def test_a_rank_says_its_first_error_once_unless_another_has_nothing_to_do_with_it(tmp_path: Path) -> None:
    desk = object.__new__(Desk)
    desk.folder, desk.rank, desk._told = Folder(tmp_path, 2), 0, None
    first = ValueError("first")
    later = RuntimeError(CLOSED)
    later.__context__ = first
    assert [desk.tell(error) for error in (first, first, later)] == 3 * [Kind.OWN]
    assert [report.message for report in desk.folder.reports()] == ["ValueError: first"]
    assert desk.tell(OSError("another")) is Kind.OWN
    assert [report.message for report in desk.folder.reports()] == ["OSError: another"]


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable'", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: no CUDA-capable device is detected", True),
        ("CUDA error: unknown error", True),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("an unknown error of mine", False),
    ],
)
def test_a_broken_gpu_is_a_lost_rank(tmp_path: Path, said: str, lost: bool) -> None:
    """So that a run may go on without it; what a wrong program causes would come again."""
    found = _tell(tmp_path, (0, RuntimeError(CLOSED)), (2, torch.AcceleratorError(said))).first_cause(_end(0, 1))
    assert str(found).startswith(f"rank 2 failed: AcceleratorError: {said.splitlines()[0]}")
    assert isinstance(found, RankLost) is lost and getattr(found, "rank", 2) == 2


def test_who_noticed_stays_until_the_cause_is_there(tmp_path: Path) -> None:
    folder = _tell(tmp_path, (0, RuntimeError(CLOSED)))
    desk = object.__new__(Desk)
    desk.folder, desk.rank = folder, 0
    waiting = threading.Thread(target=desk.stay, args=(Kind.AFTERMATH,))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    _tell(tmp_path, (1, ValueError("cause")))
    waiting.join(timeout=4)
    assert not waiting.is_alive()


def test_position_names_task_and_what_it_waits_for() -> None:
    class Awaited:
        name = "transfer x[0:1] 0->1"

    HERE.enter(4)
    assert position.describe().startswith("step 4, ") and "test_position_names" in position.describe()
    HERE.call, HERE.name = ("TILE", 5), lambda kind, subject: f"{kind} {subject}"
    HERE.waits = Awaited()
    assert HERE.text == "step 4, TILE 5, waiting for transfer x[0:1] 0->1"
    HERE.call = None
    assert HERE.text == "step 4, waiting for transfer x[0:1] 0->1"


def _idle_tiles(program: Program) -> list[str]:
    plan = program.plan
    tiles = [tile for number, tile in enumerate(plan.tiles) if number not in program.activity.tiles]
    return [f"{plan.operator(tile).name}[{tile.index}]" for tile in tiles]


@pytest.mark.parametrize("number", range(20))
def test_actions_have_the_names_of_simulated_tasks(number: int) -> None:
    rng = random.Random(number)
    graph = rng.choice([mlp, transformer, convnet])()
    topology = cluster([2, 2], CPU)
    plan = build_plan(graph, random_synchronized(graph, topology, rng), topology)
    simulated = {task.name for task in lower(plan, topology, RooflineCosts(topology)).tasks}
    program = compile_program(plan)
    actions = [own for own in (*program.forward, *program.backward) if own.kind is not ActionKind.LOSS]
    names = [task_name(program, own.kind.name, own.subject) for own in actions if own.kind in ALONE or len(own.devices or ()) > 1]
    assert len(names) >= len(graph.operators)
    idle = {f"backward {name}" for name in _idle_tiles(program)}  # whose gradients nobody needs
    shared = [sync for sync in plan.syncs if sync.aggregated and sync.contract.owner == "parts"]
    sums = {sum_name(sync, group).rpartition(" ")[0] for sync in shared for group in holders(sync)}  # one action, a task for each group
    assert set(names) - idle - sums <= simulated


def test_libraries_of_another_environment_are_not_the_users() -> None:
    """A virtual environment may use those of the one that it was made in."""
    lines = [("/elsewhere/lib/python3.11/site-packages/torch/distributed.py", 7, "barrier"), ("/home/someone/train.py", 3, "train")]
    assert telling_line(lines) == "/home/someone/train.py:3 in train"
