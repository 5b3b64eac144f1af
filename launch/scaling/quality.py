"""The picture of what a training learns: accuracy and loss over its epochs, a line for each size.

More processes are worth nothing if quality is lost: lines that lie on each other show that it is
kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from launch.plots import rising_colours
from launch.scaling.axes import Line, legend, worlds_of
from launch.terminal import plural
from recipes.scaling.row import Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUALITIES = ("accuracy", "loss")
_STYLES = ("-", "--", ":", "-.")


def has_epochs(rows: Sequence[Timing]) -> bool:
    """Whether there is a line to draw: two epochs of one size with their accuracy or loss."""
    return bool(_known(rows))


def draw_quality(figure: Figure, lines: Sequence[Line]) -> str:
    """Beside each other what is known of accuracy and loss. Returns the last epoch's in words."""
    worlds, words = worlds_of(lines), []
    colours = dict(zip(worlds, rising_colours(len(worlds)), strict=True))
    known = _known([row for line in lines for row in line.rows])
    both = figure.subplots(1, len(known), squeeze=False)[0]
    for axes, quality in zip(both, known, strict=True):
        for place, line in enumerate(lines):
            for world in sorted({row.num_processes for row in line.rows}):
                found = _by_epoch([row for row in line.rows if row.num_processes == world], quality)
                if not found:
                    continue
                label = plural(world, "process")
                # Smaller on larger, so that each is seen where all are the same.
                smaller = len(worlds) - 1 - worlds.index(world)
                look: dict[str, Any] = {"marker": line.marker, "markersize": 4 + 2 * min(4, smaller), "linewidth": 1.4}
                look["label"] = f"{line.label}, {label}" if len(lines) > 1 else label
                look |= {"color": colours[world], "linestyle": _STYLES[place % len(_STYLES)]}
                axes.plot([*found], [*found.values()], **look)
                words.append(f"{line.label}: {quality} {found[max(found)]:.4g} at {world}")
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"{quality}, the median of repeats")
        axes.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, both[0])
    return f"After the last epoch: {'; '.join(words)} (processes)."


def _known(rows: Sequence[Timing]) -> list[str]:
    sizes = defaultdict(list)
    for row in rows:
        sizes[row.name, row.recipe, row.scaling, row.num_processes].append(row)
    return [one for one in _QUALITIES if any(len(_by_epoch(own, one)) > 1 for own in sizes.values())]


def _by_epoch(rows: Sequence[Timing], quality: str) -> dict[float, float]:
    found = defaultdict(list)
    for row in rows:
        value = getattr(row, quality)
        if row.epoch is not None and value is not None:
            found[row.epoch].append(value)
    return {epoch: median(values) for epoch, values in sorted(found.items())}
