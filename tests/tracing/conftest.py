"""Prints, at the end of a run of the rules' conformance, how many rules and ATen overloads it has met."""

from __future__ import annotations

import pytest

from soap.tracing.rules import registered


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found: dict[str, set[str]] = {"rule": set(), "overload": set()}
    for report in terminalreporter.getreports("passed"):
        if report.when == "call":
            for key, value in report.user_properties:
                if key in found:
                    found[key].add(str(value))
    if found["rule"]:
        text = f"operator rules: {len(found['rule'])} of {len(registered())} checked by tiles, on {len(found['overload'])} ATen overloads"
        terminalreporter.write_sep("-", text)
