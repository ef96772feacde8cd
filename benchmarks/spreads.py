"""How far costs are off, fitted to stored measurements: the figures of ``soap/profiles/data/spreads.json``.

    python -m benchmarks.spreads fit                 # prints the file; a test holds it against this
    python -m benchmarks.spreads measure --budget 40 zoo:gpt:tiny zoo:resnet50:tiny …

``measure`` profiles models on this machine, compares each measurement with what would be said without it (the roofline; an interpolation
between the others; the roofline with the others' factors), and keeps the pairs in ``benchmarks/spreads_cpu.json``. Pairs of a GPU come
from the profiles that are kept in this repository.

All figures are standard deviations of ln(measured / predicted). The parts of a tile's error are told apart as in an analysis of variance
with nested groups (Searle, Casella & McCulloch, "Variance Components", 1992): ``rate`` is the mean of one model's tiles, ``kind`` that of
one kind of operator in one direction around it, ``shape`` what is left. Tiles count by the root of the time that they take: a plan's time
is that of its long ones, but there are few of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import accuracy_report
from soap import api
from soap.cluster.topology import DeviceType
from soap.profiles.entries import Entry, decode
from soap.profiles.lookup import Profile, Source
from soap.profiles.roofline import runtime_seconds, work_seconds

ROOT = Path(__file__).parents[1]
CPU_PAIRS = ROOT / "benchmarks/spreads_cpu.json"
GPU_PROFILES = (
    ROOT / "soap/profiles/data/profile-nvidia-h200.json",
    ROOT / "benchmarks/gpu/results/profile-gpt-float32.json",
)
"""Those in bfloat16 were made when work under autocast was still counted as float32."""
DEVICE = "h200"
LEAST_NS = 20_000
"""Shorter passes are not compared: they are a call and little else."""
KINDS_AT_ONCE = 4
"""A plan's time is that of about so many kinds of operators, whose errors partly even out."""
DIGITS = 3


class Pair(NamedTuple):
    """One pass over a tile, nanoseconds as measured and as a source of costs would have said without this measurement. ``group``: which
    profile it stands in. ``apart``: how far repetitions were from each other, as a share."""

    group: str
    kind: str
    backward: bool
    source: str
    measured_ns: float
    predicted_ns: float
    apart: float = 0.0

    @property
    def error(self) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured_ns / self.predicted_ns)

    @property
    def weight(self) -> float:
        """How much it counts."""
        return math.sqrt(self.measured_ns)


def pairs_of(group: str, entries: Sequence[Entry], device: DeviceType) -> Iterator[Pair]:
    """Every measurement beside what each source would have said without it."""
    added_ns = 1e9 * runtime_seconds(device)
    for number, entry in enumerate(entries):
        others = Profile(device, [*entries[:number], *entries[number + 1 :]])
        for backward, timing, work in ((False, entry.forward, entry.forward_work), (True, entry.backward, entry.backward_work)):
            if timing is None or not work or timing.ns < LEAST_NS:
                continue
            measured_ns, apart = timing.ns + added_ns, timing.spread_ns / 1.349 / timing.ns
            estimated_ns = 1e9 * work_seconds(work, device, entry.kind, backward=backward)
            said = {Source.ESTIMATED: estimated_ns}
            ns, source = others.tile(entry.key, entry.kind, work, backward)
            said.setdefault(source, ns)
            if source is Source.INTERPOLATED and (factor := others.factors.get((entry.kind, backward))) is not None:
                said[Source.CALIBRATED] = estimated_ns * factor
            for own, told_ns in said.items():
                yield Pair(group, entry.kind, backward, own.value, measured_ns, told_ns + added_ns, apart)


def gpu_pairs() -> list[Pair]:
    """Of the profiles of an H200."""
    device = api.load_cluster(f"{DEVICE}-8").devices[0].type
    found: list[Pair] = []
    for path in GPU_PROFILES:
        entries = [decode(entry) for profile in json.loads(path.read_text("utf-8"))["profiles"] for entry in profile["entries"]]
        found += pairs_of(path.stem, entries, device)
    return found


def cpu_pairs() -> list[Pair]:
    """Those that ``measure`` has kept."""
    return [Pair(*row) for row in json.loads(CPU_PAIRS.read_text("utf-8"))["pairs"]]


def components(pairs: Sequence[Pair]) -> dict[str, float]:
    """``rate``, ``kind`` and ``shape`` of these pairs."""
    by_group: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_group[pair.group].append(pair)
    rates, kinds, shapes = list[tuple[float, float]](), list[tuple[float, float]](), list[tuple[float, float]]()
    for own in by_group.values():
        by_kind: dict[tuple[str, bool], list[Pair]] = defaultdict(list)
        for pair in own:
            by_kind[pair.kind, pair.backward].append(pair)
        means = {kind: _mean((p.error, p.weight) for p in mine) for kind, mine in by_kind.items()}
        weights = {kind: sum(p.weight for p in mine) for kind, mine in by_kind.items()}
        rate = _mean((means[kind], weights[kind]) for kind in by_kind)
        rates.append((rate, 1.0))
        kinds += [(means[kind] - rate, weights[kind]) for kind in by_kind]
        for kind, mine in by_kind.items():
            if len(mine) > 1:
                unbiased = math.sqrt(len(mine) / (len(mine) - 1))
                shapes += [((pair.error - means[kind]) * unbiased, pair.weight) for pair in mine]
    return {"rate": _rms(rates), "kind": _rms(kinds), "shape": _rms(shapes)}


