"""Writes ``docs/reference/constants.md``, the numbers behind predictions of large runs: ``python -m docs.constants``."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "soap" / "profiles" / "data"
PAGE = Path(__file__).parent / "reference" / "constants.md"
FAMILIES = ("a100-80gb", "h100", "h100-96gb-500w", "h200", "b200", "gb200")
"""Of clusters, those on which large runs were measured."""
LINKS = ("nvlink3", "nvlink4", "nvlink5", "pcie", "network")
CODE = {
    "soap.profiles.efficiency": ("PEAK_SHARE", "BACKWARD_PRODUCTS"),
    "soap.profiles.work": ("SAVED_TRAFFIC", "ALIGNED_BYTES"),
    "soap.api.float8": ("SCALINGS", "COPIES", "MULTIPLE"),
    "soap.cluster.memory_budget": ("CONTEXT_BYTES", "CHANNEL_BYTES", "CHANNELS", "CONNECTIONS", "COMMUNICATORS"),
    "soap.simulator.memory.sweep": ("ALLOWANCE",),
    "soap.simulator.memory.transit": ("SENT_BYTES", "SENT_TENSORS"),
    "soap.simulator.chunks": ("MOST_CHUNKS", "GPU_CHUNK_NS"),
    "soap.simulator.steady": ("PERIODS", "OFF_LINE"),
    "soap.simulator.communication.ring_orders": ("MOST_NODES", "BUDGET"),
    "soap.cluster.routes": ("REFERENCE_MESSAGE_BYTES",),
    "soap.plan.syncs.bucketing": ("BUCKET_BYTES", "FIRST_BUCKET_BYTES", "GATHER_BYTES", "LEAST_GROUPS"),
    "soap.plan.syncs.gathering": ("UNDER_WAY",),
    "soap.plan.syncs.large_parts": ("LARGE_BYTES",),
    "soap.strategy.megatron": ("CHEAP_FLOPS_PER_ELEMENT", "CHEAP_FLOPS_PER_INPUT"),
    "benchmarks.frontier_plans": ("ADAM_STATES", "DOMAIN", "NETWORKS"),
}
"""Constants of modules that enter those predictions. Limits of what is searched, kept or read enter none."""

CITES = re.compile(
    r"http|measured|docs/|benchmarks/|NVIDIA|torch|Megatron|DistributedData|et al|\d{4}\.\d{5}|Transformer Engine|NCCL takes", re.IGNORECASE
)
"""In texts of constants in code: where these are from. Numbers in data files have sources, or say that they are assumed."""
LONGEST = 90
IN_CODE = "In code"


def constants() -> Iterator[tuple[str, str, Any, str]]:
    """(section, name, value, what is said of its origin)."""
    for name, entry in _read("efficiency").items():
        yield "Shares of peaks, by kind of kernel: `efficiency.json`", name, entry["value"], entry["source"]
    nccl, types, families = _read("nccl"), _read("device_types"), _read("cluster_families")
    for name, own in (("NCCL", nccl["libraries"]["NCCL"]), *((name, nccl["interconnects"][name]) for name in LINKS)):
        for path, value, source in _sourced(own):
            yield "Collectives: `nccl.json`", f"{name}: {path}", value, source
    for family in FAMILIES:
        for path, value, source in _sourced(types[families[family]["type"]]):
            yield "Devices: `device_types.json`", f"{family}: {path}", value, source
        for path, value, source in _sourced(families[family]):
            yield "Hosts and networks: `cluster_families.json`", f"{family}: {path}", value, source
    for home, names in CODE.items():
        module = import_module(home)
        told = documented(getsource(module))
        for name in names:
            yield IN_CODE, f"`{home}.{name}`", getattr(module, name), told.get(name, "")


def documented(text: str) -> dict[str, str]:
    """By name that is assigned at a module's top, the text behind it; of assignments in a row the last has that of all."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            waiting += [own.id for target in targets for own in ast.walk(target) if isinstance(own, ast.Name)]
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= dict.fromkeys(waiting, node.value.value)
        waiting = []
    return found


def kind(section: str, text: str) -> str:
    """Whether a number is from somewhere, as far as is said of it."""
    if "assum" in text.lower():
        return "assumption"
    return "source" if section != IN_CODE or CITES.search(text) else "none named"


def page() -> str:
    """The page."""
    sections: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for section, name, value, source in constants():
        said, origin = " ".join(source.split()).replace("``", "`").replace("|", "\\|"), kind(section, source)
        counts[origin] += 1
        sections.setdefault(section, []).append(f"| {name} | {_short(value)} | {origin} | {said or '-'} |")
    lines = [
        "# Numbers behind predictions", "",
        "What enters predictions of large runs ([results/frontier.md](../results/frontier.md)), as `python -m docs.constants` reads it",
        f"from data and code: {counts['source']} numbers with a source, {counts['assumption']} that are assumed, or in part, and",
        f"{counts['none named']} in code whose text names none: counts, limits and choices of ours. None is fitted to those runs.",
        "What some of them change: [results/ablations.md](../results/ablations.md).",
    ]  # fmt: skip
    for section, rows in sections.items():
        lines += ["", f"## {section}", "", "| number | value | origin | what is said of it |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _sourced(node: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    if isinstance(node, Mapping) and "value" in node:
        yield path, node["value"], str(node["source"])
    elif isinstance(node, Mapping):
        for key, own in node.items():
            yield from _sourced(own, f"{path} {key}".strip())


def _short(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"a table of {_count(value)} numbers"


def _count(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else 1


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
