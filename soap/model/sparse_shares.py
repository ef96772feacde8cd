"""A graph's sparse parameters as plain values: shown to people, kept with strategies, and overridden by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from soap.errors import ModelError, StrategyError, did_you_mean
from soap.model.graph import OperatorGraph
from soap.model.sparse_access import RowAccess, scaled


def document(graph: OperatorGraph) -> dict[str, dict[str, Any]]:
    """The sparse parameters by name, as plain JSON values. ``touched``: different rows of a batch, its half, its quarter, …"""
    return {
        name: {
            "rows": access.rows,
            "lookups": access.indices,
            "weights": [lookup.weighed for lookup in access.lookups],
            "touched": list(access.touched),
            "alpha": access.alpha,
            "source": access.source,
        }
        for name, access in graph.sparse.items()
    }


def with_document(graph: OperatorGraph, found: Mapping[str, Any]) -> OperatorGraph:
    """The graph with the touched rows of a strategy's record. Entries for other parameters are ignored. StrategyError if the record is
    wrong."""
    sparse = dict(graph.sparse)
    for name, access in graph.sparse.items():
        entry = found.get(name)
        if entry is None:
            continue
        try:
            if (entry["rows"], entry["lookups"]) == (access.rows, access.indices):
                touched = tuple(int(rows) for rows in entry["touched"])
                measured, given = entry["source"] == "measured", entry["source"] == "given"
                weights = [int(weight) for weight in entry.get("weights", ())] or [0] * len(access.lookups)
                if any(0 < weight < own.indices for weight, own in zip(weights, access.lookups, strict=True)):
                    raise ValueError(weights)
                lookups = tuple(replace(own, weight=weight) for weight, own in zip(weights, access.lookups, strict=True))
                sparse[name] = RowAccess(access.rows, lookups, touched, measured, given)
        except (ModelError, KeyError, TypeError, ValueError):
            raise StrategyError(f"the strategy's record of sparse parameter {name!r} is malformed; search again") from None
    return replace(graph, sparse=sparse)


def with_alphas(graph: OperatorGraph, shares: Sequence[tuple[str, float]]) -> OperatorGraph:
    """The graph with other shares of touched rows: (pattern of parameter names, alpha); later ones overrule earlier ones.

    ModelError if a pattern matches no sparse parameter, or a batch has too few lookups for its share.
    """
    sparse = dict(graph.sparse)
    for pattern, alpha in shares:
        names = [name for name in sparse if fnmatchcase(name, pattern)]
        if not names:
            some = ", ".join([*sparse][:5]) + (", …" if len(sparse) > 5 else "") + did_you_mean(pattern, sparse)
            raise ModelError(f"no sparse parameter is named {pattern!r}; expected one of {some}" if sparse else _dense(graph, pattern))
        for name in names:
            try:
                sparse[name] = scaled(sparse[name], alpha)
            except ModelError as cause:
                raise ModelError(f"{name}: {cause}") from None
    return replace(graph, sparse=sparse)


def _dense(graph: OperatorGraph, pattern: str) -> str:
    return f"alpha is given for {pattern!r}, but model {graph.name!r} has no sparse parameters; leave it out"
