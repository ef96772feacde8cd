"""Compiling in a second process: the right functions for the right types, by one process each, which ends with the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from numba import typeof

from soap.api import ahead
from soap.api.slow_functions import slow_functions
from soap.measure.this_machine import cpu_cores
from soap.profiles.roofline import RooflineCosts
from soap.simulator.compiled.claims import claimed
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from tests.graph_builder import mlp
from tests.machine_code import compile_all, functions
from tests.strategies import CPU, cluster

LONGEST_S = 60


def test_arguments_have_the_types_that_a_search_passes() -> None:
    compile_all()
    graph, topology = mlp(), cluster([2, 2], CPU)
    strategy, asked = data_parallel(graph, topology), IncrementalSimulator(Simulator(graph, topology, RooflineCosts(topology)))
    asked.makespan_ns(strategy)
    asked.overflow_bytes(strategy)
    entries = set(map(id, functions().values()))
    for function, arguments in slow_functions():
        assert id(function) in entries
        assert function.signatures == [tuple(typeof(argument) for argument in arguments)], function.py_func.__name__


@pytest.mark.slow
def test_what_a_search_calls_last_comes_first() -> None:
    program = (
        "import soap; from soap.api import ahead; from soap.api.slow_functions import SLOW; ahead.FEWEST_CORES = 10**6; "
        "from soap.simulator.compiled import jit; compile = jit._Entry.compile; "
        "jit._Entry.compile = lambda self, kinds: print(self.py_func.__name__) or compile(self, kinds); "
        "soap.find('zoo:rnnlm:tiny', 'p100-4x4', soap.SearchOptions(budget=1000)); print(*(own.py_func.__name__ for own in SLOW))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONGEST_S, check=True)
    *called, slow = done.stdout.splitlines()
    assert list(dict.fromkeys(name for name in called if name in slow.split())) == slow.split()[::-1]


def test_a_claim_excludes_others_until_it_is_given_back(tmp_path: Path) -> None:
    path = str(tmp_path / "claim")
    with claimed(path) as first:
        assert first
        with claimed(path, wait=False) as second:
            assert not second
    with claimed(path, wait=False) as third:
        assert third


def test_without_a_place_for_claims_everybody_has_them(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere" / "claim")
    with claimed(path) as first, claimed(path, wait=False) as second:
        assert first
        assert second


def test_what_is_on_disk_is_loaded_by_a_thread() -> None:
    compile_all()
    with ahead.compiling():
        assert not ahead._running
        ahead.begin()  # one is enough
        (thread,) = ahead._loading or [None]
        assert thread is not None or cpu_cores() < ahead.FEWEST_CORES
    assert not ahead._loading and (thread is None or not thread.is_alive())


LOADS = """
from soap.api import ahead, slow_functions
ahead.FEWEST_CORES = 1
assert ahead.all_on_disk()
assert not any(function.signatures for function in slow_functions.SLOW)
with ahead.compiling():
    pass
print([len(function.signatures) for function in slow_functions.SLOW], [sum(own.stats.cache_misses.values()) for own in slow_functions.SLOW])
"""


def test_all_is_loaded_when_the_thread_has_ended() -> None:
    compile_all()
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=LONGEST_S, check=True)
    assert (done.stdout, done.stderr) == ("[1, 1, 1, 1] [0, 0, 0, 0]\n", "")


@pytest.mark.slow
def test_the_process_ends_by_itself_or_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "all_on_disk", lambda: False)
    monkeypatch.setattr(ahead, "FEWEST_CORES", 1)
    ahead.begin()
    (child,) = ahead._running
    ahead.begin()  # one is enough
    assert ahead._running == [child]
    assert child.wait(LONGEST_S) == 0
    ahead.end()
    with ahead.compiling():
        (child,) = ahead._running
        assert child.poll() is None
    assert child.poll() is not None
    assert not ahead._running


@pytest.mark.slow
def test_the_process_ends_when_the_command_has_ended() -> None:
    waiting = "import time; from threading import Thread; from soap.api import ahead; Thread(target=ahead._end_with_parent).start(); "
    command = [sys.executable, "-c", f"{waiting} time.sleep(600)"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=LONGEST_S, check=False).returncode == 0
