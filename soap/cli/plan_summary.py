"""What the commands report of a simulated strategy: one document for programs, and the same as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isinf, prod
from typing import Any

from soap.api import SearchOutcome, costs_record, memory_range, predicted_range
from soap.api.baselines import baselines, usual_strategies
from soap.api.predictions import resources_record
from soap.cli import compressing, inputs
from soap.cli.plain_text import and_more, attributes, devices, left_last, listed, milliseconds, speed_up, split, sync_document, sync_text
from soap.cluster.topology import Topology
from soap.model import sparse_shares
from soap.model.batch import samples_of
from soap.model.graph import SUM_DTYPES, OperatorGraph
from soap.model.json_text import option_texts
from soap.profiles import shares
from soap.search.deciding import FASTEST, SAFE, Answer
from soap.search.starts import BASELINE
from soap.search.to_fit import Budgeted
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator, is_large
from soap.simulator.throughput import Throughput
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.json_file import whole_options
from soap.strategy.marks import FEATURES, Feature, are_marked, with_each_mark
from soap.units import format_bytes


def throughput_document(found: Throughput) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the commands' interface."""
    return {
        **attributes(found, "samples_per_second", "tokens_per_second", "mfu", "model_flops", "arithmetic", "peak_flops_per_second"),
        "price_per_hour": None if found.price is None else found.price.per_hour,
        "currency": None if found.price is None else found.price.currency or None,
        **attributes(found, "cost_per_million_samples", "cost_per_million_tokens"),
    }


def throughput_text(figures: Mapping[str, Any]) -> str:
    """The document in one line: ``1,234 samples/s (315,904 tokens/s), MFU 41%, 2.10 EUR per million samples``."""
    samples, tokens = (figures[f"{what}_per_second"] for what in ("samples", "tokens"))
    parts = [] if samples is None else [f"{rate(samples)} samples/s" + ("" if tokens is None else f" ({rate(tokens)} tokens/s)")]
    parts.append(f"MFU {utilisation_text(figures['mfu'])}")
    if figures["cost_per_million_samples"] is not None:
        parts.append(f"{cost_text(figures['cost_per_million_samples'], figures['currency'])} per million samples")
    if figures["cost_per_million_tokens"] is not None:
        parts[-1] += f" ({cost_text(figures['cost_per_million_tokens'], None)} per million tokens)"
    return ", ".join(parts)


def rate(per_second: float) -> str:
    """``315,904``, or three digits of a small one: ``0.0123``."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def utilisation_text(utilisation: float) -> str:
    """``41%``, ``3.2%``."""
    percent = 100 * utilisation
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%" if percent >= 0.05 else "under 0.1%"


def cost_text(amount: float, currency: str | None) -> str:
    """``2.10 EUR``, or three digits of a small amount: ``0.00123``."""
    digits = f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.3g}"
    return f"{digits} {currency}" if currency else digits


def range_text(found: Mapping[str, Any]) -> str:
    """``117.0 ms to 149.2 ms (80%); 1.1 to 1.3x data_parallel, …``, of a ``range_record``; also if steps take longer than tasks."""
    least, _, most = found["speedup"]
    longer = "" if found["step_factor"] == 1 else f", steps here take {found['step_factor']:.2f} times as long as their tasks"
    time = f"{between(found)} ({found['shares'][-1] - found['shares'][0]:.0%}{longer})"
    if least == most:  # the plan is data parallelism
        return time
    return f"{time}; {least:.2f} to {most:.2f}x {BASELINE}, which it beats in {_won(found['wins'], found['draws'])} draws of the costs"


def between(found: Mapping[str, Any]) -> str:
    """``117.0 ms to 149.2 ms``, of a ``range_record``."""
    low, _, high = found["time_ns"]
    return f"{milliseconds(low)} to {milliseconds(high)}"


def decided_text(found: Mapping[str, Any], files: Mapping[str, str] | None = None, *, at_hand: bool) -> str:
    """How sure the fastest and the safe plan of a ``decision_record`` are; empty if nothing was compared. ``files``: where they are."""
    reference, fastest, safe = found["reference"], found["fastest"], found["safe"]
    if reference is None:
        return ""
    if fastest == safe:
        won = "" if fastest == reference else f": it {_beats(found, fastest)}"
        return f"not run: {fastest} is the fastest plan on average and the safe one{won}"
    head = ("not run", "predicted", f"80% of {found['draws']} draws", "their mean", f"beats {reference} in", "by", "file")
    rows = [head, *(_row(found, answer, files) for answer in (FASTEST, SAFE))]
    asked = f"--confidence {found['confidence']:g}" if found["answer"] == FASTEST else "--confidence 0"
    remedy = "--profile and --verify decide" if at_hand else "measured costs (soap-profile, soap-profile links) tell more"
    return (
        f"{listed(rows)}\n  fastest: on average over the draws of the costs; safe: in {found['confidence']:.0%} of them faster than "
        f"{reference}, or {reference} itself\n  the answer is the {found['answer']} plan; {asked} makes it the other one; {remedy}"
    )


def _row(found: Mapping[str, Any], answer: Answer, files: Mapping[str, str] | None) -> tuple[str, ...]:
    own, name = found["plans"][found[answer]], found[answer]
    low, high = map(milliseconds, own["time_ns"])
    gain = f"{own['gain'][0]:.2f} to {own['gain'][1]:.2f}x"
    won = ("-", "") if name == found["reference"] else (_won(own["wins"], found["draws"]), gain)
    times = milliseconds(own["predicted_ns"]), f"{low} to {high}", milliseconds(own["mean_ns"])
    return f"{answer}: {name}", *times, *won, "" if files is None else files[answer]


def _beats(found: Mapping[str, Any], name: str) -> str:
    own = found["plans"][name]
    least, most = own["gain"]
    return f"beats {found['reference']} in {_won(own['wins'], found['draws'])} draws of the costs ({least:.2f} to {most:.2f}x)"


def _won(wins: float, draws: int) -> str:
    return f"{wins * draws:.0f} of {draws}"


MOST_NAMED = 4
"""So many operators are named; the document has all."""


def kept_documents(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Plain JSON values by the names of marks (``recomputed``), of what there is of each."""
    found = {feature.said[0]: _kept_document(simulator, strategy, simulation, feature) for feature in FEATURES}
    return {key: own for key, own in found.items() if own is not None}


