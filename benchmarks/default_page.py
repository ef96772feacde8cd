"""The page of ``benchmarks.default_command``: tables of all cells by mode, what they say together, and predicted beside measured times.

    python -m benchmarks.default_page results.json docs/results/default_command.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from statistics import median
from textwrap import fill

from benchmarks import default_cells
from benchmarks.default_cells import MODES, PEER, USUAL, Cell, Foreseen, Ratio
from benchmarks.step_errors import judged
from soap.errors import SoapError
from soap.files import write_text_atomically
from soap.measure.paired import CONFIDENCE

HEAD = (
    "cluster", "model", "kept", "command", "of it measuring", "running plans", "costs measured", "data parallelism, ms", "DDP, ms",
    "over data parallelism", "over DDP", "others",
)  # fmt: skip
PREDICTED_HEAD = ("cluster", "model", "plan", "predicted, ms", "measured, ms", "inside", "predicted gain", "measured gain", "inside")
LEAST = {"default": 0.97, "unprofiled": 0.95, "blind": 0.97}
"""By mode: how many times as fast as data parallelism a plan is meant to be at least."""
LIMIT_S = 120
"""What the command may take with measuring."""
RANGE = 0.8
WIDTH = 140
"""Characters of a line of text."""
SAME = "1 (the same plan)"
TITLES = {
    "default": "Nothing but the defaults",
    "unprofiled": "Without measuring",
    "blind": "Without measuring, running or confidence",
}

INTRO = f"""# The default command beside data parallelism

What `soap-search MODEL --cluster local:N -o FILE` finds for twelve small models that nobody has tuned SOAP for
([benchmarks/small_models.py](../../benchmarks/small_models.py)), trained beside data parallelism by us and by PyTorch's
`{PEER}` (DDP).

    python -m benchmarks.default_command --results FILE --write docs/results/default_command.md

- Each command begins with an empty store of measurements.
- The plan, our data parallelism and DDP train in turns in the same processes: a round is a turn of each, in another order every time, and
  each is made anew for each turn. A turn's time is the median of its timed steps, of the slowest rank. All have the same fused Adam and
  the same global batch, of which each rank of DDP has its part.
- *Over data parallelism* and *over DDP* say how many times as fast the plan is: the median of the rounds' ratios, and its interval by the
  sign test, of which each bound holds with {CONFIDENCE:.0%} confidence. Where the plan is data parallelism the first is 1.
- *Costs measured* is the share of the plan's compute time that was not estimated, when the command was done.
- *Others* is the share of the cores that other programs used while plans were timed.
"""

PREDICTED = f"""## Predicted and measured

Of each plan that was timed, the range that {RANGE:.0%} of the draws of its time are in, by the costs that are known after the command
(estimates alone in the modes that do not measure), beside the median of the rounds; and the same of the plan's gain over data parallelism.
What a step takes beside its tasks (`step` in `soap/profiles/data/spreads.json`) is here that of the other models: none is judged by itself.
All shares, as a curve: [coverage.md](coverage.md).
"""


def by_mode(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each mode that has some, cluster by cluster, models in the order in which they were first run."""
    cells = list(cells)
    models = list(dict.fromkeys(cell.model for cell in cells))
    ordered = sorted(cells, key=lambda cell: (cell.cluster, models.index(cell.model)))
    return {mode: own for mode in MODES if (own := [cell for cell in ordered if cell.mode == mode])}


def head() -> str:
    """The two lines above the cells' table."""
    return _head(HEAD)


def line(cell: Cell) -> str:
    """A cell's line of the table."""
    peer = cell.over_peer
    parts = [
        *(cell.cluster, cell.model, cell.kept),
        *(_seconds(own) for own in (cell.seconds, cell.measuring_s, cell.verifying_s)),
        f"{1 - cell.sources['estimated']:.0%}" if "estimated" in cell.sources else "?",
        _ms(median(cell.times_ns[USUAL])),
        _ms(median(cell.times_ns[PEER])) if PEER in cell.times_ns else "-",
        ratio_text(cell.over_ours) if cell.differs else SAME,
        "-" if peer is None else ratio_text(peer),
        "?" if cell.others is None else f"{cell.others:.0%}",
    ]
    return f"| {' | '.join(parts)} |"


def ratio_text(ratio: Ratio) -> str:
    """The median with its interval."""
    known = ratio.low > 0 and ratio.high < inf
    return f"**{ratio.median:.2f}** ({f'{ratio.low:.2f} to {ratio.high:.2f}' if known else 'too few rounds for an interval'})"


