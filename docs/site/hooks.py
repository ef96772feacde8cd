"""What mkdocs calls while it builds the site (``mkdocs.yml``): the README is its index; commands and public names get pages."""

from __future__ import annotations

import inspect
from typing import Any

from cli_pages import ROOT, commands, page  # mkdocs looks for modules beside this file while it loads it
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from page_text import site_text, with_site_links

import soap

COMMANDS, NAMES, RESULTS = "commands", "names", "results"
"""What stands in the navigation of ``mkdocs.yml`` for the pages that are made here, and for those that benchmarks write."""


def api_pages() -> dict[str, str]:
    """Page -> Markdown: all public names of ``soap``, which mkdocstrings replaces by their docstrings."""
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in soap.__all__:
        value = getattr(soap, name)
        if not isinstance(value, str):
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            groups["Errors" if is_error else "Classes" if inspect.isclass(value) else "Functions"].append(f"::: soap.{name}")
    return {f"reference/{title.lower()}.md": "\n\n".join([f"# {title}", *names, ""]) for title, names in groups.items()}


def made_pages() -> dict[str, str]:
    """All pages that are no files: path in the site -> Markdown."""
    readme = with_site_links((ROOT / "README.md").read_text(encoding="utf-8"), "../README.md")
    cli = {f"reference/{command}.md": page(parsers) for command, parsers in commands().items()}
    return {"index.md": f"---\nhide: [navigation]\n---\n\n{readme}", **cli, **api_pages()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the navigation."""
    config.nav = _filled(config.nav or [])
    return config


def _filled(nav: list[Any]) -> list[Any]:
    written = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    made = {
        COMMANDS: [f"reference/{command}.md" for command in commands()],
        NAMES: list(api_pages()),
        RESULTS: [f"results/{name}" for name in written],
    }
    filled: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            filled.append({title: _filled(below) if isinstance(below, list) else below for title, below in entry.items()})
        else:
            filled += made.get(entry, [entry])
    return filled


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pages are written for GitHub, too."""
    return markdown if page.file.generated_by else site_text(markdown, page.file.src_uri)
