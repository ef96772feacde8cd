"""What messages call things: fields in Python and options in commands; and what was perhaps meant by a name that nobody has."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import soap
from soap.cli import export_plan, run, schedule, search, simulate
from soap.cli.command import OPTIONS
from soap.errors import SoapError, asked, did_you_mean, options_of
from soap.preprocessing.spec import load_spec
from soap.search.options import SearchOptions
from tests.cli.refusals import assert_refused

PACKAGE = Path(__file__).parent.parent / "soap"
MODEL, CLUSTER = "zoo:rnnlm:tiny", "p100-4x4"
COMMANDS = re.compile(r"soap-[a-z-]+ |ray start|torchrun|pip install|docker|mount |NAME=")
BOTH = re.compile(r"\(--[a-z-]+([ =][^)]*)?\)|\(imports= of soap\.load\)|soap\.export and --import|\(soap-run: ")
"""Said beside what it is in Python."""
OPTION = re.compile(r"(?<![\w-])--[a-z]")
SEARCHED = re.compile(r"(?<![\w-])--(pin|forbid|sync|budget|memory-budget|beta|confidence|seconds|import|device) ")
OF_COMMANDS = ("cli/", "emulation/", "report/", "exported_plans/megatron_lm.py")
"""Used by commands alone, or about another program's options."""


def options_named() -> Iterator[str]:
    """Texts outside of the commands that name options, and neither a command whose they are nor what they are in Python."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        if name.startswith(OF_COMMANDS) or "--" not in text:
            continue
        tree = ast.parse(text)
        apart = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # documentation
        apart |= {part for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
        for node in ast.walk(tree):
            said = ast.unparse(node) if isinstance(node, ast.Raise) else ""
            if OPTION.search(said) and not COMMANDS.search(said) and not BOTH.search(said):
                yield f"{name}:{node.lineno}: {said}"
            if isinstance(node, ast.Constant) and node not in apart and SEARCHED.search(str(node.value)):
                yield f"{name}:{node.lineno}: {node.value}"


def test_only_commands_speak_of_options() -> None:
    assert not list(options_named())


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SearchOptions(budget=0), "budget 0"),
        (lambda: SearchOptions(beta=-1), "beta -1"),
        (lambda: SearchOptions(confidence=2), "confidence 2"),
        (lambda: SearchOptions(seconds=-1), "seconds -1"),
        (lambda: SearchOptions(memory_budget="120%"), "memory_budget '120%'"),
        (lambda: soap.find(MODEL, CLUSTER, SearchOptions(pins={"no*": "sample:2"})), r"pins no\*=sample:2"),
        (lambda: soap.find(MODEL, CLUSTER, SearchOptions(forbidden={"*": ""})), r"forbidden \*="),
        (lambda: soap.load("nothing.pt2", imports=["nosuch"]), "imports nosuch"),
    ],
)
def test_python_is_told_of_fields_and_a_command_of_options(make: Callable[[], object], field: str) -> None:
    with pytest.raises(SoapError, match=f"^{field}"):
        make()
    name, value = field.split(" ", 1)
    with pytest.raises(SoapError, match=f"^{OPTIONS[name]} {value}"), options_of(OPTIONS):
        make()
    assert asked(name) == name


def test_a_command_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, search.main, [MODEL, "--cluster", CLUSTER, "-o", "/dev/null", "--pin", "no*=sample:2"], 5, "--pin no*=sample:2")


def test_what_is_nearest() -> None:
    known = ["fsdp", "zero1", "a100-40gb-8", "a100-80gb-8", "h100-8"]
    assert did_you_mean("fdsp", known) == ": did you mean 'fsdp'?"
    assert did_you_mean("a100-8", known) == ": did you mean 'a100-80gb-8'?"
    assert did_you_mean("--budgte", ["--budget", "--beta"]) == ": did you mean '--budget'?"
    assert did_you_mean("--budgte", ["--save"]) == did_you_mean("wholly else", known) == did_you_mean("x" * 10**6, known) == ""


@pytest.mark.parametrize(
    ("main", "command", "meant"),
    [
        (simulate.main, ["zoo:gptx", "--cluster", CLUSTER, "--builtin", "zero1"], "gpt"),
        (simulate.main, ["zoo:gpt:tny", "--cluster", CLUSTER, "--builtin", "zero1"], "gpt:tiny"),
        (simulate.main, [MODEL, "--cluster", "p100-4x5", "--builtin", "zero1"], "p100-4x4"),
        (simulate.main, [MODEL, "--cluster", CLUSTER, "--builtin", "fdsp"], "fsdp"),
        (simulate.main, [MODEL, "--cluster", CLUSTER, "--builtin", "fsdp+recompte"], "recompute"),
        (simulate.main, [MODEL, "--cluster", CLUSTER, "--builtn", "fsdp"], "--builtin"),
        (search.main, [MODEL, "--cluster", CLUSTER, "-o", "/dev/null", "--start", "megatorn"], "megatron"),
        (search.main, [MODEL, "--cluster", CLUSTER, "-o", "/dev/null", "--sync", "alreduce"], "allreduce"),
        (search.main, [MODEL, "--cluster", CLUSTER, "-o", "/dev/null", "--lossy", "powersdg"], "powersgd"),
        (search.main, [MODEL, "--cluster", CLUSTER, "-o", "/dev/null", "--pin", "embeding.embedding=sample:2"], "embedding.embedding"),
        (search.main, [MODEL, "--cluster", CLUSTER, "-o", "/dev/null", "--optimizer", "adamv"], "adam"),
        (export_plan.main, [MODEL, "--builtin", "zero1", "--to", "torchtitn", "-o", "/dev/null"], "torchtitan"),
        (schedule.main, ["zb-h2", "--stages", "2", "--microbatches", "2"], "zb-h1"),
        (run.main, ["none.json", "--model", MODEL, "--setps", "3"], "--steps"),
    ],
)
def test_names_that_nobody_has(
    main: Callable[[list[str]], int], command: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(command)
    except SystemExit as ending:  # argparse
        code = int(str(ending.code))
    said = capsys.readouterr().err
    assert code and said.count("\n") == 1
    assert f"did you mean {meant!r}?" in said


def test_further_names_that_nobody_has(tmp_path: Path) -> None:
    with pytest.raises(SoapError, match="did you mean 'kind'"):
        (tmp_path / "s.yaml").write_text("columns: [{name: a, kind: label, kin: string}]")
        load_spec(str(tmp_path / "s.yaml"))
    with pytest.raises(SoapError, match="did you mean 'node0/gpu0'"):
        soap.load_cluster(CLUSTER).device("node0/gpu00")
