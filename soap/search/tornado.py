"""A tornado plot: how a plan's gain over data parallelism varies between half and twice each figure of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from soap.search.plot import check_plot, picture
from soap.search.sensitivity import Sensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HALF_COLOR, DOUBLE_COLOR = "C0", "C1"


def tornado(found: Sequence[Sensitivity], path: str | Path) -> bytes:
    """The picture as bytes in the format of the path's suffix. ``found``: of every figure, the widest first."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.5 * len(found)), layout="constrained")
    draw(figure.subplots(), found)
    return picture(figure, path)


def draw(axes: Axes, found: Sequence[Sensitivity]) -> None:
    """Two bars for each figure, from the gain as it is to that at half and at twice the figure; where the choice turns over, in words."""
    shown, gain = [one for one in found if one.is_known], found[0].usual
    names = [one.figure.value for one in shown]
    places = range(len(shown))
    halves, doubles = [one.at_half - gain for one in shown], [one.at_double - gain for one in shown]
    both_ways = [min(half, double) * max(half, double) > 0 for half, double in zip(halves, doubles, strict=True)]
    heights = [0.35 if same else 0.7 for same in both_ways]  # bars on one side stand beside each other, not on each other
    shift = [0.175 if same else 0.0 for same in both_ways]
    above = [place - own for place, own in zip(places, shift, strict=True)]
    below = [place + own for place, own in zip(places, shift, strict=True)]
    axes.barh(above, halves, height=heights, left=gain, color=HALF_COLOR, label="at half the figure")
    axes.barh(below, doubles, height=heights, left=gain, color=DOUBLE_COLOR, label="at twice the figure")
    axes.axvline(gain, color="black", linewidth=1.5, label=f"as it is: {gain:.2f}x")
    axes.axvline(1.0, color="C3", linewidth=1.5, linestyle="--", label="data parallelism: 1.00x")
    axes.set_yticks(list(places), [f"{name}\n{turning(one)}" for name, one in zip(names, shown, strict=True)])
    axes.invert_yaxis()
    axes.set(xlabel="predicted gain over data parallelism (x)", title="what turns the choice over")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def turning(one: Sensitivity) -> str:
    """Where the choice turns over, in words."""
    places = [f"{factor:.2g}x" for factor in (one.below, one.above) if factor is not None]
    return f"turns at {' and '.join(places)}" if places else "turns nowhere within 10x"
