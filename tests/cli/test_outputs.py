"""Commands write over nothing but what they wrote themselves. Which outputs there are is read from the commands' own parsers."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import soap
from soap import outputs
from soap.cli import checkpoints, command, export_plan, profile, report, simulate
from soap.cli.command import Parser
from soap.exported_plans.named import TARGETS
from soap.profiles.exchange import export_profiles
from soap.profiles.store import Store
from soap.runtime.training_options import StepMetrics
from soap.schedules import csv_file
from soap.schedules.named import parse
from soap.search.plot import picture
from tests.cli.refusals import assert_refused

ROOT = Path(__file__).parents[2]
Main = Callable[[list[str]], int]

READ = {
    "model", "cluster", "strategy", "first", "second", "predicted", "measured", "check", "beside", "source", "spec", "inputs", "resume",
    "weights", "eval_model", "alpha_from", "planned", "what_decides", "file", "spare_plans", "on",
}  # fmt: skip
"""Arguments that name what is read: a file, a folder, or something that has a name."""

NO_PATHS = {"GLOB", "KIND", "FIELD", "ADDRESS", "NAMES"}
"""What texts that are no paths are called."""


def commands() -> Iterator[tuple[str, list[str], Parser, Main]]:
    """Each command's name, the words it begins with, its parser and its entry point."""
    for name, place in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items():
        module = importlib.import_module(f"soap.cli.{place.partition(':')[2]}")
        yield name, [], module.make_parser(), module.main
    for verb, (make, _) in profile.VERBS.items():
        yield f"soap-profile {verb}", [verb], make(), profile.main


COMMANDS = {name: (words, parser, main) for name, words, parser, main in commands()}
OUTPUTS = [(name, action.dest) for name, (_, parser, _) in COMMANDS.items() for action in parser.outputs]


def called(name: str, dest: str, path: str) -> list[str]:
    """The command with this output and nothing that is there."""
    words, parser, _ = COMMANDS[name]
    found, last = list(words), []
    for action in parser._actions:
        if action.dest == dest:
            value = path
        elif action.required or (not action.option_strings and action.nargs != "?"):
            value = str(next(iter(action.choices))) if action.choices else "none"
        else:
            continue
        if action.option_strings:
            found += [action.option_strings[-1], value]
        else:
            last.append(value)
    group = next((group for group in parser._mutually_exclusive_groups if group.required), None)
    if group is not None:
        found += [group._group_actions[0].option_strings[-1], "none"]
    return [*found, *last]


