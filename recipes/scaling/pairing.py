"""Which rows of jobs belong together: those of one training at several sizes.

A job that adds a row with `--measure` cannot know whether others have the same global batch as it,
or the same batch per process. `scale run` knows and says so, and rows of other programs are what
they say, or strong scaling.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TypeVar

from recipes.scaling.row import Timing

K = TypeVar("K")
_EACH = {"strong": "global batch", "weak": "batch per process"}  # what all sizes of a kind share
_SHARED: dict[str, Callable[[Timing], float]] = {
    "strong": lambda row: row.batch.total or 0,
    "weak": lambda row: (row.batch.total or 0) / row.num_processes,
}


def paired(rows: Sequence[Timing]) -> list[Timing]:
    """The rows, each with its kind of scaling, and those of jobs under the name of their training.

    A row of a job that belongs to both kinds is in the result twice.
    """
    names = _names([row for row in rows if _is_of_a_job(row)])
    named = [replace(row, name=names.get(id(row), row.name)) for row in rows]
    trainings = _grouped([row for row in named if _is_of_a_job(row)], _key)
    return [one for row in named for one in _with_scaling(row, trainings.get(_key(row), []))]


def is_same_training(row: Timing, other: Timing) -> bool:
    """Whether one can be measured against the other: rows of jobs also if their batches differ."""
    return (_without_batch(row.name), row.recipe) == (_without_batch(other.name), other.recipe)


def _without_batch(name: str) -> str:
    for each in _EACH.values():
        name = name.rpartition(f", {each} ")[0] or name
    return name


def _is_of_a_job(row: Timing) -> bool:
    return not row.scaling and bool(row.setup.engine) and row.batch.total is not None


def _training(row: Timing) -> tuple[str, ...]:
    """What was trained and how, whatever the order of the flags."""
    return tuple(sorted(_flags(row.setup.command)))


def _flags(command: str) -> list[str]:
    """Each flag with its values: "max_length 512"."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a command of ours: a quotation is not closed
        words = command.split()
    found: list[str] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append(word.removeprefix("--"))
        else:
            found[-1] += f" {word}"
    return found


def _key(row: Timing) -> tuple[str, str]:
    return row.name, row.recipe


def _names(jobs: Sequence[Timing]) -> dict[int, str]:
    """The name of each row's training; where one name has several, with what they differ in."""
    named: list[tuple[Timing, str]] = []
    for own in _grouped(jobs, lambda row: (row.recipe, _training(row))).values():
        common = _common_name(own)
        named += [(row, common or row.name) for row in own]
    trainings: dict[tuple[str, str], list[set[str]]] = {}
    for row, name in named:
        trainings.setdefault((name, row.recipe), []).append(set(_training(row)))
    found = {}
    for row, name in named:
        shared = set.intersection(*trainings[name, row.recipe])
        own_flags = [flag for flag in _training(row) if flag not in shared]
        found[id(row)] = f"{name} ({', '.join(own_flags)})" if own_flags else name
    return found


def _common_name(own: Sequence[Timing]) -> str:
    """What the names of one training's rows begin with, empty if they say more than a size.

    Jobs are often named after their size: their names never meet at one size.
    """
    names = {row.name for row in own}
    points = {(row.name, row.num_processes, row.batch.total) for row in own}
    if len(names) == 1 or len({point[1:] for point in points}) < len(points):
        return ""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike).rstrip(" -_.") or min(names)


def _with_scaling(row: Timing, training: Sequence[Timing]) -> list[Timing]:
    """The row once for each kind of scaling that it shows beside the other rows of its training.

    Strong where sizes share the global batch, weak where they share that of a process. A row that
    pairs with none is strong scaling by itself.
    """
    if not _is_of_a_job(row):
        return [row if row.scaling else replace(row, scaling="strong")]
    found = []
    for kind, batch_of in _SHARED.items():
        groups = _grouped(training, batch_of)
        several = {batch for batch, rows in groups.items() if len({row.num_processes for row in rows}) > 1}
        batch = batch_of(row)
        if batch in several:
            found.append((kind, batch, len(several) > 1))
    if not found:
        found.append(("strong", row.batch.total or 0, len(training) > 1))
    return [
        replace(row, scaling=kind, name=f"{row.name}, {_EACH[kind]} {batch:g}" if labelled else row.name)
        for kind, batch, labelled in found
    ]


def _grouped(rows: Sequence[Timing], key: Callable[[Timing], K]) -> dict[K, list[Timing]]:
    groups: dict[K, list[Timing]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
