"""Starting one process per device on this host through torchrun's launcher, and ending all of them whatever happens.

Under ``torchrun`` (several hosts, or a user's own command line) nothing is started: this process is one of the ranks.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from soap.errors import RuntimeFailure, StoppedBySignal
from soap.logs import NATIVE_LOG_LEVEL, silenced
from soap.runtime.comm.failures import AFTERMATH_S, Folder, Kind, kind_of, message_of, open_desk, told_positions
from soap.runtime.comm.position import HERE, describe
from soap.runtime.comm.world import under_launcher, world_size

Result = TypeVar("Result")

SHUTDOWN_S = 5
"""How long ranks may take to end after one failed or Ctrl-C was pressed; then they are killed."""
START_S = 120
"""How long ranks may take to find each other."""
PATIENCE_S = 10
"""How long a signal waits for the ranks to be started, before it ends the launcher all the same."""
AGAIN_S = 0.05
"""After so long it is seen whether they have been."""
LAUNCHER_LOGS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
"""Loggers of torch's launcher, which would tell failures with tracebacks of its own."""
LOCALHOST = "localhost"
"""The launcher's address, unless ranks go to a place from where it has another."""
_STARTING = inspect.unwrap(LocalElasticAgent._start_workers).__code__


def launch(
    processes: int,
    entry: Callable[..., Result],
    args: Sequence[Any] = (),
    *,
    limit_s: float | None = None,
    place: Callable[[int], None] | None = None,
    address: str = LOCALHOST,
) -> dict[int, Result]:
    """Run ``entry(*args)`` in so many processes, or in this one if it already is a rank; rank -> what it returned.

    ``entry`` and ``args`` must be picklable, the entry a function at the top of a module. A rank that fails ends all; what
    it said comes back as one line in a RuntimeFailure. Ctrl-C ends all ranks and raises KeyboardInterrupt. ``limit_s``: ranks that were
    started here are ended after so long, which is a RuntimeFailure. ``place``, picklable: what a rank that is started here calls first,
    with its number, to go where it belongs. ``address``: this process's, as the ranks there reach it.
    """
    if under_launcher(os.environ):
        if world_size(os.environ) < processes:
            raise RuntimeFailure(
                f"{world_size(os.environ)} processes started for {processes} devices: expected one per device; "
                f"use torchrun with {processes} processes in total"
            )
        return {int(os.environ["RANK"]): _as_rank_of_another_launcher(entry, args)}
    threads = max(1, (os.cpu_count() or 1) // processes)
    payload = pickle.dumps((entry, tuple(args), place))  # read by ranks where it is told if they cannot
    interrupted, late = threading.Event(), _Late()  # a signal may come before the contexts that set them are entered
    try:
        with (
            silenced(*LAUNCHER_LOGS),
            _signals_end_ranks(),
            _environment_for_ranks(threads),
            _interrupts_for_launcher_alone(interrupted),
            _own_temporary_folder() as path,
            _time_limit(limit_s, late, folder := Folder(path, processes)),
        ):
            try:
                results: dict[int, Result] = elastic_launch(_config(processes, address), _rank_main)(payload, threads, folder)
            except ChildFailedError as error:
                raise folder.first_cause(error.failures) from None
            return results
    except SignalException as error:
        if error.sigval is signal.SIGINT or interrupted.is_set():
            raise KeyboardInterrupt from None
        if late.positions is not None:
            advice = f"try a smaller batch or fewer steps ({told_positions(late.positions, processes)})"
            raise RuntimeFailure(f"not done after {limit_s:g} s; all ranks have ended: {advice}") from None
        raise StoppedBySignal(f"stopped by {error.sigval.name}; all ranks have ended", error.sigval) from None


def _config(processes: int, address: str) -> LaunchConfig:
    """How torchrun's launcher starts the ranks; made where temporary files go to our own folder."""
    options: dict[str, Any] = {"signals_to_handle": ""}  # ours are there
    if "shutdown_timeout" in inspect.signature(LaunchConfig).parameters:  # not in torch 2.11
        options["shutdown_timeout"] = SHUTDOWN_S
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{address}:0",
        rdzv_configs={"timeout": START_S, "is_host": True},
        local_addr=address,
        max_restarts=0,
        monitor_interval=0.05,
        start_method="spawn",
        **options,
    )


def _rank_main(payload: bytes, threads: int, folder: Folder) -> Any:
    """What a started process does. Ctrl-C and the launcher's signals end it at once, wherever it waits."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    desk = open_desk(folder, rank)
    try:
        entry, args, place = pickle.loads(payload)
        if place is not None:
            place(rank)
        torch.set_num_threads(threads)
        result = entry(*args)
        HERE.task = "done"
        return result
    except BaseException as error:
        desk.stay(desk.tell(error))
        _end_soon()
        raise RankFailure(str(error)) from None
    finally:
        sys.stdout.flush()


class RankFailure(RuntimeError):
    """How a rank ends whose error has been told."""


def _end_soon() -> None:
    """The launcher goes by the end of a process, so that must not wait for others: threads of a backend, a destructor."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SHUTDOWN_S)


