"""How many rows of sparse parameters a batch touches: counted or given by options, and shown by ``soap-search`` and ``soap-simulate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from soap import api
from soap.api.preprocessed import measure_rows_of
from soap.cli.options import reading
from soap.cli.plain_text import aligned, and_more
from soap.cli.preprocessed import folder_of, sized
from soap.cluster.topology import Topology
from soap.model import sparse_shares
from soap.model.graph import OperatorGraph

LEGEND = "sparse parameters: a batch looks up rows of them, some of them repeatedly; alpha: share of the rows that it touches"
HEADER = ("parameter", "rows", "look-ups", "touched", "by 1/2, 1/4, 1/8", "alpha", "")
MOST_ROWS = 16
"""Lines of the text; the JSON document has all."""


def load_graph(args: argparse.Namespace, topology: Topology | None) -> OperatorGraph:
    """The model's graph, with rows counted on ``--data`` and shares from ``--alpha``."""
    args.model = sized(args.model, args.alpha_from or folder_of(args.data))
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"reading {args.model}", file=sys.stderr)
    if args.data is None and args.alpha_from is None:
        return sparse_shares.with_alphas(api.planned_graph(args.model, **reading(args, topology)), args.alpha)
    model = api.load(args.model, plan_only=True, **reading(args, topology))
    graph = model.graph
    if args.data is not None:
        from soap.cli.batches import batch_size, user_batches  # imports torch, which reading the model has done already

        batches = user_batches(args.data, batch_size(model))
        graph = api.measure_rows(model, (batches(step) for step in range(args.alpha_batches)))
    if args.alpha_from is not None:
        graph = measure_rows_of(model, args.alpha_from)
    return sparse_shares.with_alphas(graph, args.alpha)


def text(sparse: Mapping[str, Mapping[str, Any]]) -> str:
    """The document of ``sparse_shares`` as a table."""
    rows = [HEADER]
    for name, own in list(sparse.items())[:MOST_ROWS]:
        whole, *parts = map(str, own["touched"])
        rows.append((name, str(own["rows"]), str(own["lookups"]), whole, ", ".join(parts[:3]), f"{own['alpha']:.3g}", own["source"]))
    return "\n".join([LEGEND, "", aligned(rows, indent=""), *(line.lstrip() for line in and_more(len(sparse), MOST_ROWS))])
