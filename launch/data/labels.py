"""The targets of a classifier, as its label column says: one class, several, or numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
import torch
from datasets import ClassLabel, Dataset, List, Value

from launch.data.batches import Example
from launch.data.encode import TEXT_TYPES
from launch.data.tokens import lengths_of
from recipes.errors import Problem, UserError, mistake, plural
from recipes.rules.check import new_problems
from recipes.run import RunSpec, Setting, Settings

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


@dataclass(frozen=True)
class Target:
    """What the model learns. `problem_type` is transformers' name for it.

    `names` are those of the model's outputs, in its order: classes, or the numbers of a regression.
    `numbers` finds a class by the label of a row. `is_vector`: a row has a list with a number for
    each output. `words` are for a person.
    """

    problem_type: str
    names: list[str]
    words: str
    numbers: Mapping[Any, int] = field(default_factory=dict)
    is_vector: bool = False

    def encode(self, label: Any) -> int | float | tuple[float, ...]:
        """A row's label as a batch holds it: a class, a number, or a number for each output."""
        if self.problem_type == SINGLE:
            return self.numbers[label]
        if self.is_vector:
            return tuple(map(float, label))
        if self.problem_type == REGRESSION:
            return float(label)
        applying = {self.numbers[one] for one in (label if isinstance(label, list) else [label])}
        return tuple(float(number in applying) for number in range(len(self.names)))


def recognise(run: Settings, rows: Dataset, classes: Sequence[str] = ()) -> Target:
    """The target that the column `label` of the rows holds. `--problem_type` wins, and otherwise
    its type decides: texts and integers are classes, other numbers a regression, lists several
    classes at once.

    `classes` are the names of a model that was trained to classify, in its order. Raises
    `UserError` if the column holds something else.
    """
    name, wanted = run["dataset_label_field"], run["problem_type"]
    feature = rows.features["label"]
    is_list = isinstance(feature, List)
    kind = feature.feature if is_list else feature
    if not isinstance(kind, (Value, ClassLabel)):
        raise _no_class(name, "lists, or numbers and texts mixed")
    column, flat = _columns(rows)
    if is_list and column.null_count:
        raise _incomplete(name, column.null_count, "a list in every row, empty where no class applies")
    is_fraction = isinstance(kind, Value) and kind.dtype.startswith(("float", "double", "decimal"))
    is_vector = is_list and isinstance(kind, Value) and _are_vectors(column, flat)
    if wanted == REGRESSION or (wanted is None and is_fraction and not is_vector):
        return _numbers(name, column, flat, is_list)
    if wanted == SINGLE and is_list:
        what = f"takes one class a row, and the column {name!r} holds lists"
        raise mistake("problem_type", what, f"--problem_type {MULTI}, or leave it out")
    if is_vector:
        outputs = compute.list_value_length(column)[0].as_py()
        names = list(classes) if len(classes) == outputs else [str(number) for number in range(outputs)]
        return Target(MULTI, names, f"multi-label: {outputs} labels", {n: n for n in range(outputs)}, True)
    target = _classes(name, kind, compute.unique(flat).to_pylist(), classes)
    if not is_list and wanted != MULTI:
        return target
    return replace(target, problem_type=MULTI, words=f"multi-label: {len(target.names):,} labels")


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


# --- Numbers -------------------------------------------------------------------------------------


def _are_vectors(column: pyarrow.ChunkedArray, flat: pyarrow.ChunkedArray) -> bool:
    """True if the lists have a 0 or 1 for each class: all have one length, from 2 on. As a list of
    classes, such a one would name all of them.
    """
    lengths = compute.unique(compute.list_value_length(column)).to_pylist()
    return len(lengths) == 1 and lengths[0] > 1 and set(compute.unique(flat).to_pylist()) <= {0, 1}


def _numbers(name: str, column: pyarrow.ChunkedArray, flat: pyarrow.ChunkedArray, is_list: bool) -> Target:
    types = pyarrow.types
    if not (types.is_integer(flat.type) or types.is_floating(flat.type) or types.is_boolean(flat.type)):
        what = f"regression learns numbers, and the column {name!r} holds {flat.type}"
        raise mistake("problem_type", what, "leave it out, or a column of numbers")
    values = compute.cast(flat, pyarrow.float64())
    unusable = values.null_count + (compute.sum(compute.invert(compute.is_finite(values))).as_py() or 0)
    if unusable:
        raise _incomplete(name, unusable, "a number in every row")
    lengths = compute.unique(compute.list_value_length(column)).to_pylist() if is_list else [1]
    if len(lengths) > 1 or not lengths[0]:
        shown = ", ".join(map(str, sorted(lengths)[:5]))
        raise mistake("dataset_label_field", f"the lists in {name!r} hold {shown} numbers", "as many in every row")
    limits = compute.min_max(values).as_py()
    names = [f"{name}_{number}" for number in range(lengths[0])] if is_list else [name]
    words = f"regression: numbers from {limits['min']:g} to {limits['max']:g}"
    return Target(REGRESSION, names, words, is_vector=is_list)


