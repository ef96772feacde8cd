"""What a change costs, counted in a small repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.change_cost import Touched, main, table, touched


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """``main`` with two files of soap and a test; ``toy`` changes one, moves one, adds one and a picture; ``main`` goes on meanwhile."""

    def git(*command: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *named, *command], cwd=tmp_path, check=True, capture_output=True)

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")

    git("init", "-b", "main")
    write("soap/a.py", "1\n2\n3\n")
    write("soap/plan/b.py", "1\n2\n")
    write("tests/c.py", "1\n")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "toy")
    write("soap/a.py", "1\nx\ny\n3\n")
    write("soap/plan/new.py", "1\n")
    write("soap/picture.png", "no code\n")
    write("tests/c.py", "2\n")
    git("mv", "soap/plan/b.py", "soap/plan/moved.py")
    git("add", ".")
    git("commit", "-m", "toy")
    git("checkout", "main")
    write("soap/other.py", "1\n")
    git("add", ".")
    git("commit", "-m", "another's")
    return tmp_path


EXPECTED = [
    Touched("soap/a.py", 2, 1),
    Touched("soap/plan/b.py", 0, 2),
    Touched("soap/plan/moved.py", 2, 0),
    Touched("soap/plan/new.py", 1, 0),
]


def test_files_that_a_branch_touches_since_it_left_the_base(repository: Path) -> None:
    assert touched("toy", root=repository) == EXPECTED
    assert touched("toy", folder="soap/plan", root=repository) == EXPECTED[1:]
    assert table(["toy"], root=repository).splitlines()[0] == "toy: 4 files of soap, 5 lines more, 3 less"


def test_a_range_is_compared_with_its_own_beginning(repository: Path) -> None:
    assert touched("main..toy", root=repository) == sorted([*EXPECTED, Touched("soap/other.py", 0, 1)])
    assert touched("toy..toy", root=repository) == []


def test_an_unknown_branch_is_told_in_one_line(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository)
    assert main(["nowhere"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "nowhere" in said and "expected branches" in said
