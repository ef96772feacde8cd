"""What ``soap-search`` reports of one search: a document for programs, and the same as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap import api
from soap.cli import compressing, explanation, plan_summary, verification
from soap.cli.first_measuring import Measured
from soap.cli.plain_text import milliseconds
from soap.search.deciding import FASTEST, Answer
from soap.search.starts import BASELINE
from soap.strategy.compression import Compression
from soap.strategy.config import SyncConfig
from soap.strategy.sync import saving_memory
from soap.units import format_bytes

SEARCHED = ("seed", "budget", "beta", "risk", "draws", "spreads", "evaluations", "interrupted", "pins", "forbidden", "memory_limit_bytes")


def document(
    outcome: api.SearchOutcome,
    files: Mapping[Answer, str] | None = None,
    *,
    explain: bool = False,
    measured: Measured | None = None,
    verified_s: float | None = None,
    warmed: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface. ``files``: where the fastest and the safe plan were written, if they
    were. ``measured``: what was measured before the search, None if nothing. ``verified_s``: seconds spent on running plans, None if none
    was to be run. ``warmed``: the warm-up (``compressing.warm_up_document``)."""
    recorded = outcome.record["search"]
    found = {
        **plan_summary.document(outcome.simulator, outcome.strategy, outcome.simulation),
        "search": {key: recorded[key] for key in SEARCHED if key in recorded},
        "bound_ns": None if outcome.bound is None else outcome.bound.bound_ns,
    }
    if phases := compressing.warm_up_document(outcome.simulator, outcome.strategy, warmed):
        found["warm_up"] = phases
    if outcome.result.saving_bytes:
        found["saving_memory"] = _saving(outcome)
    if measured is not None:
        found["profiled"] = measured.document
    if outcome.kept is not None and verified_s is not None:
        found["measured"] = verification.document(outcome.runs, outcome.kept, verified_s)
    else:
        found["decision"] = api.decision_record(outcome.decision)
    if files is not None:
        found |= {"strategy": files[outcome.decision.answer], "files": dict(files)}
    if outcome.result.budgeted:
        found["budgeted"] = [plan_summary.budgeted(name, own) for name, own in outcome.result.budgeted.items()]
    if explain:
        why = outcome.explanation, outcome.synchronization, outcome.unkept
        found |= explanation.documents(outcome.simulator.graph, *why, outcome.time_ns)
    return found


def brief(outcome: api.SearchOutcome) -> dict[str, Any]:
    """The part of the report that needs no simulation, as plain JSON values."""
    graph, topology, recorded = outcome.simulator.graph, outcome.simulator.topology, outcome.shortened().record
    return {
        **plan_summary.subject(graph, topology),
        "search": {key: recorded["search"][key] for key in SEARCHED if key in recorded["search"]},
        **{key: recorded[key] for key in ("predicted_ns", "data_parallel_ns", "decision", "measured") if key in recorded},
        "brief": True,
    }


def brief_text(found: Mapping[str, Any], output: str) -> str:
    """That for people."""
    kept = found["measured"]["kept"] if "measured" in found else found["decision"]["kept"]
    return (
        f"{found['model']['name']} ({found['model']['operators']} operators) on {found['cluster']['name']}: {kept}, "
        f"{milliseconds(found['predicted_ns'])} predicted, data_parallel {milliseconds(found['data_parallel_ns'])}\n"
        f"no time was left to say more; soap-simulate --strategy {output} does\n\nwrote {output}"
    )


def text(
    outcome: api.SearchOutcome,
    found: Mapping[str, Any],
    *,
    told: Sequence[str] = (),
    lossy: Sequence[Compression] = (),
    at_hand: bool = False,
    measured: Measured | None = None,
    verified_s: float | None = None,
) -> str:
    """The document for people. ``told``: the user's constraints. ``lossy``: methods to compress by. ``at_hand``: on this machine."""
    sections = [plan_summary.text(found, plan_summary.FOUND, _which(found)), plan_summary.optimality(outcome)]
    if "saving_memory" in found:
        sections.append(_saving_text(found["saving_memory"], saving_memory(outcome.simulator.topology)))
    if "budgeted" in found:
        sections.append("\n".join(map(plan_summary.budgeted_text, found["budgeted"])))
    if measured is not None:
        sections.append(measured.text)
    if told:
        sections[-1] += f"\nas the search was told: --{', --'.join(told)}; the other strategies above were not"
    if lossy and "compressed" not in found:
        sections[-1] += f"\n{compressing.does_not_pay(lossy)}"
    if "measured" in found:
        sections.append(verification.text(found["measured"]))
    elif verified_s is not None and outcome.kept is None:
        sections.append("ran nothing: no other plan has a chance to be faster than data parallelism")
    if "decision" in found and (decided := plan_summary.decided_text(found["decision"], found.get("files"), at_hand=at_hand)):
        sections.append(decided)
    if "explanation" in found:
        sections += explanation.texts(found, outcome.time_ns, outcome.simulator.topology)
    return "\n\n".join(sections)


def _which(found: Mapping[str, Any]) -> str:
    """Which plan is shown as the found one, and why."""
    if "measured" in found:
        return f"{found['measured']['kept']}, kept: {verification.why(found['measured'])}"
    own = found["decision"]
    if own["reference"] is None:
        return ""
    both = f"{own['fastest']}, the fastest plan on average" if own["answer"] == FASTEST else f"{own['safe']}, the safe plan"
    if own["fastest"] == own["safe"]:
        return f"{own['fastest']}, the fastest plan on average, and a safe one"
    other = f"the safe one is {own['safe']}" if own["answer"] == FASTEST else f"the fastest on average is {own['fastest']}"
    return f"{both}; {other} (below)"


def _saving(outcome: api.SearchOutcome) -> dict[str, Any]:
    """Why the search could save memory unasked, and where it does."""
    allowed, syncs = saving_memory(outcome.simulator.topology), outcome.strategy.parameters.items()
    saving = {name: sync for name, sync in syncs if sync.offload or sync in allowed}
    parameters = len(outcome.simulator.graph.parameters)
    words = sorted({sync.word + "+offload" * sync.offload for sync in saving.values()})
    counts = {"methods": words, "parameters": len(saving), "of": parameters}
    return {"data_parallel_lacks_bytes": outcome.result.saving_bytes, **counts}


def _saving_text(saving: Mapping[str, Any], choices: Sequence[SyncConfig]) -> str:
    allowed = ", ".join(sync.word for sync in choices[:-1]) + f" or {choices[-1].word}"
    lacking = format_bytes(saving["data_parallel_lacks_bytes"])
    why = f"{BASELINE} lacks {lacking} of memory, so that devices may share parameters' states or values ({allowed})"
    if not saving["parameters"]:
        return f"{why}: none is, as this plan fits without it and is faster"
    return f"{why}: {saving['parameters']} of {saving['of']} are, by {' and '.join(saving['methods'])}"
