"""``python -m pytest -p tests.processor_time``: the processor seconds of each test, of all processes that work for it.

Unlike the clock's, these say what a test costs on a machine that others use as well, and count ranks that are kept from test to test. Each
test gets the property ``processor_s`` (``--junitxml`` writes it); the summary has the dearest directories, files and tests. Linux only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quiet import used_seconds

NAME = "processor_s"
SHOWN = 40


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note what was used before its set-up."""
    item.stash[_BEFORE] = used_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The last report, of its tear-down, tells what was used since then."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((NAME, round(used_seconds() - item.stash[_BEFORE], 3)))
    return report


_BEFORE = pytest.StashKey[float]()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The dearest directories, files and tests."""
    tests = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == NAME:
                    tests[report.nodeid] += seconds
    folder: Callable[[str], str] = lambda test: str(Path(test.partition("::")[0]).parent)  # noqa: E731
    file: Callable[[str], str] = lambda test: test.partition("::")[0]  # noqa: E731
    for what, name in (("directory", folder), ("file", file), ("test", str)):
        found = Counter[str]()
        for test, seconds in tests.items():
            found[name(test)] += seconds
        terminalreporter.section(f"processor seconds by {what}: {sum(found.values()):.0f}")
        for key, seconds in found.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f} {key}")
