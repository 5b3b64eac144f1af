"""Shared by all plots: a palette, and matplotlib, imported only when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
YELLOW, PURPLE, VERMILION, GREY = "#F0E442", "#CC79A7", "#D55E00", "#999999"


def installed() -> bool:
    """True if matplotlib, the extra `plot`, is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of `width` x `height` inches, for files only: no display is needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
