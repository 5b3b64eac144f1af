"""The targets of a classifier, as its label column says: one class, several, or numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
from datasets import ClassLabel, Dataset, List, Value

from launch.data.batches import Example
from launch.data.packing import Cut
from launch.data.tokens import lengths_of
from recipes.errors import Problem, UserError, mistake, plural
from recipes.rules.check import new_problems
from recipes.run import RunSpec, Setting, Settings

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


@dataclass(frozen=True)
class Target:
    """What the model learns. `problem_type` is transformers' name for it.

    `names` are those of the model's outputs, in its order. `numbers` finds a class by the label of
    a row. `is_vector`: a row has a 0 or 1 for each class. `words` are for a person.
    """

    problem_type: str
    names: list[str]
    words: str
    numbers: Mapping[Any, int] = field(default_factory=dict)
    is_vector: bool = False

    def encode(self, label: Any) -> int | float | tuple[float, ...]:
        """A row's label as a batch holds it: a class, a number, or a number for each class."""
        if self.problem_type == SINGLE:
            return self.numbers[label]
        if self.problem_type == REGRESSION:
            return float(label)
        if self.is_vector:
            return tuple(map(float, label))
        applying = {self.numbers[one] for one in (label if isinstance(label, list) else [label])}
        return tuple(float(number in applying) for number in range(len(self.names)))


def recognise(run: Settings, rows: Dataset, classes: Sequence[str] = ()) -> Target:
    """The target that the column `label` of the rows holds. `--problem_type` wins, and otherwise
    its type decides: texts and integers are classes, other numbers a regression, lists several
    classes at once.

    `classes` are the names of a model that was trained to classify, in its order. Raises
    `UserError` if the column holds something else.
    """
    name, wanted, feature = run["dataset_label_field"], run["problem_type"], rows.features["label"]
    column, flat = _labels(rows, name, "dataset_label_field")
    is_list = isinstance(feature, List)
    kind = feature.feature if is_list else feature
    if not isinstance(kind, (Value, ClassLabel)):
        raise _no_class(name, "lists, or numbers and texts mixed")
    if is_list and wanted not in (None, MULTI):
        raise mistake("problem_type", f"takes one label a row, and the column {name!r} holds lists", "leave it out")
    is_fraction = isinstance(kind, Value) and kind.dtype.startswith(("float", "double", "decimal"))
    if not is_list and (wanted == REGRESSION or (wanted is None and is_fraction)):
        return _regression(name, column)
    if is_list and isinstance(kind, Value) and _are_vectors(column, flat):
        outputs = compute.list_value_length(column)[0].as_py()
        names = list(classes) if len(classes) == outputs else [str(number) for number in range(outputs)]
        return Target(MULTI, names, f"multi-label: {outputs} labels", {n: n for n in range(outputs)}, True)
    by_label = _classes(name, kind, compute.unique(flat).to_pylist())
    names = list(by_label.values())
    known = [one.lower() for one in classes]
    if names and all(one.lower() in known for one in names):  # the model was trained on all of them
        names, numbers = list(classes), {label: known.index(one.lower()) for label, one in by_label.items()}
    elif len(names) > 1:
        numbers = {label: number for number, label in enumerate(by_label)}
    else:
        what = f"all rows have the same label: {''.join(names) or 'none'}"
        raise mistake("dataset_label_field", what, "data with two classes or more")
    if is_list or wanted == MULTI:
        return Target(MULTI, names, f"multi-label: {len(names):,} labels", numbers)
    return Target(SINGLE, names, f"{len(names):,} classes", numbers)


def recognised(run: RunSpec, problem_type: str | None) -> tuple[RunSpec, list[Problem]]:
    """The run with the `problem_type` of its data, and the advice that `check` could not give
    before. Raises `UserError` for settings that do not go with such labels.
    """
    if problem_type is None or run["problem_type"] == problem_type:
        return run, []
    setting = Setting(problem_type, "data", f"what the column {run['dataset_label_field']} holds")
    known = replace(run, limits={**run.limits, "problem_type": setting})
    found = new_problems(known, run)
    if errors := [problem for problem in found if problem.severity == "error"]:
        raise UserError(*errors)
    return known, found


