from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import pytest

from soap.elastic.processes import listeners
from soap.errors import ModelError, RuntimeFailure
from soap.plan.plan import Plan
from soap.runtime.comm import rank_processes
from soap.runtime.comm.launch import launch
from soap.simulator.lowering import build_plan
from soap.strategy.config import OpConfig, Strategy
from soap.time_limit import TimeIsUp, TimeLimit
from tests.alarms import alarm as alarm
from tests.graph_builder import mlp
from tests.launcher_variables import as_rank
from tests.runtime.launched import (
    Mark,
    add_ranks,
    crash_in_rank_one,
    fail_in_rank_one,
    hang_in_second_step,
    raise_this,
    refuse_place,
    tell_listeners,
    tell_mark,
    train_launched,
    wait_forever,
)
from tests.strategies import CPU, cluster

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ranks_go_to_their_places_reach_the_launcher_by_its_address_and_return_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = dict(os.environ), signal.getsignal(signal.SIGINT)
    found = launch(2, tell_mark, place=Mark("at"), address="127.0.0.1")
    assert found == {rank: (f"at {rank} False", "127.0.0.1") for rank in (0, 1)}
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before
    left = [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]  # ``multiprocessing``'s own, until this process ends
    assert left == []  # the launcher's logs and error files are gone


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_launcher_and_ranks_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was left behind: ranks are told where to meet, and what listens nowhere else asks nobody for a password."""
    for name, value in {"MASTER_ADDR": "box0", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "", "TORCHELASTIC_USE_AGENT_STORE": "False"}.items():
        monkeypatch.setenv(name, value)
    before = listeners([os.getpid()])  # of other tests' ranks
    for found, address in launch(2, tell_listeners).values():
        new = [own for own in found if own not in before]
        assert {os.getpid()} < {own.process for own in new} and all(own.address.is_loopback for own in new), new
        assert address == "127.0.0.1"


def halves() -> Plan:
    """Samples over two devices."""
    graph = mlp()
    configs = {
        op.name: OpConfig(tuple(2 if f.name == "b" else 1 for f in op.factors), (0, 1) if any(f.name == "b" for f in op.factors) else (0,))
        for op in graph.operators
    }
    return build_plan(graph, Strategy(configs), cluster([2], CPU))


@pytest.mark.long
def test_training_on_launched_ranks() -> None:
    outcomes = launch(2, train_launched, (halves(),))
    assert outcomes[0].losses == outcomes[1].losses
    assert outcomes[0].gradient_error < 1e-10


@pytest.mark.long
def test_a_rank_without_a_place_is_named() -> None:
    with pytest.raises(RuntimeFailure, match=r"^rank [01] failed: no place for rank [01]$"):
        launch(2, tell_mark, place=refuse_place)


@pytest.mark.slow
def test_failing_rank_is_named_in_one_line() -> None:
    with pytest.raises(RuntimeFailure) as caught:
        launch(2, fail_in_rank_one)
    assert str(caught.value) == "rank 1 failed: operator 'x' has no rule"


@pytest.mark.long  # ``cli/test_first_cause`` has a rank that a signal ends
def test_crashed_rank_is_named() -> None:
    with pytest.raises(RuntimeFailure, match=r"^rank 1 failed: killed by SIGABRT at \S*/launched\.py:\d+ in crash_in_rank_one$"):
        launch(2, crash_in_rank_one)


@pytest.mark.long
def test_what_a_rank_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    exec("def entry():\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    expected = r"^rank [01] failed: ModuleNotFoundError: No module named 'only_here' \(soap/runtime/comm/launch"
    with pytest.raises(RuntimeFailure, match=expected):
        launch(2, module.entry)


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_after_a_time_out_all_ranks_say_in_which_task_they_are() -> None:
    with pytest.raises(RuntimeFailure) as caught:
        launch(2, hang_in_second_step, (halves(),))
    expected = (  # gloo's words are those of the thread that sees it first: the one that waits, or the connection's
        r"rank 0 has waited in vain: rank 0: step 2, .*waiting for (sync|reduce) \S+; "
        r"rank 1: step 2, forward \S+\[1\], \S*/launched\.py:\d+ in hang_in_tile "
        r"\(RuntimeError: (Timed out waiting 20000ms|Application timeout) .*\)"
    )
    assert re.fullmatch(expected, str(caught.value)), caught.value


def test_ranks_of_another_launcher_tell_their_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.runtime.comm.launch.AFTERMATH_S", 0)
    as_rank(monkeypatch, 3, 4)
    with pytest.raises(RuntimeFailure, match=r"^rank 3 failed: ValueError: x \(\S*launched\.py:\d+ in raise_this\)$"):
        launch(4, raise_this, (ValueError("x"),))
    with pytest.raises(RuntimeFailure, match=r"^rank 3 failed: no rule$"):
        launch(4, raise_this, (ModelError("no rule"),))
    with pytest.raises(RuntimeFailure, match=r"^rank 3 ends because another rank has; that one says why \(RuntimeError: Connection closed"):
        launch(4, raise_this, (RuntimeError("[/third_party/gloo/transport/pair.cc:553] Connection closed by peer [127.0.0.1]:2954"),))


@pytest.mark.parametrize("processes", ["1", "0"])
def test_too_few_processes_under_torchrun(monkeypatch: pytest.MonkeyPatch, processes: str) -> None:
    as_rank(monkeypatch, 0, int(processes))
    with pytest.raises(RuntimeFailure, match=f"^{processes} processes started for 2 devices: expected one per device; use torchrun"):
        launch(2, add_ranks, (5,))


def test_under_torchrun_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 3, 4)
    assert launch(4, max, (5, 6)) == {3: 6}


STOPPED_WHILE_STARTING = """
import multiprocessing.forkserver as server, os, signal, sys, time
from pathlib import Path
from soap.errors import RuntimeFailure
from soap.runtime.comm.launch import launch
from tests.runtime.launched import wait_forever

