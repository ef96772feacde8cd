"""Draws ``docs/soap.svg``, the picture of the README: ``python docs/picture.py``."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

DEVICES = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
INK, PAPER, LINE = "#24292f", "#ffffff", "#8c959f"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def rectangle(x: float, y: float, width: float, height: float, fill: str = PAPER, *, round_by: float = 6) -> str:
    """A box with its upper left corner at (x, y)."""
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{round_by:g}' fill='{fill}' stroke='{LINE}'/>"


def text(x: float, y: float, words: str, *, size: int = 13, weight: str = "normal", anchor: str = "middle") -> str:
    """One line of text with its baseline at y."""
    style = f"font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' fill='{INK}' {FONT}"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(words)}</text>"


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a head at its end, horizontal or vertical."""
    dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    back_x, back_y = to_x - 8 * dx, to_y - 8 * dy
    head = f"{to_x:g},{to_y:g} {back_x + 4 * dy:g},{back_y + 4 * dx:g} {back_x - 4 * dy:g},{back_y - 4 * dx:g}"
    line = f"<line x1='{x:g}' y1='{y:g}' x2='{back_x:g}' y2='{back_y:g}' stroke='{INK}' stroke-width='1.5'/>"
    return line + f"<polygon points='{head}' fill='{INK}'/>"


def box(x: float, y: float, title: str, below: str, *, width: float = 150) -> list[str]:
    """A box of the upper half with a title and a line below it."""
    middle = x + width / 2
    return [rectangle(x, y, width, 50), text(middle, y + 21, title, weight="bold"), text(middle, y + 39, below, size=11)]


def strips(x: float, y: float, size: float, *, across: bool) -> list[str]:
    """A square in four parts, one for each device: rows, or columns if it is cut across."""
    part = size / len(DEVICES)
    if across:
        return [rectangle(x + i * part, y, part, size, fill, round_by=0) for i, fill in enumerate(DEVICES)]
    return [rectangle(x, y + i * part, size, part, fill, round_by=0) for i, fill in enumerate(DEVICES)]


def copies(x: float, y: float, size: float) -> list[str]:
    """A square that each device has a copy of."""
    return [rectangle(x + 5 * i, y + 5 * i, size - 15, size - 15, fill, round_by=0) for i, fill in enumerate(DEVICES)]


def way() -> list[str]:
    """The upper half: from a model and a cluster to training."""
    drawn = box(10, 20, "PyTorch model", "model.pt2") + box(10, 100, "Cluster", "devices and links")
    drawn += box(230, 20, "Search", "Metropolis-Hastings") + box(230, 100, "Simulator", "time and memory")
    drawn += box(470, 20, "Strategy", "strategy.json") + box(690, 20, "Training", "one process per device")
    drawn += [arrow(160, 45, 230, 45), arrow(160, 125, 230, 125), arrow(380, 45, 470, 45), arrow(620, 45, 690, 45)]
    drawn += [arrow(285, 70, 285, 100), arrow(325, 100, 325, 70)]
    drawn += [text(278, 89, "proposal", size=11, anchor="end"), text(332, 89, "cost", size=11, anchor="start")]
    drawn += box(580, 100, "Predicted and measured, side by side", "soap-compare", width=260)
    drawn += [arrow(380, 125, 580, 125), text(480, 118, "predicted", size=11)]
    return [*drawn, arrow(765, 70, 765, 100), text(773, 89, "measured", size=11, anchor="start")]


def operator(x: float, y: float, name: str, *, split: bool) -> list[str]:
    """An operator's samples and its parameter, the parameter copied or split."""
    parameter = strips(x + 82, y, 56, across=True) if split else copies(x + 82, y, 56)
    samples = copies(x, y, 56) if split else strips(x, y, 56, across=False)
    below = [text(x + 28, y + 72, "samples", size=11), text(x + 110, y + 72, "parameters", size=11)]
    return [text(x + 69, y - 9, name), *samples, *parameter, *below]


def strategies() -> list[str]:
    """The lower half: data parallelism, and a strategy that treats each operator in its own way."""
    usual = "Data parallelism: every device copies every parameter, and all gradients are summed"
    drawn = [text(10, 196, usual, weight="bold", anchor="start")]
    names = ("embedding", "LSTM", "softmax layer")
    for i, name in enumerate(names):
        drawn += operator(30 + 200 * i, 228, name, split=False)
    drawn.append(text(10, 338, "Another strategy: each operator is split in its own way", weight="bold", anchor="start"))
    for i, name in enumerate(names):
        drawn += operator(30 + 200 * i, 370, name, split=name != "LSTM")
    for i, fill in enumerate(DEVICES):
        drawn += [rectangle(680, 236 + 24 * i, 16, 16, fill, round_by=3), text(704, 249 + 24 * i, f"device {i}", size=12, anchor="start")]
    return drawn


def picture() -> str:
    """The whole picture as SVG."""
    head = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 460' width='860' height='460' role='img'>"
    title = "<title>From a model and a cluster to a strategy, and what a strategy is</title>"
    return "\n".join([head, title, rectangle(0, 0, 860, 460, round_by=0).replace(LINE, "none"), *way(), *strategies(), "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("soap.svg").write_text(picture(), encoding="utf-8")
