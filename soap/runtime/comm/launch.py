"""Starts one process per device on this host with torchrun's launcher, and ends all of them whatever happens. Under ``torchrun`` (several
hosts, or the user's own command line) nothing is started: this process is already one of the ranks."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from multiprocessing import resource_tracker
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from soap import time_limit
from soap.errors import RuntimeFailure, StoppedBySignal
from soap.logs import NATIVE_LOG_LEVEL, silenced
from soap.runtime.comm.failures import AFTERMATH_S, Folder, Kind, kind_of, message_of, open_desk, told_positions
from soap.runtime.comm.launched import loopback, own_rank, under_launcher, world_size
from soap.runtime.comm.position import HERE, describe
from soap.runtime.comm.rank_processes import Environment, end_with_launcher, import_ahead, start_method

BACKEND = "soap"
BACKLOG = 1024
"""Ranks that knock at once."""


class Meeting(StaticTCPRendezvous):
    """The meeting place of one launcher, whose store it is."""

    def __init__(self, address: str, run: str, timeout_s: int) -> None:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((address, 0), family=family, backlog=BACKLOG) as listening:
            port = int(listening.getsockname()[1])
            super().__init__(address, port, 0, 1, run, timeout_s)
            limit = timedelta(seconds=timeout_s)
            self._store = TCPStore(
                address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
            )

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND


def _made(parameters: RendezvousParameters) -> RendezvousHandler:
    return Meeting(parameters.endpoint, parameters.run_id, int(parameters.config["timeout"]))


rendezvous_handler_registry.register(BACKEND, _made)


Result = TypeVar("Result")

SHUTDOWN_S = 5
"""How long ranks may take to end after one failed or Ctrl-C was pressed; then they are killed."""
START_S = 120
"""How long ranks may take to find each other."""
PATIENCE_S = 60
"""How long a signal is held back while ranks are being started; after that it ends the launcher anyway. The first rank starts once what
ranks need is imported, which takes seconds, or many on a loaded machine."""
AGAIN_S = 0.05
"""After so long a held-back signal is sent again."""
LAUNCHER_LOGS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
"""Loggers of torch's launcher, which would print tracebacks of their own."""
LOCALHOST = "127.0.0.1"
"""The launcher's address, unless ``place`` moves ranks to where it has another one."""
_STARTING = inspect.unwrap(LocalElasticAgent._start_workers).__code__


def launch(
    processes: int,
    entry: Callable[..., Result],
    args: Sequence[Any] = (),
    *,
    limit_s: float | None = None,
    place: Callable[[int], None] | None = None,
    address: str = LOCALHOST,
    modules: Sequence[str] = (),
) -> dict[int, Result]:
    """Run ``entry(*args)`` in ``processes`` processes, or in this one if it is a rank already. Returns rank -> what ``entry`` returned.

    ``entry`` and ``args`` must be picklable; ``entry`` is a function at the top of a module. ``limit_s``: time limit in seconds for ranks
    that are started here. ``place`` (picklable): called first in each rank that is started here, with its number, to move it where it
    belongs, such as an emulated host. ``address``: this process's address as those ranks reach it. ``modules``: what ranks are going to
    import, beside the module of ``entry``.

    RuntimeFailure in one line if a rank fails (all ranks end then), or after the time limit. KeyboardInterrupt after Ctrl-C, which ends all
    ranks, TimeIsUp when the time of the command is over, which does so, too; StoppedBySignal after other signals.
    """
    if under_launcher(os.environ):
        if world_size(os.environ) < processes:
            raise RuntimeFailure(
                f"{world_size(os.environ)} processes started for {processes} devices: expected one per device; "
                f"use torchrun with {processes} processes in total"
            )
        return {own_rank(os.environ): _as_rank_of_another_launcher(entry, args)}
    threads = max(1, (os.cpu_count() or 1) // processes)
    payload = pickle.dumps((entry, tuple(args), place))  # ranks unpickle it where a failure is reported
    interrupted, late = threading.Event(), _Late()  # a signal may come before the contexts that set them are entered
    commands_s = time_limit.left_s()
    limit_s = commands_s if limit_s is None else min(limit_s, commands_s)
    try:
        with (
            time_limit.held_back(),
            silenced(*LAUNCHER_LOGS),
            _signals_end_ranks(),
            _environment_for_ranks(threads),
            _interrupts_for_launcher_alone(interrupted),
        ):
            import_ahead([entry.__module__, *modules])  # leaves a socket among temporary files until this process ends
            with _own_temporary_folder() as path, _time_limit(limit_s, late, folder := Folder(path, processes)):
                start = elastic_launch(_config(processes, address), _rank_main)
                try:
                    results: dict[int, Result] = start(payload, threads, folder, Environment.of_launcher())
                except ChildFailedError as error:
                    raise folder.first_cause(error.failures) from None
            return results
    except SignalException as error:
        if error.sigval is signal.SIGINT or interrupted.is_set():
            raise KeyboardInterrupt from None
        if late.positions is not None and limit_s == commands_s:
            time_limit.heed()
        if late.positions is not None:
            advice = f"try a smaller batch or fewer steps ({told_positions(late.positions, processes)})"
            raise RuntimeFailure(f"not done after {limit_s:g} s; all ranks have ended: {advice}") from None
        raise StoppedBySignal(f"stopped by {error.sigval.name}; all ranks have ended", error.sigval) from None


def _config(processes: int, address: str) -> LaunchConfig:
    """The settings of torchrun's launcher. To be made while temporary files go to our own folder."""
    options: dict[str, Any] = {"signals_to_handle": ""}  # we install our own handlers
    if "shutdown_timeout" in inspect.signature(LaunchConfig).parameters:  # not in torch 2.11
        options["shutdown_timeout"] = SHUTDOWN_S
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend=BACKEND,
        rdzv_endpoint=address,
        rdzv_configs={"timeout": START_S},
        local_addr=address,
        max_restarts=0,
        monitor_interval=0.05,
        start_method=start_method(),
        **options,
    )


