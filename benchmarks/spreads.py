"""How far costs are off, fitted to stored measurements: the figures of ``soap/profiles/data/spreads.json``.

    python -m benchmarks.spreads measure --again zoo:gpt:tiny zoo:resnet50@2 …   # on a quiet machine; without --again it goes on
    python -m benchmarks.spreads compression                                  # the same, of compressing gradients
    python -m benchmarks.spreads fit > soap/profiles/data/spreads.json

``measure`` profiles models on this machine, compares each measurement with what would be said without it (the roofline; an interpolation
between the others; the roofline with the others' factors), and measures its links quickly some times (``benchmarks.spread_pairs``).
A test holds the file against ``fit``.

All figures are standard deviations of ln(measured / predicted). The parts of a tile's error are told apart as in an analysis of variance
with nested groups (Searle, Casella & McCulloch, "Variance Components", 1992): ``rate`` is the mean of one model's tiles, ``kind`` that of
one kind of operator in one direction around it, ``shape`` what is left. Tiles count by the root of the time that they take: a plan's time
is that of its long ones, but there are few of them. Classes of kinds and short and long passes have figures of their own where there are
``LEAST_PAIRS``; the others have the common ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import stdev
from typing import Any

from benchmarks import accuracy_report, default_cells
from benchmarks.spread_pairs import (
    CPU_CLUSTER,
    CPU_PAIRS,
    ROOT,
    Pair,
    compression_pairs,
    cpu_pairs,
    gpu_pairs,
    measure,
    measure_compression,
    record,
)
from benchmarks.step_errors import MODE, step_error
from soap.cli.options import positive
from soap.errors import SoapError
from soap.profiles.entries import UPDATE
from soap.profiles.lookup import Source
from soap.profiles.spreads import CLASSES, ELSEWHERE, HERE, SIZES, class_of, row_name

KINDS_AT_ONCE = 4
"""A plan's time is that of about so many kinds of operators, whose errors partly even out."""
LEAST_PAIRS = 20
"""Passes without which a class or a size has no figures of its own."""
LEAST_UPDATES, LEAST_REPEATS = 5, 3
SHORT_NS = {"cpu": 1_000_000, "cuda": 100_000}
"""A pass that is said to take less is short."""
DIGITS = 3
DEVICES = ("cpu", "cuda")
GPU_SOURCE = "the H200's profiles (soap/profiles/data, benchmarks/gpu/results)"
Figures = dict[str, Any]


def rates_of(pairs: Sequence[Pair]) -> dict[str, float]:
    """By group, the mean error of its kinds of operators."""
    found = {}
    for group in dict.fromkeys(pair.group for pair in pairs):
        kinds = _by_kind([pair for pair in pairs if pair.group == group]).values()
        found[group] = _mean((_mean((p.error, p.weight) for p in mine), sum(p.weight for p in mine)) for mine in kinds)
    return found


def parts_of(pairs: Sequence[Pair], rates: Mapping[str, float]) -> dict[str, float]:
    """``kind`` and ``shape`` of some pairs, by the rates of the groups as wholes."""
    kinds, shapes = list[tuple[float, float]](), list[tuple[float, float]]()
    for (group, *_), mine in _by_kind(pairs).items():
        mean = _mean((pair.error, pair.weight) for pair in mine)
        kinds.append((mean - rates[group], sum(pair.weight for pair in mine)))
        if len(mine) > 1:
            unbiased = math.sqrt(len(mine) / (len(mine) - 1))
            shapes += [((pair.error - mean) * unbiased, pair.weight) for pair in mine]
    return {"kind": _rms(kinds), **({"shape": _rms(shapes)} if shapes else {})}


def components(pairs: Sequence[Pair]) -> dict[str, float]:
    """``rate``, ``kind`` and ``shape`` of these pairs."""
    rates = rates_of(pairs)
    return {"rate": _rms((rate, 1.0) for rate in rates.values()), **parts_of(pairs, rates)}


