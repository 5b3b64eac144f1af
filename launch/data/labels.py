"""The targets of a classifier, as its label column says: one class, several, or numbers."""

from __future__ import annotations

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
    """The target of a classifier. `problem_type` is transformers' name for it.

    `names` are those of the model's outputs, in its order. `numbers` maps a row's label to its
    class. `is_vector`: a row has a 0 or 1 for each class. `words` describe the target to the user.
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
        applying = {self.numbers[one] for one in label}
        return tuple(float(number in applying) for number in range(len(self.names)))


def recognise(run: Settings, rows: Dataset, classes: Sequence[str] = ()) -> Target:
    """The target that the column `label` of the rows holds: texts and integers are classes, other
    numbers a regression, lists several classes at once. `--problem_type` wins where it can.

    `classes` are the names of a model that was trained to classify, in its order. Raises
    `UserError` if the column holds something else.
    """
    name, wanted, feature = run["dataset_label_field"], run["problem_type"], rows.features["label"]
    column, flat = _labels(rows, name, "dataset_label_field")
    is_list = isinstance(feature, List)
    if wanted and is_list != (wanted == MULTI):
        holds = "lists" if is_list else "one label a row"
        raise mistake("problem_type", f"is {wanted}, and the column {name!r} holds {holds}", "leave it out")
    fractions = not is_list and (pyarrow.types.is_floating(flat.type) or pyarrow.types.is_decimal(flat.type))
    if wanted == REGRESSION or (wanted is None and fractions):
        return _regression(name, column)
    kind = feature.feature if is_list else feature
    if is_list and isinstance(kind, Value) and (outputs := _outputs(column, flat)):
        names = list(classes) if len(classes) == outputs else [str(number) for number in range(outputs)]
        return Target(MULTI, names, f"multi-label: {outputs} labels", is_vector=True)
    by_label = _classes(name, kind, flat)
    names, known = list(by_label.values()), [one.lower() for one in classes]
    numbers = {label: number for number, label in enumerate(by_label)}
    if names and all(one.lower() in known for one in names):  # the model was trained on all of them
        names, numbers = list(classes), {label: known.index(one.lower()) for label, one in by_label.items()}
    elif len(names) < 2:
        what = f"all rows have the same label: {''.join(names) or 'none'}"
        raise mistake("dataset_label_field", what, "data with two classes or more")
    if is_list:
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
    flat = compute.list_flatten(column) if isinstance(rows.features["label"], List) else column
    unusable = column.null_count
    if pyarrow.types.is_floating(flat.type):
        unusable += compute.sum(compute.invert(compute.is_finite(flat))).as_py() or 0
    if unusable:
        what = f"the column {name!r} has {plural(unusable, 'row')} without a usable label"
        raise mistake(flag, what, "a label in every row: a class, a number, or a list that may be empty")
    return column, flat


def _outputs(column: pyarrow.ChunkedArray, flat: pyarrow.ChunkedArray) -> int:
    """The number of classes if every list has a 0 or 1 for each, and 0 for lists of classes: as
    such, lists of one length of only 0 and 1 would all name the same classes.
    """
    lengths = compute.unique(compute.list_value_length(column)).to_pylist()
    is_vector = len(lengths) == 1 and lengths[0] > 1 and set(compute.unique(flat).to_pylist()) <= {0, 1}
    return lengths[0] if is_vector else 0


def _regression(name: str, column: pyarrow.ChunkedArray) -> Target:
    try:
        limits = compute.min_max(compute.cast(column, pyarrow.float64())).as_py()
    except pyarrow.ArrowException:
        what = f"regression learns numbers, and the column {name!r} holds {column.type}"
        raise mistake("problem_type", what, "leave it out, or a column of numbers") from None
    return Target(REGRESSION, [name], f"regression: numbers from {limits['min']:g} to {limits['max']:g}")


def _classes(name: str, kind: Any, flat: pyarrow.ChunkedArray) -> dict[Any, str]:
    """The name of each class by the label in a row, in the order of the classes: as the data lists
    them, texts in alphabetical order, or numbers in theirs.
    """
    if isinstance(kind, ClassLabel):
        return dict(enumerate(kind.names))
    values = compute.unique(flat).to_pylist() if isinstance(kind, Value) else [None]
    if all(isinstance(value, str) for value in values):
        return {value: value for value in sorted(values)}
    if all(isinstance(value, (int, float)) and value == int(value) for value in values):
        whole = sorted(map(int, values))
        dense = whole[0] == 0 and whole[-1] < 10 * len(whole)  # one that is missing may be in other data
        return {number: str(number) for number in (range(whole[-1] + 1) if dense else whole)}
    held = ", ".join(repr(value) for value in values[:5]) if isinstance(kind, Value) else "lists, or numbers and texts"
    raise mistake(
        "dataset_label_field",
        f"the column {name!r} holds {held}: a class is a text or a whole number",
        "a label for every row, as a text or a whole number; or --problem_type regression for numbers to learn",
    )


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
    cannot take: those to evaluate on may have other values.
    """
    column, flat = _labels(rows, run["dataset_label_field"], flag)
    if target.problem_type == REGRESSION:
        try:
            compute.cast(column, pyarrow.float64())
        except pyarrow.ArrowException:
            raise mistake(flag, f"has labels that are no numbers: {column.type}", "a number in every row") from None
    unknown = [value for value in compute.unique(flat).to_pylist() if value not in target.numbers]
    fits = target.problem_type == REGRESSION or not unknown
    if target.is_vector:
        fits = _outputs(column, flat) == len(target.names)
    if not fits:
        what = f"has labels that are not among the classes: {', '.join(map(repr, unknown[:5]))}"
        fix = "rows whose labels the training data has too: if they are sorted by label, shuffle them first"
        raise mistake(flag, what, fix)
    examples = rows.select(np.flatnonzero(lengths_of(rows)))
    if not len(examples):
        raise mistake(flag, f"all texts in the column {run['dataset_text_field']!r} are empty", "texts to classify")
    return Labelled(examples, run["max_length"], target)