def conclusion(cells: Sequence[Cell], least: float) -> list[str]:
    """What a mode's cells say together, as sentences. ``least``: how many times as fast as data parallelism a plan is meant to be."""
    ours = [cell.over_ours.median for cell in cells]
    peers = {cell.key: peer.median for cell in cells if (peer := cell.over_peer) is not None}
    both = [cell.over_ours.median >= least and peers.get(cell.key, 0.0) >= least for cell in cells]
    differ = [cell.over_ours.median for cell in cells if cell.differs]
    said = [f"{_reached(ours, least)} as our data parallelism{_middle(ours)}."]
    if peers:
        said.append(f"{_reached(list(peers.values()), least)} as DDP{_middle(list(peers.values()))}; {_count(both)} as both.")
    said += [f"{len(differ)} differ from data parallelism{_middle(differ)}."]
    for name, where in (("our data parallelism", {cell.key: cell.over_ours.median for cell in cells}), ("DDP", peers)):
        worse = [f"{cluster} {model} {own:.2f}" for (model, cluster, _), own in where.items() if own < least]
        said += [f"Less than {least} times as fast as {name}: {', '.join(worse)}."] if worse else []
    kept = [f"{cell.cluster} {cell.model}" for cell in cells if not cell.differs]
    said += [f"Data parallelism was kept, which counts as 1: {', '.join(kept)}."] if kept else []
    seconds = [cell.seconds for cell in cells]
    within = _count(own <= LIMIT_S for own in seconds)
    took = f"The command took {min(seconds):.0f} to {max(seconds):.0f} s, median {median(seconds):.0f}; {within} at most {LIMIT_S} s."
    return [*said, took]


def _reached(ratios: Sequence[float], least: float) -> str:
    return f"{_count(own >= least for own in ratios)} plans are at least {least} times as fast"


def _middle(ratios: Sequence[float]) -> str:
    return f" (median {median(ratios):.3f}, least {min(ratios):.3f})" if ratios else ""


def predicted_lines(cells: Sequence[Cell]) -> list[str]:
    """A line for each plan that was timed: ranges of times and gains, and whether what was measured lies inside."""
    lines = []
    for cell in cells:
        for own in cell.times:
            low, high = own.between(RANGE)
            gain = ["", "", ""] if cell.gain is None or own.plan != cell.gain.plan else _gain_parts(cell.gain)
            time = [f"{_ms(low)} to {_ms(high)}", _ms(own.measured), _inside(own)]
            lines.append(f"| {' | '.join([cell.cluster, cell.model, own.plan, *time, *gain])} |")
    return lines


def predicted_conclusion(cells: Sequence[Cell]) -> str:
    """How many of a mode's measured times and gains lie inside their ranges."""
    times = [own for cell in cells for own in cell.times]
    gains = [own for cell in cells if (own := cell.gain) is not None]
    said = f"{_count(own.inside(RANGE) for own in times)} measured times lie inside their {RANGE:.0%} range ({_sides(times)})"
    return said + (f"; {_count(own.inside(RANGE) for own in gains)} gains ({_sides(gains)})." if gains else ".")


def page(cells: Sequence[Cell]) -> str:
    """All of it, as Markdown."""
    modes = by_mode(cells)
    parts = [INTRO, *(f"{own}.\n" for own in dict.fromkeys(cell.machine for cell in cells) if own)]
    for mode, own in modes.items():
        command = " ".join(["soap-search MODEL --cluster local:N -o FILE", *MODES[mode]])
        parts.append(f"## {TITLES[mode]}\n\n    {command}\n")
        parts.append(_list(conclusion(own, LEAST[mode])))
        parts.append("\n".join([head(), *map(line, own), ""]))
        if notes := _notes(own):
            parts.append(_list(notes))
    parts.append(PREDICTED)
    for mode, own in by_mode(judged(cells)).items():
        parts.append(f"### {TITLES[mode]}: predicted\n\n{predicted_conclusion(own)}\n")
        parts.append("\n".join([_head(PREDICTED_HEAD), *predicted_lines(own), ""]))
    return "\n".join(parts)


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Write the page."""
    write_text_atomically(path, page(cells))


def _notes(cells: Sequence[Cell]) -> list[str]:
    """What is to be said of how the peer ran, once for cells that say the same."""
    notes: dict[str, list[str]] = {}
    for cell in cells:
        if cell.note:
            notes.setdefault(cell.note, []).append(f"{cell.cluster} {cell.model}")
    return [f"DDP, {', '.join(places)}: {note}" for note, places in notes.items()]


def _gain_parts(gain: Foreseen) -> list[str]:
    low, high = gain.between(RANGE)
    return [f"{low:.2f} to {high:.2f}", f"{gain.measured:.2f}", _inside(gain)]


def _inside(own: Foreseen) -> str:
    low, high = own.between(RANGE)
    return "below" if own.measured < low else "above" if own.measured > high else "yes"


def _sides(all_of: Sequence[Foreseen]) -> str:
    where = [_inside(own) for own in all_of]
    return f"{where.count('below')} below, {where.count('above')} above"


def _count(which: Iterable[bool]) -> str:
    values = list(which)
    return f"{sum(values)} of {len(values)}"


def _list(sentences: Iterable[str]) -> str:
    return "".join(fill(own, WIDTH, initial_indent="- ", subsequent_indent="  ") + "\n" for own in sentences)


def _head(names: Sequence[str]) -> str:
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="default_page", description="The page of what benchmarks.default_command has kept.")
    parser.add_argument("results", type=Path, metavar="FILE")
    parser.add_argument("page", type=Path, metavar="PAGE")
    args = parser.parse_args(argv)
    try:
        if not (cells := default_cells.read(args.results)):
            parser.error(f"no cells in {args.results}; expected what benchmarks.default_command --results keeps")
        write(args.page, cells)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