def _labels(rows: Dataset, name: str, flag: str) -> tuple[pyarrow.ChunkedArray, pyarrow.ChunkedArray]:
    """The labels, and those inside them if they are lists. Raises `UserError` if a row has none."""
    column = rows.select_columns("label").with_format("arrow")[:]["label"]
    if column.null_count:
        raise _without_label(name, column.null_count, flag)
    return column, compute.list_flatten(column) if isinstance(rows.features["label"], List) else column


def _without_label(name: str, count: int, flag: str) -> UserError:
    what = f"the column {name!r} has {plural(count, 'row')} without a usable label"
    return mistake(flag, what, "a label in every row: a class, a number, or a list that may be empty")


def _are_vectors(column: pyarrow.ChunkedArray, flat: pyarrow.ChunkedArray) -> bool:
    """True if the lists have a 0 or 1 for each class: all have one length, from 2 on. As a list of
    classes, such a one would name all of them.
    """
    lengths = compute.unique(compute.list_value_length(column)).to_pylist()
    return len(lengths) == 1 and lengths[0] > 1 and set(compute.unique(flat).to_pylist()) <= {0, 1}


def _regression(name: str, column: pyarrow.ChunkedArray, flag: str = "dataset_label_field") -> Target:
    try:
        values = compute.cast(column, pyarrow.float64())
    except pyarrow.ArrowException:
        what = f"regression learns numbers, and the column {name!r} holds {column.type}"
        raise mistake("problem_type", what, "leave it out, or a column of numbers") from None
    if unusable := compute.sum(compute.invert(compute.is_finite(values))).as_py():
        raise _without_label(name, unusable, flag)
    limits = compute.min_max(values).as_py()
    return Target(REGRESSION, [name], f"regression: numbers from {limits['min']:g} to {limits['max']:g}")


def _classes(field_name: str, kind: Value | ClassLabel, values: list[Any]) -> dict[Any, str]:
    """The name of each class by the label in a row, in the order of the classes.

    Texts are in alphabetical order. Numbers from 0 stay as they are: one that is missing may be in
    other data. Others, such as -1 and 1 or ids with wide gaps, are numbered in their order.
    """
    if isinstance(kind, ClassLabel):
        return dict(enumerate(kind.names))
    if all(isinstance(value, str) for value in values):
        return {value: value for value in sorted(values)}
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value == int(value) for value in values):
        raise _no_class(field_name, ", ".join(repr(value) for value in values[:5]))
    whole = sorted(map(int, values))
    dense = whole[0] == 0 and whole[-1] < 10 * len(whole)
    return {number: str(number) for number in (range(whole[-1] + 1) if dense else whole)}


def _no_class(name: str, held: str) -> UserError:
    what = f"the column {name!r} holds {held}: a class is a text or a whole number"
    fix = "a label for every row, as a text or a whole number; or --problem_type regression for numbers to learn"
    return mistake("dataset_label_field", what, fix)


# --- Rows ----------------------------------------------------------------------------------------


@dataclass
class Labelled(Cut):
    """The tokens of each text, with its label as the model learns it."""

    target: Target

    def __str__(self) -> str:
        full = int((lengths_of(self.examples) == self.length).sum())
        more = f", {full:,} of them cut there or just as long" if full else ""
        return f"{super().__str__()}{more}, {self.target.words}"

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        rows = self.examples[numbers]
        labels = map(self.target.encode, rows["label"])
        return [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], labels, strict=True)]


def labelled(run: Settings, rows: Dataset, target: Target, flag: str) -> Labelled:
    """The examples whose text is not empty. Raises `UserError` for labels that `Target.encode`
    cannot take: the splits of a part have the same columns, but those to evaluate on other values.
    """
    name = run["dataset_label_field"]
    column, flat = _labels(rows, name, flag)
    if target.problem_type == REGRESSION:
        _regression(name, column, flag)
    else:
        lengths = compute.unique(compute.list_value_length(column)).to_pylist() if target.is_vector else []
        unknown = [value for value in compute.unique(flat).to_pylist() if value not in target.numbers]
        if unknown or any(length != len(target.names) for length in lengths):
            what = f"has labels that are not among the classes: {', '.join(map(repr, unknown[:5]))}"
            fix = "rows whose labels the training data has too: if they are sorted by label, shuffle them first"
            raise mistake(flag, what, fix)
    examples = rows.select(np.flatnonzero(lengths_of(rows)))
    if not len(examples):
        raise mistake(flag, f"all texts in the column {run['dataset_text_field']!r} are empty", "texts to classify")
    return Labelled(examples, run["max_length"], target)
