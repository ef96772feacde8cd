"""What holds for all tests: no process stays behind, the user's cache stays as it is, hypothesis draws as many examples as ``extent`` says,
and suites of many cases tell at the end what they have seen.

A test tells by ``record_property("tally", [table, row, number])``; the summary has one line per row: how many, and the largest number.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from soap.files import cache_folder
from tests import made_up_machine
from tests.extent import load_profile
from tests.kept_models import CACHE, COLLECTED, keep_zoo_models

if TYPE_CHECKING:
    from tests.runtime.pool import Pool

MARK = "SOAP_TESTS_OF"
PATIENCE_S = 10.0
QUICK_ON_RANKS = ("test_exactness.py", "test_exchanges.py", "test_training.py", "test_trainer.py")


def pytest_configure(config: pytest.Config) -> None:
    """What is kept of this machine for its user (measured rates and profiles) is neither read nor changed: tests have a cache folder of
    their own, which all their processes share. Machine code alone is the user's: it takes minutes to make."""
    load_profile()
    gc.disable()  # until all tests are collected, a third of which it takes otherwise
    if CACHE not in os.environ:
        kept = cache_folder()
        os.environ[CACHE] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="soap-tests-")
        if kept is not None:
            (kept / "machine_code").mkdir(parents=True, exist_ok=True)
            Path(os.environ[CACHE], "soap").mkdir()
            Path(os.environ[CACHE], "soap", "machine_code").symlink_to(kept / "machine_code")
        made_up_machine.keep()
        config.add_cleanup(forget_cache)
    # Tests keep both cores busy while one of them measures this machine; commands that are started say so otherwise. The first filter is
    # what a launcher sets for its ranks.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker,ignore:other work kept")


@pytest.hookimpl(tryfirst=True)  # before marks are asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Four ranks take some seconds of both cores to start, so only few of the tests that have them are quick. Files with such tests come
    first: of two workers one begins with them, and the other, which takes from the end of what is left, does without ranks of its own."""
    on_ranks = [item for item in items if "four" in getattr(item, "fixturenames", ())]
    for item in on_ranks:
        if item.path.name not in QUICK_ON_RANKS:
            item.add_marker(pytest.mark.slow)
    files = {item.path for item in on_ranks}
    items.sort(key=lambda item: item.path not in files)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector of garbage need not look through them again and again."""
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    gc.enable()


def forget_cache() -> None:
    shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def interrupts_reach_processes() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and so would be all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def models_are_read_once() -> None:
    """See ``keep_zoo_models``."""
    keep_zoo_models()


@pytest.fixture(autouse=True)
def products_are_as_before() -> Iterator[None]:
    """Reading a model with ``--matmul-precision`` sets it for the process, as is said; other tests are not to see that."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module", autouse=True)
def no_file_begins_in_a_cluster() -> None:
    """A process is in one Ray cluster at most: what a file of tests has joined it leaves, whatever comes behind it in this process."""
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        pytest.fail("another file's tests have left this process in a Ray cluster; expected a fixture that leaves it (elastic/conftest)")


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four ranks, which keep the models that they have traced."""
    from tests.runtime.pool import Pool  # imports torch, which half of the tests do without

    pool = Pool(4, timeout_s=280)  # half of it for ranks that wait while another one's first search compiles the simulator
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool(four: Pool) -> Pool:
    """Three of them."""
    from tests.runtime.pool import FirstOf

    return FirstOf(four, 3)


@pytest.fixture
def kept_ranks(four: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands launch runs on ranks that are there already, where neither how they start and end nor what they say is tested."""
    from tests.runtime.kept import launch_on

    monkeypatch.setattr("soap.runtime.comm.launch.launch", launch_on(four))


@pytest.fixture(scope="session", autouse=True)
def no_process_stays_behind() -> Iterator[None]:
    """Every process that tests start, and theirs, inherit a mark in their environment: Linux shows who has it."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield
    del os.environ[MARK]
    if (server := sys.modules.get("multiprocessing.forkserver")) is not None:
        server._forkserver._stop()  # of ``tests.runtime.pool``; it would end with this process
    end = time.monotonic() + PATIENCE_S
    while left := marked(mark):
        if time.monotonic() > end:
            pytest.fail(f"{len(left)} processes stay behind, among them {left[0]!r}")
        time.sleep(0.1)


def marked(mark: str) -> list[str]:
    """Command lines of the processes with this mark, but for the tracker that multiprocessing keeps until its process ends."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # another user's, or gone meanwhile
            continue
    return [line for line in found if "multiprocessing.resource_tracker" not in line]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    tables: dict[str, dict[str, list[float]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "tally" and report.when == "call":
                    tables.setdefault(value[0], {}).setdefault(value[1], []).append(value[2])
    for table, rows in sorted(tables.items()):
        terminalreporter.section(table)
        for row, numbers in sorted(rows.items()):
            terminalreporter.write_line(f"{row:32} {len(numbers):5}   largest {max(numbers):.1e}")
        terminalreporter.write_line(f"{'all':32} {sum(map(len, rows.values())):5}")
