"""How many files of ``soap/`` does a change touch? For changes that are made on branches to learn what a feature costs, and not merged.

    python -m benchmarks.change_cost toy-method toy-field toy-action
    python -m benchmarks.change_cost main..toy-method --folder soap/simulator

A branch is compared with where it left ``--base``, a range ``A..B`` with its own beginning. Files that were renamed count twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Touched(NamedTuple):
    """A file that a change touches, and how many lines it adds and takes out there."""

    path: str
    added: int
    removed: int


def touched(change: str, *, base: str = "main", folder: str = "soap", root: Path = Path()) -> list[Touched]:
    """The Python files of a folder that a branch or range changes, by path. ValueError if git does not know it."""
    first, dots, last = change.partition("..")
    if not dots:
        first, last = _git(root, "merge-base", base, change).strip(), change
    lines = _git(root, "diff", "--numstat", "--no-renames", "-z", first, last, "--", folder).split("\0")
    found = [line.split("\t") for line in lines if line]
    return [Touched(path, int(added), int(removed)) for added, removed, path in found if path.endswith(".py")]


def _git(root: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or "it said nothing"
        raise ValueError(f"git {' '.join(command)}: {said[:200]}; expected branches, or a range A..B, of this repository")
    return done.stdout


def table(changes: Sequence[str], *, base: str = "main", folder: str = "soap", root: Path = Path()) -> str:
    """A line for each change, and one for each file that it touches."""
    lines = []
    for change in changes:
        files = touched(change, base=base, folder=folder, root=root)
        added, removed = sum(own.added for own in files), sum(own.removed for own in files)
        lines.append(f"{change}: {len(files)} files of {folder}, {added} lines more, {removed} less")
        lines += [f"  {own.path} +{own.added} -{own.removed}" for own in files]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="change_cost", description="Files of soap/ that changes touch.")
    parser.add_argument("changes", nargs="+", metavar="CHANGE", help="a branch, or a range A..B")
    parser.add_argument("--base", default="main", help="where branches come from (default %(default)s)")
    parser.add_argument("--folder", default="soap", help="which files count (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        print(table(args.changes, base=args.base, folder=args.folder))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