def test_there_is_every_kind_of_output() -> None:
    assert len(COMMANDS) >= 16
    kinds = {kind.name for _, parser, _ in COMMANDS.values() for kind in parser.outputs.values()}
    assert kinds == {kind.name for kind in outputs.KINDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_names_a_file_is_read_or_written(name: str) -> None:
    """A new option whose value is text, as a path is, is put down as an output, or here as something that is read."""
    _, parser, _ = COMMANDS[name]
    for action in parser._actions:
        text = action.type is None and not action.choices and action.nargs != 0 and action.metavar not in NO_PATHS
        named = isinstance(action.metavar, str) and action.metavar.partition(".")[0] in ("FILE", "DIR", "OUT")
        if (text or named) and action not in parser.outputs:
            assert action.dest in READ, f"{name} {action.dest}: expected add_output, or that it is read"


@pytest.mark.parametrize(("name", "dest"), OUTPUTS)
def test_something_else_is_left_alone(
    name: str, dest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, parser, main = COMMANDS[name]
    kind = next(kind for action, kind in parser.outputs.items() if action.dest == dest)
    ours, link, text = tmp_path / "mymodel.py", tmp_path / "link", "import torch\n"
    ours.write_text(text)
    link.symlink_to(ours)
    code = parser.failure_code or 2
    for path in ("mymodel.py", "link"):
        expected = ("expected a folder",) if kind.is_folder else (f"not {kind.name}",)
        seems = "Python code" if path.endswith(".py") else "a text"
        assert_refused(capsys, main, called(name, dest, path), code, f"{path!r} is there and seems to be {seems}", *expected)
    assert ours.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mymodel.py"]


@pytest.mark.parametrize(("name", "dest"), OUTPUTS)
def test_what_may_be_written_over(name: str, dest: str, tmp_path: Path) -> None:
    words, parser, _ = COMMANDS[name]
    kind = next(kind for action, kind in parser.outputs.items() if action.dest == dest)
    empty = tmp_path / "empty"
    if kind.is_folder:
        empty.mkdir()
    else:
        empty.touch()
    for path in (str(empty), str(tmp_path / "new"), *([] if kind.is_folder else [os.devnull])):
        command.check_outputs(parser, parser.parse_args(called(name, dest, path)[len(words) :]))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_an_output_may_not_be_an_input_or_another_output(tmp_path: Path) -> None:
    read, link, new = tmp_path / "s.json", tmp_path / "link.json", str(tmp_path / "o.json")
    read.write_text('{"format": "soap-strategy"}')
    link.symlink_to(read)
    _, parser, _ = COMMANDS["soap-simulate"]
    begun = ["zoo:gpt", "--strategy", str(read)]
    for output in (read, link, tmp_path / "no" / ".." / "s.json"):
        with pytest.raises(command.UsageError, match=r"--output .* is the same file as --strategy"):
            command.check_outputs(parser, parser.parse_args([*begun, "--output", str(output)]))
    with pytest.raises(command.UsageError, match=r"is the same file as --(output|timeline)"):
        command.check_outputs(parser, parser.parse_args([*begun, "--output", new, "--timeline", new]))
    command.check_outputs(parser, parser.parse_args([*begun, "--output", new, "--timeline", str(tmp_path / "t.json")]))
    with pytest.raises(command.UsageError, match=r"--timeline .* is the same file as --beside"):
        command.check_outputs(parser, parser.parse_args(["zoo:gpt", "--builtin", "zero1", "--beside", str(read), "--timeline", str(read)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soap-search", "soap-schedule"])
def test_where_the_command_prints_to_is_no_output(name: str, tmp_path: Path) -> None:
    """``-o FILE > FILE``, and ``-o /dev/stdout > FILE``: renaming the output to FILE would lose what is printed."""
    module = {"soap-search": "search", "soap-schedule": "schedule"}[name]
    begun = [sys.executable, "-m", f"soap.cli.{module}"]
    options = ["zoo:rnnlm:tiny", "-o"] if module == "search" else ["1f1b", "--stages", "2", "--microbatches", "2", "--csv"]
    for path in ("out", "/dev/stdout"):
        with (tmp_path / "out").open("wb") as stream:
            done = subprocess.run([*begun, *options, path], cwd=tmp_path, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 2
        assert f"{path!r} is where this command prints to" in done.stderr
        assert done.stderr.count("\n") == 1
    done = subprocess.run([*begun, *options, "/dev/stdout"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "it is no ordinary file" in done.stderr


def write_own(folder: Path) -> dict[str, list[str]]:
    """Write files of each kind by what writes them. Returns the kinds' names with those of the files."""
    from matplotlib.figure import Figure

    rnnlm, gpt = ["zoo:rnnlm:tiny", "--cluster", "v100-4"], ["zoo:gpt:tiny", "--cluster", "v100-4"]
    named = ["--builtin", "zero1"]
    assert simulate.main([*rnnlm, *named, "-o", str(folder / "s.json"), "--timeline", str(folder / "t.json")]) == 0
    assert report.main([*rnnlm, *named, "-o", str(folder / "r.html"), "--on", "v100-4"]) == 0
    for target in TARGETS:
        assert export_plan.main([*gpt, *named, "--to", target.name, "-o", str(folder / f"plan{target.suffix}")]) == 0
    formats = ("png", "svg", "pdf")
    for suffix in formats:
        (folder / f"p.{suffix}").write_bytes(picture(Figure(figsize=(1, 1)), f"p.{suffix}"))
    checkpoints.Lines(str(folder / "log"), after=0)(StepMetrics(1, 2.5, 0.1))
    soap.export(Module(), (torch.ones(3),), path=folder / "m.pt2", verify=False)
    names = ("1f1b", "zb-h1", "interleaved:2")
    for number, name in enumerate(names):
        csv_file.dump(folder / f"{number}.csv", parse(name).table(2, 4))
    export_profiles(Store(folder / "store"), folder / "profile.json")
    return {
        "a strategy file": ["s.json"],
        "a timeline of ours": ["t.json"],
        "a report of ours": ["r.html"],
        "a plan for another trainer": [f"plan{target.suffix}" for target in TARGETS],
        "a picture of ours": [f"p.{suffix}" for suffix in formats],
        "a log of steps": ["log"],
        "a model that soap-export wrote": ["m.pt2"],
        "a schedule's table": [f"{number}.csv" for number in range(len(names))],
        "a file of measurements": ["profile.json"],
    }


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def write_foreign(folder: Path) -> dict[str, str]:
    """Write files of others that are like ours, of each kind. Returns what they are said to be."""
    from matplotlib.figure import Figure

    texts = {
        "config.json": ('{"model": {"layers": 3}}', "another JSON file"),
        "trace.json": ('{"schemaVersion": 1, "traceEvents": [{"name": "process_name", "ph": "M"}]}', "another JSON file"),
        "losses.jsonl": ('{"step": 1, "loss": 2.5}\n', "another JSON file"),
        "ds.json": ('{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}', "another JSON file"),
        "page.html": ("<!DOCTYPE html><title>SOAP</title>", "a page of HTML"),
        "test.py": ('own = {"format": "soap-strategy"}\n', "Python code"),
        "run.sh": ("#!/bin/bash\n", "a script"),
        "data.csv": ("a,b\n1,2\n", "a table"),
        "numbers.csv": ("1,2\n", "a table"),
        "notes": ("nearest to a plan of SOAP\n", "a text"),
        "latin": (b"\xe4\xf6\xfc and \xff\n", "binary data"),
    }
    for name, (text, _) in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for suffix in ("png", "svg", "pdf"):
        Figure(figsize=(1, 1)).savefig(folder / f"own.{suffix}")
    torch.save({"w": torch.ones(2)}, folder / "weights.pt")
    exported = torch.export.export(Module(), (torch.ones(3),))
    torch.export.save(exported, folder / "own.pt2")
    np.save(folder / "array.npy", np.ones(2))
    sqlite3.connect(folder / "base.db").execute("create table t (a)").connection.close()
    said = {name: seems for name, (_, seems) in texts.items()} | dict.fromkeys(("weights.pt", "own.pt2"), "a zip archive")
    said |= {"array.npy": "a NumPy array", "base.db": "an SQLite database"}
    return said | {"own.png": "a picture", "own.svg": "a picture", "own.pdf": "a PDF file"}


@pytest.mark.slow
def test_each_kind_is_told_from_all_others(tmp_path: Path) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    own.mkdir()
    foreign.mkdir()
    written = write_own(own)
    kinds = [kind for kind in outputs.KINDS if not kind.is_folder]
    assert written.keys() == {kind.name for kind in kinds}
    (own / "sorted.json").write_text(json.dumps(json.loads((own / "s.json").read_text()), sort_keys=True))  # as jq -S writes it
    written["a strategy file"].append("sorted.json")
    for name, paths in written.items():
        for path in (own / one for one in paths):
            assert [kind.name for kind in kinds if kind.is_own(path)] == [name], path
            assert outputs.seems(path) == name
    said = write_foreign(foreign)
    for path in sorted(foreign.iterdir()):
        assert not [kind.name for kind in kinds if kind.is_own(path)], path
        assert outputs.seems(path) == said.pop(path.name)
    assert not said
    spare = tmp_path / "spare"
    spare.mkdir()
    (own / "s.json").rename(spare / "spare-1-0.json")
    outputs.check(spare, outputs.SPARE_PLANS)
    (foreign / "config.json").rename(spare / "spare-1-1.json")
    with pytest.raises(soap.SoapError, match="is there and is not a folder whose spare"):
        outputs.check(spare, outputs.SPARE_PLANS)


@pytest.mark.slow
def test_the_python_calls_write_over_nothing_else_either(tmp_path: Path) -> None:
    path = tmp_path / "mymodel.py"
    path.write_text("import torch\n")
    strategy = soap.classical("data_parallel", "zoo:rnnlm:tiny", "v100-4")
    with pytest.raises(soap.SoapError, match="seems to be Python code, not a strategy file"):
        soap.save_strategy(path, strategy, "zoo:rnnlm:tiny", "v100-4")
    with pytest.raises(soap.SoapError, match="seems to be Python code, not a model that soap-export wrote"):
        soap.export(Module(), (torch.ones(3),), path=path)
    assert path.read_text() == "import torch\n"
    soap.save_strategy(os.devnull, strategy, "zoo:rnnlm:tiny", "v100-4")  # which takes everything


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may do all
    with pytest.raises(soap.SoapError, match=r"--save '.*/a/b' cannot be made: .* is read-only"):
        outputs.check(tmp_path / "a" / "b", outputs.FOLDER, "--save")
    with pytest.raises(soap.SoapError, match="is read-only; choose another folder"):
        outputs.check(tmp_path, outputs.FOLDER, "--save")
    with pytest.raises(soap.SoapError, match="cannot be looked at: not a directory"):
        outputs.check(Path(__file__) / "a", outputs.FOLDER)
