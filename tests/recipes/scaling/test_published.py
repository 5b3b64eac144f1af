"""Published tables of throughput, each verdict recomputed here by other code.

published.csv: where each table stands (for NVIDIA/DeepLearningExamples at commit 729963dd, with the
line of its README), the numbers of GPUs or nodes, and images, sequences, tokens, ... per second, or
times where `scaling` says so. `published` is the speedup that the source prints, as far as it does.
"""

import csv
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from recipes.scaling import sentences
from recipes.scaling.analyse import analyse
from recipes.scaling.timings import Timing


class Table(NamedTuple):
    title: str
    scaling: str
    sizes: list[int]
    rates: list[Fraction]
    published: list[float]


def _table(row: dict[str, str]) -> Table:
    numbers = [Fraction(number) for number in row["rates"].split()]
    rates = [1 / number for number in numbers] if row["scaling"] == "times" else numbers
    scaling = "weak" if row["scaling"] == "weak" else "strong"
    sizes, published = map(int, row["processes"].split()), map(float, row["published"].split())
    return Table(f"{row['source']} {row['line']} {row['table']}", scaling, list(sizes), rates, list(published))


with Path(__file__).with_name("published.csv").open(newline="") as _stream:
    TABLES = [_table(row) for row in csv.DictReader(_stream)]


def expected_band(table: Table, place: int) -> str:
    if table.rates[place] < max(table.rates[:place]):
        return "negative scaling"
    efficiency = table.rates[place] / table.rates[0] * table.sizes[0] / table.sizes[place]
    per_mille = (1000 * efficiency + Fraction(1, 2)).__floor__()
    return "excellent" if per_mille >= 850 else "good" if per_mille >= 700 else "poor"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_verdicts_on_a_published_scaling_table_have_its_speedups_and_grades_of_efficiency(table):
    """Through the columns that people have: so many samples take so long."""
    timed = zip(table.sizes, (float(1000 / rate) for rate in table.rates), strict=True)
    series = analyse([Timing(size, time, samples=1000, scaling=table.scaling) for size, time in timed])[0]
    for place, size in enumerate(series.sizes):
        assert size.speedup.median == pytest.approx(float(table.rates[place] / table.rates[0]))
        if table.published:
            assert size.speedup.median == pytest.approx(table.published[place], rel=0.012)
        if place:
            assert size.band == expected_band(table, place)
            assert f"{size.band} (one timing)" in sentences.verdict(size, series)