def _by_kind(pairs: Sequence[Pair]) -> dict[tuple[str, str, bool], list[Pair]]:
    found: dict[tuple[str, str, bool], list[Pair]] = defaultdict(list)
    for pair in pairs:
        found[pair.group, pair.kind, pair.backward].append(pair)
    return found


def plan_errors(table: str) -> list[tuple[str, str, float]]:
    """(cluster, model, ln(measured / predicted)) of all plans of docs/accuracy.md, whose computations and links were measured."""
    return [(plan.cluster, plan.model, math.log(plan.measured_ns / plan.predicted_ns)) for plan in accuracy_report.read(table)]


def gain_errors(table: str) -> list[float]:
    """ln(measured gain / predicted gain) of docs/benchmarks.md, *Predicted and measured, end to end*: nothing was measured but rates."""
    section = table.split("\n## Predicted and measured, end to end\n")[1].split("\n## ")[0]
    return [math.log(float(row[7]) / float(row[6])) for row in list(_rows(section))[2:] if row[1] != "data_parallel"]


def measured_gain_errors(table: str) -> list[float]:
    """ln(measured gain / predicted gain) over data parallelism of the plans of docs/accuracy.md."""
    groups: dict[tuple[str, str], dict[str, accuracy_report.Plan]] = defaultdict(dict)
    for plan in accuracy_report.read(table):
        groups[plan.cluster, plan.model][plan.strategy] = plan
    found = []
    for own in groups.values():
        usual = own.pop(accuracy_report.USUAL)
        error = math.log(usual.measured_ns / usual.predicted_ns)
        found += [error - math.log(plan.measured_ns / plan.predicted_ns) for plan in own.values()]
    return found


def published_errors(table: str) -> list[float]:
    """ln(predicted / published) of the rows of docs/results/published.md on one device, where nothing is communicated."""
    return [math.log(1 + float(row[7].rstrip("%")) / 100) for row in _rows(table) if len(row) == 10 and row[1] == "1"]


def quick_error(values: Sequence[Mapping[str, Any]], names: Sequence[str]) -> float:
    """By how much repeated quick measurements of links vary in what they say of these: the root mean square over sizes of the one that
    varies most. SoapError if there are too few."""
    if len(values) < LEAST_REPEATS:
        raise SoapError(f"{len(values)} quick measurements of links in {CPU_PAIRS.name}: expected {LEAST_REPEATS} or more: measure them")
    return max(_rms((_varies(own[name][size] for own in values), 1.0) for size in values[0][name]) for name in names)


def _varies(values: Iterable[int]) -> float:
    return stdev(math.log(max(1, value)) for value in values)


def fit() -> Figures:
    """The file ``spreads.json``. SoapError if too little was measured."""
    accuracy = _text("docs/accuracy.md")
    errors, gains = [error for *_, error in plan_errors(accuracy)], measured_gain_errors(accuracy)
    plan, known_gains = (_rms((error, 1.0) for error in own) for own in (errors, gains))
    part = plan / math.sqrt(2)
    measured = (
        f"docs/accuracy.md: {len(errors)} plans whose computations and links were measured erred by {plan:.3f} (root mean "
        "square); shared evenly between two of the errors that a plan's time has"
    )
    kept = record()
    pairs, where = {"cpu": cpu_pairs(kept), "cuda": gpu_pairs()}, {"cpu": _cpu_source(kept), "cuda": GPU_SOURCE}
    tiles = {device: _tiles(device, own, part, measured, where[device]) for device, own in pairs.items()}
    own, said = math.sqrt(max(known_gains**2 - part**2, 0.0)), f"docs/accuracy.md: gains erred by {known_gains:.3f}, more than links say"
    plans = {device: _figures({"all": own}, said) for device in DEVICES}
    corrections = "as measured: a correction is what a run's own tasks took; no later run is kept beside one"
    nothing = _figures({"all": 0.0}, "processors launch nothing")
    server = _figures({"all": tiles["cpu"]["estimated"]["kind"]}, "as an estimated kind of operator")
    return {
        "short": {device: {"below_ns": ns, "source": "choice: calls are much of shorter passes"} for device, ns in SHORT_NS.items()},
        "tile": {source.value: {device: tiles[device][source.value] for device in DEVICES} for source in Source},
        "corrected": {device: _figures({"rate": part, "kind": part}, corrections) for device in DEVICES},
        **_links(part, measured, plans, kept["quick"]),
        "launch": {
            "measured": {"cpu": nothing, "cuda": _figures({"all": part}, f"as tiles: {measured}")},
            "estimated": {
                "cpu": nothing,
                "cuda": _figures({"all": 0.2}, "assumption: as the processors beside GPUs differ; measured beside an H200 alone"),
            },
        },
        "update": {
            "measured": {device: _figures({"rate": part, "all": part}, f"as tiles: {measured}") for device in DEVICES},
            "estimated": {device: _updates(own, tiles[device]["estimated"], where[device]) for device, own in pairs.items()},
        },
        "compression": _compression(kept, part, measured),
        "server": dict.fromkeys(DEVICES, server),
        "step": _steps(),
        "memory": {
            "quantiles": [0.91, 1.0],
            "source": "docs/benchmarks.md: 120 ranks used 1 / 1.01 to 1 / 1.15 of what was expected, in the median 1 / 1.05, none more",
        },
    }


