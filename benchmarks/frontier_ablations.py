"""What each price does to predictions of large runs: they are made once as they are, and once more without one price.

    python -m benchmarks.frontier_ablations --rows ROWS.json --groups GROUPS.json --models FOLDER --resume FILE

Rows are all plans of small workloads (``benchmarks.frontier``), by a rule that knows no error: on at most 128 GPUs, of at most 1,024 plans
times GPUs, without experts. *Rows*: those whose prediction changes without the price; the next four columns are of these, the others of all
rows. *Time*: predicted / measured - 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from benchmarks.frontier import Outcome, decided, errors, outcome_of, refused
from benchmarks.frontier_plans import CLUSTERS, Row, graph_of, kernels_of, kind_of_attention, said, topology_of
from benchmarks.pages import give
from soap.cluster.memory_budget import left_by_process
from soap.cluster.topology import Topology
from soap.files import write_text_atomically
from soap.profiles import efficiency
from soap.simulator.kernels import FLASH2, OVERLAP
from soap.simulator.memory.sweep import without_allowance

MOST_GPUS, MOST_PLANS_TIMES_GPUS = 128, 1024

AS_IS = "nothing"
SHARES = f"shares of peaks by kind of kernel: {efficiency.PEAK_SHARE} for all"
LAUNCHES = "launches of kernels"
FUSED = "light calls in one kernel: call by call instead"
FLASH = "tables of flash attention: the share of other products instead"
HOPPER = "FlashAttention-2 on Hopper: cuDNN's instead"
OVERLAPPED = "collectives of tensor parallelism in parts, beside products"
SUMS = "sums in the activations' type: in float32 instead"
FLOAT8 = "products in float8: in bfloat16 instead"
FLOWING = "steps that flow into each other"
PROCESS = "memory that a GPU's process takes"
ALLOWANCE = "allowance for memory beyond what is simulated"
PRICES = (SHARES, LAUNCHES, FUSED, FLASH, HOPPER, OVERLAPPED, SUMS, FLOAT8, FLOWING, PROCESS, ALLOWANCE)


def small(groups: Sequence[Mapping[str, Any]], rows: Mapping[str, Row]) -> list[Mapping[str, Any]]:
    """The workloads that are priced."""
    found = []
    for group in groups:
        ids = ids_of(group)
        is_mixture = any(rows[id]["model"].get("experts") for id in ids)
        is_said = not any(said(rows[id]).lacking for id in ids)
        if is_said and group["gpus"] <= MOST_GPUS and len(ids) * group["gpus"] <= MOST_PLANS_TIMES_GPUS and not is_mixture:
            found.append(group)
    return found


def ids_of(group: Mapping[str, Any]) -> list[str]:
    """All plans of a workload: those that ran, and those that lacked memory."""
    return [*(own["id"] for own in group["ranking"]), *group["oom_ids"]]


def without_each(row: Row, models: Path, known: Mapping[str, Outcome] = MappingProxyType({})) -> dict[str, Outcome]:
    """By price that the row has, its outcome without it; and as it is. ``known``: outcomes that stay."""
    found = {name: known[name] if name in known else price() for name, price in _played(row, models).items()}
    as_is = found[AS_IS]
    found[PROCESS] = replace(as_is, available_bytes=as_is.available_bytes + taken_bytes())
    found[ALLOWANCE] = replace(as_is, peak_bytes=without_allowance(as_is.peak_bytes))
    return found


def _played(row: Row, models: Path) -> dict[str, Callable[[], Outcome]]:
    """Prices that are played; those of memory follow from what is expected with them."""
    own, topology, kernels = said(row), topology_of(row), kernels_of(row)
    graph, (kind, *added) = graph_of(row, own, models), kernels.split("+")

    def without(one: str) -> str:
        return "+".join([kind, *(other for other in added if other != one)])

    def with_data(changed: Callable[[], Mapping[str, Any]]) -> Outcome:
        with given(changed()):
            return outcome_of(row, own, graph, topology, kernels)

    found: dict[str, Callable[[], Outcome]] = {AS_IS: partial(outcome_of, row, own, graph, topology, kernels)}
    found[SHARES] = partial(with_data, one_share)
    found[LAUNCHES] = partial(outcome_of, row, own, graph, without_launches(topology), kernels)
    if kind != "eager":
        found[FUSED] = partial(outcome_of, row, own, graph, topology, "+".join(["eager", *added]))
    if kind_of_attention(row) == "flash":
        found[FLASH] = partial(with_data, no_flash_tables)
    if FLASH2 in added and CLUSTERS[row["gpu"]].startswith("h"):
        found[HOPPER] = partial(outcome_of, row, own, graph, topology, without(FLASH2))
    if OVERLAP in added:
        found[OVERLAPPED] = partial(outcome_of, row, own, graph, topology, without(OVERLAP))
    if row["tp"] > 1:
        found[SUMS] = partial(outcome_of, row, own, graph.summed_in("float32"), topology, kernels)
    if own.float8:
        plain = replace(own, float8="")
        found[FLOAT8] = partial(outcome_of, row, plain, graph_of(row, plain, models), topology, kernels)
    if own.flows:
        found[FLOWING] = partial(outcome_of, row, own, graph, topology, kernels, flows=False)
    return found


def given(data: Mapping[str, Any]) -> AbstractContextManager[object]:
    """While it lasts, kernels reach the shares of these data, beside those that are known."""
    changed = {**efficiency._data(), **{name: {"value": value} for name, value in data.items()}}
    return patch.object(efficiency, "_data", lambda: changed)


def no_flash_tables() -> dict[str, Any]:
    """Attention in 16-bit types reaches the share that other products do, at any length."""
    return flat_tables(efficiency.figures()["product"]["bfloat16"])


def one_share() -> dict[str, Any]:
    """All kernels reach ``PEAK_SHARE``, of either rate."""
    kinds = ("product", "convolution", "attention", "attention_backward", "recurrent", "unaligned_product")
    none: dict[str, Any] = {kind: {} for kind in (*kinds, "kind_memory", "kind_memory_backward")}
    return {**none, "memory": efficiency.PEAK_SHARE, **flat_tables(efficiency.PEAK_SHARE)}


def flat_tables(share: float) -> dict[str, Any]:
    """Tables of flash attention in which it reaches a share of any peak at any length."""
    passes = {"forward": share, "backward": share / efficiency.BACKWARD_PRODUCTS}
    table = {f"{mask} {name}": {"64": [reached]} for mask in ("full", "masked") for name, reached in passes.items()}
    return {"flash_attention": {"any": {"peak": 1e12, "lengths": [1024], **table}}, "flash_attention_2": {}}


def without_launches(topology: Topology) -> Topology:
    """The cluster whose devices begin kernels at once."""
    devices = tuple(replace(own, type=replace(own.type, kernel_seconds=0.0)) for own in topology.devices)
    return replace(topology, devices=devices)


def taken_bytes() -> int:
    """What a process takes of a GPU's memory beside tensors."""
    whole_bytes = 2**50
    return whole_bytes - left_by_process(whole_bytes)