def _as_rank_of_another_launcher(entry: Callable[..., Result], args: Sequence[Any]) -> Result:
    """Where torchrun has started the ranks, each tells its own error; one that noticed another's end waits to be ended for that."""
    rank = os.environ["RANK"]
    try:
        return entry(*args)
    except Exception as error:
        kind, message = kind_of(error), message_of(error)
        if kind is Kind.AFTERMATH:
            time.sleep(AFTERMATH_S)
            raise RuntimeFailure(f"rank {rank} ends because another rank has; that one says why ({message})") from error
        if kind is Kind.LATE:
            raise RuntimeFailure(f"rank {rank} has waited in vain: {describe(error.__traceback__)} ({message})") from error
        raise RuntimeFailure(f"rank {rank} failed: {message}") from error


@contextmanager
def _environment_for_ranks(threads: int) -> Iterator[None]:
    """Settings that a process reads when it starts; the user's own are left alone."""
    wanted = {"OMP_NUM_THREADS": str(threads)}
    # After Ctrl-C the process that tidies up semaphores tells that it did. It is started with the first rank, and reads this.
    wanted["PYTHONWARNINGS"] = "ignore:resource_tracker"
    wanted[NATIVE_LOG_LEVEL] = "ERROR"  # or torch warns that addresses have no names, of connections that end, of kernels that it lacks
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this host, whose own name may not resolve
    added = [name for name in wanted if name not in os.environ]
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        if handled is None:
            os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


@contextmanager
def _interrupts_for_launcher_alone(interrupted: threading.Event) -> Iterator[None]:
    """Ranks are born with Ctrl-C blocked and keep it so: one that is still starting would print where it was.

    A thread takes Ctrl-C in the launcher's stead and ends the launcher by SIGTERM, which it hands on to the ranks. The event
    tells that it was Ctrl-C. ``sigtimedwait`` only looks: one that waits returns, in CPython, as if the signal had come when the
    process was stopped (Ctrl-Z) and goes on after its time.
    """
    done = threading.Event()
    if not hasattr(signal, "sigtimedwait") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def take() -> None:
        while not done.wait(0.1):
            if signal.sigtimedwait({signal.SIGINT}, 0) is not None:
                interrupted.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return

    resource_tracker.ensure_running()  # or it is started with the first rank, and unblocks what is blocked here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Late:
    """Whether the time limit has ended the ranks: then where they were by that time."""

    positions: Mapping[int, str] | None = None


@contextmanager
def _time_limit(limit_s: float | None, late: _Late, folder: Folder) -> Iterator[None]:
    """Ends the launcher by SIGTERM, which it hands on to the ranks, when it has asked them where they are."""

    done = threading.Event()

    def end() -> None:
        positions = folder.ask()
        if not done.is_set():  # it takes a while
            late.positions = positions
            os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(limit_s, end) if limit_s is not None else None
    if timer is None:
        yield
        return
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        done.set()
        timer.cancel()
        timer.join()


@contextmanager
def _own_temporary_folder() -> Iterator[str]:
    """The launcher leaves logs and error files where temporary files go: give it a folder that is removed."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="soap-run-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


@contextmanager
def _signals_end_ranks() -> Iterator[None]:
    """Signals raise SignalException, upon which torch's launcher ends the ranks, but not while it is starting them.

    A rank whose start is broken off would print where it was; those that the launcher has not heard of yet would stay. So a signal that
    comes then is sent again a little later, by a thread. Only the main thread has to do with signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    later: SimpleQueue[int | None] = SimpleQueue()  # a handler may put something there whatever it has interrupted
    first_s: float | None = None

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        first_s = first_s or time.monotonic()
        if _starts_ranks(frame) and time.monotonic() - first_s < PATIENCE_S:
            later.put(number)
            return
        raise SignalException("stopped", signal.Signals(number))

    def send_again() -> None:
        while (number := later.get()) is not None:
            time.sleep(AGAIN_S)
            os.kill(os.getpid(), number)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    thread = threading.Thread(target=send_again, daemon=True)
    thread.start()
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        try:
            later.put(None)
            thread.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _starts_ranks(frame: FrameType | None) -> bool:
    """Whether torch's launcher is just starting ranks, and has not yet noted them all."""
    while frame is not None and frame.f_code is not _STARTING:
        frame = frame.f_back
    return frame is not None