def _cpu_source(kept: Mapping[str, Any]) -> str:
    models = kept["models"].values()
    budgets, days = sorted(own["budget_s"] for own in models), sorted(own["when"] for own in models)
    devices = " and ".join(dict.fromkeys(own["device"] for own in models))
    each = f"{budgets[0]:g}" if budgets[0] == budgets[-1] else f"{budgets[0]:g} to {budgets[-1]:g}"
    how = f" ({len(days)} models, {each} s each, until {days[-1]}, {devices})" if days else ""
    return f"benchmarks/{CPU_PAIRS.name}{how}"


def _tiles(device: str, pairs: Sequence[Pair], part: float, measured: str, where: str) -> Figures:
    """By source, the figures of tiles. Sources with too few passes have those of the next worse one. ``where``: pairs come from."""
    tiles = [pair for pair in pairs if not pair.kind.startswith(UPDATE)]
    found: Figures = {}
    for source in (Source.ESTIMATED, Source.CALIBRATED, Source.INTERPOLATED):
        own = [pair for pair in tiles if pair.source == source.value]
        if len(own) < LEAST_PAIRS:
            if not found:
                raise SoapError(f"{len(own)} passes in {where}: expected {LEAST_PAIRS} or more: measure more models")
            worse = next(reversed(found))
            found[source.value] = {**found[worse], "source": f"as {worse}: {len(own)} passes alone"}
            continue
        least = 0.0 if source is Source.ESTIMATED else part
        parts = components(own)
        said = f"{len(own)} passes in {len({pair.group for pair in own})} profiles: {where}; each beside what the others say"
        if source is not Source.ESTIMATED:
            parts |= {"rate": max(parts["rate"], part), "kind": max(parts["kind"], part)}
        elif device == "cuda":
            parts["rate"], more = _published_rate(parts["kind"], part)
            said += more
        rates = rates_of(own)

        def parted(some: Sequence[Pair], rates: Mapping[str, float] = rates, least: float = least) -> dict[str, float]:
            found = parts_of(some, rates)
            return {**found, "kind": max(found["kind"], least)}

        found[source.value] = {**_figures(parts, said), "classes": _classes(device, own, parted)}

    def repeated(some: Sequence[Pair]) -> dict[str, float]:
        return {"shape": max(_rms((pair.apart, pair.weight) for pair in some), part / 2)}

    once = [pair._replace(predicted_ns=pair.measured_ns) for pair in tiles if pair.source == Source.ESTIMATED.value]
    whole = _figures({"rate": part, "kind": part, **repeated(once)}, f"{measured}; shape: as repetitions differ, if that is more than half")
    found[Source.MEASURED.value] = {**whole, "classes": _classes(device, once, repeated)}
    return found