def plan_errors(table: str) -> list[tuple[str, str, float]]:
    """(cluster, model, ln(measured / predicted)) of all plans of docs/accuracy.md, whose computations and links were measured."""
    return [(plan.cluster, plan.model, math.log(plan.measured_ns / plan.predicted_ns)) for plan in accuracy_report.read(table)]


def gain_errors(table: str) -> list[float]:
    """ln(measured gain / predicted gain) of docs/benchmarks.md, *Predicted and measured, end to end*: nothing was measured but rates."""
    section = table.split("\n## Predicted and measured, end to end\n")[1].split("\n## ")[0]
    return [math.log(float(row[7]) / float(row[6])) for row in list(_rows(section))[2:] if row[1] != "data_parallel"]


def measured_gain_errors() -> list[float]:
    """ln(measured gain / predicted gain) over data parallelism of the plans of docs/accuracy.md."""
    groups: dict[tuple[str, str], dict[str, accuracy_report.Plan]] = defaultdict(dict)
    for plan in accuracy_report.read((ROOT / "docs/accuracy.md").read_text("utf-8")):
        groups[plan.cluster, plan.model][plan.strategy] = plan
    found = []
    for own in groups.values():
        usual = own.pop(accuracy_report.USUAL)
        error = math.log(usual.measured_ns / usual.predicted_ns)
        found += [error - math.log(plan.measured_ns / plan.predicted_ns) for plan in own.values()]
    return found


def published_errors(table: str) -> list[float]:
    """ln(predicted / published) of the rows of docs/results/published.md on one device, where nothing is communicated."""
    found = []
    for row in _rows(table):
        if len(row) == 9 and row[1] == "1":
            found.append(math.log(1 + float(row[7].rstrip("%")) / 100))
    return found


