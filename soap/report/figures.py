"""How all pictures look, and the one place that knows whether bokeh is there.

Colours are those of Okabe and Ito (2008), which people with any colour vision tell apart, and of Tol's muted scheme where these are too
few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from soap.errors import SoapError
from soap.units import format_seconds

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

BLUE, SKY, GREEN, YELLOW, ORANGE, RED, PINK, GREY = "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999"
INDIGO, WINE, TEAL, DEEP = "#332288", "#882255", "#44AA99", "#C02A00"
TASK_COLOURS: Mapping[str, str] = {
    "forward": SKY,
    "recompute": PINK,
    "backward": BLUE,
    "weights": INDIGO,
    "transfer": ORANGE,
    "exchange": YELLOW,
    "reduce": RED,
    "sync": WINE,
    "compress": TEAL,
    "copy": GREY,
    "update": GREEN,
}
MEMORY_COLOURS: Mapping[str, str] = {
    "values": BLUE,
    "states": SKY,
    "gradients": ORANGE,
    "batch": GREY,
    "kept": GREEN,
    "workspace": YELLOW,
    "buffers": RED,
    "allowance": PINK,
}
INK = "#767676"
"""Of axes and labels until the page knows whether it is dark: readable on white and on black."""
ENTRY_TAG = "entry-pixels"
"""In a legend's tags before the width of its widest entry, for ``assets/page.js``."""
LETTER_PIXELS, ENTRY_PIXELS = 6.5, 32
"""About the width of a letter of a legend, and of what an entry has beside its letters."""
ROW_PIXELS, LEAST_PIXELS, MOST_PIXELS = 20, 180, 900


def require() -> None:
    """SoapError now if a report could not be made later; call it before long work."""
    if find_spec("bokeh") is None:
        raise SoapError("reports need bokeh, which is not installed; install it, or soap-search[report]")


def duration(time_ns: float) -> str:
    """A time for people."""
    return format_seconds(time_ns / 1e9)


def plain(text: str, most: int = 80) -> str:
    """Text for labels: short, and not taken for TeX, which would be loaded from elsewhere."""
    short = text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
    return short.replace("$$", "$\u200b$").replace("\\(", "\\\u200b(").replace("\\[", "\\\u200b[")


def height_of(rows: int) -> int:
    """Pixels of a picture with so many rows."""
    return max(LEAST_PIXELS, min(MOST_PIXELS, 90 + ROW_PIXELS * rows))


def new_figure(height: int, tools: str = "", **options: Any) -> BokehFigure:
    """An empty picture as wide as the page, without a toolbar if there are no ``tools``. ``options``: of ``bokeh.plotting.figure``."""
    from bokeh.plotting import figure

    made = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        toolbar_location="right" if tools else None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        **options,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = False
    for axis in made.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = INK
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.axis_label_text_font_style = "normal"
    made.grid.grid_line_color = INK
    made.grid.grid_line_alpha = 0.25
    return made


def zoomable(made: BokehFigure, tooltips: Sequence[tuple[str, str]], renderers: Sequence[Any] | None = None) -> None:
    """Add panning, zooming along the time axis (by the wheel with the control key, or by a box), and what is told of what one points at."""
    from bokeh.models import BoxZoomTool, HoverTool, PanTool, ResetTool, SaveTool, WheelZoomTool

    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    box = BoxZoomTool(dimensions="width")
    hover = HoverTool(tooltips=list(tooltips), point_policy="follow_mouse")
    if renderers is not None:
        hover.renderers = list(renderers)
    made.add_tools(PanTool(dimensions="width"), box, wheel, ResetTool(), SaveTool(), hover)
    made.toolbar_location = "right"
    made.toolbar.active_drag, made.toolbar.active_scroll = box, wheel


def name_rows(made: BokehFigure, names: Sequence[str], most: int = 44) -> None:
    """Label the vertical axis: row i, counted from above, is at -i."""
    from bokeh.models import FixedTicker

    made.yaxis.ticker = FixedTicker(ticks=[-i for i in range(len(names))])
    made.yaxis.major_label_overrides = {-i: plain(name, most) for i, name in enumerate(names)}
    made.ygrid.grid_line_color = None
    pixels = (made.height - 90) / max(1, len(names))
    if pixels < 11:
        made.yaxis.major_label_text_font_size = f"{max(6, int(pixels))}px"


def legend_above(made: BokehFigure, items: Sequence[tuple[str, Sequence[Any]]], *, hide: bool = True) -> None:
    """A legend over the picture, in as many columns as fit, found by ``ENTRY_TAG``. ``hide``: clicking an entry hides what it names."""
    from bokeh.models import Legend, LegendItem

    legend = Legend(items=[LegendItem(label=name, renderers=list(own)) for name, own in items], orientation="horizontal")
    legend.background_fill_alpha, legend.border_line_color, legend.label_text_color = 0, None, INK
    legend.click_policy = "hide" if hide else "none"
    legend.margin, legend.padding, legend.spacing, legend.location = 0, 4, 10, "top_left"
    legend.ncols, legend.tags = 6, [ENTRY_TAG, max((len(name) for name, _ in items), default=0) * LETTER_PIXELS + ENTRY_PIXELS]
    made.add_layout(legend, "above")


def byte_unit(size_bytes: int) -> tuple[float, str]:
    """The unit in which a size has at least one digit before the point: bytes in it, and its name."""
    units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
    return next((own for own in units if size_bytes >= own[0]), units[-1])


def mixed(colour: str, share: float, other: str = "#ffffff") -> str:
    """A colour with a share of another one (white) in it, from 0 to 1."""
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(own + (to - own) * share):02x}" for own, to in pairs)


def heat(steps: int = 128) -> list[str]:
    """Colours from little (blue) to much (red) that can be told apart by all, on white and on black."""
    half = steps // 2
    low = [mixed(SKY, i / half, ORANGE) for i in range(half)]
    return low + [mixed(ORANGE, i / (steps - half - 1), DEEP) for i in range(steps - half)]
