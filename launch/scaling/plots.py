"""The plots of a scaling report: measured values with quartiles, and ideal scaling dashed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.quiet import silence
from recipes.scaling.analyse import EXCELLENT, GOOD, NEGATIVE, Series, Size, Spread, hardware_of
from recipes.scaling.timings import PARTS, Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
YELLOW, PURPLE, VERMILION, GREY = "#F0E442", "#CC79A7", "#D55E00", "#999999"
NO_PICTURES = "No pictures: matplotlib is not installed (pip install matplotlib)."
_WIDTH, _HEIGHT, _DPI = 7.0, 4.5, 300  # inches, and dots per inch
_STYLE: Any = {
    "font.size": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a dollar sign in a name is not a formula
}
# The lengths of the two lists differ, so that no two of many lines share colour and marker.
_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_PART_COLOURS = dict(zip(PARTS, (YELLOW, SKY, BLUE, VERMILION, GREEN, PURPLE, ORANGE, GREY), strict=True))
_IDEAL: Any = {"linestyle": "--", "color": GREY, "linewidth": 1, "zorder": 1, "label": "ideal"}
_WIDE = 8  # above this ratio of world sizes, the axis is logarithmic, because small sizes would overlap


class Line(NamedTuple):
    """A series with its label, colour and marker, which are the same in every picture."""

    series: Series
    label: str
    colour: str
    marker: str


@dataclass(frozen=True)
class Picture:
    """A picture, saved once per format, with a caption that explains how to read the picture."""

    kind: str  # the end of the picture's file name
    caption: str
    files: dict[str, bytes]  # by format; always with png, which the page shows


def pictures(name: str, series: Sequence[Series], formats: Sequence[str]) -> list[Picture]:
    """Draw the pictures of the training `name`, except pictures for which `series` has no values.
    The caller checks that matplotlib is installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    hardware = shorten(hardware_of(series), 110, placeholder=" ...")
    both = len({one.scaling for one in series}) > 1
    lines = []
    for one, colour, marker in zip(series, cycle(_COLOURS), cycle(_MARKERS), strict=False):
        label = f"{one.recipe or one.name}{f', {one.scaling} scaling' if both else ''}"
        lines.append(Line(one, shorten(label, 40, placeholder=" ..."), colour, marker))
    drawn = []
    with matplotlib.rc_context(_STYLE), silence():  # no warnings about characters missing in the font
        for key, kind in _KINDS.items():
            known = [line for line in lines if kind.has(line.series)]
            if not known:
                continue
            height = _HEIGHT + 0.1 * max(0, len(known) - 3)
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")  # for files: needs no display
            kind.draw(figure, known)
            title = f"{shorten(name, 110, placeholder=' ...')}: {kind.title}"
            figure.suptitle("\n".join(fill(line, 75) for line in (title, hardware) if line), fontsize=11)
            _legend(figure)
            files = {form: _saved(figure, form) for form in ("png", *formats)}
            title = ", ".join(filter(None, (name, kind.title, hardware)))
            drawn.append(Picture(key, f"{title}. {kind.caption}", files))
    return drawn


def _saved(figure: Figure, form: str) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format=form, dpi=_DPI)
    return stream.getvalue()


# --- Parts of several pictures -------------------------------------------------------------------


