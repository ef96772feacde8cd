"""How Python calls compiled functions: what these see of structures, what they return and raise, and when they are compiled anew."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from soap.errors import SoapError
from soap.simulator.compiled import machine_code
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.handles import blank, handle
from soap.simulator.compiled.machine_code import Library
from tests.simulator.compiled.small_library import (
    NO_ENTRY,
    NO_ROOM,
    SMALL,
    Found,
    Inner,
    Outer,
    half,
    is_even,
    look,
    look_at_arrays,
    quarter,
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", [lambda inner: inner, handle], ids=["structure", "handle"])
def test_fields_are_the_structures_own_arrays(part: Callable[[Inner], Inner]) -> None:
    cube, matrix = np.arange(24.0).reshape(2, 3, 4), np.arange(6, dtype=np.int8).reshape(3, 2)
    found = Found(np.zeros(7), np.zeros((1, 1)))
    look(handle(Outer(cube, part(Inner(np.arange(5, dtype=np.int32))), matrix)), handle(found))
    assert found.numbers.tolist() == [2, 3, 4, cube[1, 2, 3], matrix[1, 0], 5, 4]
    assert matrix[0, 1] == 9


def test_arrays_of_a_handle_are_the_structures_own() -> None:
    cube, found = np.zeros((2, 3, 4)), Found(np.zeros(1), np.zeros((2, 3)))
    matrix = np.arange(6, dtype=np.int8).reshape(2, 3)
    look_at_arrays(handle(Outer(cube, Inner(np.arange(5, dtype=np.int32)), matrix)), handle(found))
    assert found.rows.tolist() == [[0, 0, 0], [8, 9, 10]]
    assert cube[1, 0, 0] == 7


def test_structures_have_what_their_annotations_say() -> None:
    with pytest.raises(ValueError, match=r"items of Inner has 1 dimensions of int32, or is not contiguous: expected 1 of int32, contig"):
        handle(Inner(np.zeros(4, np.int32)[::2]))
    with pytest.raises(ValueError, match=r"items of Inner has 2 dimensions of int64"):
        handle(Inner(np.zeros((2, 2), np.int64)))
    made = blank(Outer)
    assert made.cube.shape == (2, 2, 2) and made.matrix.dtype == np.dtype(np.int8)
    assert made.inner.items.tolist() == [0, 0]


def test_what_they_return_and_raise() -> None:
    assert [half(3.0), is_even(3), is_even(4), quarter(12, False), quarter(12, True)] == [1.5, False, True, 3, 6]
    with pytest.raises(LookupError, match=f"^'?{NO_ENTRY}'?$"):
        quarter(0, True)
    for _ in range(2):
        with pytest.raises(MemoryError, match=f"^{NO_ROOM}$"):
            quarter(1 << 50, True)
    with pytest.raises(TypeError, match="fill can only be called by compiled code"):
        fill(np.zeros(1, np.int64), 0, 1, 2)


def test_they_are_compiled_once_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    SMALL.load()
    code, made = SMALL.path.read_bytes() if SMALL.path and SMALL.path.exists() else b"", []

    def run(command: list[str], **_: Any) -> CompletedProcess[bytes]:
        made.append(command[-1])
        return CompletedProcess(command, 0, code, b"")

    source = tmp_path / "module_of_one_function.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    for number in (1, 1, 2):
        source.write_text(f"@compiled\ndef one(): return {number}")
        library = Library(source.stem)
        library.load()
        assert library.is_made
    assert made == [source.stem] * 2
    assert len(list(tmp_path.rglob("*.o"))) == 2


def test_a_failure_to_compile_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CompletedProcess[bytes]([], 1, b"", b"numba: no\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SoapError, match=r"^the simulator cannot be compiled: numba: no$"):
        Library("tests.extent").load()


def test_of_several_processes_one_compiles(tmp_path: Path) -> None:
    path = tmp_path / "new" / "library.o"
    with machine_code._alone(path), path.with_suffix(".lock").open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with machine_code._alone(path):  # given back
        pass
    with machine_code._alone(None), machine_code._alone(Path("/proc/nowhere/library.o")):
        pass