Outcomes = Mapping[str, Mapping[str, Outcome]]
"""By row, by price."""


def predictions(rows: Sequence[Row], models: Path, resume: Path | None) -> Outcomes:
    """Outcomes of all rows. ``resume``: a file with earlier ones, which is kept up to date."""
    warnings.simplefilter("ignore")
    known: dict[str, dict[str, Outcome]] = {}
    if resume is not None and resume.exists():
        loaded = json.loads(resume.read_text(encoding="utf-8"))
        known = {id: {name: Outcome(**own) for name, own in each.items()} for id, each in loaded.items()}
    for row in sorted(rows, key=lambda row: (row["gpus"], row["family"])):
        known[row["id"]] = without_each(row, models, known.get(row["id"], {}))
        told = ", ".join(f"{own.step_ms:,.0f}" for own in known[row["id"]].values())
        print(f"{row['id']}: {told} ms, {known[row['id']][AS_IS].took_seconds} s", file=sys.stderr, flush=True)
        if resume is not None:
            found = {id: {name: asdict(own) for name, own in each.items()} for id, each in known.items()}
            write_text_atomically(resume, json.dumps(found, indent=1))
    return {row["id"]: known[row["id"]] for row in rows}


def page(rows: Sequence[Row], groups: Sequence[Mapping[str, Any]], found: Outcomes, command: str) -> str:
    """The page."""
    by_id, as_is = {row["id"]: row for row in rows}, {id: own[AS_IS] for id, own in found.items()}
    lines = [
        "# What each price does to predictions of large runs", "", (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), "",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}: {len(rows)} rows of {len(groups)} workloads.", "",
        "| without | rows | their time, with | of sizes | without | of sizes "
        "| all: time | of sizes | pairs in order | winners | lacked memory, refused | ran, refused |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for price in (AS_IS, *PRICES):
        outcomes = {id: own.get(price, own[AS_IS]) for id, own in found.items()}
        changed = [row for row in rows if not alike(outcomes[row["id"]], as_is[row["id"]])]
        decisions = [decided(group, by_id, outcomes) for group in groups]
        right, pairs, won = sum(own.right for own in decisions), sum(own.pairs for own in decisions), sum(own.is_won for own in decisions)
        (lacked, lacking), (wrong, ran) = (refused(rows, outcomes, ran=own) for own in (False, True))
        lines.append(
            f"| {price} | {len(changed) or '-'} | {_medians(changed, as_is)} | {_medians(changed, outcomes)} | {_medians(rows, outcomes)} "
            f"| {right} of {pairs} | {won} of {len(decisions)} | {lacked} of {lacking} | {wrong} of {ran} |"
        )
    return "\n".join([*lines, ""])


def alike(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes say the same."""
    return (one.step_ms, one.peak_bytes, one.available_bytes) == (other.step_ms, other.peak_bytes, other.available_bytes)


def _medians(rows: Sequence[Row], outcomes: Mapping[str, Outcome]) -> str:
    off = errors(rows, outcomes)
    return f"{median(off):+.1%} | {median(map(abs, off)):.1%}" if off else "- | -"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="frontier_ablations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="the rows, as JSON")
    parser.add_argument("--groups", type=Path, required=True, metavar="FILE", help="workloads with several plans each, as JSON")
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where exported models are, or are put")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="do not predict the rows in this JSON file again; others are added")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    args = parser.parse_args(argv)
    rows, groups = (json.loads(path.read_text(encoding="utf-8")) for path in (args.rows, args.groups))
    by_id = {row["id"]: row for row in rows}
    chosen = small(groups, by_id)
    args.models.mkdir(parents=True, exist_ok=True)
    own = [by_id[id] for group in chosen for id in ids_of(group)]
    found = predictions(own, args.models, args.resume)
    give(page(own, chosen, found, "python -m benchmarks.frontier_ablations"), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
