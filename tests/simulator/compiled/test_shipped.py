"""Machine code that the package brings along: read without compiling where it fits, and as if it was not there where anything differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np
import pytest
from numba.core import config

from soap.errors import SoapError
from soap.simulator.compiled import shipped, stamps
from soap.simulator.compiled.communication import fill_table
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.jit import entry, is_compiled
from soap.simulator.compiled.shipping import ENVIRONMENT, ship
from soap.simulator.compiled.state import Lists
from soap.simulator.compiled.task_keys import FORWARD, task_key

LONGEST_S = 120
KEY = (FORWARD, 3, 1, 4, 1, 5)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shipped._is_like(shipped.PROCESSOR, shipped.FEATURES), reason="this processor is of another kind"),
]

COMPILE = """
import sys
from pathlib import Path
import numpy as np
from soap.simulator.compiled.communication import fill_table
from soap.simulator.compiled.lists import GrowingLists
from soap.simulator.compiled.shipping import ship
from soap.simulator.compiled.task_keys import task_key
GrowingLists().arrays()  # compiles nothing: it is empty
lists = GrowingLists()
lists.add([1, 2])
lists.arrays()
task_key(*map(int, sys.argv[2:]))
ship([task_key, fill_table], Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small entries, compiled by another process for the processor that is shipped for."""
    folder, kept = tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("kept")
    environment = {**os.environ, **ENVIRONMENT, "NUMBA_CACHE_DIR": str(kept)}
    command = [sys.executable, "-c", COMPILE, str(folder), *map(str, KEY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder for machine code, empty."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def brought(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``made``, as what the package brings along."""
    folder = tmp_path / "machine_code"
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(shipped, "FOLDER", folder)
    shipped._functions.cache_clear()
    monkeypatch.setattr(stamps, "stamp", stamps.stamp.__wrapped__)
    yield folder  # type: ignore[misc]
    shipped._functions.cache_clear()


def compilations(function: Callable[..., Any] = task_key) -> int:
    """How often a new process with this package would compile an entry; what it computes is compared with the usual machine code."""
    own: Any = entry(function.py_func)  # type: ignore[attr-defined]
    assert own(*KEY) == task_key(*KEY)
    hits, misses = (sum(own.stats._asdict()[name].values()) for name in ("cache_hits", "cache_misses"))
    assert hits + misses == 1
    return misses


def kept_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.nbc")]


def test_what_is_shipped_is_not_compiled(brought: Path, nothing_kept: Path) -> None:
    own: Any = entry(task_key.py_func)  # type: ignore[attr-defined]
    assert is_compiled(own) and compilations() == 0
    assert kept_files(nothing_kept) == []


def test_structures_are_found_by_all_of_their_fields(brought: Path, nothing_kept: Path) -> None:
    lists = Lists(np.array([0, 2], np.int64), np.array([1, 2], np.int32), np.full(64, -1, np.int32), np.zeros(4, np.int32))
    usual = lists._replace(table=lists.table.copy())
    fill_table(handle(usual), 0, 1)
    own: Any = entry(fill_table.py_func)  # type: ignore[attr-defined]
    own(handle(lists), 0, 1)
    assert sum(own.stats.cache_misses.values()) == 0
    assert lists.table.tolist() == usual.table.tolist() and sorted(set(lists.table.tolist())) == [-1, 0]
    other: Any = entry(fill_table.py_func)  # type: ignore[attr-defined]
    other(handle(lists._replace(item=lists.item.astype(np.int64))), 0, 1)
    assert sum(other.stats.cache_misses.values()) == 1


def test_without_it_an_entry_is_compiled_and_kept(nothing_kept: Path) -> None:
    assert compilations() == 1
    assert len(kept_files(nothing_kept)) == 1
    assert compilations() == 0


def lack_a_feature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(shipped.FEATURES, True) | {"fma": False})


def name_another_processor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(config, "CPU_NAME", "x86-64")


def change_a_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stamps, "_sources", lambda: b"changed")


def change_a_constant(patch: pytest.MonkeyPatch) -> None:
    used = stamps._used
    patch.setattr(stamps, "_used", lambda function: ((*used(function)[0], ("MORE", 1)), used(function)[1]))


def install_another_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llvmlite, "__version__", "0.0.1")


@pytest.mark.parametrize(
    "change", [lack_a_feature, name_another_processor, change_a_source, change_a_constant, install_another_compiler]
)
def test_what_was_made_for_another_machine_or_of_other_sources_is_left_alone(
    change: Callable[[pytest.MonkeyPatch], None], brought: Path, nothing_kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compilations() == 0
    shipped._functions.cache_clear()
    change(monkeypatch)
    assert compilations() == 1
    assert len(kept_files(nothing_kept)) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_files_that_are_damaged_or_gone_are_left_alone(brought: Path, nothing_kept: Path) -> None:
    (path,) = brought.glob("*.task_key-0.bin")
    cut(path)
    assert compilations() == 1
    path.unlink()
    assert compilations() == 0  # kept meanwhile
    cut(brought / shipped.INDEX)
    cut(brought / shipped.INDEX)
    shipped._functions.cache_clear()
    own: Any = entry(fill_table.py_func)  # type: ignore[attr-defined]
    assert not is_compiled(own)


def test_where_nothing_can_be_kept_what_is_shipped_is_read(
    brought: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "soap.simulator.compiled.kept._Nowhere")
    monkeypatch.chdir(tmp_path)
    assert compilations() == 0
    (brought / shipped.INDEX).unlink()
    shipped._functions.cache_clear()
    assert compilations() == 1
    assert compilations() == 1
    assert kept_files(tmp_path) == []


def test_it_has_entries_without_their_sources(made: Path) -> None:
    text = (made / shipped.INDEX).read_text(encoding="utf-8")
    assert set(json.loads(text)["functions"]) == {
        "soap.simulator.compiled.task_keys.task_key",
        "soap.simulator.compiled.communication.fill_table",
    }
    assert str(Path(shipped.__file__).parents[2]) not in text  # no place of this machine
    for path in made.glob("*.bin"):
        assert b"return " not in path.read_bytes(), path.name  # the listing of types has all lines of the function


def test_only_what_is_compiled_for_that_processor_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SoapError, match=r"^processor None with features None: expected the environment NUMBA_CPU_NAME=x86-64-v3"):
        ship([task_key], tmp_path)
    monkeypatch.setattr(config, "CPU_NAME", shipped.PROCESSOR)
    monkeypatch.setattr(config, "CPU_FEATURES", "")
    with pytest.raises(SoapError, match="task_key has no machine code on disk; expected that it is compiled first"):
        ship([entry(task_key.py_func)], tmp_path)  # type: ignore[attr-defined, list-item]