def _kept_document(
    simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation, feature: Feature
) -> dict[str, Any] | None:
    """None if no operator has it. ``light``: of recomputed ones, those that are but for their products. ``kept_``: of the same strategy
    if they had no mark. ``peak_bytes``: of the device that holds most."""
    names = are_marked(strategy, feature.field)
    if not names:
        return None
    kept = simulator.predict(with_each_mark(strategy, dict.fromkeys(names, 0)))
    light = [name for name in names if getattr(strategy.operators[name], feature.field) != feature.values[1]]
    return {
        "operators": names,
        **({"light": light} if len(feature.values) > 2 else {}),
        "of_operators": len(strategy.operators),
        "peak_bytes": max(simulation.peak_bytes),
        "kept_peak_bytes": max(kept.peak_bytes),
        "kept_predicted_ns": kept.makespan_ns,
        "kept_overflow_bytes": kept.overflow_bytes,
    }


def kept_texts(report: Mapping[str, Any]) -> list[str]:
    """What ``kept_documents`` has put into a report, in two lines each."""
    own = ((report[feature.said[0]], feature.do) for feature in FEATURES if feature.said[0] in report)
    return [_kept_text(found, report["predicted_ns"], do) for found, do in own]


def _kept_text(found: Mapping[str, Any], predicted_ns: int, do: str) -> str:
    names: Sequence[str] = found["operators"]
    shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    lacks = found["kept_overflow_bytes"]
    light = f" ({len(found['light'])} but for their products)" if found.get("light") else ""
    lowers = "lowers" if found["peak_bytes"] <= found["kept_peak_bytes"] else "raises"
    saved = f"{lowers} the peak from {format_bytes(found['kept_peak_bytes'])} to {format_bytes(found['peak_bytes'])}"
    fits = f" (all kept, {format_bytes(lacks)} would be missing)" if lacks else ""
    added = predicted_ns - found["kept_predicted_ns"]
    return (
        f"{len(names)} of {found['of_operators']} operators {do}{light}: {shown}\n"
        f"  that takes {milliseconds(added)} more, and {saved}{fits}"
    )


def budgeted(name: str, start: Budgeted) -> dict[str, Any]:
    """Plain JSON values of a start that recomputes as little as fits. ``gap``: by what share ``added_ns`` may exceed the least time of any
    choice of runs, if each saves and costs the same whatever others do (``Budgeted``); None if nothing is known of that."""
    own = attributes(start, "runs", "selective", "of_runs", "added_ns", "least_ns")
    return {"start": name, **own, "gap": None if isinf(start.gap) else start.gap}


def budgeted_text(found: Mapping[str, Any]) -> str:
    """That in one line."""
    if found["gap"] is None:
        near = "one step is enough, so nothing less is"
    elif found["gap"] == 0:
        near = "no choice of runs takes less"
    else:
        near = f"at most {found['gap']:.1%} more than any choice of runs"
    products = f" ({found['selective']} but for their products)" if found["selective"] else ""
    return f"start {found['start']!r}: {found['runs']} of {found['of_runs']} runs{products}, {milliseconds(found['added_ns'])}; {near}"


