"""Published tables of throughput, each verdict recomputed here by other code.

published.csv: where each table stands (for NVIDIA/DeepLearningExamples at commit 729963dd, with the
line of its README), the numbers of GPUs or nodes, and images, sequences, tokens, ... per second, or
times where `scaling` says so. `published` is the speedup that the source prints, as far as it does.
"""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from recipes.scaling.row import Timing
from recipes.scaling.verdicts import Series, analyse


class Table(NamedTuple):
    title: str
    scaling: str
    sizes: list[int]
    rates: list[Fraction]
    published: list[float]


def _tables() -> list[Table]:
    with Path(__file__).with_name("published.csv").open(newline="") as stream:
        return [_table(row) for row in csv.DictReader(stream)]


def _table(row: dict[str, str]) -> Table:
    numbers = [Fraction(number) for number in row["rates"].split()]
    rates = [1 / number for number in numbers] if row["scaling"] == "times" else numbers
    scaling = "weak" if row["scaling"] == "weak" else "strong"
    sizes, published = map(int, row["processes"].split()), map(float, row["published"].split())
    return Table(f"{row['source']} {row['line']} {row['table']}", scaling, list(sizes), rates, list(published))


TABLES = _tables()


def analysed(table: Table) -> Series:
    """Through the columns that people have: so many samples take so long."""
    seconds = [float(1000 / rate) for rate in table.rates]
    rows = [
        Timing(size, time, samples=1000, scaling=table.scaling) for size, time in zip(table.sizes, seconds, strict=True)
    ]
    return analyse(rows)[0]


def expected_band(table: Table, place: int) -> str:
    if table.rates[place] < max(table.rates[:place]):
        return "negative scaling"
    efficiency = table.rates[place] / table.rates[0] * table.sizes[0] / table.sizes[place]
    per_mille = (1000 * efficiency + Fraction(1, 2)).__floor__()
    return "excellent" if per_mille >= 850 else "good" if per_mille >= 700 else "poor"


def expected_law(table: Table) -> str:
    """By Karp and Flatt's fraction, with single timings taken as good to 2 percent."""
    speedups = [rate / table.rates[0] for rate in table.rates]
    times = [Fraction(size, table.sizes[0]) for size in table.sizes]
    if any(later < max(speedups[:place]) for place, later in enumerate(speedups) if place):
        return "turns"
    pairs = list(zip(speedups, times, strict=True))[1:]
    fractions = [(p / s - 1) / (p - 1) for s, p in pairs]
    open_by = [Fraction(2, 100) * p / s / (p - 1) for s, p in pairs]
    if fractions[-1] - max(fractions[0], 0) > open_by[0] + open_by[-1]:
        return "growing overhead"
    weights = [(p - 1) / p for _, p in pairs]
    fitted = sum(e * w * w for e, w in zip(fractions, weights, strict=True)) / sum(w * w for w in weights)
    fitted = min(max(fitted, Fraction(0)), Fraction(1))
    level = all(abs(max(e, 0) - fitted) <= 2 * by for e, by in zip(fractions, open_by, strict=True))
    return "amdahl" if level else "none"


def test_there_are_many_tables_of_several_sources():
    assert len(TABLES) >= 60
    assert len({table.title.split("/")[0] for table in TABLES}) >= 5


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_a_published_table_gets_the_verdict_that_its_numbers_give(table):
    series = analysed(table)
    for place, (size, verdict) in enumerate(zip(series.sizes, series.verdicts, strict=True)):
        assert size.speedup.median == pytest.approx(float(table.rates[place] / table.rates[0]))
        if table.published:
            assert size.speedup.median == pytest.approx(table.published[place], rel=0.012)
        if place:
            assert verdict.band == expected_band(table, place)
            assert f"{verdict.band} (one timing)" in verdict.words


STRONG = [table for table in TABLES if table.scaling == "strong" and len(table.sizes) > 2]


@pytest.mark.parametrize("table", STRONG, ids=lambda table: table.title)
def test_a_published_table_follows_the_law_that_its_numbers_give(table):
    law = analysed(table).law
    assert law.kind == expected_law(table)
    assert (law.serial is None) == (law.kind != "amdahl")


def test_the_tables_hold_every_band():
    found = {expected_band(table, place) for table in TABLES for place in range(1, len(table.sizes))}
    assert found == {"excellent", "good", "poor", "negative scaling"}
