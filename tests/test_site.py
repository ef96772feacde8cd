"""The site of the pages (`make docs`): what is made for it, that no page is left out, and, where mkdocs is there, that it builds and asks
no network."""

from __future__ import annotations

import argparse
import http.server
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from soap.cli.command import Parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SNIPPET = re.compile(r'^--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)
ASK = "const q = document.querySelector('.md-search__input'); q.focus(); q.value = 'recomputation'; q.dispatchEvent(new Event('keyup'))"
ANSWERED = "return document.querySelectorAll('.md-search-result__item').length > 0"
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of ``docs/site`` by its name."""
    monkeypatch.syspath_prepend(DOCS / "site")
    return importlib.import_module


@pytest.fixture
def cli_pages(site: Any) -> ModuleType:
    found: ModuleType = site("cli_pages")
    return found


class Settings(yaml.SafeLoader):
    """Reads ``mkdocs.yml`` without mkdocs: what only it can make is left out."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for below in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages_of(below) if isinstance(below, list) else [below]


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Settings)
    files = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "results"]
    assert sorted(pages_of(settings["nav"])) == sorted([*files, "index.md", "commands", "names", "results"])


def test_every_command_has_a_page_with_all_of_its_options(cli_pages: ModuleType) -> None:
    commands = cli_pages.commands()
    assert {"soap-search", "soap-run", "soap-schedule"} <= commands.keys()
    verbs = [parser.prog.removeprefix("soap-profile") for parser in commands["soap-profile"]]
    assert verbs == ["", " show", " links", " export", " import"]
    for command, parsers in commands.items():
        text = cli_pages.page(parsers)
        assert text.startswith(f"# {command}\n")
        shown = [action for parser in parsers for action in parser._actions if action.help != argparse.SUPPRESS]
        rows = [line for line in text.splitlines() if line.startswith("| `")]
        assert len(rows) == len(shown) > 2
        for action in shown:
            for way in action.option_strings or [action.metavar or action.dest]:
                assert any(f"`{way}" in row for row in rows), (command, way)
    assert "(default 10000)" in cli_pages.page(commands["soap-search"])


def test_what_markdown_would_take_for_its_own_is_escaped(cli_pages: ModuleType) -> None:
    parser = Parser("soap-x", "Does <this>, and *that*.\n\n  soap-x a   as a table\n", "soap-x --all", exit_codes="exit codes:\n  0 yes")
    parser.add_argument("--all", metavar="A|B", default=3, help="of a_b, [c] | %(default)s%%; not with --other")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    text = cli_pages.page([parser])
    assert "Does \\<this\\>, and \\*that\\*.\n\n    soap-x a   as a table\n" in text
    assert "| `--all A|B` | of a\\_b, \\[c\\] \\| 3%; not with `--other` |" in text
    assert "```text\nexit codes:\n  0 yes\n```" in text and "hidden" not in text


def test_links_that_leave_the_pages_are_words(site: Any) -> None:
    with_links = site("page_text").with_site_links
    kept = "[a](../map.md#rooms), [b](https://x.org), [c](#d)"
    assert with_links(kept, "howto/search.md") == kept
    assert with_links("[clusters.json](../../soap/data/clusters.json)", "howto/search.md") == "`clusters.json`"
    assert with_links("[README](../README.md)", "usage.md") == "[README](index.md)"
    readme = "![drawn](docs/soap.svg) [docs/a.md](docs/a.md#b) [`n`](notebooks)"
    assert with_links(readme, "../README.md") == "![drawn](soap.svg) [docs/a.md](a.md#b) `n`"


def test_lists_in_lists_are_indented_by_four(site: Any) -> None:
    text = "text\n\n    code\n\n- a\n  b\n  - c\n    d\n\n  e\n\nf\n\n    code\n```\n  - x\n```\n1. g\n   - h\n"
    changed = "text\n\n    code\n\n- a\n    b\n    - c\n        d\n\n    e\n\nf\n\n    code\n```\n  - x\n```\n1. g\n    - h\n"
    assert site("page_text").site_text(text, "a.md") == changed


def test_snippets_of_pages_are_there() -> None:
    found = [place for page in DOCS.rglob("*.md") for place in SNIPPET.findall(page.read_text(encoding="utf-8"))]
    assert found
    for file, section in found:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not section or all(f"--8<-- [{edge}:{section}]" in text for edge in ("start", "end")), f"{file} has no section {section}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not all(importlib.util.find_spec(name) for name in ("material", "mkdocstrings")):
        pytest.skip("the site needs mkdocs-material and mkdocstrings: make docs, or pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_builds_without_a_warning_and_has_what_is_told_elsewhere(built: Path) -> None:
    text = {path.relative_to(built).as_posix(): path.read_text(encoding="utf-8") for path in built.rglob("*.html")}
    assert {"index.html", "howto/memory.html", "reference/soap-run.html", "internals/plan.html"} <= text.keys()
    assert "soap.find_servers" in text["reference/functions.html"] and "SearchOutcome" in text["reference/classes.html"]
    assert "InfeasibleError" in text["reference/errors.html"] and "--microbatches" in text["reference/soap-schedule.html"]
    asked = {link for page in text.values() for link in re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(https?://[^"]+)"', page)}
    assert asked == set()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_browser_asks_no_network_and_finds_words(built: Path) -> None:
    pytest.importorskip("selenium", reason="needs selenium: pip install '.[browser]'")
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    from selenium.webdriver.support.ui import WebDriverWait

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Silent(*args, directory=str(built)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = chromium()
    try:
        home = f"http://127.0.0.1:{server.server_port}"
        for page in ("index.html", "reference/functions.html", "howto/memory.html"):
            browser.get(f"{home}/{page}")
            assert browser.execute_script("return document.querySelector('article h1').innerText.length") > 2
        browser.execute_script(ASK)
        WebDriverWait(browser, 60).until(lambda own: own.execute_script(ANSWERED))
        requested = {urlsplit(url).netloc for url in requests(browser)}
        assert requested == {f"127.0.0.1:{server.server_port}"}
        assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.quit()
        server.shutdown()
        server.server_close()


def chromium() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


def requests(browser: Any) -> Iterator[str]:
    """What pages have asked for; not what is in them (data:) or made by them (blob:)."""
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = str(message["params"]["request"]["url"])
            if not url.startswith(("data:", "blob:")):
                yield url
