"""The pages: lines that fit a screen, links that lead somewhere, commands that exist."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BY_HAND = [page for page in PAGES if page.parent.name != "results"]
"""Without those that benchmarks write."""
WIDEST = 140
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
OUTSIDE = {"accelerator", "aten", "dataclasses", "found", "glibc", "torch", "transformers", "vX"}
"""First words of names of other packages, and of variables in examples."""
ENDINGS = {"cff", "json", "jsonl", "npy", "pt2", "py", "toml", "yaml"}
"""Of names of files."""
OF_THEIR_TIME = {"CHANGELOG.md", "lab_notebook.md"}
"""Pages that may name what has gone."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Number and text of all lines but rows of tables, which cannot be broken."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("|"):
            yield number, line


def anchors(page: Path) -> set[str]:
    """What headings of a page are called in links, as GitHub makes it of their words."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each ``soap-…`` command that stands in a block of its own; lines that end with a backslash are joined."""
    joined = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in joined.splitlines():
        found = re.match(r" {4}(?:sudo )?(soap-[\w-]+ .*)", line)
        if found:
            yield shlex.split(found.group(1), comments=True)


def test_lines_are_at_most_140_characters_wide() -> None:
    assert [f"{name_of(page)}:{number}" for page in BY_HAND for number, line in text_lines(page) if len(line) > WIDEST] == []


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists(), f"{page.name} links to {target}, which is not there"
            assert not anchor or anchor in anchors(there), f"{page.name} links to {target}; {there.name} has no such heading"


def test_the_readme_fits_on_a_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_the_picture_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = importlib.import_module("picture").picture()
    assert (ROOT / "docs" / "soap.svg").read_text(encoding="utf-8") == drawn


def test_the_page_of_numbers_is_what_its_script_writes() -> None:
    """``python -m docs.constants`` writes it anew."""
    module = importlib.import_module("docs.constants")
    assert (ROOT / "docs" / "reference" / "constants.md").read_text(encoding="utf-8") == module.page()
    kinds = {name.rpartition(".")[2]: module.kind(section, text) for section, name, _, text in module.constants()}
    assert kinds["CONTEXT_BYTES`"] == "source" and kinds["LEAST_GROUPS`"] == "none named" and kinds["CHANNELS`"] == "assumption"
    assert kinds["h100: kernel_overhead"] == "assumption" and kinds["product"] == "source"
    told = module.documented('A, B = 1, 2\nC = 3\n"""Of all."""\nD = 4\n\ndef d() -> None: ...\n')
    assert told == dict.fromkeys("ABC", "Of all.")


def test_commands_of_the_pages_exist_with_these_options() -> None:
    seen = set()
    for page in BY_HAND:
        for program, *words in commands(page):
            module = importlib.import_module(f"soap.cli.{program.removeprefix('soap-').replace('-', '_')}")
            module.make_parser().parse_args(words)  # ends the test with what is wrong otherwise
            seen.add(program)
    assert {"soap-search", "soap-run", "soap-simulate"} <= seen


def test_options_of_benchmarks_exist() -> None:
    for page in BY_HAND:
        for module, words in re.findall(r"python -m (benchmarks[\w.]*)((?: [^`\n]*)?)", page.read_text(encoding="utf-8")):
            path = ROOT / module.replace(".", "/")
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            missing = [option for option in re.findall(r"--[\w-]+", words) if f'"{option}"' not in path.read_text(encoding="utf-8")]
            assert not missing, f"{page.name}: {module} has no {', '.join(missing)}"


def test_changelog_entries_are_one_line_each() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(" ")] == []


def test_files_and_modules_that_pages_name_exist() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/**/*.py")]  # not what is installed in .venv
    ends = {"/".join(path.split("/")[-count:]) for path in files for count in range(1, path.count("/") + 2)}
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ROOT / path for path in files}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)[`:]", text)) - {"train.py", "search.py"}  # a user's own
        assert named <= ends, f"{page.name} names {sorted(named - ends)}, which are not there"
        for name in set(re.findall(r"`(?:python -m )?(soap(?:\.\w+){2,}|benchmarks\.\w+)", text)) - set(modules):
            home, _, last = name.rpartition(".")
            assert home in modules, f"{page.name} names {name}, which is no module"
            assert re.search(rf"\b{last}\b", modules[home].read_text(encoding="utf-8")), f"{page.name} names {name}, which is not there"


def test_what_pages_name_by_module_or_class_is_there() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("[a-z]*/**/*.py")}
    homes: dict[str, list[str]] = {}  # a module by its last words, or a class -> files that may be meant
    for path, text in texts.items():
        words = path.relative_to(ROOT).with_suffix("").parts
        for name in {".".join(words[first:]).removesuffix(".__init__") for first in range(len(words))} | set(CLASS.findall(text)):
            homes.setdefault(name, []).append(text)
    for page in BY_HAND:
        for name in set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`", page.read_text(encoding="utf-8"))) - homes.keys():
            home, _, last = name.rpartition(".")
            if name.partition(".")[0] in OUTSIDE or last in ENDINGS or page.name in OF_THEIR_TIME:
                continue
            found = homes.get(home, homes.get(home.rpartition(".")[2], []))
            assert any(re.search(rf"\b{last}\b", text) for text in found), f"{page.name} names {name}, which is not there"
