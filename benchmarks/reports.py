"""Two reports, how large they are, and how long a headless Chromium takes to open them; their pictures are those of docs/report.md.

    python -m benchmarks.reports --folder /tmp/reports --pictures docs/pictures

gpt on eight H100s, searched; Llama 3 8B (bfloat16, 64 sequences of 8192 tokens) on 64 of them by FSDP with recomputation. Costs are those
of data sheets. Opening is from the request of the file to when the first tab is drawn, the median of three times. Expected: at most 5 MB,
and 2 s. It takes the extras ``report`` (with which pillow comes) and ``browser``, and Debian's packages ``chromium`` and
``chromium-driver``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from benchmarks.published import read
from benchmarks.published_models import graph_of
from soap import api
from soap.cli import reporting, search_report
from soap.report import write
from soap.search.deciding import FASTEST, SAFE
from soap.search.options import SearchOptions
from soap.strategy.named import named

LLAMA_SEQUENCES = 64
TABS = {"gpt-8": ("overview", "operators", "memory", "search"), "llama-64": ("operators", "timeline", "links")}
OPENINGS = 3
COLOURS = 200
WIDTH, LEAST, MOST = 1280, 700, 1250
"""Pixels of a picture: its width, and between which its height is."""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={WIDTH},1000", "--hide-scrollbars")
DRAWN = "return [...document.querySelectorAll('[role=tabpanel]')].find((own) => !own.hidden)?.dataset.drawn === 'yes'"


def gpt(path: Path) -> None:
    """The report of a search."""
    graph, topology = api.load("zoo:gpt", plan_only=True).graph, api.load_cluster("h100-8")
    outcome = api.find(graph, topology, SearchOptions(budget=300, cores=1, costs="estimate"))
    files = {SAFE: "strategy.json" if outcome.other is None else "strategy.safe.json", FASTEST: "strategy.json"}
    reporting.write_search(str(path), "strategy.json", outcome, search_report.document(outcome, files), "estimate")


def llama(path: Path) -> None:
    """The report of a strategy that has a name, on a cluster of which two copies are simulated."""
    graph, topology = graph_of(read()["models"]["llama3-8b-8192"], LLAMA_SEQUENCES, dtype="bfloat16"), api.load_cluster("h100-8x8")
    simulator = api.simulator_for(replace(graph, name="llama3-8b"), topology, costs="estimate")
    strategy = named("fsdp+recompute", graph, topology)
    simulation = simulator.predict(strategy)
    write(path, reporting.plan_contents(reporting.titled("fsdp+recompute", simulator), simulator, strategy, simulation))


def browser() -> Any:
    """A headless Chromium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def opening_s(own: Any, path: Path) -> float:
    """Seconds until the first tab is drawn."""
    own.get("about:blank")
    begin = time.perf_counter()
    own.get(f"file://{path}")
    while not own.execute_script(DRAWN):
        time.sleep(0.01)
    return time.perf_counter() - begin


def save(png: bytes, path: Path) -> None:
    """A picture with few colours, rare ones among them: a legend shows some that occur nowhere else."""
    Image.open(BytesIO(png)).convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def take(own: Any, tab: str, path: Path) -> None:
    """A picture of a tab."""
    own.execute_script(f"document.getElementById('tab-{tab}').click()")
    while not own.execute_script(DRAWN):
        time.sleep(0.05)
    time.sleep(1)
    tall = own.execute_script("return document.documentElement.scrollHeight")
    size = {"width": WIDTH, "height": max(LEAST, min(MOST, tall)), "deviceScaleFactor": 1, "mobile": False}
    own.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(1)
    save(own.get_screenshot_as_png(), path)
    own.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__)
    parser.add_argument("--folder", metavar="DIR", type=Path, required=True, help="where reports go")
    parser.add_argument("--pictures", metavar="DIR", type=Path, help="where pictures go (default: none)")
    args = parser.parse_args(argv)
    for folder in filter(None, (args.folder, args.pictures)):
        folder.mkdir(parents=True, exist_ok=True)
    own = browser()
    try:
        for name, make in (("gpt-8", gpt), ("llama-64", llama)):
            path, begin = (args.folder / f"{name}.html").resolve(), time.process_time()
            make(path)
            made_s = time.process_time() - begin
            seconds = median(opening_s(own, path) for _ in range(OPENINGS))
            print(f"{name}: {path.stat().st_size / 1e6:.2f} MB, made in {made_s:.1f} s of a core, opened in {seconds:.2f} s", flush=True)
            for tab in TABS[name] if args.pictures else ():
                take(own, tab, args.pictures / f"report-{name}-{tab}.png")
    finally:
        own.quit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