def _rank_main(payload: bytes, threads: int, folder: Folder, environment: Environment) -> Any:
    """The main function of a started rank. Ctrl-C and the launcher's signals end it at once, wherever it waits."""
    end_with_launcher()
    environment.enter()
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
    """Raised by a rank whose error has been reported."""


def _end_soon() -> None:
    """End this process soon even if a backend's threads or a destructor hang: the launcher waits for its end."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SHUTDOWN_S)


def _as_rank_of_another_launcher(entry: Callable[..., Result], args: Sequence[Any]) -> Result:
    """Run a rank that torchrun has started. Each rank tells its own error; a rank with an aftermath waits, so the cause is told first."""
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
    """Environment variables that processes read when they start. The user's own settings are left alone."""
    wanted = {"OMP_NUM_THREADS": str(threads)}
    # The process that cleans up semaphores would warn after Ctrl-C. It is started with the first rank and reads this.
    wanted["PYTHONWARNINGS"] = "ignore:resource_tracker"
    wanted[NATIVE_LOG_LEVEL] = "ERROR"  # or torch warns of addresses without names, closed connections and missing kernels
    wanted |= loopback()  # all ranks are on this host
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
    """Ranks start with Ctrl-C blocked and keep it blocked: otherwise a rank that is still starting would print a traceback.

    A thread takes Ctrl-C for the launcher and sends the launcher SIGTERM, which it passes on to the ranks. ``interrupted`` is set to tell
    Ctrl-C from other signals. ``sigtimedwait`` polls with a timeout of 0: with a longer one, CPython reports a signal that never came if
    the process was stopped (Ctrl-Z) and continued after the timeout.
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

    resource_tracker.ensure_running()  # if it were started with the first rank, it would unblock what is blocked here
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
    """``positions``: rank -> where it was when the time limit ended the ranks; None if it has not."""

    positions: Mapping[int, str] | None = None


@contextmanager
def _time_limit(limit_s: float, late: _Late, folder: Folder) -> Iterator[None]:
    """After the time limit, ask the ranks where they are, then end the launcher by SIGTERM, which it passes on to the ranks."""

    done = threading.Event()

    def end() -> None:
        positions = folder.ask()
        if not done.is_set():  # asking takes a while: the ranks may have finished
            late.positions = positions
            os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(max(0.0, limit_s), end) if limit_s < inf else None
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
    """The launcher leaves logs and error files among temporary files: give it a folder that is removed afterwards."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="soap-run-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


@contextmanager
def _signals_end_ranks() -> Iterator[None]:
    """Signals raise SignalException, so that torch's launcher ends the ranks; but not while it is starting them.

    If a start is interrupted, that rank prints a traceback, and ranks that the launcher has not noted yet keep running. So a signal that
    comes then is held back and sent again a little later, by a thread. Nothing is done outside of the main thread: it alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    later: SimpleQueue[int | None] = SimpleQueue()  # its put is reentrant: safe in a signal handler
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
    """Whether torch's launcher is starting ranks just now, and has not noted all of them."""
    while frame is not None and frame.f_code is not _STARTING:
        frame = frame.f_back
    return frame is not None
