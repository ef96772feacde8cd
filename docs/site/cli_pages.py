"""A page of Markdown for each command, made from its parser, so that no option is left out and none is told that is not there."""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from soap.cli.command import EXIT_CODES, Parser

ROOT = Path(__file__).parent.parent.parent


def commands() -> dict[str, list[Parser]]:
    """Command of ``pyproject.toml`` -> its parser, and those of what it does beside that when a verb follows (``soap-profile show``)."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    found = {}
    for command, entry in scripts.items():
        module = importlib.import_module(f"soap.cli.{entry.partition(':')[2]}")
        found[command] = [module.make_parser(), *(make() for make, _ in getattr(module, "VERBS", {}).values())]
    return found


def page(parsers: list[Parser]) -> str:
    """The page of a command: its own parser's part, and a section for each further one."""
    first, *others = parsers
    lines = [f"# {first.prog}", *_body(first)]
    for parser in others:
        lines += [f"## {parser.prog}", *_body(parser)]
    return "\n".join([*lines, ""])


def _body(parser: Parser) -> Iterator[str]:
    description, examples = parser.description or "", (parser.epilog or "").removesuffix(EXIT_CODES).strip()
    yield ""
    for line in description.splitlines():
        yield f"    {line.strip()}" if line.startswith(" ") else plain(line)
    yield ""
    example, _, others = examples.removeprefix("example:\n").partition("\n\n")
    yield from ["```sh", *(line.strip() for line in example.splitlines()), "```", ""]
    if others:  # exit codes of its own
        yield from ["```text", others, "```", ""]
    for group in parser._action_groups:
        rows = [_row(parser, action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        if rows:
            yield from [f"| {'argument' if group is parser._positionals else 'option'} | what it does |", "|---|---|", *rows, ""]


def _row(parser: Parser, action: argparse.Action) -> str:
    """One option: how it is written, and its help with defaults filled in."""
    formatter = parser._get_formatter()
    written = formatter._format_action_invocation(action)  # as --help has it
    told = formatter._expand_help(action) if action.help else ""
    repeated = " (may be repeated)" if isinstance(action, argparse._AppendAction) and "repeat" not in told else ""
    ways = "<br>".join(f"`{way}`" for way in re.split(r", (?=-)", written))
    return f"| {ways} | {plain(told)}{repeated} |"


def plain(text: str) -> str:
    """Text of a terminal as Markdown that shows the same: what is special is escaped, what looks like code is code."""
    spaced = " ".join(text.split())
    escaped = re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", spaced)
    return re.sub(r"(?<![\w/-])(--?[a-z][\w-]*)", lambda found: f"`{found.group(1)}`".replace("\\", ""), escaped)