def _incomplete(name: str, count: int, fix: str) -> UserError:
    what = f"the column {name!r} has {plural(count, 'row')} without a usable label"
    return mistake("dataset_label_field", what, fix)


# --- Classes -------------------------------------------------------------------------------------


def _classes(name: str, kind: Value | ClassLabel, values: list[Any], of_model: Sequence[str]) -> Target:
    """The classes that occur, or those that the data or the model itself lists."""
    by_label = dict(enumerate(kind.names)) if isinstance(kind, ClassLabel) else _names_by_label(name, kind, values)
    names = list(by_label.values())
    place = {known.lower(): number for number, known in enumerate(of_model)}
    if len({one.lower() for one in names} & place.keys()) == len(names):  # the model was trained on all of them
        in_order = [next((one for one in names if one.lower() == known.lower()), known) for known in of_model]
        words = f"{len(in_order):,} classes" + (", as many as the model knows" if len(names) < len(in_order) else "")
        return Target(SINGLE, in_order, words, {label: place[one.lower()] for label, one in by_label.items()})
    if len(names) < 2:
        raise mistake("dataset_label_field", f"all rows have the label {names[0]!r}", "data with two classes or more")
    return Target(SINGLE, names, f"{len(names):,} classes", {label: n for n, label in enumerate(by_label)})


def _names_by_label(field_name: str, kind: Value, values: list[Any]) -> dict[Any, str]:
    """The name of each class by the label in a row, in the order of the classes.

    Texts are in alphabetical order. Numbers from 0 stay as they are: one that is missing may be in
    other data. Others, such as -1 and 1 or ids with wide gaps, are numbered in their order.
    """
    if kind.dtype in TEXT_TYPES and all(isinstance(value, str) for value in values):
        return {value: value for value in sorted(values)}
    if not values or not all(_is_whole(value) for value in values):
        raise _no_class(field_name, ", ".join(repr(value) for value in values[:5]) or "nothing")
    whole = sorted(int(value) for value in values)
    dense = whole[0] == 0 and whole[-1] < 10 * len(whole)
    return {number: str(number) for number in (range(whole[-1] + 1) if dense else whole)}


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value == int(value)


def _no_class(name: str, held: str) -> UserError:
    what = f"the column {name!r} holds {held}: a class is a text or a whole number"
    fix = "a label for every row, as a text or a whole number; or --problem_type regression for numbers to learn"
    return mistake("dataset_label_field", what, fix)


# --- Rows ----------------------------------------------------------------------------------------


@dataclass
class Labelled(torch.utils.data.Dataset):
    """The tokens of each text, with its label as the model learns it."""

    examples: Dataset
    target: Target

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        """A micro-batch at once, which torch's loader asks for."""
        rows = self.examples[numbers]
        labels = map(self.target.encode, rows["label"])
        return [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], labels, strict=True)]


def labelled(run: Settings, rows: Dataset, target: Target, flag: str) -> Labelled:
    """The examples whose text is not empty. Raises `UserError` for labels unlike the target's."""
    _require_known(run, rows, target, flag)
    examples = rows.select(np.flatnonzero(lengths_of(rows)))
    if not len(examples):
        what = f"all texts in the column {run['dataset_text_field']!r} are empty"
        raise mistake(flag, what, "texts to classify")
    return Labelled(examples, target)


def _columns(rows: Dataset) -> tuple[pyarrow.ChunkedArray, pyarrow.ChunkedArray]:
    """The labels, and those inside them if they are lists."""
    column = rows.select_columns("label").with_format("arrow")[:]["label"]
    return column, compute.list_flatten(column) if isinstance(rows.features["label"], List) else column


def _require_known(run: Settings, rows: Dataset, target: Target, flag: str) -> None:
    """Raises `UserError` for a label that `Target.encode` cannot take, in data to evaluate on.

    All splits of a part have the same columns, so only their values may differ.
    """
    (column, flat), name = _columns(rows), run["dataset_label_field"]
    if target.problem_type == REGRESSION or target.is_vector:
        found = _numbers(name, column, flat, target.is_vector)
        if len(found.names) != len(target.names):
            what = f"has {len(found.names)} numbers a row in {name!r}, and the training data {len(target.names)}"
            raise mistake(flag, what, "rows with labels of the same shape")
        return
    unknown = [value for value in compute.unique(flat).to_pylist() if value not in target.numbers]
    if column.null_count or unknown:
        shown = ", ".join(repr(value) for value in unknown[:5])
        what = f"has labels that are not among the classes: {shown}" if unknown else "has rows without labels"
        fix = "rows whose labels the training data has too: rows that are sorted by label, shuffled before the split"
        raise mistake(flag, what, fix)
