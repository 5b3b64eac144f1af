"""What the pictures of a scaling report mark and number."""

import pytest

from launch.plots import BLUE, new_figure
from launch.scaling.axes import Line, legend, mark_negative, of_sizes, with_values
from recipes.scaling.row import Timing
from recipes.scaling.verdicts import analyse

pytest.importorskip("matplotlib")


def line_of(**seconds):
    rows = [Timing(int(world.removeprefix("at")), time) for world, time in seconds.items()]
    return Line("standard", BLUE, "o", analyse(rows)[0], rows)


@pytest.fixture
def axes():
    return new_figure(4, 3).subplots()


def speedup(size):
    return size.speedup


def test_a_size_that_is_slower_than_a_smaller_one_gets_a_cross(axes):
    mark_negative(axes, line_of(at1=10, at2=6, at4=30), speedup)
    (cross,) = axes.lines
    assert list(cross.get_xdata()) == [4] and cross.get_marker() == "x"


def test_a_cross_is_named_once_and_after_the_series(axes):
    axes.plot([1, 2], [1, 2], label="standard")
    for _ in range(2):
        mark_negative(axes, line_of(at1=10, at2=30), speedup)
    axes.plot([1, 2], [1, 2], label="fast")
    legend(axes.figure, axes)
    (found,) = axes.figure.legends
    assert [text.get_text() for text in found.get_texts()] == ["standard", "fast", "negative scaling"]


def test_nothing_is_marked_where_every_size_is_faster(axes):
    mark_negative(axes, line_of(at1=10, at2=6, at4=4), speedup)
    assert not axes.lines


def test_points_of_one_series_have_their_values(axes):
    line = line_of(at1=10, at2=6)
    with_values(axes, [line], of_sizes(line, speedup, "{:.2f}"))
    assert [text.get_text() for text in axes.texts] == ["1.00", "1.67"]


@pytest.mark.parametrize("lines", [2, 1])
def test_values_that_would_touch_are_left_out(lines, axes):
    line = line_of(**{f"at{world}": 10 / world for world in range(1, 4 if lines == 2 else 9)})
    with_values(axes, [line] * lines, of_sizes(line, speedup, "{:.2f}"))
    assert not axes.texts