def fit() -> dict[str, Any]:
    """The file ``spreads.json``."""
    accuracy = plan_errors((ROOT / "docs/accuracy.md").read_text("utf-8"))
    gains = gain_errors((ROOT / "docs/benchmarks.md").read_text("utf-8"))
    published = published_errors((ROOT / "docs/results/published.md").read_text("utf-8"))
    plan = _rms((error, 1.0) for _, _, error in accuracy)
    measured_source = (
        f"docs/accuracy.md: {len(accuracy)} plans whose computations and links were measured erred by {plan:.3f} (root mean square); "
        "shared evenly between two of the errors that a plan's time has"
    )
    part = plan / math.sqrt(2)
    cpu, gpu = cpu_pairs(), gpu_pairs()
    alone = {"cpu": cpu, "cuda": gpu}
    where = {"cpu": "benchmarks/spreads_cpu.json", "cuda": "the H200's profiles (soap/profiles/data, benchmarks/gpu/results)"}
    tile: dict[str, Any] = {"measured": {}, "interpolated": {}, "calibrated": {}, "estimated": {}}
    for kind, pairs in alone.items():
        repeats = _rms((pair.apart, pair.weight) for pair in pairs)
        tile["measured"][kind] = _figures({"rate": part, "kind": part, "shape": max(repeats, part / 2)}, measured_source)
        for source in (Source.INTERPOLATED, Source.CALIBRATED, Source.ESTIMATED):
            own = [pair for pair in pairs if pair.source == source.value]
            parts = components(own)
            said = f"{len(own)} passes in {len({pair.group for pair in own})} profiles: {where[kind]}; each beside what the others say"
            if source is not Source.ESTIMATED:
                parts |= {"rate": max(parts["rate"], part), "kind": max(parts["kind"], part)}
            elif kind == "cuda":
                whole = _rms((error, 1.0) for error in published)
                parts["rate"] = math.sqrt(max(whole**2 - parts["kind"] ** 2 / KINDS_AT_ONCE, part**2))
                said += (
                    f"; rate: with it the errors of a step add up to {whole:.3f}, as those of {len(published)} published steps on one "
                    "device do (docs/results/published.md)"
                )
            tile[source.value][kind] = _figures(parts, said)
    links = _rms((gain, 1.0) for gain in gains) / math.sqrt(3)
    gains_source = (
        f"docs/benchmarks.md, end to end: the gains of {len(gains)} plans on local:2, whose links nobody had measured, erred by "
        f"{links * math.sqrt(3):.3f}; shared evenly between what all communications have in common, what their sorts have, and the plan"
    )
    known_gains = _rms((gain, 1.0) for gain in measured_gain_errors())
    own = math.sqrt(max(known_gains**2 - part**2, 0.0))
    plan_source = f"docs/accuracy.md: gains erred by {known_gains:.3f}, more than links explain"
    nccl = "assumption: half of the error on processors, none was measured"
    repeated = "local:2 measured four times within an hour, on a machine with a load of 3 to 8: {} (standard deviations of ln)"
    quick_sums = "a sum within steps varied by 0.38, messages by 0.19 to 0.39; 0.38 is shared evenly between the two"
    quick_work = "the processor time of a sum varied by 0.21, that of a message by 0.09"
    return {
        "tile": tile,
        "communication": {
            "measured": {kind: _figures({"all": part, "sort": part}, measured_source) for kind in ("cpu", "cuda")},
            "quick": {
                "cpu": _figures({"all": 0.27, "sort": 0.27}, repeated.format(quick_sums)),
                "cuda": _figures({"all": links / 2, "sort": links / 2}, nccl),
            },
            "described": {
                "cpu": _figures({"all": links, "sort": links}, gains_source),
                "cuda": _figures({"all": links / 2, "sort": links / 2}, nccl),
            },
        },
        "overhead": {
            "measured": {kind: _figures({"all": 2 * part}, measured_source) for kind in ("cpu", "cuda")},
            "quick": {"cpu": _figures({"all": 0.21}, repeated.format(quick_work)), "cuda": _figures({"all": links / 2}, nccl)},
            "described": {"cpu": _figures({"all": links}, gains_source), "cuda": _figures({"all": links / 2}, nccl)},
        },
        "plan": {
            "measured": {kind: _figures({"all": own}, plan_source) for kind in ("cpu", "cuda")},
            **{
                known: {"cpu": _figures({"all": links}, gains_source), "cuda": _figures({"all": links / 2}, nccl)}
                for known in ("quick", "described")
            },
        },
        "launch": {
            "cpu": _figures({"all": 0.0}, "processors launch nothing"),
            "cuda": _figures({"all": 0.2}, "assumption: as the processors beside GPUs differ; measured beside an H200 alone"),
        },
        "update": {
            kind: _figures(
                {"rate": tile["estimated"][kind]["rate"], "all": tile["estimated"][kind]["kind"]}, "as an estimated kind of operator"
            )
            for kind in ("cpu", "cuda")
        },
        "server": dict.fromkeys(("cpu", "cuda"), _figures({"all": tile["estimated"]["cpu"]["kind"]}, "as an estimated kind of operator")),
        "memory": {
            "quantiles": [0.91, 1.0],
            "source": "docs/benchmarks.md: 120 ranks used 1 / 1.01 to 1 / 1.15 of what was expected, in the median 1 / 1.05, none more",
        },
    }


def _figures(parts: Mapping[str, float], source: str) -> dict[str, Any]:
    return {**{name: round(value, DIGITS) for name, value in parts.items()}, "source": source}


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _mean(values: Iterable[tuple[float, float]]) -> float:
    pairs = list(values)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _rms(values: Iterable[tuple[float, float]]) -> float:
    pairs = list(values)
    return math.sqrt(_mean((value * value, weight) for value, weight in pairs)) if pairs else 0.0


def measure(models: Sequence[str], cluster: str, budget_s: float) -> dict[str, Any]:
    """Profile models on this machine, each in a store of its own."""
    device = api.load_cluster(cluster).devices[0].type
    rows: list[Pair] = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"XDG_CACHE_HOME": folder}
            out = Path(folder) / "profile.json"
            for arguments in ([model, "--cluster", cluster, "--budget", str(budget_s)], ["export", str(out)]):
                command = [sys.executable, "-m", "soap.cli.profile", *arguments]
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            entries = [decode(entry) for profile in json.loads(out.read_text("utf-8"))["profiles"] for entry in profile["entries"]]
        own = list(pairs_of(f"{model} on {cluster}", [entry for entry in entries if entry.forward_work], device))
        rows += own
        print(f"{model}: {len(own)} pairs, {median(abs(p.error) for p in own if p.source == Source.ESTIMATED):.2f} estimated", flush=True)
    return {"when": f"{datetime.now(UTC):%Y-%m-%d}", "cluster": cluster, "device": device.identity, "pairs": [list(row) for row in rows]}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spreads", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("fit", help="print spreads.json")
    own = commands.add_parser("measure", help="profile models, and keep how far estimates were off")
    own.add_argument("models", nargs="+", metavar="MODEL")
    own.add_argument("--cluster", default="local:2")
    own.add_argument("--budget", type=float, default=40.0, metavar="SECONDS", help="for each model (default %(default)g)")
    args = parser.parse_args(argv)
    if args.command == "fit":
        print(json.dumps(fit(), indent=1))
    else:
        CPU_PAIRS.write_text(json.dumps(measure(args.models, args.cluster, args.budget)) + "\n")


if __name__ == "__main__":
    main()
