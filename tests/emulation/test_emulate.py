"""Emulated hosts on this box: how they are configured, what their cards count, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from soap.cluster.presets import preset
from soap.emulation import emulate, network, quota, reference_work
from soap.emulation.emulate import emulated
from soap.emulation.hosts import host_limits
from soap.emulation.names import NAMESPACES, group_name, host_address
from soap.emulation.network import HEADER_BYTES, MTU_BYTES
from soap.emulation.placement import Placement, card_counters, run_evenly, working_as_rank
from soap.emulation.quota import CpuGroups
from soap.errors import RuntimeFailure, SoapWarning, StoppedBySignal
from soap.runtime.system.process import GLOO_LOOPS, GLOO_WORKERS, THREADS
from tests.emulation.conftest import abandoned, traces
from tests.emulation.test_hosts import boxes

ROOT = Path(__file__).parents[2]
PAIR = host_limits(preset("emulated:2x1@80Mbit/s"), 1.0, 2)
SLOW_PAIR = host_limits(preset("emulated:2x1@80Mbit/s"), 0.25, 2)
SEGMENT_BYTES = MTU_BYTES - 52
"""What one segment of TCP carries."""
PAYLOAD_BYTES = 1_000_000
PATIENCE_S = 10.0
REFERENCE_NS = 20_000.0


@pytest.fixture(autouse=True)
def nothing_stays(groups: CpuGroups) -> Iterator[None]:
    """After all tests here nothing is there that no living process has made; handlers of signals are as before."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    emulate.remove_leftovers(groups)
    yield
    assert abandoned(groups) == []
    assert [signal.getsignal(number) for number in numbers] == before


def buckets(*where: str) -> dict[str, tuple[int, int]]:
    """Interface -> (bytes per second, bytes) of its token bucket, in the namespace that is named, if one is."""
    shown = json.loads(subprocess.run(["tc", "-j", *where, "qdisc", "show"], capture_output=True, text=True, check=True).stdout)
    return {entry["dev"]: (entry["options"]["rate"], entry["options"]["burst"]) for entry in shown if entry["kind"] == "tbf"}


