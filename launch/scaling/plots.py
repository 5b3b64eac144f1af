"""The pictures of a scaling report, as PNG: what was measured with its spread, beside what would be ideal."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from textwrap import fill, shorten
from typing import Any

from launch.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, new_figure
from recipes.quiet import silence
from recipes.scaling.timings import PARTS, Timing
from recipes.scaling.verdicts import EXCELLENT, GOOD, Series, Size, Spread, milliseconds, parts

_WIDTH, _HEIGHT, _DPI = 7.0, 4.5, 150  # inches, and dots in one
_STYLE: Any = {
    "font.size": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a dollar in a name begins no formula
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
_WIDE = 8  # from this ratio of world sizes on, powers of two share a linear axis badly


@dataclass(frozen=True)
class Picture:
    """A PNG; `kind` is what its file's name ends in, `caption` says how to read it, `alt` what it shows, in numbers."""

    kind: str
    caption: str
    alt: str
    png: bytes


@dataclass(frozen=True)
class _Line:
    """A series as it is drawn: the same label, colour and marker in every picture."""

    label: str
    colour: str
    marker: str
    series: Series
    rows: list[Timing]


def pictures(name: str, series: Sequence[Series], rows: Sequence[Timing]) -> list[Picture]:
    """The pictures of the training `name`, whose series and rows these are, as far as there are numbers for them.

    Raises `UserError` where matplotlib is not installed.
    """
    import matplotlib

    lines = _lines(series, rows)
    drawn = []
    with matplotlib.rc_context(_STYLE), silence():  # silence: of letters that the font lacks
        for kind, (title, caption, draw) in _KINDS.items():
            if not has_numbers(kind, series):
                continue
            figure = new_figure(_WIDTH, _height(kind, series))
            alt = draw(figure, lines)
            figure.suptitle(fill(f"{shorten(name, 110, placeholder=' ...')}: {title}", 75), fontsize=11)
            drawn.append(Picture(kind, f"{name}, {title}. {caption}", f"{name}, {title}. {alt}", _png(figure)))
    return drawn


def has_numbers(kind: str, series: Sequence[Series]) -> bool:
    """Whether the series hold what a picture of that kind needs; `NEEDS` says in words what that is."""
    sizes = [size for one in series for size in one.sizes]
    if kind == "speedup_efficiency":
        return any(len(one.sizes) > 1 for one in series)
    if kind == "throughput":
        return any(size.samples_per_second for size in sizes)
    if kind == "accuracy":
        return any(size.accuracy is not None for size in sizes)
    if kind == "step_time":
        return any(parts(size.typical) for size in sizes)
    return True


NEEDS = {
    "speedup_efficiency": "two world sizes of one series",
    "throughput": "the column samples",
    "accuracy": "the column accuracy",
    "step_time": "the parts of a step, from `recipes scale run`",
}


def _height(kind: str, series: Sequence[Series]) -> float:
    """Inches: a bar for each size needs its own room, and so does a long legend."""
    if kind == "step_time":
        bars = sum(bool(parts(size.typical)) for one in series for size in one.sizes)
        return max(_HEIGHT, 1.8 + 0.3 * bars)
    return _HEIGHT + 0.1 * max(0, len(series) - 3)


def _lines(series: Sequence[Series], rows: Sequence[Timing]) -> list[_Line]:
    both = len({one.scaling for one in series}) > 1
    lines = []
    for index, one in enumerate(series):
        label = one.recipe or one.name
        label = shorten(f"{label}, {one.scaling} scaling" if both else label, 40, placeholder=" ...")
        key = (one.name, one.recipe, one.scaling)
        own = [row for row in rows if not row.applied and (row.name, row.recipe, row.scaling) == key]
        look = (_COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)])
        lines.append(_Line(label, *look, one, own))
    return lines


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DPI)
    return stream.getvalue()


# --- The pictures: each draws into a figure and returns its numbers in words -----------------------------------------


