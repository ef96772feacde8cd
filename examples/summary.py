"""What the demo has shown, in Markdown: the measured times as they are, also where they are not what was hoped for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CLEARLY = 1.05
"""Ratios of measured times closer to 1 than this are noise on a machine that does other things as well."""


def verdict(report: Mapping[str, Any]) -> str:
    """One paragraph: whether the found strategy is faster, and how far the predictions are off."""
    found, usual = report["strategies"]["strategy"], report["strategies"]["data_parallel"]
    if usual["measured_ns"] is None:
        return f"The plan that is kept is data parallelism: none is surely faster here. An iteration takes {_off(found)} the prediction."
    gain = usual["measured_ns"] / found["measured_ns"]
    promised = usual["predicted_ns"] / found["predicted_ns"]
    if gain >= CLEARLY:
        first = f"The found strategy trains {gain:.2f} times as fast as data parallelism (predicted: {promised:.2f} times)."
    else:
        first = (
            f"Here and now the found strategy is NOT faster than data parallelism: measured {gain:.2f} times as fast, predicted "
            f"{promised:.2f} times. Other programs at work on this machine are the usual reason; try again when it is idle."
        )
    return f"{first} An iteration takes {_off(found)} the prediction, with data parallelism {_off(usual)}."


def summary(report: Mapping[str, Any], machine: str, commands: Sequence[str]) -> str:
    """The whole document. ``report``: what ``soap-run --json`` printed; ``commands``: what was typed."""
    head = f"# {report['processes']} processes on one machine ({report['backend']})\n\n{machine}."
    parts = [head, verdict(report), _times(report), _checked(report["check"]), _losses(report), _typed(commands)]
    return "\n\n".join(parts) + "\n"


def _times(report: Mapping[str, Any]) -> str:
    rows = [
        "| time per iteration | predicted | measured (median) | fastest and slowest step | measured / predicted |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, entry in report["strategies"].items():
        times = entry["steps_ns"]
        if times is None:  # the same plan, which is trained once
            continue
        spread = f"{_ms(min(times))} to {_ms(max(times))}"
        ratio = entry["measured_ns"] / entry["predicted_ns"]
        rows.append(f"| {name} | {_ms(entry['predicted_ns'])} | {_ms(entry['measured_ns'])} | {spread} | {ratio:.2f} |")
    return "\n".join(rows)


def _checked(check: Mapping[str, Any]) -> str:
    worst = check["worst"]
    found = "agree with" if check["passed"] else "do NOT agree with"
    return (
        f"Loss, gradients and updated parameters {found} those of one process: {check['compared']} tensors in {check['steps']} steps, "
        f"largest relative difference {worst['error']:.1e} ({worst['kind']} {worst['name']}), allowed {check['tolerance']:.0e}."
    )


def _losses(report: Mapping[str, Any]) -> str:
    losses = report["strategies"]["strategy"]["losses"]
    return f"Loss: {losses[0]:.3f} in step 1, {losses[-1]:.3f} in step {len(losses)}."


def _typed(commands: Sequence[str]) -> str:
    return "## Commands\n\n" + "\n".join(f"    {command}" for command in commands)


def _off(entry: Mapping[str, Any]) -> str:
    return f"{entry['measured_ns'] / entry['predicted_ns']:.2f} times"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