def _published_rate(kind: float, part: float) -> tuple[float, str]:
    """The error of a GPU's rate that the steps of others leave, and its source."""
    published = published_errors(_text("docs/results/published.md"))
    whole = _rms((error, 1.0) for error in published)
    said = (
        f"; rate: with it the errors of a step add up to {whole:.3f}, as those of {len(published)} published steps on one device do "
        "(docs/results/published.md)"
    )
    return math.sqrt(max(whole**2 - kind**2 / KINDS_AT_ONCE, part**2)), said


def _classes(device: str, pairs: Sequence[Pair], parted: Callable[[Sequence[Pair]], Mapping[str, float]]) -> Figures:
    """By class, size or both, the figures of those of which there are enough passes, and fewer than of both sizes or of all classes."""
    found = {}
    for name in (*CLASSES, ""):
        both = [pair for pair in pairs if name in ("", class_of(pair.kind))]
        sizes = {size: [pair for pair in both if SIZES[pair.predicted_ns >= SHORT_NS[device]] == size] for size in SIZES}
        for size, own in {"": both, **sizes}.items():
            if LEAST_PAIRS <= len(own) < len(both if size else pairs):
                found[row_name(name, size)] = _figures(parted(own), f"{len(own)} of these passes")
    return found


def _updates(pairs: Sequence[Pair], estimated: Mapping[str, Any], where: str) -> Figures:
    """Of estimated updates: how far they are off beside the rate of tiles, or by themselves, whichever is less."""
    own = [pair for pair in pairs if pair.kind.startswith(UPDATE)]
    if len(own) < LEAST_UPDATES:
        said = f"as an estimated kind of operator: {len(own)} updates alone"
        return _figures({"rate": estimated["rate"], "all": estimated["kind"]}, said)
    rates = rates_of([pair for pair in pairs if pair.source == Source.ESTIMATED.value and not pair.kind.startswith(UPDATE)])
    alone, beside = (parts_of(own, defaultdict(float, by))["kind"] for by in ({}, rates))
    said = f"{len(own)} updates in {where}; beside the rate of tiles they err by {beside:.3f}, by themselves by {alone:.3f}"
    return _figures({"rate": 0.0, "all": alone} if alone < beside else {"rate": estimated["rate"], "all": beside}, said)


def _compression(kept: Mapping[str, Any], part: float, measured: str) -> Figures:
    """Of selections, and of what else devices do for compressed gradients: how far a data sheet is off, by itself."""
    pairs = compression_pairs(kept)
    if len(pairs) < LEAST_PAIRS:
        raise SoapError(f"{len(pairs)} works of compression in {CPU_PAIRS.name}: expected {LEAST_PAIRS} or more: measure them")
    own = {name: [pair for pair in pairs if (pair.kind == "select") == (name == "select")] for name in ("select", "restore")}
    parts = {name: _rms((pair.error, pair.weight) for pair in some) for name, some in own.items()}
    where, methods = kept["compression"], len({pair.group.split(" ", 1)[1] for pair in pairs})
    said = f"{len(own['select'])} selections and {len(own['restore'])} other works of {methods} methods"
    beside = f"beside other work (load {where['load']:g} at the beginning)"
    source = f"benchmarks/{CPU_PAIRS.name}: {said}, on one thread {beside}, {where['when']}, {where['device']}"
    none = f"assumption: as on processors, none was measured on a GPU: {source}"
    known = _figures({"rate": part, "select": part, "restore": part}, f"as tiles: {measured}")
    return {
        "measured": dict.fromkeys(DEVICES, known),
        "estimated": {"cpu": _figures({"rate": 0.0, **parts}, source), "cuda": _figures({"rate": 0.0, **parts}, none)},
    }


