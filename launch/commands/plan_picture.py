"""`recipes plan --plot FILE`: the memory of each recipe as a bar."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from launch import plots
from recipes.errors import mistake
from recipes.planner.plan import Plan

_GIB = 2**30
_COLOURS = (
    plots.BLUE, plots.SKY, plots.GREEN, plots.ORANGE, plots.YELLOW, plots.PURPLE, plots.VERMILION, plots.GREY,
)  # fmt: skip


def require_writable(file: str) -> None:
    """Before anything is planned. Raises `UserError`."""
    if Path(file).suffix not in (".png", ".svg", ".pdf"):
        raise mistake("plot", f"{file!r} is not a picture file", "a name that ends in .png, .svg or .pdf")
    if not os.access(Path(file).parent, os.W_OK):
        raise mistake("plot", f"{file} cannot be written", "choose a writable folder")


def draw(plan: Plan, parts: Iterable[str], file: str) -> None:
    """Each recipe is a stacked bar of these parts of its memory, with a line at what is usable.

    Raises `UserError` if the file cannot be written.
    """
    figure = plots.new_figure(8, 1.6 + 0.6 * len(plan.recipes))
    axes = figure.subplots()
    names = [f"{entry.name}\n{entry.micro_batch} x {entry.accumulation}" for entry in plan.recipes]
    left = [0.0] * len(names)
    for part, colour in zip(parts, _COLOURS, strict=True):
        sizes = [getattr(entry.components, part) / _GIB for entry in plan.recipes]
        axes.barh(names, sizes, left=left, label=part, color=colour)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(plan.usable_bytes / _GIB, color="black", linestyle="--", label="usable")
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each GPU")
    axes.set_title(f"{plan.model}, sequences of {plan.length:,} tokens, {plan.gpu}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise mistake("plot", f"{file} cannot be written: {error}", "choose a writable folder") from None
