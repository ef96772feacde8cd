"""Machine code on disk, used by Python and by compiled code."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from soap.simulator.compiled.events import simulate_all
from soap.simulator.compiled.jit import file_of, is_entry
from soap.simulator.compiled.kept import MachineCode
from tests.machine_code import compile_all, functions

ROOT = Path(__file__).parents[3]
FUNCTIONS = """
from soap.simulator.compiled.jit import compiled, entry

@compiled
def doubled(number):
    return 2 * number

@entry
def inner(number: int) -> int:
    return doubled(number) + 1

@entry
def outer(number: int) -> int:
    return doubled(inner(number))
"""
CALLS = """
import json, sys
from numba.core import event
import functions
compiled = []
class Listener(event.Listener):
    def on_start(self, event): compiled.append(event.data["dispatcher"].py_func.__qualname__)
    def on_end(self, event): pass
event.register("numba:compile", Listener())
found = [getattr(functions, name)(20) for name in sys.argv[1:]]
print(json.dumps([found, compiled, "numba.np.linalg" in sys.modules]))
"""


def test_what_is_loaded_is_called_by_python_and_by_compiled_code(tmp_path: Path) -> None:
    """Alone, and by an entry that is compiled later, or loaded, too. What only the compiler needs is imported where it compiles."""
    (tmp_path / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))), "NUMBA_CACHE_DIR": str(tmp_path / "kept")}

    def calls(*names: str) -> tuple[list[int], list[str]]:
        done = subprocess.run([sys.executable, "-c", CALLS, *names], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found, compiled, imported = json.loads(done.stdout)
        assert imported == bool(compiled)
        return found, compiled

    assert calls("inner") == ([41], ["inner", "doubled"])
    assert calls("inner") == ([41], [])
    assert calls("inner", "outer") == ([41, 82], ["outer", "doubled"])
    assert calls("outer", "inner") == ([82, 41], [])


def test_machine_code_calls_nothing_that_the_compiler_brings_along() -> None:
    """numba makes the functions that count references known to LLVM when it is about to compile: code on disk is loaded without that."""
    compile_all()
    paths = [Path(path) for own in functions().values() if is_entry(own) for path in file_of(own).versions.values()]
    assert len(paths) > 20
    assert [path.name for path in paths if b"NRT_" in path.read_bytes()] == []


def test_machine_code_for_types_that_are_gone_is_made_anew(tmp_path: Path) -> None:
    kept = MachineCode(simulate_all, str(tmp_path), "simulate_all")
    assert kept.versions == {}
    kept.save("key", "code")
    assert list(kept.versions) == ["key"]
    index = next(tmp_path.glob("*.nbi"))
    version = pickle.loads(index.read_bytes())
    index.write_bytes(pickle.dumps(version) + b"csoap.simulator.gone\nArrays\n.")
    assert kept.versions == {}
