"""``python -m benchmarks.kills [--of 20] [--only KIND ...] [--out PAGE]``: training with servers and workers, disturbed at random moments:
a worker or a server killed, the launcher or Ray's head, the network of a host cut for five seconds, the servers' disk full. Resumable;
takes an hour. Results: docs/results/kills.md.

Each run trains a model whose values tell how often each sample has counted (``benchmarks.kill_run``), with two workers and two servers, and
is disturbed some times, each as soon as it has recovered from the last and a random moment has passed. Cut networks are those of emulated
hosts, disks are small ones in memory: both need root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import kept
from benchmarks.kill_drills import DRILLS, drill
from benchmarks.pages import give
from benchmarks.quiet import Watch

VERSION = 1
COMMAND = "python -m benchmarks.kills"
PER_RUN = 5
WIDTH = 138
SHOWN = {
    "worker": "a worker is killed",
    "server": "a server is killed",
    "launcher": "the launcher is killed",
    "head": "a process of Ray's head is killed",
    "network": "the network of a host is cut for 5 s",
    "disk": "the servers' disk is full",
}
CELL = {
    "type": "object",
    "properties": {
        "kind": {"enum": [*DRILLS]},
        "seed": {"type": "integer"},
        "leases": {"type": "integer"},
        "events": {"type": "array", "items": {"type": "object"}},
        "wrong": {"type": "array", "items": {"type": "string"}},
        "lost_workers": {"type": "integer"},
        "dealt_again": {"type": "integer"},
        "seconds": {"type": "number"},
        "others": {"type": ["number", "null"]},
        "date": {"type": "string"},
    },
    "required": ["kind", "seed", "leases", "events", "wrong", "lost_workers", "dealt_again", "seconds", "others", "date"],
    "additionalProperties": False,
}


def measure(kind: str, seed: int, kills: int) -> dict[str, Any]:
    """One run."""
    watch, begin_s = Watch(), time.monotonic()
    found = drill(kind, seed, kills, Path(tempfile.mkdtemp(prefix="kills-")))
    facts = {"seconds": round(time.monotonic() - begin_s, 1), "others": watch.others_share(), "date": date.today().isoformat()}
    return {**asdict(found), **facts}


def page(cells: Sequence[dict[str, Any]]) -> str:
    """What was done and what came of it."""
    days, busy = sorted({cell["date"] for cell in cells}), [cell["others"] for cell in cells if cell["others"] is not None]
    used = f"{min(busy, default=0):.0%} to {max(busy, default=0):.0%}"
    head = (
        f"`{COMMAND}`, {' to '.join(sorted({days[0], days[-1]}))}, two cores. Two workers and two servers train a model whose values tell "
        "how often each sample has counted and how many pushes have; they are disturbed at random moments. A run goes well if all samples "
        "counted as often as there were epochs, and no process, shared memory or temporary file is left; after the launcher and Ray's "
        f"head the same call goes on. Others, Ray's own processes among them, used {used} of the cores: times are no proof of anything but "
        "that training goes on."
    )
    lines = [
        "# Training that is disturbed",
        "",
        textwrap.fill(head, WIDTH),
        "",
        "| what happens | times | runs | leases trained | samples lost or counted twice | left behind | went wrong | leases dealt again |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, shown in SHOWN.items():
        own = [cell for cell in cells if cell["kind"] == kind]
        if own:
            wrong = [line for cell in own for line in cell["wrong"]]
            miscounted, left = (sum(line.startswith(word) for line in wrong) for word in ("counted", "left behind"))
            other = len(wrong) - miscounted - left
            leases, again = (sum(cell[key] for cell in own) for key in ("leases", "dealt_again"))
            times = sum(len(cell["events"]) for cell in own)
            lines.append(f"| {shown} | {times} | {len(own)} | {leases:,} | {miscounted} | {left} | {other} | {again} |")
    lines += ["", *_recovery(cells), "", *_errors(cells)]
    return "\n".join(lines).rstrip() + "\n"


def _recovery(cells: Sequence[dict[str, Any]]) -> list[str]:
    """How long training was slower, or away."""
    lines = [
        "How training went on, medians (and the largest): leases a second in the two seconds before and in the worst second behind it; the",
        "longest time without an acknowledged lease; the time until what was lost is back (Ray starts a process and it loads the model), a",
        "warning has come (disk), or the network is (network). For Ray's head: until the run has said its line and ended.",
        "",
        "| what happens | before | worst second | without a lease | back, or ended |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, shown in SHOWN.items():
        events = [event for cell in cells if cell["kind"] == kind for event in cell["events"]]
        figures = [_middle(events, *keys) for keys in (("before_per_s",), ("least_per_s",), ("gap_s",), ("back_s", "ended_s"))]
        if any(figures):
            lines.append(f"| {shown} | {' | '.join(figures)} |")
    return lines


def _middle(events: Sequence[dict[str, Any]], *keys: str) -> str:
    found = [event[key] for event in events for key in keys if key in event]
    unit = "/s" if keys[0].endswith("per_s") else " s"
    return f"{statistics.median(found):.1f}{unit} ({max(found):.1f})" if found else ""


def _errors(cells: Sequence[dict[str, Any]]) -> list[str]:
    found = [(cell["kind"], cell["seed"], line) for cell in cells for line in cell["wrong"]]
    return ["What went wrong:", "", *(f"- {kind}, run {seed}: {line}" for kind, seed, line in found)] if found else []


def main() -> None:
    """Measure what is missing; write cells behind each run, and the page at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=int, default=20, help="disturbances of each kind (default %(default)s)")
    parser.add_argument("--only", nargs="*", choices=[*DRILLS], default=[*DRILLS])
    parser.add_argument("--cells", type=Path, default=Path("kills.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further run after so long")
    args = parser.parse_args()
    end_s = time.monotonic() + args.seconds
    cells = kept.read(args.cells, CELL, VERSION, COMMAND)
    for seed in range(-(-args.of // PER_RUN)):
        for kind in args.only:
            kills = min(PER_RUN, args.of - seed * PER_RUN)
            if any((cell["kind"], cell["seed"]) == (kind, seed) for cell in cells) or time.monotonic() > end_s:
                continue
            cells.append(measure(kind, seed, kills))
            kept.write(args.cells, cells, VERSION)
            last = cells[-1]
            print(f"{kind} {seed}: {len(last['events'])} in {last['seconds']:.0f} s, {last['wrong'] or 'well'}", file=sys.stderr)
    if cells:
        give(page(cells), args.out)


if __name__ == "__main__":
    main()
