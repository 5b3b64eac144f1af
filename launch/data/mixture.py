"""A mixture of data sets: its parts tokenized one by one, and mixed by their weights.

Without weights every part is taken whole, once an epoch. With weights an epoch ends when every
example of every part has been seen: other parts begin again from their first. So nothing is left
out, and the shares hold in any stretch of it. `datasets.interleave_datasets` draws the parts at
random: it takes 1.4 s of a core for a million examples against 0.3 s, and its shares are near the
weights only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import datasets
import numpy as np
from datasets import Dataset

from launch.data.encode import described
from launch.data.sources import unread_files
from launch.data.tokens import Tokenized, lengths_of, tokenized
from recipes.errors import UserError
from recipes.mixture import Part, parts_of
from recipes.rules.data_and_model import nothing_to_evaluate_on
from recipes.run import RunSpec

Found = TypeVar("Found")


@dataclass
class Source:
    """The examples of a part of a mixture, or of the single source."""

    name: str
    weight: float | None
    train: Dataset


def run_of(run: RunSpec, part: Part) -> RunSpec:
    """The run, as if this part were its only data."""
    own = {"dataset_name": part.name, "dataset_train_split": part.split, "dataset_config": part.config}
    return run.given_too(**{name: value for name, value in own.items() if value})


def tokens_of_parts(run: RunSpec, tokenizer) -> list[tuple[Part, Tokenized]]:
    """Each part of the run's data with its tokens. Raises as `tokenized` does."""
    return of_parts(run, lambda own, part: tokenized(own, tokenizer, part.columns))


def of_parts(run: RunSpec, read: Callable[[RunSpec, Part], Found]) -> list[tuple[Part, Found]]:
    """Each part of the run's data, with what `read` makes of a run that has no other."""
    parts = parts_of(run["dataset_name"])
    if not parts:
        return [(Part("stdlib source"), read(run, Part("")))]
    return [(part, _of_part(run_of(run, part), part, read, len(parts) == 1)) for part in parts]


def _of_part(run: RunSpec, part: Part, read: Callable[[RunSpec, Part], Found], alone: bool) -> Found:
    with naming(part.name, alone):
        try:
            return read(run, part)
        except UserError as error:
            if alone or run["dataset_test_split"] or error.problems[0].subject != "dataset_test_split":
                raise
            # Another part may have something to evaluate on.
            return read(run.given_too(eval_strategy="no"), part)


@contextlib.contextmanager
def naming(name: str, alone: bool) -> Iterator[None]:
    """A mistake about one of several parts says which."""
    try:
        yield
    except UserError as error:
        if alone:
            raise
        whats = (problem.what if name in problem.what else f"{name}: {problem.what}" for problem in error.problems)
        problems = [replace(problem, what=what) for problem, what in zip(error.problems, whats, strict=True)]
        raise UserError(*problems) from None


def mixed(parts: list[Source]) -> Dataset:
    """The examples of an epoch."""
    if parts[0].weight is None:
        return parts[0].train if len(parts) == 1 else datasets.concatenate_datasets([part.train for part in parts])
    sizes = np.array([len(part.train) for part in parts])
    starts = np.cumsum(sizes) - sizes
    counts = taken(parts)
    numbers = [start + np.arange(count) % size for start, count, size in zip(starts, counts, sizes, strict=True)]
    order = np.concatenate(numbers)[evenly(counts)]
    return datasets.concatenate_datasets([part.train for part in parts]).select(order)


def evenly(counts: Sequence[int]) -> np.ndarray:
    """The numbers of so many examples of each part, end to end, in an order in which the shares
    hold in any stretch.
    """
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.argsort(places, kind="stable")


def taken(parts: list[Source]) -> list[int]:
    """How many examples of each part an epoch has: in the ratio of the weights, and no part less
    than whole.
    """
    sizes = np.array([len(part.train) for part in parts])
    if parts[0].weight is None:
        return sizes.tolist()
    weights = np.array([part.weight for part in parts])
    whole = int(np.argmax(sizes / weights))  # the part that is seen once
    return np.maximum(sizes, np.rint(weights / weights[whole] * sizes[whole]).astype(np.int64)).tolist()


def evaluated(run: RunSpec, parts: Sequence[Dataset | None]) -> Dataset | None:
    """The examples to evaluate on, of all parts that have any. Raises `UserError` if none has, and
    the run evaluates.
    """
    found = [part for part in parts if part is not None]
    if not found and run["eval_strategy"] != "no":
        raise UserError(nothing_to_evaluate_on("its parts have only train", run["dataset_streaming"]))
    return datasets.concatenate_datasets(found) if found else None


def note_on(run: RunSpec, tokenizer, part: Part, columns: Sequence[str], kind: str | None) -> str:
    """How the columns and files of a part were read, for a person."""
    return described(run, columns, tokenizer.chat_template) + unread_files(part.name, kind)


def figures(parts: list[Source], longest: int) -> list[str]:
    """Of each part its examples, how often an epoch has them, its tokens and shares."""
    counts = taken(parts)
    lengths = [np.minimum(lengths_of(part.train), longest) for part in parts]
    tokens = [_tokens(*of_part) for of_part in zip(lengths, counts, strict=True)]
    lines = []
    for part, count, own in zip(parts, counts, tokens, strict=True):
        often = count / len(part.train)
        times = f" x {often:,.2f}" if often > 1 else ""
        of_all = f"{len(part.train):,} examples{times}, {count / sum(counts):.1%} of all"
        lines.append(f"{part.name}: {of_all}; {own:,} tokens, {own / sum(tokens):.1%}")
    return lines


def _tokens(lengths: np.ndarray, count: int) -> int:
    """Of the first `count` examples, which begin again at the end."""
    rounds, rest = divmod(count, len(lengths))
    return int(lengths.sum()) * rounds + int(lengths[:rest].sum())
