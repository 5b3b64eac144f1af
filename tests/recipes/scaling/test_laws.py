"""The law that speedups follow: Amdahl's, growing overhead, or a curve that turns."""

import pytest

from launch.scaling.words import serial_words
from recipes.scaling.laws import Point, law_of
from recipes.scaling.row import Timing
from recipes.scaling.verdicts import Series, analyse


def series_of(throughputs: dict[int, float]) -> Series:
    (series,) = analyse([Timing(world, 1000 / rate, samples=1000) for world, rate in throughputs.items()])
    return series


def verdicts(throughputs: dict[int, float]) -> list[str]:
    return [verdict.band for verdict in series_of(throughputs).verdicts[1:]]


# --- Negative scaling ----------------------------------------------------------------------------


def test_slower_than_any_smaller_size_is_negative():
    found = series_of({1: 255, 4: 691, 8: 666})
    assert [verdict.band for verdict in found.verdicts] == ["", "poor", "negative scaling"]
    assert found.verdicts[-1].slower_than == 4
    assert "2.61 times as fast as 1, 32.6% efficiency: negative scaling" in found.verdicts[-1].words
    assert "It is 0.96 times as fast as 4 processes." in found.verdicts[-1].words


def test_a_size_that_is_as_fast_as_a_smaller_one_is_not_negative():
    assert verdicts({1: 100, 2: 180, 4: 180}) == ["excellent", "poor"]


def test_a_difference_that_repeats_leave_open_is_not_negative():
    times = {1: (100, 101, 99), 2: (60, 66, 55), 4: (61, 67, 54)}
    (series,) = analyse([Timing(world, time) for world, repeats in times.items() for time in repeats])
    assert [verdict.band for verdict in series.verdicts[1:]] == ["good", "poor"]
    assert series.law.kind != "turns"


# --- Laws ----------------------------------------------------------------------------------------


def amdahl(serial: float, processes: int) -> float:
    return 1 / (serial + (1 - serial) / processes)


def usl(a: float, b: float, processes: int) -> float:
    return processes / (1 + a * (processes - 1) + b * processes * (processes - 1))


def test_a_level_fraction_is_amdahls():
    law = law_of([Point(world, amdahl(0.05, world)) for world in (1, 2, 4, 8, 16)])
    assert (law.kind, law.serial) == ("amdahl", pytest.approx(0.05))


def test_a_fraction_that_rises_is_overhead_that_grows():
    found = series_of({world: 100 * world / (1 + 0.01 * world * world) for world in (1, 2, 4, 8)})
    assert (found.law.kind, found.serial_fraction) == ("growing overhead", None)
    assert "overhead grows with the processes" in serial_words(found)


def test_where_the_curve_turns_its_best_size_is_named():
    found = series_of({world: 100 * usl(0.02, 0.01, world) for world in (1, 2, 4, 8, 16, 32)})
    assert found.law.peak == pytest.approx((0.98 / 0.01) ** 0.5)
    assert "Of the measured sizes 8 is the best" in serial_words(found)
    assert "highest at 9.9 processes" in serial_words(found)


def test_a_curve_that_does_not_fit_names_the_best_measured_size_alone():
    words = serial_words(series_of({1: 100, 2: 166, 4: 33}))
    assert words.endswith("Of the measured sizes 2 is the best, 1.66 times as fast as 1.")


def test_the_smallest_size_need_not_be_one():
    law = law_of([Point(4 * world, usl(0.02, 0.02, world)) for world in (1, 2, 4, 8, 16)])
    assert law.peak == pytest.approx(4 * (0.98 / 0.02) ** 0.5)


def test_a_fraction_of_a_tenth_of_a_percent_promises_no_hundreds():
    words = serial_words(series_of({world: 100 * amdahl(0.001225, world) for world in (1, 2, 4, 8)}))
    assert words == (
        "Serial fraction 0.1% (Amdahl's law, 4 world sizes): too small for a limit to follow from sizes up to 8."
    )


def test_a_fraction_that_falls_is_not_amdahls():
    found = series_of({1: 100, 2: 150, 4: 380, 8: 790})
    assert (found.law.kind, found.serial_fraction) == ("none", None)
    assert "is not level" in serial_words(found)