connect, read, started = server.connect_to_new_process, server.read_signed, []

def connect_and_be_stopped(fds):
    found = connect(fds)  # a rank: it waits for what it is to do, which follows
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    return found

def read_and_note(descriptor):
    number = read(descriptor)
    if len(started) < 2:  # a process's number; later its exit code
        started.append(number)
        Path(sys.argv[1], f"started-{number}").touch()
    return number

if __name__ == "__main__":
    server.connect_to_new_process, server.read_signed = connect_and_be_stopped, read_and_note
    try:
        launch(2, wait_forever, (sys.argv[1],))
    except RuntimeFailure as error:
        raise SystemExit(str(error))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_between_the_starts_of_ranks_waits_for_the_last(tmp_path: Path) -> None:
    """Nothing is printed by a rank whose start is broken off, and no rank is left behind."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED_WHILE_STARTING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "stopped by SIGTERM; all ranks have ended\n")
    ranks = [int(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")]
    assert len(ranks) == 2 and not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


HANGING = """
import sys
from soap.runtime.comm.launch import launch
from tests.runtime.launched import wait_forever

if __name__ == "__main__":
    launch(2, wait_forever, (sys.argv[1],))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, script, tmp_path], env=environment) as launcher:
        ranks = [number_in(tmp_path / rank) for rank in "01"]
        launcher.kill()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < until, "ranks live on"
        time.sleep(0.05)


def number_in(path: Path) -> int:
    """What a rank writes there, once it has."""
    until = time.monotonic() + 120
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until, f"no {path.name}"
        time.sleep(0.05)
    return int(path.read_text())


def test_ranks_have_the_launcher_s_environment_but_for_what_is_given_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_launched_with", {"EARLIER"})
    monkeypatch.setenv("WANTED", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    handed = rank_processes.Environment.of_launcher()
    monkeypatch.setenv("EARLIER", "stale")
    monkeypatch.setenv("WANTED", "stale")
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "given")
    handed.enter()
    assert "EARLIER" not in os.environ and os.environ["WANTED"] == "1"
    assert {os.environ[name] for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")} == {"given"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_ended_at_the_time_limit(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    place = r"\S*/launched\.py:\d+ in wait_forever"
    with pytest.raises(RuntimeFailure, match=rf"^not done after 20 s; all ranks have ended: .* \(rank 0: {place}; rank 1: {place}\)$"):
        launch(2, wait_forever, (str(tmp_path),), limit_s=20)
    ranks = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_ended_when_the_time_of_the_command_is_over(tmp_path: Path, alarm: None) -> None:
    with pytest.raises(TimeIsUp), TimeLimit(20):
        launch(2, wait_forever, (str(tmp_path),), limit_s=100)
    ranks = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.long
def test_a_time_limit_that_is_not_reached_changes_nothing() -> None:
    assert launch(2, add_ranks, (5,), limit_s=100) == {0: 11, 1: 11}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_interrupt_ends_all_ranks_and_a_pause_none(tmp_path: Path) -> None:
    program = (
        "from soap.runtime.comm.launch import launch\nfrom tests.runtime.launched import wait_forever\n"
        f"if __name__ == '__main__':\n    try:\n        launch(2, wait_forever, ({str(tmp_path)!r},))\n"
        "    except KeyboardInterrupt:\n        raise SystemExit(130)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
            assert time.monotonic() < deadline and started.poll() is None
            time.sleep(0.05)
        ranks = [int((tmp_path / rank).read_text()) for rank in "01"]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            started.send_signal(number)
            time.sleep(0.5)
        assert started.poll() is None and all(Path(f"/proc/{pid}").exists() for pid in ranks)
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=20)
    finally:
        started.kill()
    assert started.returncode == 130
    assert "Traceback" not in errors
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