def test_rates_quotas_and_addresses(groups: CpuGroups) -> None:
    hosts = host_limits(boxes(2, 2, intra="200 MB/s"), 0.25, 2)
    with emulated(hosts) as emulation:
        number = emulation.number
        here = buckets("-n", f"soap{number}-br")
        for host in range(2):
            name = f"soap{number}-{host}"
            assert here[name][0] == 25_000_000
            inside = buckets("-n", name)
            assert {device: rate for device, (rate, _) in inside.items()} == {"eth0": 25_000_000, "lo": 100_000_000}
            for rate, burst in (here[name], *inside.values()):  # what the kernel hands over at once must fit in; the kernel rounds
                assert burst == pytest.approx(network.burst_bytes(rate), rel=5e-3) and burst > network.SEGMENTS_BYTES + 14
            shown = json.loads(
                subprocess.run(["ip", "-j", "-n", name, "addr", "show", "eth0"], capture_output=True, text=True, check=True).stdout
            )
            assert [entry["local"] for entry in shown[0]["addr_info"]] == [str(host_address(number, host))]
            assert shown[0]["mtu"] == 9000 and shown[0]["operstate"] == "UP"
        for rank in range(4):  # each host's half of a core in equal parts
            assert emulation.place.hosts[rank] == (f"soap{number}-{rank // 2}", str(groups.group(number, rank)))
            if not groups.unified:
                figures = [int((groups.group(number, rank) / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period")]
                assert figures == [2500, 10000]
        assert traces(groups, number) != []
    assert traces(groups, number) == []


def test_this_process_may_work_as_a_rank_and_leaves_again(groups: CpuGroups) -> None:
    before = os.sched_getaffinity(0)
    interrupted = pytest.raises(KeyboardInterrupt)
    with emulated(SLOW_PAIR, REFERENCE_NS) as emulation, interrupted, working_as_rank(emulation.place):
        assert reference_work.reference_ns() == REFERENCE_NS
        members = (groups.free_group(emulation.number) / "cgroup.procs").read_text().split()
        assert os.sched_getaffinity(0) == set(emulation.place.cores[0])
        raise KeyboardInterrupt
    assert reference_work.reference_ns() is None
    assert members == [str(os.getpid())]
    assert traces(groups, emulation.number) == [] and os.sched_getaffinity(0) == before


def with_three_threads(place: Placement, pipe: Connection) -> None:
    """A placed rank that has two more threads than its main one, named as gloo's, and is paced."""
    os.environ["OMP_NUM_THREADS"] = "1"
    place(0)
    started, over = threading.Event(), threading.Event()
    numbers = [threading.get_native_id()]

    def communicate(name: str) -> None:
        numbers.append(threading.get_native_id())
        (THREADS / str(numbers[-1]) / "comm").write_text(name)
        started.set()
        over.wait()

    others = [threading.Thread(target=communicate, args=(name,)) for name in (f"{GLOO_LOOPS}_loop", f"{GLOO_WORKERS}_runloop")]
    for other in others:
        started.clear()
        other.start()
        started.wait()
    run_evenly()
    pipe.send([(number, os.sched_getaffinity(number), os.sched_getscheduler(number)) for number in numbers])
    pipe.send(reference_work.reference_ns())
    pipe.recv()
    over.set()
    for other in others:
        other.join()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_ranks_that_are_paced_have_no_quota(groups: CpuGroups, scale: float) -> None:
    spawn = get_context("spawn")
    with emulated(host_limits(preset("emulated:4x1"), scale, 2), REFERENCE_NS) as emulation:
        ours, theirs = spawn.Pipe()
        rank = spawn.Process(target=with_three_threads, args=(emulation.place, theirs))
        rank.start()
        assert ours.poll(PATIENCE_S)
        (main, main_cores, _), (loop, loop_cores, _), (worker, worker_cores, policy) = ours.recv()
        name = "cgroup.threads" if groups.unified else "tasks"
        limited, free = groups.group(emulation.number, 0), groups.free_group(emulation.number)
        assert (limited / name).read_text().split() == []
        assert {str(main), str(loop), str(worker)} <= set((free / name).read_text().split())
        own, apart = set(emulation.place.cores[0]), set(emulation.place.communication_cores)
        assert main_cores == own and worker_cores == (apart or own) and loop_cores == (apart or os.sched_getaffinity(0))
        assert not apart & own and bool(apart) == (scale < 1 and len(os.sched_getaffinity(0)) > 1)
        assert policy == os.SCHED_OTHER
        assert rank.pid in quota.processes(groups, emulation.number)
        assert ours.recv() == REFERENCE_NS
        ours.send("go")
        rank.join(PATIENCE_S)
        assert rank.exitcode == 0


def with_two_computing_threads(place: Placement, pipe: Connection) -> None:
    """A placed rank that cannot be paced."""
    os.environ["OMP_NUM_THREADS"] = "2"
    place(0)
    for _ in range(2):
        pipe.send(Path("/proc/self/cgroup").read_text())
        pipe.recv()
        run_evenly()


def test_other_ranks_have_a_quota_as_soon_as_they_train(groups: CpuGroups) -> None:
    spawn = get_context("spawn")
    with emulated(SLOW_PAIR) as emulation:
        ours, theirs = spawn.Pipe()
        rank = spawn.Process(target=with_two_computing_threads, args=(emulation.place, theirs))
        rank.start()
        where = []
        for _ in range(2):
            assert ours.poll(PATIENCE_S)
            where.append(ours.recv())
            ours.send("go")
        rank.join(PATIENCE_S)
        assert rank.exitcode == 0
        free, limited = groups.free_group(emulation.number), groups.group(emulation.number, 0)
        assert [f"/{free.parent.name}/{group.name}" in text for text, group in zip(where, (free, limited), strict=True)] == [True, True]


def test_a_process_that_is_gone_joins_no_group(groups: CpuGroups) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait(PATIENCE_S)
    with emulated(SLOW_PAIR) as emulation:
        with pytest.raises(RuntimeFailure, match=rf"process {gone.pid} in control group .*: No such process; start again"):
            quota.join(groups.group(emulation.number, 1), gone.pid)
        assert quota.processes(groups, emulation.number) == []


def test_one_host_has_no_limits_on_links() -> None:
    with emulated(host_limits(preset("emulated:1x2"), 1.0, 2)) as emulation:
        assert buckets("-n", f"soap{emulation.number}-br") == {}
        assert buckets("-n", f"soap{emulation.number}-0") == {}


def grown(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for then, now in zip(before, after, strict=True))


def on_host_1(place: Placement, address: str, pipe: Connection) -> None:
    """Takes the payload, and tells what its card counted and whether its loopback is another's."""
    place(1)
    before = card_counters()
    with socket.create_server((address, 4000)) as server:
        pipe.send("listening")
        stream, peer = server.accept()
        with stream:
            size = 0
            while data := stream.recv(65536):
                size += len(data)
    after = card_counters()
    pipe.send((size, peer[0], grown(before, after), os.environ["GLOO_SOCKET_IFNAME"]))


def on_host_0(place: Placement, address: str, pipe: Connection) -> None:
    """Sends the payload, and tells what its card counted."""
    place(0)
    before = card_counters()
    with socket.create_connection((address, 4000), timeout=PATIENCE_S) as stream:
        stream.sendall(bytes(PAYLOAD_BYTES))
        stream.shutdown(socket.SHUT_WR)
        assert stream.recv(1) == b""  # the other has read it all
    after = card_counters()
    pipe.send(grown(before, after))


@pytest.mark.slow
def test_ranks_are_on_their_hosts_and_cards_count(groups: CpuGroups) -> None:
    spawn = get_context("spawn")
    with emulated(PAIR) as emulation:
        address = str(host_address(emulation.number, 1))
        (ours_1, theirs_1), (ours_0, theirs_0) = spawn.Pipe(), spawn.Pipe()
        receiver = spawn.Process(target=on_host_1, args=(emulation.place, address, theirs_1))
        receiver.start()
        assert ours_1.poll(PATIENCE_S) and ours_1.recv() == "listening"
        assert quota.processes(groups, emulation.number) == [receiver.pid]
        sender = spawn.Process(target=on_host_0, args=(emulation.place, address, theirs_0))
        sender.start()
        assert ours_1.poll(PATIENCE_S) and ours_0.poll(PATIENCE_S)
        size, peer, (sent_1, received_1, frames_sent_1, frames_received_1), interface = ours_1.recv()
        sent_0, received_0, frames_sent_0, frames_received_0 = ours_0.recv()
        for process in (sender, receiver):
            process.join(PATIENCE_S)
            assert process.exitcode == 0
    assert (size, peer, interface) == (PAYLOAD_BYTES, str(host_address(emulation.number, 0)), "eth0")
    for counted, frames in ((sent_0, frames_sent_0), (received_1, frames_received_1)):
        assert PAYLOAD_BYTES < counted < 1.03 * PAYLOAD_BYTES
        more = counted - HEADER_BYTES * frames - PAYLOAD_BYTES
        again = round(more / SEGMENT_BYTES)  # on a busy machine an acknowledgement may be late
        assert again in (0, 1, 2) and abs(more - again * SEGMENT_BYTES) < 500  # frames that find addresses are shorter
    for counted, frames in ((received_0, frames_received_0), (sent_1, frames_sent_1)):
        assert 0 < counted < 0.03 * PAYLOAD_BYTES
        assert abs(counted - HEADER_BYTES * frames) < 500


def fail() -> None:
    raise ValueError("of the run")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(PATIENCE_S)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)


@pytest.mark.parametrize(("what", "error"), [(fail, ValueError), (interrupt, KeyboardInterrupt), (terminate, StoppedBySignal)])
def test_nothing_stays_after_a_failure(groups: CpuGroups, what: Callable[[], None], error: type[BaseException]) -> None:
    with pytest.raises(error), emulated(PAIR) as emulation:
        assert traces(groups, emulation.number) != []
        what()
    assert traces(groups, emulation.number) == []


@pytest.mark.parametrize("step", ["build", "remove"])
def test_signals_wait_while_hosts_are_made_and_removed(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    work, done = getattr(network, step), []

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        result = work(*args)
        done.append(step)
        return result

    monkeypatch.setattr(network, step, interrupted)
    entered = []
    with pytest.raises(KeyboardInterrupt), emulated(PAIR):
        entered.append(True)
    assert done == [step] and entered == ([True] if step == "remove" else [])


def test_what_was_made_is_removed_if_the_rest_cannot_be(groups: CpuGroups, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeFailure, match="modprobe sch_tbf"), emulated(PAIR):
        pass


def test_two_side_by_side_and_the_next_start_spares_who_is_alive(groups: CpuGroups) -> None:
    with emulated(PAIR) as one:
        before = traces(groups, one.number)
        with emulated(PAIR) as other:
            assert other.number != one.number
            assert traces(groups, one.number) == before
        assert traces(groups, other.number) == []
        assert traces(groups, one.number) == before


def test_a_thread_may_emulate_too(groups: CpuGroups) -> None:
    seen = []

    def run() -> None:
        with emulated(PAIR) as emulation:
            seen.extend(traces(groups, emulation.number))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_killed_launcher_left_goes_with_the_next_start(groups: CpuGroups) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.emulation.launcher"]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    number, placed, other = map(int, launcher.stdout.readline().split())
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    end_s = time.monotonic() + PATIENCE_S
    while is_alive(placed) and time.monotonic() < end_s:  # it ends with its launcher
        time.sleep(0.01)
    assert not is_alive(placed) and is_alive(other)
    left = traces(groups, number)
    assert len([name for name in left if name.startswith(str(NAMESPACES))]) == 3
    assert f"{groups.root}/{group_name(number)}" in left
    with emulated(PAIR):
        assert not is_alive(other)
    assert traces(groups, number) == []


def test_what_the_box_lost_meanwhile_is_not_missed(groups: CpuGroups) -> None:
    with emulated(PAIR) as emulation:
        subprocess.run(["ip", "-n", f"soap{emulation.number}-br", "link", "del", "bridge"], check=True)
        subprocess.run(["ip", "link", "del", f"soap{emulation.number}-br"], check=True)
        subprocess.run(["ip", "netns", "del", f"soap{emulation.number}-1"], check=True)


def test_warns_of_what_cannot_be_removed(groups: CpuGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(PAIR) as emulation:
        monkeypatch.setattr(network, "remove", lambda number: [f"namespace soap{number}-0"])
        with pytest.warns(SoapWarning, match=rf"could not remove namespace soap{emulation.number}-0; the next start tries again"):
            emulate.remove(groups, emulation.number)
        monkeypatch.undo()


def test_a_rank_that_comes_too_late(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="emulated host soap0-0: No such file or directory; it was removed meanwhile"):
        subprocess_place(tmp_path)


def subprocess_place(folder: Path) -> None:
    """In a process of its own, as the placement marks a process for good; its error comes back."""
    with get_context("spawn").Pool(1) as pool:
        pool.apply(Placement((("soap0-0", str(folder / "gone")),)), (0,))


def test_numbers_with_taken_addresses_are_passed_over() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate.reserved(lambda number: number % 7 == 5) as number:
            assert number % 7 == 5
    with pytest.raises(RuntimeFailure, match="all 512 numbers of emulations are in use"), emulate.reserved(lambda _: False):
        pass


def test_addresses_that_the_box_uses(groups: CpuGroups) -> None:
    with emulated(PAIR) as emulation:
        assert not network.is_subnet_free(emulation.number)
        assert network.is_subnet_free(511)
