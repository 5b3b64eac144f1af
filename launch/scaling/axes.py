"""What the pictures of a scaling report share: lines, axes, legends, numbers in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING, Any

from launch.plots import GREY
from recipes.scaling.row import Timing
from recipes.scaling.sizes import NEGATIVE, Size, Spread
from recipes.scaling.verdicts import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDEAL = "ideal"
_FEW_VALUES = 6  # that stand beside each other without touching
_WIDE = 8  # from this ratio of world sizes on, powers of two do not fit on a linear axis


@dataclass(frozen=True)
class Line:
    """A series with its label, colour and marker, the same in every picture."""

    label: str
    colour: str
    marker: str
    series: Series
    rows: list[Timing]


def worlds_of(lines: Sequence[Line]) -> list[int]:
    return sorted({size.num_processes for line in lines for size in line.series.sizes})


def side_by_side(lines: Sequence[Line]) -> list[tuple[Line, float]]:
    """Each series with its offset from the centre of a world size, so that none hides another."""
    gap = min(0.18, 0.6 / len(lines))
    return [(line, gap * (index - (len(lines) - 1) / 2)) for index, line in enumerate(lines)]


def dots(axes: Axes, lines: Sequence[Line], of_row: Callable[[Timing], Any], of_size: Callable[[Size], Any]) -> None:
    """A dot for each row, in front of the hollow marker of its world size.

    World sizes are evenly spaced.
    """
    worlds = worlds_of(lines)
    for line, offset in side_by_side(lines):
        sizes = [size for size in line.series.sizes if of_size(size) is not None]
        places = [worlds.index(size.num_processes) + offset for size in sizes]
        values = [(place, of_size(size), f"{of_size(size):.3g}") for place, size in zip(places, sizes, strict=True)]
        with_values(axes, lines, values, beside=True)
        look: dict = {"color": line.colour, "marker": line.marker, "linewidth": 1.2, "label": line.label}
        axes.plot(places, [of_size(size) for size in sizes], markerfacecolor="white", markersize=9, zorder=2, **look)
        rows = [row for row in line.rows if of_row(row) is not None]
        places = [worlds.index(row.num_processes) + offset for row in rows]
        axes.plot(places, [of_row(row) for row in rows], ".", color=line.colour, markersize=5, alpha=0.8, zorder=3)
    name_worlds(axes, worlds)


def name_worlds(axes: Axes, worlds: Sequence[int]) -> None:
    every = ceil(len(worlds) / 10)
    axes.set_xticks(range(0, len(worlds), every), [str(world) for world in worlds[::every]])
    axes.set_xlim(-0.5, len(worlds) - 0.5)
    axes.set_xlabel("processes")


def with_errors(axes: Axes, line: Line, of_size: Callable[[Size], Spread | None]) -> None:
    """Medians with their quartiles, which a single measurement does not have."""
    found = [(size, spread) for size in line.series.sizes if (spread := of_size(size))]
    worlds = [size.num_processes for size, _ in found]
    below = [spread.median - spread.low if size.repeats > 1 else 0.0 for size, spread in found]
    above = [spread.high - spread.median if size.repeats > 1 else 0.0 for size, spread in found]
    errors = [below, above] if any(below + above) else None
    look: dict = {"color": line.colour, "marker": line.marker, "markersize": 5, "linewidth": 1.2, "capsize": 4}
    axes.errorbar(worlds, [spread.median for _, spread in found], yerr=errors, label=line.label, **look)


def mark_negative(axes: Axes, line: Line, of_size: Callable[[Size], Spread | None]) -> None:
    """A cross on each size that is slower than a smaller one, named once in the legend."""
    series = line.series
    slow = [size for size, verdict in zip(series.sizes, series.verdicts, strict=True) if verdict.band == NEGATIVE]
    found = [(size.num_processes, spread.median) for size in slow if (spread := of_size(size))]
    if not found:
        return
    named = NEGATIVE in axes.get_legend_handles_labels()[1]
    look: dict = {"color": "black", "markersize": 11, "markeredgewidth": 1.5, "zorder": 4}
    axes.plot(*zip(*found, strict=True), "x", label=None if named else NEGATIVE, **look)


def with_values(
    axes: Axes, lines: Sequence[Line], points: Sequence[tuple[float, float, str]], beside: bool = False
) -> None:
    """The numbers of one series above or `beside` its points, where few enough to be read."""
    if len(lines) > 1 or len(points) > _FEW_VALUES:
        return
    for place, (across, up, words) in enumerate(points):
        # Within the axes: the first and the last point lie on their edges.
        side = "center" if len(points) == 1 else {0: "left", len(points) - 1: "right"}.get(place, "center")
        look: dict = {"xytext": (9, -3), "ha": "left"} if beside else {"xytext": (0, 8), "ha": side}
        axes.annotate(words, (across, up), textcoords="offset points", fontsize=8, **look)


def of_sizes(line: Line, of_size: Callable[[Size], Spread | None], form: str) -> list[tuple[float, float, str]]:
    """The points of a line over its world sizes, with their values in words."""
    found = [(size.num_processes, spread.median) for size in line.series.sizes if (spread := of_size(size))]
    return [(world, value, form.format(value)) for world, value in found]


def in_words(lines: Sequence[Line], words: Callable[[Size], str]) -> str:
    """A picture's numbers, for those who cannot see it:

    `fast, strong scaling: 1.9 times at 2 (processes).`
    """
    texts = []
    for line in lines:
        found = [f"{text} at {size.num_processes}" for size in line.series.sizes if (text := words(size))]
        if found:
            texts.append(f"{line.series.recipe or line.series.name}, {line.series.scaling} scaling: {', '.join(found)}")
    return "; ".join(texts) + " (processes)."


def _is_wide(worlds: Sequence[int]) -> bool:
    return worlds[-1] / worlds[0] > _WIDE


def process_axis(axes: Axes, lines: Sequence[Line]) -> None:
    """Ticks at the measured world sizes, without those whose numbers would overlap."""
    worlds = worlds_of(lines)
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


def points_between(first: int, last: int) -> list[float]:
    """Points between two world sizes: enough for a line that bends on a logarithmic axis."""
    return [first * (last / first) ** (step / 50) for step in range(51)]


def value_axis(axes: Axes, worlds: Sequence[int]) -> None:
    """From 0; or logarithmic if a wide range of values would press the small ones flat."""
    low, high = axes.dataLim.intervaly
    if _is_wide(worlds) and high > _WIDE * low:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    else:
        axes.set_ylim(0, high * 1.06)


def ideal_in_legend(axes: Axes, worlds: Sequence[int]) -> None:
    """One entry for all dashed lines, whatever their colours; a single size has none."""
    if len(worlds) > 1:
        axes.plot([], [], "--", color=GREY, linewidth=1, label=IDEAL)


def legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, so that it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:  # no value could be drawn
        return
    last = (IDEAL, NEGATIVE)
    order = sorted(range(len(labels)), key=lambda place: labels[place] in last)
    handles, labels = [handles[place] for place in order], [labels[place] for place in order]
    columns = 4 if max(map(len, labels)) < 20 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)