def _links(part: float, measured: str, plans: Figures, quick: Sequence[Mapping[str, Any]]) -> Figures:
    """Of communication, what it keeps devices busy with, and plans, by how links are known. ``plans``: those whose links were measured."""
    gains = gain_errors(_text("docs/benchmarks.md"))
    whole = _rms((gain, 1.0) for gain in gains)
    links = whole / math.sqrt(3)
    said = (
        f"docs/benchmarks.md, end to end: the gains of {len(gains)} plans on {CPU_CLUSTER}, whose links nobody had measured, erred by "
        f"{whole:.3f}; shared evenly between what all communications have in common, what their sorts have, and the plan"
    )
    nccl = "assumption: half of the error on processors, none was measured"
    times, busy = quick_error(quick, ("message", "sum")), quick_error(quick, ("message busy", "sum busy"))
    often = f"benchmarks/{CPU_PAIRS.name}: {CPU_CLUSTER} measured quickly {len(quick)} times, until {quick[-1]['when']}"
    repeated = f"{often}, varied by {{:.3f}}, beside the errors of measured ones"
    both = math.sqrt(times**2 / 2 + part**2)
    described = {"cpu": _figures({"all": links, "sort": links}, said), "cuda": _figures({"all": links / 2, "sort": links / 2}, nccl)}
    overhead = {"cpu": _figures({"all": links}, said), "cuda": _figures({"all": links / 2}, nccl)}
    left = "what remains if links are measured quickly: "
    remaining = {device: {**own, "source": f"{left}{own['source']}"} for device, own in overhead.items()}
    shared = f"{repeated.format(times)}; shared evenly"
    return {
        "communication": {
            "measured": {device: _figures({"all": part, "sort": part}, measured) for device in DEVICES},
            "quick": {"cpu": _figures({"all": both, "sort": both}, shared), "cuda": described["cuda"]},
            "described": described,
        },
        "overhead": {
            "measured": {device: _figures({"all": 2 * part}, measured) for device in DEVICES},
            "quick": {"cpu": _figures({"all": math.hypot(busy, 2 * part)}, repeated.format(busy)), "cuda": overhead["cuda"]},
            "described": overhead,
        },
        "plan": {"measured": plans, "quick": remaining, "described": overhead},
    }


def _steps() -> Figures:
    """Of whole steps: of processes that share a machine's cores as they were timed, elsewhere nothing."""
    cells = default_cells.read(ROOT / "benchmarks/default_command_cells.json")
    mean, spread = step_error(cells)
    counted = [cell for cell in cells if cell.mode == MODE]
    said = (
        f"benchmarks/default_command_cells.json: {len(counted)} plans of {len({cell.model for cell in counted})} models on processes of "
        "one machine, whose costs were measured; the spread beside that of the draws"
    )
    nothing = {"mean": 0.0, "all": 0.0}
    elsewhere = "none is known: plans of docs/accuracy.md erred to both sides"
    return {
        HERE: {"cpu": _figures({"mean": mean, "all": spread}, said), "cuda": _figures(nothing, "none was measured")},
        ELSEWHERE: {device: _figures(nothing, elsewhere) for device in DEVICES},
    }


def _figures(parts: Mapping[str, float], source: str) -> Figures:
    return {**{name: round(value, DIGITS) for name, value in parts.items()}, "source": source}


def _text(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spreads", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("fit", help="print spreads.json")
    commands.add_parser("compression", help="time how gradients are compressed here, and keep how far estimates were off")
    own = commands.add_parser("measure", help="profile models and links, and keep how far estimates were off")
    own.add_argument("models", nargs="+", metavar="MODEL")
    own.add_argument("--budget", type=positive, default=30, metavar="SECONDS", help="for each model (default %(default)s)")
    own.add_argument("--repeat", type=positive, default=4, metavar="N", help="quick measurements of links (default %(default)s)")
    own.add_argument("--again", action="store_true", help="forget what is kept already")
    args = parser.parse_args(argv)
    try:
        if args.command == "fit":
            print(json.dumps(fit(), indent=1))
        elif args.command == "compression":
            measure_compression()
        else:
            measure(args.models, args.budget, args.repeat, again=args.again)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
