"""Numbers as a person reads them."""

import pytest

from launch.terminal import console, duration, memory_size, plural, print_note, print_problems, print_table
from recipes.errors import Problem


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "error", "0 errors"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (1000, "step", "1,000 steps"),
    ],
)
def test_a_count_agrees_with_its_noun(count, noun, words):
    assert plural(count, noun) == words


@pytest.mark.parametrize(("size", "words"), [(512 * 2**20, "512.0 MiB"), (3 * 2**29, "1.50 GiB")])
def test_memory_is_counted_in_powers_of_two(size, words):
    assert memory_size(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.00123, "1.23 ms"),
        (0.0123, "12.3 ms"),
        (0.1234, "123 ms"),
        (0.9999, "1.00 s"),
        (1.25, "1.25 s"),
        (125, "125 s"),
    ],
)
def test_a_duration_has_three_digits(seconds, words):
    assert duration(seconds) == words


VERBATIM = "data:b:1.jsonl [red]:smile:[/red]"


@pytest.mark.parametrize(
    "say",
    [
        lambda: print_problems([Problem("dataset_name", VERBATIM)], console()),
        lambda: print_note(VERBATIM, console()),
        lambda: print_table(["file", "again"], [[VERBATIM, VERBATIM]]),
    ],
    ids=["problem", "note", "table"],
)
def test_what_a_person_wrote_is_printed_as_it_is(say, capsys):
    say()
    assert VERBATIM in capsys.readouterr().out


def test_a_whole_table_wider_than_the_console_keeps_every_number(capsys):
    print_table(["recipe", *"abcdefghijklm"], [["memory_zero3", *["19,998.4"] * 13]], whole=True)
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["memory_zero3", *["19,998.4"] * 13]
