"""Machine code on disk is valid as long as nothing that is compiled into it changes, wherever it stands."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np
import pytest
from numba.core.extending import _Intrinsic
from numba.core.registry import CPUDispatcher

import soap
from soap.simulator.compiled import memory as compiled_memory
from soap.simulator.compiled import stamps, transit
from soap.simulator.compiled.evaluate import evaluate
from soap.simulator.compiled.syncs import memory as synchronized_memory
from tests.machine_code import functions

ROOT = Path(soap.__file__).parent


def globals_of(code: CodeType) -> Iterator[str]:
    """Names of what code takes from its module, or from Python."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_of(inner)


def test_all_that_is_compiled_in_is_hashed() -> None:
    """Compiled functions take nothing but numbers and the like, whose values are hashed, other compiled functions, which are hashed with
    their sources, intrinsics and named tuples of hashed sources, and what numpy, math and Python themselves have."""
    found = functions()
    assert {"soap.simulator.compiled.evaluate.evaluate", "soap.search.compiled.chain.advance"} <= found.keys()
    for name, function in found.items():
        python = function.py_func
        hashed = {*stamps._files(), Path(python.__code__.co_filename)}  # a file elsewhere is hashed with its own functions
        constants, called = stamps._used(function)
        for used in set(globals_of(python.__code__)):
            if used not in python.__globals__:
                assert hasattr(builtins, used), (name, used)
                continue
            value = python.__globals__[used]
            if isinstance(value, CPUDispatcher):
                assert value in called, (name, used)
            elif isinstance(value, stamps.CONSTANTS):
                assert (used, value) in constants, (name, used)
            elif isinstance(value, _Intrinsic) or (isinstance(value, type) and hasattr(value, "_fields")):
                assert Path(inspect.getfile(sys.modules[value.__module__])) in hashed, (name, used)
            elif isinstance(value, FunctionType):  # one that numba's ``overload`` implements
                assert Path(inspect.getfile(value)) in hashed, (name, used)
            else:
                assert value is np or value is math or getattr(math, used, None) is value, (name, used)


def test_what_is_called_by_what_is_called_is_hashed() -> None:
    called = {function.py_func.__name__ for function in stamps._all_called(evaluate)}
    assert {"task_key", "push", "finish_bucket", "hash_place"} <= called


@pytest.mark.parametrize(
    ("module", "name"), [(compiled_memory, "BUCKET_BYTES"), (synchronized_memory, "COPIES"), (transit, "ADDING_COPIES")]
)
def test_constants_of_other_modules_are_told_apart(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled modules import from modules that are not compiled."""
    before, of_another = stamps.stamp(compiled_memory.bound_memory), stamps.stamp(evaluate)
    monkeypatch.setattr(module, name, getattr(module, name) + 1)
    for known in (stamps.stamp, stamps._used):
        known.cache_clear()
    changed, of_another_then = stamps.stamp(compiled_memory.bound_memory), stamps.stamp(evaluate)
    monkeypatch.undo()
    for known in (stamps.stamp, stamps._used):
        known.cache_clear()
    assert changed != before == stamps.stamp(compiled_memory.bound_memory)
    assert of_another_then == of_another  # it does not ask for memory, and need not be compiled again


UNIT, OUTSIDE = "UNIT = {}\n", "from unit import UNIT\nLIMIT = 10 * UNIT\n"
INSIDE = """from outside import LIMIT
from soap.simulator.compiled.jit import compiled, entry, is_compiled

@compiled
def more(x):
    return x + LIMIT

@entry
def twice(x):
    return 2 * more(x)

print(is_compiled(twice), twice(1))
"""


@pytest.mark.slow
def test_machine_code_is_never_older_than_a_constant_that_another_module_works_out(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    (tmp_path / "inside.py").write_text(INSIDE)

    def told(unit: int) -> str:
        (tmp_path / "unit.py").write_text(UNIT.format(unit))
        command = [sys.executable, "-B", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT.parent)!r}]; import inside"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert [told(unit) for unit in (3, 3, 5, 5, 3)] == ["False 62", "True 62", "False 102", "True 102", "False 62"]


def test_who_uses_numba_s_own_cache_stands_alone() -> None:
    """That looks at a function's own file alone."""
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if any(keyword.arg == "cache" for call in calls for keyword in call.keywords if ast.unparse(call.func) in ("njit", "cfunc", "jit")):
            assert path.relative_to(ROOT).as_posix() in ("emulation/reference_kernel.py", "preprocessing/kernel.py")
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("soap")]