def _legend(figure: Figure) -> None:
    """Draw the legend below the axes, with each label once, and "ideal" and NEGATIVE last."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    found = dict(zip(names, handles, strict=True))
    labels = sorted(found, key=lambda label: label in ("ideal", NEGATIVE))
    if labels:
        columns = min(len(labels), 4 if max(map(len, labels)) < 20 else 2)
        shown = [found[label] for label in labels]
        figure.legend(shown, labels, loc="outside lower center", ncols=columns, frameon=False)


def _curves(axes: Axes, lines: Sequence[Line], of_size: Callable[[Size], Spread | None]) -> None:
    """Draw medians with their quartiles, and a cross on each world size with negative scaling."""
    for line in lines:
        found = [(size, spread) for size in line.series.sizes if (spread := of_size(size))]
        worlds = [size.num_processes for size, _ in found]
        middle = [spread.median for _, spread in found]
        errors = [
            [spread.median - spread.low for _, spread in found],
            [spread.high - spread.median for _, spread in found],
        ]
        look: Any = {"color": line.colour, "marker": line.marker, "markersize": 5, "linewidth": 1.2}
        axes.errorbar(worlds, middle, yerr=errors, capsize=4 if any(map(any, errors)) else 0, label=line.label, **look)
        for size, spread in found:
            if size.band == NEGATIVE:
                at = (size.num_processes, spread.median)
                axes.plot(*at, "x", color="black", markersize=11, markeredgewidth=1.5, zorder=4, label=NEGATIVE)


def _process_axis(axes: Axes, lines: Sequence[Line], from_zero: bool = True) -> None:
    """Set the ticks at the measured world sizes."""
    worlds = sorted({size.num_processes for line in lines for size in line.series.sizes})
    if worlds[-1] / worlds[0] > _WIDE:
        axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.margins(0.1)
    axes.set_xlabel("processes")
    if from_zero:
        axes.set_ylim(bottom=0)


def _dots(axes: Axes, line: Line, of_row: Callable[[Timing], float | None]) -> None:
    """Draw a dot for each row of timings that has a value."""
    found = [(row.num_processes, value) for row in line.series.rows if (value := of_row(row)) is not None]
    axes.plot(*zip(*found, strict=True), ".", color=line.colour, markersize=5, alpha=0.8, zorder=3)


# --- The pictures --------------------------------------------------------------------------------


def _draw_times(figure: Figure, lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    _curves(axes, lines, lambda size: size.epoch_time)
    for line in lines:
        _dots(axes, line, lambda row: row.epoch_time)
        worlds, first = [size.num_processes for size in line.series.sizes], line.series.sizes[0]
        per_sample = first.epoch_time.median / (first.typical.samples or 1) * first.num_processes
        ideal = [per_sample * (size.typical.samples or 1) / size.num_processes for size in line.series.sizes]
        axes.plot(worlds, ideal, **_IDEAL)
    axes.set_ylabel("time (s): each timing (dot) and the median")
    _process_axis(axes, lines)


def _draw_speedup(figure: Figure, lines: Sequence[Line]) -> None:
    speedups, efficiencies = figure.subplots(1, 2)
    _curves(speedups, lines, lambda size: size.speedup)
    _curves(efficiencies, lines, lambda size: size.efficiency)
    for line in lines:
        worlds = [size.num_processes for size in line.series.sizes]
        speedups.plot(worlds, [world / worlds[0] for world in worlds], **_IDEAL)
    speedups.set_ylabel("speedup over the smallest world")
    _process_axis(speedups, lines)
    efficiencies.set_ylabel("efficiency (% of ideal)")
    _process_axis(efficiencies, lines)
    _bands(efficiencies)


def _bands(axes: Axes) -> None:
    """Shade the bands of efficiency (poor, good, excellent); name each at the right edge."""
    from matplotlib.ticker import PercentFormatter

    top = max(1.12, 1.05 * axes.dataLim.y1)
    for name, low, high, shade in (
        ("poor", 0.0, GOOD, "0.88"),
        ("good", GOOD, EXCELLENT, "0.94"),
        ("excellent", EXCELLENT, top, "1"),
    ):
        axes.axhspan(low, high, color=shade, zorder=0)
        place: Any = {"transform": axes.get_yaxis_transform(), "rotation": 270, "va": "center", "fontsize": 9}
        axes.text(1.02, (low + high) / 2, name, **place)
    axes.axhline(1, **_IDEAL)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_accuracy(figure: Figure, lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    _curves(axes, lines, lambda size: None if size.accuracy is None else Spread(*[size.accuracy] * 3))
    for line in lines:
        _dots(axes, line, lambda row: row.accuracy)
    axes.set_ylabel("model accuracy: each run (dot) and the best run")
    _process_axis(axes, lines, from_zero=False)


def _draw_step_times(figure: Figure, lines: Sequence[Line]) -> None:
    bars = [(line, size) for line in lines for size in line.series.sizes if size.typical.parts]
    figure.set_figheight(max(_HEIGHT, 1.8 + 0.3 * len(bars)))
    axes = figure.subplots()
    places = [index + 0.5 * lines.index(line) for index, (line, _) in enumerate(bars)]
    left = [0.0] * len(bars)
    for part, colour in _PART_COLOURS.items():
        widths = [1000 * size.typical.parts.get(part, 0.0) for _, size in bars]
        if any(widths):
            axes.barh(places, widths, left=left, label=part.replace("_", " "), color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in zip(places, left, strict=True):
        axes.text(end, place, f" {end:.4g}", va="center", fontsize=9)
    axes.use_sticky_edges = False  # else a bar's part of length 0 sets the end of the axis
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_yticks(places, [f"{line.label}, {size.num_processes}" for line, size in bars])
    axes.invert_yaxis()
    axes.set_ylabel("series, processes")
    axes.set_xlabel("time of an optimizer step (ms, medians)")


class _Kind(NamedTuple):
    title: str
    caption: str
    has: Callable[[Series], Any]
    draw: Callable[[Figure, Sequence[Line]], None]


_CROSS = "A cross marks a world size that is slower than a smaller one."
_KINDS = {
    "epoch_time_detailed": _Kind(
        "measured time",
        f"Dots: single timings; markers: the median at each world size, with quartiles. "
        f"Dashed: the time if every process were as fast as in the smallest world. {_CROSS}",
        lambda series: True,
        _draw_times,
    ),
    "speedup_efficiency": _Kind(
        "speedup and efficiency",
        f"Medians with quartiles, relative to the smallest world. Dashed: ideal. Shades: good and poor. {_CROSS}",
        lambda series: len(series.sizes) > 1,
        _draw_speedup,
    ),
    "accuracy": _Kind(
        "accuracy",
        "Dots: single timings; markers: the best at each world size.",
        lambda series: any(size.accuracy is not None for size in series.sizes),
        _draw_accuracy,
    ),
    "step_time": _Kind(
        "parts of a step",
        "Medians of the parts of an optimizer step, and their sum. Communication: only the time a step waits for it.",
        lambda series: any(size.typical.parts for size in series.sizes),
        _draw_step_times,
    ),
}