def _draw_epoch_times(figure: Any, lines: Sequence[_Line]) -> str:
    """Each epoch as a dot on its median and, where there are repeats, how far each is from it."""
    repeated = any(size.repeats > 1 for line in lines for size in line.series.sizes)
    times, *deviations = figure.subplots(1, 1 + repeated, squeeze=False)[0]
    _dots(times, lines, lambda row: row.epoch_time, lambda size: size.epoch_time.median)
    worlds = _worlds(lines)
    for line, offset in _beside(lines):
        places = [worlds.index(size.num_processes) + offset for size in line.series.sizes]
        times.plot(places, _ideal_times(line.series), "--", color=line.colour, linewidth=1, zorder=1)
    _ideal_in_legend(times, worlds)
    times.set_ylabel("seconds: each epoch (dots) and the median")
    _value_axis(times, worlds)
    for axes in deviations:
        _deviations(axes, lines)
    _legend(figure, times)
    return _told(lines, lambda size: f"{size.epoch_time.median:.3g} s")


def _deviations(axes: Any, lines: Sequence[_Line]) -> None:
    medians = {id(line): {size.num_processes: size.epoch_time.median for size in line.series.sizes} for line in lines}
    for line, offset in _beside(lines):
        middle = medians[id(line)]
        places = [_worlds(lines).index(row.num_processes) + offset for row in line.rows]
        away = [100 * (row.epoch_time / middle[row.num_processes] - 1) for row in line.rows]
        axes.plot(places, away, line.marker, color=line.colour, markersize=4, alpha=0.7)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("% away from the median of its size")
    _world_names(axes, _worlds(lines))


def _ideal_times(series: Series) -> list[float]:
    """Seconds of an epoch with as many samples if each process were as fast as in the smallest world."""
    first = series.sizes[0]
    ideal = []
    for size in series.sizes:
        samples, of_first = size.typical.samples, first.typical.samples
        work = samples / of_first if samples and of_first else 1.0
        ideal.append(first.epoch_time.median * work * first.num_processes / size.num_processes)
    return ideal


def _draw_speedup(figure: Any, lines: Sequence[_Line]) -> str:
    speedups, efficiencies = figure.subplots(1, 2)
    lines = [line for line in lines if len(line.series.sizes) > 1]
    for line in lines:
        _with_errors(speedups, line, lambda size: size.speedup)
        _with_errors(efficiencies, line, lambda size: size.efficiency)
    smallest = {line.series.sizes[0].num_processes for line in lines}
    for first in sorted(smallest):
        largest = max(line.series.sizes[-1].num_processes for line in lines)
        ends = _between(first, largest)
        speedups.plot(ends, [end / first for end in ends], "--", color=GREY, linewidth=1, zorder=1)
    _ideal_in_legend(speedups, _worlds(lines))
    speedups.set_ylabel("speedup over the smallest world (times)")
    efficiencies.set_ylabel("efficiency (% of ideal)")
    for axes in (speedups, efficiencies):
        _process_axis(axes, lines)
    _value_axis(speedups, _worlds(lines))
    _bands(efficiencies, max(size.efficiency.high for line in lines for size in line.series.sizes))
    _legend(figure, speedups)
    return _told(lines, lambda size: f"{size.speedup.median:.2f} times, {size.efficiency.median:.1%}")


def _bands(axes: Any, highest: float) -> None:
    """The bands of efficiency as shades, named at the right edge where no line runs."""
    from matplotlib.ticker import PercentFormatter

    top = max(1.12, highest * 1.05)
    edges = {"poor": (0.0, GOOD, "0.88"), "good": (GOOD, EXCELLENT, "0.94"), "excellent": (EXCELLENT, top, "1")}
    for name, (low, high, shade) in edges.items():
        axes.axhspan(low, high, color=shade, zorder=0)
        place = {"transform": axes.get_yaxis_transform(), "rotation": 270, "va": "center", "fontsize": 9}
        axes.text(1.02, (low + high) / 2, name, **place)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, zorder=1)
    axes.set_ylim(0, top)
    step = 0.25 * ceil(top / 2)
    above = [1 + step * count for count in range(1, 1 + int((top - 1) / step))]
    axes.set_yticks([0, 0.25, 0.5, GOOD, EXCELLENT, 1, *above] if top < 3 else [0, 1, *above])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_throughput(figure: Any, lines: Sequence[_Line]) -> str:
    axes = figure.subplots()
    lines = [line for line in lines if any(size.samples_per_second for size in line.series.sizes)]
    for line in lines:
        _with_errors(axes, line, lambda size: size.samples_per_second)
        known = [size for size in line.series.sizes if size.samples_per_second]
        first, ends = known[0], _between(known[0].num_processes, known[-1].num_processes)
        rate = first.samples_per_second.median / first.num_processes  # type: ignore[union-attr]
        axes.plot(ends, [rate * end for end in ends], "--", color=line.colour, linewidth=1, zorder=1)
    _ideal_in_legend(axes, _worlds(lines))
    axes.set_ylabel("samples/s of all processes")
    _process_axis(axes, lines)
    _value_axis(axes, _worlds(lines))
    _legend(figure, axes)
    return _told(lines, _samples_told)


