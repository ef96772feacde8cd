"""Pages as they stand in the repository, read there by people, made ready for the site's renderer. Nothing here needs mkdocs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ITEM = re.compile(r"(?:-|\d+\.) ")


def site_text(text: str, source: str) -> str:
    """A page's Markdown for the site. ``source``: where the page is, from ``docs``, such as ``howto/search.md`` or ``../README.md``."""
    return "\n".join(_nested(with_site_links(text, source).split("\n")))


def with_site_links(text: str, source: str) -> str:
    """Links to what is outside of ``docs``, and so not in the site, become the words that they are on; the README is the site's index."""

    def replaced(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found.group(0)
        file, hash_sign, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), file))
        if there == "README.md":
            there = "docs/index.md"
        if not there.startswith("docs/"):
            return words if words.startswith("`") else f"`{words}`"
        home = "docs" if source == "../README.md" else posixpath.join("docs", posixpath.dirname(source))
        return f"{picture}[{words}]({posixpath.relpath(there, home)}{hash_sign}{anchor})"

    return LINK.sub(replaced, text)


def _nested(lines: list[str]) -> Iterator[str]:
    """Lists inside lists are indented by four spaces: Python-Markdown takes two for none, unlike GitHub."""
    in_list = fenced = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if not fenced and line and not line.startswith(" "):
            in_list = bool(ITEM.match(line)) or (in_list and bool(lines[number - 1]))
        spaces = len(line) - len(line.lstrip(" "))
        yield " " * (4 * (spaces // 2)) + line.lstrip(" ") if in_list and not fenced and spaces else line
