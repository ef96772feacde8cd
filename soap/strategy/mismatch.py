"""Why a strategy file does not fit: how its model and cluster differ from the given ones, worded for one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from soap.cluster.topology import Topology
from soap.errors import asked
from soap.model.batch import sample_factor
from soap.model.graph import FactorKind, Operator, OperatorGraph
from soap.model.json_text import one_line, short


def model_differences(document: Mapping[str, Any], graph: OperatorGraph) -> list[str]:
    """How the file's model differs from this one: an empty list, or one that begins with both names.

    Files from when losses over flattened tokens were divided by samples alone have another hash for the same model. They are read, and
    leave positions whole.
    """
    model, operators = document["model"], document["operators"]
    missing = [op.name for op in graph.operators if op.name not in operators]
    extra = [name for name in operators if name not in graph.index]
    changed = []
    earlier = False
    for op in graph.operators:
        if op.name in operators:
            entry = operators[op.name]
            left_out = _positions_of_loss(op) - entry["sizes"].keys()
            earlier = earlier or bool(left_out)
            changed += _operator_differences(op, entry, left_out)
    if (model["hash"] == graph.hash) != earlier and not (missing or extra or changed) and _sums_agree(model, graph):
        return []
    theirs = f"{short(model['name'])} ({one_line(model['hash'], 20)}, {model['operators']} operators)"
    if model["hash"] == graph.hash:
        result = [f"strategy file was changed by hand: it is for this model, {theirs}, but its operators are not"]
    else:
        ours = f"{short(graph.name)} ({graph.hash}, {len(graph.operators)} operators)"
        result = [f"strategy was made for another model: {theirs} instead of {ours}"]
    result += [f"{what}: {_some(names)}" for what, names in (("not in the file", missing), ("only in the file", extra)) if names]
    if changed:
        result.append(f"different: {_some(changed, quote=False)}")
    if not _sums_agree(model, graph):
        sums = model.get("sum_dtype", "float32")
        other = f"partial results are summed in {sums} there and in {graph.sum_dtype} here"
        result.append(f"{other}: read the model with {asked('sum_dtype')} {sums}")
    elif not (missing or extra or changed):
        result.append("operators and factor sizes agree, their connections, types or parameters differ")
    return result


def _sums_agree(model: Mapping[str, Any], graph: OperatorGraph) -> bool:
    return graph.sum_dtype in (None, model.get("sum_dtype", "float32"))


def _positions_of_loss(op: Operator) -> set[str]:
    """Names of the factors other than samples of an operator that sums over all that it reads."""
    if sample_factor(op) is None or not all(factor.summed for factor in op.factors):
        return set()
    return {factor.name for factor in op.factors if factor.kind is FactorKind.REDUCTION}


def _operator_differences(op: Operator, entry: Mapping[str, Any], left_out: Set[str]) -> list[str]:
    """How an operator differs from its entry, but for factors that the entry may leave out."""
    sizes = {factor.name: factor.size for factor in op.factors if factor.name not in left_out}
    if entry["kind"] != op.kind:
        return [f"{op.name} is {short(entry['kind'])} instead of {op.kind!r}"]
    names = list(dict.fromkeys([*entry["sizes"], *sizes]))
    pairs = [(name, entry["sizes"].get(name, "none"), sizes.get(name, "none")) for name in names]
    return [f"{op.name} has {one_line(name, 40)} of size {theirs} instead of {ours}" for name, theirs, ours in pairs if theirs != ours]


def cluster_differences(cluster: Mapping[str, Any], topology: Topology) -> list[str]:
    """How the cluster that a file names differs from this one: an empty list, or one that begins with both names."""
    names = [device.name for device in topology.devices]
    if cluster["hash"] == topology.hash and [*cluster["devices"]] == names:
        return []
    there, here = set(cluster["devices"]), set(names)
    missing, extra = [n for n in cluster["devices"] if n not in here], [n for n in names if n not in there]
    result = [
        f"strategy was made for another cluster: {short(cluster['name'])} ({one_line(cluster['hash'], 20)}, "
        f"{len(cluster['devices'])} devices) instead of {short(topology.name)} ({topology.hash}, {len(names)} devices)"
    ]
    result += [f"{what}: {_some(found)}" for what, found in (("devices not here", missing), ("devices not in the file", extra)) if found]
    if not missing and not extra:
        result.append("the devices' names agree, their order, types or links differ")
    return result


def _some(values: Sequence[str], most: int = 4, *, quote: bool = True) -> str:
    shown = ", ".join(short(value) if quote else one_line(value) for value in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