def _samples_told(size: Size) -> str:
    return f"{size.samples_per_second.median:.4g} samples/s" if size.samples_per_second else ""


def _draw_accuracy(figure: Any, lines: Sequence[_Line]) -> str:
    axes = figure.subplots()
    lines = [line for line in lines if any(size.accuracy is not None for size in line.series.sizes)]
    _dots(axes, lines, lambda row: row.accuracy, lambda size: size.accuracy)
    axes.set_ylabel("accuracy: each epoch (dots) and the best")
    _legend(figure, axes)
    return _told(lines, lambda size: "" if size.accuracy is None else f"{size.accuracy:.4g}")


def _draw_step_times(figure: Any, lines: Sequence[_Line]) -> str:
    axes = figure.subplots()
    bars = [(line, size) for line in lines for size in line.series.sizes if parts(size.typical)]
    names = [f"{line.label}, {size.num_processes}" for line, size in bars]
    places = [index + 0.5 * lines.index(line) for index, (line, _) in enumerate(bars)]
    left = [0.0] * len(bars)
    for part in PARTS:
        widths = [1000 * parts(size.typical).get(part, 0.0) for _, size in bars]
        if not any(widths):
            continue
        label = part.replace("_", " ")
        axes.barh(places, widths, left=left, label=label, color=_PART_COLOURS[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_ylabel("series, processes")
    axes.set_xlabel("milliseconds of an optimizer step, medians")
    _legend(figure, axes)
    return _told(lines, _parts_told)


def _parts_told(size: Size) -> str:
    found = parts(size.typical)
    if not found:
        return ""
    largest = max(found, key=lambda name: found[name])
    return (
        f"{milliseconds(sum(found.values()))}, most of it {largest.replace('_', ' ')} ({milliseconds(found[largest])}),"
    )


_KINDS: dict[str, tuple[str, str, Callable[[Any, Sequence[_Line]], str]]] = {
    "epoch_time_detailed": (
        "time of an epoch",
        "A dot is an epoch, a hollow marker the median of its size; right: how far each is from that median. Dashed: "
        "each process as fast as in the smallest world.",
        _draw_epoch_times,
    ),
    "speedup_efficiency": (
        "speedup and efficiency",
        "Medians with quartiles, over the smallest world of each series. Dashed: ideal. Shades: the bands.",
        _draw_speedup,
    ),
    "throughput": (
        "throughput",
        "Medians with quartiles. Dashed: each process as fast as in the smallest world.",
        _draw_throughput,
    ),
    "accuracy": ("accuracy", "A dot is an epoch, a hollow marker the best of its size.", _draw_accuracy),
    "step_time": (
        "where the time of a step goes",
        "Medians of the parts of an optimizer step; communication is what the step waits for.",
        _draw_step_times,
    ),
}


# --- What they share -------------------------------------------------------------------------------------------------


def _worlds(lines: Sequence[_Line]) -> list[int]:
    return sorted({size.num_processes for line in lines for size in line.series.sizes})


def _beside(lines: Sequence[_Line]) -> list[tuple[_Line, float]]:
    """Each series with its offset from the middle of a world size's place, so that none hides another."""
    gap = min(0.18, 0.6 / len(lines))
    return [(line, gap * (index - (len(lines) - 1) / 2)) for index, line in enumerate(lines)]


def _dots(axes: Any, lines: Sequence[_Line], of_row: Callable[..., Any], of_size: Callable[..., Any]) -> None:
    """A place for each world size: a dot for each row, in front of the hollow marker of its size."""
    worlds = _worlds(lines)
    for line, offset in _beside(lines):
        sizes = [size for size in line.series.sizes if of_size(size) is not None]
        places = [worlds.index(size.num_processes) + offset for size in sizes]
        look = {"color": line.colour, "marker": line.marker, "linewidth": 1.2, "label": line.label}
        axes.plot(places, [of_size(size) for size in sizes], markerfacecolor="white", markersize=9, zorder=2, **look)
        rows = [row for row in line.rows if of_row(row) is not None]
        places = [worlds.index(row.num_processes) + offset for row in rows]
        axes.plot(places, [of_row(row) for row in rows], ".", color=line.colour, markersize=5, alpha=0.8, zorder=3)
    _world_names(axes, worlds)


def _world_names(axes: Any, worlds: Sequence[int]) -> None:
    every = ceil(len(worlds) / 10)
    axes.set_xticks(range(0, len(worlds), every), [str(world) for world in worlds[::every]])
    axes.set_xlim(-0.5, len(worlds) - 0.5)
    axes.set_xlabel("processes")


def _with_errors(axes: Any, line: _Line, of_size: Callable[[Size], Spread | None]) -> None:
    """Medians with their quartiles; a single measurement has none to show."""
    found = [(size, spread) for size in line.series.sizes if (spread := of_size(size))]
    worlds = [size.num_processes for size, _ in found]
    below = [spread.median - spread.low if size.repeats > 1 else 0.0 for size, spread in found]
    above = [spread.high - spread.median if size.repeats > 1 else 0.0 for size, spread in found]
    errors = [below, above] if any(below + above) else None
    look = {"color": line.colour, "marker": line.marker, "markersize": 5, "linewidth": 1.2, "capsize": 4}
    axes.errorbar(worlds, [spread.median for _, spread in found], yerr=errors, label=line.label, **look)


def _told(lines: Sequence[_Line], words: Callable[[Size], str]) -> str:
    """What a picture shows for those who cannot see it: `fast: 1.9 times at 2, 3.6 times at 4 processes`."""
    told = []
    for line in lines:
        found = [f"{text} at {size.num_processes}" for size in line.series.sizes if (text := words(size))]
        if found:
            told.append(f"{line.series.recipe or line.series.name}, {line.series.scaling} scaling: {', '.join(found)}")
    return "; ".join(told) + " (processes)."


def _is_wide(worlds: Sequence[int]) -> bool:
    return worlds[-1] / worlds[0] > _WIDE


def _process_axis(axes: Any, lines: Sequence[_Line]) -> None:
    """Ticks at the world sizes that were measured, as far as their numbers do not touch each other."""
    worlds = _worlds(lines)
    place: Callable[[float], float] = log2 if _is_wide(worlds) else float
    if _is_wide(worlds):
        axes.set_xscale("log", base=2)
    room = max((place(worlds[-1]) - place(worlds[0])) * 0.09, 1e-9)
    ticks = [worlds[-1]]
    for world in reversed(worlds):
        if place(ticks[-1]) - place(world) >= room:
            ticks.append(world)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("processes")
    if len(worlds) == 1:
        axes.set_xlim(worlds[0] - 1, worlds[0] + 1)


def _between(first: int, last: int) -> list[float]:
    """Places of a line that is straight or bent, depending on the axes."""
    return [first * (last / first) ** (step / 50) for step in range(51)]


def _value_axis(axes: Any, worlds: Sequence[int]) -> None:
    """From 0, or logarithmic where the largest of many sizes would press the others flat."""
    low, high = axes.dataLim.intervaly
    if _is_wide(worlds) and high > _WIDE * low:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    else:
        axes.set_ylim(0, high * 1.06)


def _ideal_in_legend(axes: Any, worlds: Sequence[int]) -> None:
    """One entry, whatever the colours of the dashes; a single size has no ideal."""
    if len(worlds) > 1:
        axes.plot([], [], "--", color=GREY, linewidth=1, label="ideal")


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 4 if max(map(len, labels)) < 20 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)
