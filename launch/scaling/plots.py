"""The pictures of a scaling report: measurements with their spread, beside the ideal."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from launch.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, new_figure
from launch.scaling.axes import (
    Line,
    dots,
    ideal_in_legend,
    in_words,
    legend,
    mark_negative,
    name_worlds,
    of_sizes,
    points_between,
    process_axis,
    side_by_side,
    value_axis,
    with_errors,
    with_values,
    worlds_of,
)
from launch.scaling.quality import draw_quality, has_epochs
from recipes.quiet import silence
from recipes.scaling.causes import milliseconds
from recipes.scaling.row import PARTS, Timing
from recipes.scaling.sizes import EXCELLENT, GOOD, Size
from recipes.scaling.verdicts import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _DPI = 7.0, 4.5, 300  # inches, and dots in one
_STYLE: Any = {
    "font.size": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a dollar sign in a name is not a formula
}
# Two lists of different length, so that no two of many lines share both.
_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_PART_COLOURS = {
    "data_wait": YELLOW,
    "forward": SKY,
    "backward": BLUE,
    "communication": VERMILION,
    "optimizer": GREEN,
    "logging": PURPLE,
    "saving": ORANGE,
    "other": GREY,
}


@dataclass(frozen=True)
class Picture:
    """A picture in each format, and what is written beside it."""

    kind: str  # the end of its file's name
    caption: str  # how to read it
    alt: str  # its numbers in words
    files: dict[str, bytes]  # by format; always with png, which the page shows


def pictures(name: str, series: Sequence[Series], rows: Sequence[Timing], formats: Sequence[str]) -> list[Picture]:
    """The pictures of the training `name` for which its series hold numbers.

    Raises `UserError` if matplotlib is not installed.
    """
    import matplotlib

    lines = _lines(series, rows)
    drawn = []
    with matplotlib.rc_context(_STYLE), silence():  # warnings about characters that the font lacks
        for kind, (title, caption, draw) in _KINDS.items():
            if not has_numbers(kind, series, rows):
                continue
            figure = new_figure(_WIDTH, _height(kind, series))
            alt = draw(figure, lines)
            figure.suptitle(fill(f"{shorten(name, 110, placeholder=' ...')}: {title}", 75), fontsize=11)
            files = {one: _saved(figure, one) for one in ("png", *formats)}
            drawn.append(Picture(kind, f"{name}, {title}. {caption}", f"{name}, {title}. {alt}", files))
    return drawn


def has_numbers(kind: str, series: Sequence[Series], rows: Sequence[Timing]) -> bool:
    """Whether the series hold what a picture of that kind needs; `NEEDS` says it in words."""
    if kind == "quality":
        return has_epochs([row for row in rows if row.name == series[0].name and not row.applied])
    sizes = [size for one in series for size in one.sizes]
    if kind == "speedup_efficiency":
        return any(len(one.sizes) > 1 for one in series)
    if kind == "throughput":
        return any(size.samples_per_second for size in sizes)
    if kind == "accuracy":
        return any(size.accuracy is not None for size in sizes)
    if kind == "step_time":
        return any(size.typical.parts.known() for size in sizes)
    return True


NEEDS = {
    "speedup_efficiency": "two world sizes of one series",
    "throughput": "the column samples",
    "accuracy": "the column accuracy",
    "quality": "the columns epoch and accuracy or loss, of two epochs",
    "step_time": "the parts of a step, from `recipes scale run`",
}


def _height(kind: str, series: Sequence[Series]) -> float:
    """Inches: bars need room, and so does a long legend."""
    if kind == "step_time":
        bars = sum(bool(size.typical.parts.known()) for one in series for size in one.sizes)
        return max(_HEIGHT, 1.8 + 0.3 * bars)
    return _HEIGHT + 0.1 * max(0, len(series) - 3)


def _lines(series: Sequence[Series], rows: Sequence[Timing]) -> list[Line]:
    both = len({one.scaling for one in series}) > 1
    lines = []
    for index, one in enumerate(series):
        label = one.recipe or one.name
        label = shorten(f"{label}, {one.scaling} scaling" if both else label, 40, placeholder=" ...")
        key = (one.name, one.recipe, one.scaling)
        own = [row for row in rows if not row.applied and (row.name, row.recipe, row.scaling) == key]
        look = (_COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)])
        lines.append(Line(label, *look, one, own))
    return lines


def _saved(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=_DPI)
    return stream.getvalue()


# --- The pictures: each draws into a figure and returns its numbers in words ---------------------


def _draw_epoch_times(figure: Figure, lines: Sequence[Line]) -> str:
    """Each epoch as a dot, the medians, and the deviations from them if epochs were repeated."""
    repeated = any(size.repeats > 1 for line in lines for size in line.series.sizes)
    times, *deviations = figure.subplots(1, 1 + repeated, squeeze=False)[0]
    dots(times, lines, lambda row: row.epoch_time, lambda size: size.epoch_time.median)
    worlds = worlds_of(lines)
    for line, offset in side_by_side(lines):
        places = [worlds.index(size.num_processes) + offset for size in line.series.sizes]
        times.plot(places, _ideal_times(line.series), "--", color=GREY, linewidth=1, zorder=1)
    ideal_in_legend(times, worlds)
    times.set_ylabel("time (s): each row (dots) and the median")
    value_axis(times, worlds)
    for axes in deviations:
        _deviations(axes, lines)
    legend(figure, times)
    return in_words(lines, lambda size: f"{size.epoch_time.median:.3g} s")


def _deviations(axes: Axes, lines: Sequence[Line]) -> None:
    medians = {id(line): {size.num_processes: size.epoch_time.median for size in line.series.sizes} for line in lines}
    for line, offset in side_by_side(lines):
        middle = medians[id(line)]
        places = [worlds_of(lines).index(row.num_processes) + offset for row in line.rows]
        away = [100 * (row.epoch_time / middle[row.num_processes] - 1) for row in line.rows]
        axes.plot(places, away, line.marker, color=line.colour, markersize=4, alpha=0.7)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("deviation from the median (%)")
    name_worlds(axes, worlds_of(lines))


def _ideal_times(series: Series) -> list[float]:
    """Seconds of each epoch if every process were as fast as in the smallest world."""
    first = series.sizes[0]
    ideal = []
    for size in series.sizes:
        samples, of_first = size.typical.samples, first.typical.samples
        work = samples / of_first if samples and of_first else 1.0
        ideal.append(first.epoch_time.median * work * first.num_processes / size.num_processes)
    return ideal


def _draw_speedup(figure: Figure, lines: Sequence[Line]) -> str:
    speedups, efficiencies = figure.subplots(1, 2)
    lines = [line for line in lines if len(line.series.sizes) > 1]
    for line in lines:
        with_errors(speedups, line, lambda size: size.speedup)
        with_errors(efficiencies, line, lambda size: size.efficiency)
        mark_negative(speedups, line, lambda size: size.speedup)
        mark_negative(efficiencies, line, lambda size: size.efficiency)
    with_values(speedups, lines, of_sizes(lines[0], lambda size: size.speedup, "{:.2f}"))
    with_values(efficiencies, lines, of_sizes(lines[0], lambda size: size.efficiency, "{:.0%}"))
    smallest = {line.series.sizes[0].num_processes for line in lines}
    for first in sorted(smallest):
        largest = max(line.series.sizes[-1].num_processes for line in lines)
        ends = points_between(first, largest)
        speedups.plot(ends, [end / first for end in ends], "--", color=GREY, linewidth=1, zorder=1)
    ideal_in_legend(speedups, worlds_of(lines))
    speedups.set_ylabel("speedup over the smallest world")
    efficiencies.set_ylabel("efficiency (% of ideal)")
    for axes in (speedups, efficiencies):
        process_axis(axes, lines)
    value_axis(speedups, worlds_of(lines))
    _bands(efficiencies, max(size.efficiency.high for line in lines for size in line.series.sizes))
    legend(figure, speedups)
    return in_words(lines, lambda size: f"{size.speedup.median:.2f} times, {size.efficiency.median:.1%}")


def _bands(axes: Axes, highest: float) -> None:
    """The bands of efficiency as shades, named beside the right edge."""
    from matplotlib.ticker import PercentFormatter

    top = max(1.12, highest * 1.05)
    edges = {"poor": (0.0, GOOD, "0.88"), "good": (GOOD, EXCELLENT, "0.94"), "excellent": (EXCELLENT, top, "1")}
    for name, (low, high, shade) in edges.items():
        axes.axhspan(low, high, color=shade, zorder=0)
        place: dict = {"transform": axes.get_yaxis_transform(), "rotation": 270, "va": "center", "fontsize": 9}
        axes.text(1.02, (low + high) / 2, name, **place)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, zorder=1)
    axes.set_ylim(0, top)
    step = 0.25 * ceil(top / 2)
    above = [1 + step * count for count in range(1, 1 + int((top - 1) / step))]
    axes.set_yticks([0, 0.25, 0.5, GOOD, EXCELLENT, 1, *above] if top < 3 else [0, 1, *above])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_throughput(figure: Figure, lines: Sequence[Line]) -> str:
    axes = figure.subplots()
    lines = [line for line in lines if any(size.samples_per_second for size in line.series.sizes)]
    for line in lines:
        with_errors(axes, line, lambda size: size.samples_per_second)
        mark_negative(axes, line, lambda size: size.samples_per_second)
        known = [size for size in line.series.sizes if size.samples_per_second]
        first, ends = known[0], points_between(known[0].num_processes, known[-1].num_processes)
        rate = first.samples_per_second.median / first.num_processes  # type: ignore[union-attr]
        axes.plot(ends, [rate * end for end in ends], "--", color=GREY, linewidth=1, zorder=1)
    with_values(axes, lines, of_sizes(lines[0], lambda size: size.samples_per_second, "{:.4g}"))
    ideal_in_legend(axes, worlds_of(lines))
    axes.set_ylabel("samples/s of all processes")
    process_axis(axes, lines)
    value_axis(axes, worlds_of(lines))
    legend(figure, axes)
    return in_words(lines, _samples_in_words)


def _samples_in_words(size: Size) -> str:
    return f"{size.samples_per_second.median:.4g} samples/s" if size.samples_per_second else ""


def _draw_accuracy(figure: Figure, lines: Sequence[Line]) -> str:
    axes = figure.subplots()
    lines = [line for line in lines if any(size.accuracy is not None for size in line.series.sizes)]
    dots(axes, lines, lambda row: row.accuracy, lambda size: size.accuracy)
    axes.margins(y=0.12)
    axes.set_ylabel("accuracy: each row (dots) and the best")
    legend(figure, axes)
    return in_words(lines, lambda size: "" if size.accuracy is None else f"{size.accuracy:.4g}")


def _draw_step_times(figure: Figure, lines: Sequence[Line]) -> str:
    axes = figure.subplots()
    bars = [(line, size) for line in lines for size in line.series.sizes if size.typical.parts.known()]
    names = [f"{line.label}, {size.num_processes}" for line, size in bars]
    places = [index + 0.5 * lines.index(line) for index, (line, _) in enumerate(bars)]
    left = [0.0] * len(bars)
    for part in PARTS:
        widths = [1000 * size.typical.parts.known().get(part, 0.0) for _, size in bars]
        if not any(widths):
            continue
        label = part.replace("_", " ")
        axes.barh(places, widths, left=left, label=label, color=_PART_COLOURS[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in zip(places, left, strict=True):
        axes.text(end, place, f" {end:.3g}", va="center", fontsize=9)
    axes.margins(x=0.08)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_ylabel("series, processes")
    axes.set_xlabel("time of an optimizer step (ms, medians)")
    legend(figure, axes)
    return in_words(lines, _parts_in_words)


def _parts_in_words(size: Size) -> str:
    found = size.typical.parts.known()
    if not found:
        return ""
    largest = max(found, key=lambda name: found[name])
    return (
        f"{milliseconds(sum(found.values()))}, most of it {largest.replace('_', ' ')} ({milliseconds(found[largest])}),"
    )


_KINDS: dict[str, tuple[str, str, Callable[[Figure, Sequence[Line]], str]]] = {
    "epoch_time_detailed": (
        "measured time",
        "Dots: rows of timings; hollow markers: the median at each world size; right: deviations from it. Dashed: "
        "every process as fast as in the smallest world.",
        _draw_epoch_times,
    ),
    "speedup_efficiency": (
        "speedup and efficiency",
        "Medians with quartiles, relative to the smallest world of each series. Dashed: ideal. Shades: bands. A cross "
        "is slower than a smaller world.",
        _draw_speedup,
    ),
    "throughput": (
        "throughput",
        "Medians with quartiles. Dashed: every process as fast as in the smallest world. A cross is slower than a "
        "smaller world.",
        _draw_throughput,
    ),
    "accuracy": ("accuracy", "Dots: rows of timings; hollow markers: the best at each size.", _draw_accuracy),
    "quality": (
        "accuracy and loss by epoch",
        "A line for each world size: where they lie on each other, quality is kept. Where an epoch was repeated, its "
        "median.",
        draw_quality,
    ),
    "step_time": (
        "parts of a step",
        "Medians of the parts of an optimizer step, and their sum; communication is the part that the step waits for.",
        _draw_step_times,
    ),
}
