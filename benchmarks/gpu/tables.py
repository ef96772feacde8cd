"""Results of the checks as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """One table for the kernels, the updates, the steps and the runs on ranks each."""
    parts = [table(found) for kind, table in TABLES.items() if (found := [r for r in results if r["check"].split("-")[0] == kind])]
    return "\n\n".join(parts)


def _table(title: str, head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = ["| " + " | ".join(map(str, line)) + " |" for line in (head, ["---"] * len(head), *lines)]
    return "\n".join([f"### {title}", "", *rows])


def _place(result: Mapping[str, Any]) -> str:
    return f"{result['device']}, torch {result['torch']}, {result['date']}"


def _kernels(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [row for result in results for row in result["values"]]

    def line(row: Row) -> list[object]:
        if "error" in row:
            return [row["kind"], *row["asked"][-2:], row["error"], "", "", ""]
        seconds = row["forward_ns"] / 1e9
        moved = f"{row['moved_bytes'] / seconds / 1e9:.0f}"
        rate = f"{row['flops'] / seconds / 1e12:.1f}" if row["flops"] else ""
        backward = f"{row['backward_ns'] / row['forward_ns']:.2f}" if row["backward_ns"] else ""
        shape = " x ".join(map(str, row["shape"]))
        return [row["kind"], row["dtype"], shape, f"{row['forward_ns'] / 1e3:.1f}", rate, moved, backward]

    head = ["kind", "type", "shape", "forward us", "TFLOP/s", "GB/s", "backward / forward"]
    return _table(f"Operators: {_place(results[0])}", head, [line(row) for row in rows])


def _updates(results: Sequence[Mapping[str, Any]]) -> str:
    (result,) = results
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for row in result["values"]:
        times.setdefault((row["kind"], row["tensors"], row["bytes_each"]), {})[row["way"]] = row["ns"]
    lines = [[*key, *(f"{ways[way] / 1e3:.0f}" for way in ("loop", "foreach", "fused"))] for key, ways in times.items()]
    head = ["optimizer", "tensors", "bytes each", "loop us", "foreach us", "fused us"]
    return _table(f"Updates: {_place(result)}", head, lines)


def _steps(results: Sequence[Mapping[str, Any]]) -> str:
    def line(result: Mapping[str, Any]) -> list[object]:
        row = result["values"]
        measured = row["measured_ns"]

        def of(source: str) -> str:
            ns = row["predicted_ns"].get(source)
            return "" if ns is None else f"{ns / 1e6:.1f} ({ns / measured:.3f})"

        predicted = [of(source) for source in ("data sheet", "quick measurement", "profile")]
        memory = [f"{row[size] / 2**20:.0f}" for size in ("predicted_bytes", "measured_bytes")]
        return [row["model"], row["precision"] + (", compiled" if row["compiled"] else ""), f"{measured / 1e6:.1f}", *predicted, *memory]

    head = ["model", "precision", "measured ms", "sheet", "quick measurement", "profile", "memory predicted MiB", "measured"]
    return _table(f"Steps: {_place(results[0])}", head, [line(result) for result in results])


def _runs(results: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for result in results:
        for row in result["values"]:
            name = row.get("model", row.get("command", "")), row.get("plan", ""), row.get("devices", ""), " ".join(row.get("options", ()))
            lines.append([*name, row["code"], row["said"][-1].replace("|", "/") if row["said"] else ""])
    head = ["model", "plan", "ranks", "options", "exit code", "last line"]
    return _table(f"Runs: {_place(results[0])}", head, lines)


def _collectives(results: Sequence[Mapping[str, Any]]) -> str:
    (result,) = results
    lines = [[row["type"], row["elements"], "yes" if row["equal"] else "NO", f"{row['ns'] / 1e3:.1f}"] for row in result["values"]]
    return _table(f"Collectives of one rank: {_place(result)}", ["type", "elements", "equal", "us of a call"], lines)


def _offloading(results: Sequence[Mapping[str, Any]]) -> str:
    (result,) = results
    values = result["values"]
    lines = []
    for name in ("states", "kept"):
        row = values[name]
        away = row["states_bytes"] if name == "states" else row["planned_bytes"]
        saved = "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 2**20:.1f}"
        lines.append([name, row["model"], f"{row['largest_difference']:.1e}", f"{away / 2**20:.1f}", saved, "yes" if row["ok"] else "NO"])
    head = ["away", "model", "largest difference", "on hosts MiB", "saved on the GPU MiB", "as it should be"]
    return _table(f"Offloading: {_place(result)}", head, lines)


TABLES: dict[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "products": _kernels,
    "operators": _kernels,
    "updates": _updates,
    "collectives": _collectives,
    "offloading": _offloading,
    "step": _steps,
    "plans": _runs,
    "suites": _runs,
    "plain": _runs,
    "failures": _runs,
}
"""First word of a check's name -> its table."""
