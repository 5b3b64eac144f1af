"""Numbers as a person reads them."""

import pytest

from launch.terminal import console, duration, memory_size, plural, print_note, print_problems, print_table
from recipes.errors import Problem


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (plural(1, "process"), "1 process"),
        (memory_size(512 * 2**20), "512.0 MiB"),
        (memory_size(3 * 2**29), "1.50 GiB"),
        (duration(0.00123), "1.23 ms"),
        (duration(0.1234), "123 ms"),
        (duration(0.9999), "1.00 s"),
        (duration(125), "125 s"),
    ],
)
def test_counts_memory_sizes_and_durations_are_printed_with_their_unit(shown, words):
    assert shown == words


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
def test_rich_markup_in_a_users_text_is_printed_as_it_is(say, capsys):
    say()
    assert VERBATIM in capsys.readouterr().out


def test_a_table_printed_with_the_argument_whole_keeps_every_number_even_if_wider_than_the_console(capsys):
    print_table(["recipe", *"abcdefghijklm"], [["memory_zero3", *["19,998.4"] * 13]], whole=True)
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["memory_zero3", *["19,998.4"] * 13]
