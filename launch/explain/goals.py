"""Accumulation beside mixed precision: what each is for, by what was measured of each."""

from __future__ import annotations

from collections.abc import Callable

from launch.explain.reasons import ALIKE, clearly_differs, gradient_words, memory_words, speed_words
from launch.explain.topics import BOTH, Measured, Row

_FOR = ("batches beyond memory", "faster arithmetic, smaller activations", "large batches, fast")
_COMBINED = ("yes: divide each loss by their number", "yes: unscale_ fp16 once, before clipping", "they are, here")


def goals(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table with a column for accumulation, for AMP and for both."""
    first = measured.rows[0]
    shown = [(variant.goal, row) for variant, row in zip(BOTH.variants, measured.rows, strict=True) if variant.goal]
    headings, rows = [goal for goal, _ in shown], [row for _, row in shown]

    def cells(words: Callable[[Row], str]) -> list[str]:
        return [words(row) for row in rows]

    return ["", *headings], [
        ["is for", *_FOR],
        ["saves memory", *cells(lambda row: _yes(row.peak_bytes < 0.98 * first.peak_bytes, memory_words(row, first)))],
        ["saves time", *cells(lambda row: _time(row, first))],
        ["gradient", *cells(gradient_words)],
        ["exchanges per step", *cells(lambda row: f"{row.synchronisations:g}")],
        ["can be combined", *_COMBINED],
    ]


def _yes(is_so: bool, words: str) -> str:
    return f"{'yes' if is_so else 'no'}: {words}"


def _time(row: Row, first: Row) -> str:
    words, ratio = speed_words(row, first), first.seconds / row.seconds
    if ratio > ALIKE and not clearly_differs(row, first):
        return f"unclear: {words}"
    return _yes(ratio > ALIKE, words)
