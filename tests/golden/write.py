"""Write the golden figures anew: ``python -m tests.golden.write [4] [16] [64] [searches] [strategies] [--everything]``.

A change that is meant to move predictions shows itself so: what it moves are lines in the diff of its commit. Entries of clusters without
ports must be as they were, or nothing is written, unless ``--everything`` is said. Strategy files are history: they are written where there
are none, and never again.
"""

from __future__ import annotations

import sys
import time

from tests.golden import figures, strategy_files


def main(arguments: list[str]) -> int:
    """Exit status 1 if something differs that must not."""
    everything, asked = "--everything" in arguments, [name for name in arguments if name != "--everything"]
    known = [*map(str, figures.COUNTS), "searches", "strategies"]
    if unknown := [name for name in asked if name not in known]:
        print(f"unknown {unknown[0]!r}; expected some of {', '.join(known)}, --everything", file=sys.stderr)
        return 2
    wanted = asked or known
    good = all([write_predictions(count, everything) for count in figures.COUNTS if str(count) in wanted])
    if "searches" in wanted:
        good = write_searches(everything) and good
    if "strategies" in wanted:
        strategy_files.write_missing()
    return 0 if good else 1


def write_predictions(count: int, everything: bool) -> bool:
    """False, with the first line that is not allowed to change, if nothing was written."""
    path = figures.PREDICTIONS / f"{count}.json"
    record: figures.Record = {**figures.header(count), "models": {}}
    for model in figures.models(count):
        begin = time.perf_counter()
        record["models"][model] = figures.predicted(model, count)
        print(f"{count:2} devices  {model:30} {time.perf_counter() - begin:6.1f} s", flush=True)
    forbidden = forbidden_change(figures.read(path), record) if path.exists() and not everything else ""
    if forbidden:
        print(f"{path.name} is left as it is: {forbidden}", file=sys.stderr)
        return False
    path.write_text(figures.text(record) + "\n")
    return True


def forbidden_change(before: figures.Record, now: figures.Record) -> str:
    """The first difference between two fixtures that is not on clusters with ports alone; empty if there is none."""
    for model, own in before["models"].items():
        found = now["models"].get(model, {"graph": "none"})
        if found["graph"] != own["graph"]:
            return f"{model}: expected graph {own['graph']}, found {found['graph']}"
    for name, about in before["clusters"].items():
        if about["ports"]:
            continue
        if now["clusters"].get(name) != about:
            return f"cluster {name}: expected {about}, found {now['clusters'].get(name)}"
        for model, own in before["models"].items():
            for difference in figures.differences(model, name, False, own[name], now["models"][model][name]):
                return str(difference)
    return ""


def write_searches(everything: bool) -> bool:
    """As ``write_predictions``."""
    before = figures.read(figures.SEARCHES) if figures.SEARCHES.exists() else {}
    found = figures.searches()
    for name, own in before.items():
        if not (everything or own["ports"] or own == found.get(name)):
            print(f"{figures.SEARCHES.name} is left as it is: {name}: expected {own}, found {found.get(name)}", file=sys.stderr)
            return False
    figures.SEARCHES.write_text(figures.text(found) + "\n")
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
