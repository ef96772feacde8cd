"""Rows of large runs, made small: a change of any price or of memory shows in their predictions (``tests/test_frontier_gate``).

    python -m benchmarks.frontier_gate --rows ROWS.json --write tests/golden/frontier.json

Models keep their sizes, but have four layers; steps have twice as many micro-batches as stages. So a prediction takes under a second, and
no prediction here is compared with a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frontier import predicted
from benchmarks.frontier_plans import Row, key_of, said
from soap.files import write_text_atomically

COUNT = 40
LAYERS = 4
EACH = 8
"""Rows of a model, so that five models are exported."""
LEFT_OUT = (
    "step_ms", "figure", "unit", "derivation", "peak_memory", "source_title", "source_place", "source_address", "notes", "order_note",
    "confidence", "figure_other", "flop_formula", "tokens_per_step",
)  # fmt: skip
"""Of a row, what was measured and where it stands: nothing of it enters a prediction."""


def small(row: Row) -> dict[str, Any] | None:
    """The row with few layers and micro-batches; None if it cannot be said, or has more chunks than layers are left."""
    own, stages = said(row), row["pp"] * (row["virtual_stages"] or 1)
    if own.lacking or stages > LAYERS or row["model"]["layers"] < LAYERS:
        return None
    size = row["global_batch"] // (row["dp"] * own.microbatches)
    count = min(own.microbatches, 2 * row["pp"])
    kept = {name: value for name, value in row.items() if name not in LEFT_OUT}
    counts = {"global_batch": size * row["dp"] * count, "micro_batch": size, "microbatches_per_pipeline": count, "step_ms": None}
    return {**kept, **counts, "model": {**row["model"], "layers": LAYERS}}


def chosen(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Some rows of each of the models that have most, evenly spaced; of a model those whose graph has most."""
    models: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if (own := small(row)) is not None:
            key = json.dumps(key_of(own, said(own)), sort_keys=True)
            models.setdefault(row["model"]["name"], {}).setdefault(key, []).append(own)
    most = sorted((max(own.values(), key=len) for own in models.values()), key=len, reverse=True)[: COUNT // EACH]
    return [own[i * len(own) // EACH] for own in most for i in range(EACH)]


def outcomes(rows: Sequence[Row], models: Path) -> dict[str, dict[str, Any]]:
    """By row, its predicted step in ms and peak in bytes; or why it is refused."""
    found = {}
    for row in rows:
        own = predicted(row, models)
        found[row["id"]] = {"refused": own.lacking} if own.lacking else {"step_ms": own.step_ms, "peak_bytes": own.peak_bytes}
        print(f"{row['id']}: {found[row['id']]}, {own.took_seconds} s", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="frontier_gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, metavar="FILE", help="choose rows from this file; by default those of the page stay")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="rows and their predictions")
    args = parser.parse_args(argv)
    if args.rows is not None:
        rows = chosen(json.loads(args.rows.read_text(encoding="utf-8")))
    else:
        rows = json.loads(args.write.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory() as folder:
        record = {"rows": rows, "outcomes": outcomes(rows, Path(folder))}
    write_text_atomically(args.write, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
