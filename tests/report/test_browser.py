"""The page in a headless Chromium: it loads, complains of nothing, asks for nothing, draws every tab, and stays fluid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")
pytest.importorskip("selenium", reason="needs selenium: pip install '.[browser]'")

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from soap.report import write
from soap.report.page import SECTIONS
from soap.report.timeline import MOST_BARS
from soap.simulator.analysis.timeline_file import TimedTask
from soap.simulator.tasks import TaskKind
from tests.graph_builder import GraphBuilder
from tests.report.made import contents, usual
from tests.report.test_page import EVIL

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000", "--enable-unsafe-swiftshader")
OPEN = "return [...document.querySelectorAll('[role=tabpanel]')].find((panel) => !panel.hidden)"
FRAMES = """
const done = arguments[0]; const begin = performance.now(); const frames = []; let last = begin;
const models = Bokeh.documents.flatMap((own) => own.roots()).flatMap((root) => [...root.references()]);
const range = models.find((own) => own.type === "Range1d" && own.bounds); // time's
const [start, end] = [range.start, range.end];
function next(now) {
  frames.push(now - last); last = now;
  const share = Math.min(0.9, (now - begin) / 2000);
  range.setv({start: start + share * 0.4 * (end - start), end: end - share * 0.4 * (end - start)});
  if (now - begin < 2000) requestAnimationFrame(next); else done(frames.slice(1));
}
requestAnimationFrame(next);
"""
"""Zooms in for two seconds, a little in each frame; gives the times between frames, in milliseconds."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def opened(browser: Any, path: Path) -> None:
    browser.get(f"file://{path}")
    drawn(browser)


def drawn(browser: Any) -> None:
    WebDriverWait(browser, 60).until(lambda own: own.execute_script(f"{OPEN}?.dataset.drawn === 'yes'"))


def complaints(browser: Any) -> list[str]:
    """Errors of the page; that pixels are read back from the graphics processor is none."""
    return [str(entry["message"]) for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def requested(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def show(browser: Any, key: str) -> None:
    browser.execute_script(f"document.getElementById('tab-{key}').click()")
    drawn(browser)


def test_every_tab_is_drawn_without_errors_and_requests(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, usual())
    opened(browser, path)
    for section in SECTIONS:
        show(browser, section.key)
        empty = browser.execute_script(
            f"return [...{OPEN.removeprefix('return ')}.querySelectorAll('.picture')]"
            ".filter((own) => own.getClientRects().length && !own.firstElementChild).map((own) => own.id)"
        )
        assert empty == [], section.key
    assert complaints(browser) == []
    assert [url for url in requested(browser) if not url.startswith(("data:", f"file://{path}"))] == []


def test_names_of_others_are_text(browser: Any, tmp_path: Path) -> None:
    builder = GraphBuilder(name=EVIL)
    hidden = builder.linear(builder.input("x", 8, 16), 4, name=EVIL)
    graph = builder.build(builder.cross_entropy(hidden, builder.input("y", 8, dtype="int64")))
    write(tmp_path / "evil.html", contents(graph, title=f"{EVIL}.json"))
    opened(browser, tmp_path / "evil.html")
    for section in SECTIONS:
        show(browser, section.key)
    assert browser.title == f"{EVIL}.json: SOAP"
    assert browser.find_element("tag name", "h1").text == f"{EVIL}.json"
    assert complaints(browser) == []


def test_thousands_of_tasks_stay_fluid(browser: Any, tmp_path: Path) -> None:
    own = usual().measured
    assert own is not None
    kinds = [TaskKind.FORWARD, TaskKind.BACKWARD]
    tasks = {f"t{i}": TimedTask(f"t{i}", kinds[i % 2], 100 * i, 100 * i + 90, 90, 0, "linear", (f"gpu{i % 8}",)) for i in range(5000)}
    write(tmp_path / "many.html", replace(usual(), measured=replace(own, tasks=tasks)))
    assert len(tasks) < MOST_BARS  # each is a bar of its own
    opened(browser, tmp_path / "many.html")
    show(browser, "timeline")
    browser.set_script_timeout(60)
    frames = browser.execute_async_script(FRAMES)
    print(f"{len(frames)} frames in 2 s, the longest {max(frames):.0f} ms")
    assert len(frames) >= 20 and complaints(browser) == []


def test_two_plans_are_drawn_side_by_side(browser: Any, tmp_path: Path) -> None:
    write(tmp_path / "two.html", usual(), replace(usual(), title="another"))
    opened(browser, tmp_path / "two.html")
    for section in SECTIONS:
        show(browser, section.key)
        boxes = browser.execute_script(
            f"return [...{OPEN.removeprefix('return ')}.querySelectorAll('article')].map((own) => own.getBoundingClientRect().x)"
        )
        assert len(boxes) == 2 and boxes[0] < boxes[1], section.key
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert complaints(browser) == []