SINGLE = "single_device"
FOUND = "found"
"""The name of the found strategy in reports."""
MOST_OPERATORS = 16
"""Rows of the list of operators; the strategy file has all."""


def subject(graph: OperatorGraph, topology: Topology) -> dict[str, dict[str, Any]]:
    """A report's model and cluster as plain JSON values."""
    return {
        "model": {"name": graph.name, "hash": graph.hash, "operators": len(graph.operators)},
        "cluster": {"name": topology.name, "hash": topology.hash, "devices": [device.name for device in topology.devices]},
    }


def document(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """A simulated strategy as plain JSON values. The keys are part of the commands' interface."""
    graph, topology = simulator.graph, simulator.topology
    usual, others = usual_strategies(simulator), baselines(simulator)
    baseline = usual[BASELINE]
    about = subject(graph, topology)
    about["cluster"]["shared_cores"] = shared_cores(topology)
    return {
        **about,
        **({"sum_dtype": graph.sum_dtype} if graph.sum_dtype else {}),
        "same_as": next((name for name, own in usual.items() if own == strategy), None),
        "costs": costs_record(simulator, simulation.tasks),
        "folded": _folded(simulator, strategy, simulation),
        "predicted_ns": simulation.makespan_ns,
        "range": predicted_range(simulator, strategy, len(simulation.tasks.tasks)),
        "fits": simulation.fits,
        "speedup": others[BASELINE]["predicted_ns"] / max(1, simulation.makespan_ns),
        "baselines": others,
        "throughput": throughput_document(simulation.throughput),
        "expected_memory_bytes": list(simulation.peak_bytes),
        "peak_memory_bytes": list(simulation.peak_by_kind),
        "memory_range_bytes": [memory_range(peak) for peak in simulation.peak_bytes],
        "available_memory_bytes": list(topology.memory_limits),
        **_hosts(simulation),
        "bytes_moved": simulation.bytes_moved,
        "data_parallel_bytes_moved": simulator.predict(baseline).bytes_moved,
        "busy_ns": simulation.busy_ns,
        "idle_devices": [topology.devices[device].name for device in _idle_devices(strategy, topology)],
        "samples": samples_of(graph),
        "unlike_data_parallel": _differences(graph, strategy, baseline),
        "sparse": sparse_shares.document(graph),
        "synchronized": {name: sync_document(sync) for name, sync in strategy.parameters.items() if sync != SyncConfig()},
        **({"whole_strategy": whole} if (whole := whole_options(strategy)) else {}),
        **({"compressed": compressed} if (compressed := compressing.document(simulator, strategy, simulation)) else {}),
        **kept_documents(simulator, strategy, simulation),
    }


def text(report: Mapping[str, Any], name: str, why: str = "") -> str:
    """The document as a short table. ``name``: what the strategy is called in it. ``why``: which plan that is, and why it was taken."""
    model, cluster = report["model"], report["cluster"]
    alike, crowd = _same(report, name), report["cluster"]["shared_cores"]
    sections = [
        (f"{lossy}\n" if (lossy := compressing.first_line(report.get("compressed"))) else "")
        + f"{model['name']} ({model['operators']} operators) on {cluster['name']} ({len(cluster['devices'])} devices)\n"
        f"costs: {report['costs']['description']}\n{resting(report['costs'])}"
        + (f"\nlinks: {report['costs']['links']}" if report["costs"]["links"] else "")
        + (f"\npartial results: made, sent and added up in {SUM_DTYPES[sums]}" if (sums := report.get("sum_dtype")) else "")
        + (f"\n{crowded(len(cluster['devices']), crowd)}" if crowd else "")
        + (f"\n{_idle(report)}" if report["idle_devices"] else "")
        + (f"\n{_folding(report['folded'])}" if report["folded"] else ""),
        _times(report, name) + (f"\n  {name}: {why}" if why else ""),
        _resources(report),
        *([alike] if alike else []),
        *([] if alike and report["same_as"] == SINGLE else [_unlike(report["unlike_data_parallel"], model["operators"])]),
        *([inputs.rows_text(report["sparse"])] if report["sparse"] else []),
        *([_synchronized(report["synchronized"])] if report["synchronized"] else []),
        *([f"the whole strategy: {'; '.join(option_texts(Strategy, whole))}"] if (whole := report.get("whole_strategy")) else []),
        *([compressing.text(report["compressed"])] if "compressed" in report else []),
        *([f"warm-up: {compressing.warm_up_text(report['warm_up'], report['predicted_ns'])}"] if report.get("warm_up") else []),
        *kept_texts(report),
    ]
    return "\n\n".join(sections)


def resting(costs: Mapping[str, Any]) -> str:
    """Where the predicted compute time comes from."""
    return f"compute time {shares.text(costs['shares'], costs['corrected'])}"


def optimality(outcome: SearchOutcome) -> str:
    """How good the found strategy is among all: whether changing one operator could improve it, and the time that no strategy can be
    below."""
    optimal = outcome.result.locally_optimal and outcome.strategy == outcome.result.strategy
    lines = ["no other configuration of any one operator is better (locally optimal)"] if optimal else []
    bound, found_ns = outcome.bound, outcome.time_ns
    if bound is None:
        lines.append("at best: not worked out, the space is too large")
    elif found_ns >= bound.bound_ns:
        what = "dependent computation" if bound.path_ns >= bound.work_ns else "computation, divided among the devices"
        away = f"this plan is within {found_ns / bound.bound_ns - 1:.0%} of it"
        lines.append(f"at best {milliseconds(bound.bound_ns)}, without any communication ({what}): {away}")
    return "\n".join(lines)


def recorded(simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """What a strategy file records of a prediction."""
    return {"predicted_ns": simulation.makespan_ns, **resources_record(simulation)}


def shared_cores(topology: Topology) -> int | None:
    """The number of this machine's cores if more processes than cores share them; None otherwise."""
    cores = sum(host.cpu_cores for host in topology.hosts)
    alone = topology.device_count <= cores or not topology.name.startswith("local:") or topology.devices[0].type.kind != "cpu"
    return None if alone else cores


def crowded(processes: int, cores: int) -> str:
    """A line about shared cores."""
    return f"note: {processes} processes share {cores} core{'s' if cores > 1 else ''} of this machine"


def dump(report: Mapping[str, Any]) -> str:
    """One JSON document."""
    return json.dumps(report, indent=2, allow_nan=False)


def _idle_devices(strategy: Strategy, topology: Topology) -> list[int]:
    """The workers that compute nothing, or copies of what others compute alone."""
    configs = strategy.operators.values()
    used = {device for config in configs for device in (config.devices if prod(config.degrees) > 1 else config.devices[:1])}
    return [device for device in topology.workers if device not in used]


def _idle(report: Mapping[str, Any]) -> str:
    """A line about devices that compute nothing of their own, and whether that is for want of samples."""
    idle, count, samples = report["idle_devices"], len(report["cluster"]["devices"]), report["samples"]
    few = f": {samples} samples are too few for all" if samples is not None and samples == count - len(idle) > 1 else ""
    named = f"{', '.join(idle[:2])}{', …' * (len(idle) > 2)}"
    return f"note: idle, but for copies of what others compute: {len(idle)} of {count} devices ({named}){few}"


def _folded(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any] | None:
    """How the simulation was folded, or why it could not be; None if there was no need."""
    if isinstance(simulation, FoldedSimulation):
        copies, devices = simulation.folding.copies.images.shape
        return {"copies": copies, "devices_per_copy": devices}
    folded = simulator.run_folded(strategy) if is_large(strategy) else None
    return {"reason": folded} if isinstance(folded, str) else None


def _folding(folded: Mapping[str, Any]) -> str:
    """A line about folding."""
    if "reason" in folded:
        return f"note: every device was simulated: {folded['reason']}"
    return f"note: {folded['copies']} copies of the model, on {folded['devices_per_copy']} devices each, do the same: two were simulated"


def _differences(graph: OperatorGraph, strategy: Strategy, baseline: Strategy) -> list[dict[str, Any]]:
    found = []
    for op in graph.operators:
        config, usual = strategy.operators[op.name], baseline.operators[op.name]
        if config != usual:
            entry = {"operator": op.name, "kind": op.kind, "split": split(op, config), "devices": list(config.devices)}
            found.append({**entry, "data_parallel_split": split(op, usual), "data_parallel_devices": list(usual.devices)})
    return found


def _same(report: Mapping[str, Any], name: str) -> str:
    """A line if the strategy is a classical one that the reader would not recognize."""
    same = report["same_as"]
    if same is None or same == name or len(report["cluster"]["devices"]) == 1:
        return ""
    if name != FOUND:
        return f"{name} is {same}"
    return f"the strategy is {same}" + (": splitting does not pay here" if same == SINGLE else "")


def _times(report: Mapping[str, Any], name: str) -> str:
    predicted_ns = report["predicted_ns"]
    rows = [("", "predicted", "speed-up over it"), (name, milliseconds(predicted_ns), "" if report["fits"] else "does not fit into memory")]
    left_out = [baseline for baseline, cost in report["baselines"].items() if cost["predicted_ns"] is None]
    for baseline, cost in report["baselines"].items():
        if cost["predicted_ns"] is None:
            continue
        lacking = cost["overflow_bytes"]
        lacks = f" (does not fit: {format_bytes(lacking)} missing)" if lacking else ""
        rows.append((baseline, milliseconds(cost["predicted_ns"]), speed_up(cost["predicted_ns"], predicted_ns) + lacks))
    asked = f"  not simulated, as each takes seconds or more: {', '.join(left_out)} (soap-simulate --builtin NAME; what fits: --fits)"
    return "\n".join([left_last(rows), *([asked] if left_out else []), f"  {name}: {range_text(report['range'])}"])


def _resources(report: Mapping[str, Any]) -> str:
    names, peaks = report["cluster"]["devices"], report["expected_memory_bytes"]
    fullest = max(range(len(peaks)), key=lambda d: peaks[d] / report["available_memory_bytes"][d])
    available = report["available_memory_bytes"][fullest]
    between = " to ".join(map(format_bytes, report["memory_range_bytes"][fullest]))
    held = f"{between} of {format_bytes(available)} ({names[fullest]})"
    busy = [report["busy_ns"][name] for name in names]
    mean = sum(busy) / len(busy) / max(1, report["predicted_ns"])
    rows = [
        ("memory per device", held),
        ("at its peak", kinds_text(report["peak_memory_bytes"][fullest])),
        *([("memory of hosts", _host_text(report["host_memory"]))] if "host_memory" in report else []),
        ("moved per iteration", f"{format_bytes(report['bytes_moved'])} ({BASELINE}: {format_bytes(report['data_parallel_bytes_moved'])})"),
        ("devices busy", f"{mean:.0%} of the time on average"),
        ("throughput", throughput_text(report["throughput"])),
    ]
    return listed(rows)


def _hosts(simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """What parameter servers beside accelerators keep in the hosts' main memory, if there are any."""
    pairs = zip(simulation.topology.hosts, simulation.host_memory, strict=True)
    held = [{"name": host.name, "held_bytes": held, "available_bytes": host.memory_bytes} for host, held in pairs]
    return {"host_memory": held} if any(simulation.host_memory) else {}


def _host_text(hosts: Sequence[Mapping[str, Any]]) -> str:
    """How much servers keep on the host that is fullest by that."""
    fullest = max(hosts, key=lambda host: host["held_bytes"] / (host["available_bytes"] or float("inf")))
    known, held = fullest["available_bytes"], format_bytes(fullest["held_bytes"])
    of = f"of {format_bytes(known)}" if known else "whose memory is not known: whether that fits was not checked"
    return f"parameter servers keep up to {held} on {fullest['name']}" + (f", {of}" if not known else f" {of}")


def kinds_text(kinds: Mapping[str, int]) -> str:
    """What a peak of memory is made of, the most first."""
    largest = sorted(((size, kind) for kind, size in kinds.items() if size), key=lambda own: -own[0])
    return ", ".join(f"{kind} {format_bytes(size)}" for size, kind in largest)


def _synchronized(syncs: Mapping[str, Mapping[str, Any]]) -> str:
    alike: dict[str, list[str]] = {}
    for name, entry in syncs.items():
        alike.setdefault(sync_text(entry), []).append(name)
    rows = [(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), how) for how, names in alike.items()]
    return f"{len(syncs)} parameters are not all-reduced:\n" + listed(rows)


def _unlike(differences: Sequence[Mapping[str, Any]], operators: int) -> str:
    if not differences:
        return f"all {operators} operators are configured as in data parallelism"
    alike: dict[tuple[str, str, str], list[str]] = {}
    for entry in differences:
        now = f"{entry['split']} on {devices(entry['devices'])}"
        usual = f"{entry['data_parallel_split']} on {devices(entry['data_parallel_devices'])}"
        alike.setdefault((entry["kind"], now, usual), []).append(entry["operator"])
    rows = [
        (names[0] + (f" and {len(names) - 1} more {kind}" if len(names) > 1 else ""), now, f"instead of {usual}")
        for (kind, now, usual), names in list(alike.items())[:MOST_OPERATORS]
    ]
    shown = sum(len(names) for names in list(alike.values())[:MOST_OPERATORS])
    head = f"{len(differences)} of {operators} operators are configured unlike data parallelism:"
    return "\n".join([head, listed(rows), *and_more(len(differences), shown, "the strategy file has all")])
