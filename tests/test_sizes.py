"""No file and no function grows beyond what can be read at once, read from the source; each exception says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import statements

ROOT = Path(__file__).parent.parent
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 70, 12

EXCEPTIONS: dict[str, str] = {}
"""A file, or a function of it -> why it may be larger."""

ROOMS = ("soap", "tests", "benchmarks", "release")
FILES = sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def too_large(file: str, text: str) -> Iterator[tuple[str, str]]:
    """What of a file is beyond the limits: (the file, or a function of it, and by what)."""
    lines = text.count("\n")
    if lines > MAX_LINES:
        yield file, f"{lines} lines; expected at most {MAX_LINES}: split it by reason to change"
    for node in statements(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines, parameters = (node.end_lineno or node.lineno) - node.lineno + 1, parameter_count(node)
            if lines > MAX_FUNCTION_LINES or parameters > MAX_PARAMETERS:
                limits = f"expected at most {MAX_FUNCTION_LINES} and {MAX_PARAMETERS}"
                yield f"{file}::{node.name}", f"{lines} lines, {parameters} parameters; {limits}"


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without ``self`` and ``cls``; ``*args`` and ``**kwargs`` are one each."""
    own = function.args
    names = [argument.arg for argument in (*own.posonlyargs, *own.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(own.kwonlyargs) + (own.vararg is not None) + (own.kwarg is not None)


def found_in(file: str) -> dict[str, str]:
    return dict(too_large(file, (ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.slow
def test_nothing_is_too_large_without_a_reason() -> None:
    assert {what: size for file in FILES for what, size in found_in(file).items() if what not in EXCEPTIONS} == {}


def test_exceptions_have_a_reason_and_are_still_needed() -> None:
    for what, reason in EXCEPTIONS.items():
        file = what.partition("::")[0]
        assert reason and file in FILES and what in found_in(file), f"{what} is within the limits, or gone: take it out of the table"


def test_few_modules_stand_on_the_ground_floor() -> None:
    assert len(list((ROOT / "soap").glob("*.py"))) <= 9


def test_what_is_counted() -> None:
    assert dict(too_large("a.py", "x = 1\n" * 600)) == {}
    assert list(dict(too_large("a.py", "x = 1\n" * 601))) == ["a.py"]
    twelve = ", ".join(f"p{i}" for i in range(11))
    assert dict(too_large("a.py", f"class A:\n    def f(self, {twelve}, *, k): ...\n")) == {}
    assert list(dict(too_large("a.py", f"class A:\n    def f(self, {twelve}, *args, k): ...\n"))) == ["a.py::f"]
    assert list(dict(too_large("a.py", f"async def f(self, {twelve}, /, k, **rest): ...\n"))) == ["a.py::f"]
    assert dict(too_large("a.py", "def f():\n" + "    x = 1\n" * 69)) == {}
    assert list(dict(too_large("a.py", "def f():\n" + "    x = 1\n" * 70))) == ["a.py::f"]
    for deep in ("try:\n    x = 1\nexcept E:\n    pass\nelse:\n    {}", "match x:\n  case 1:\n    {}", "class A:\n  if x:\n    {}"):
        assert list(dict(too_large("a.py", deep.format(f"def f({twelve}, p11, p12): ...\n")))) == ["a.py::f"]
