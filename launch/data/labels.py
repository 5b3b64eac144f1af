"""Read a classifier's targets from its label column: one class, several classes, or a number."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, List, Value

from launch.data.batches import Cut, Example
from launch.data.tokens import lengths_of
from recipes.errors import Problem, mistake, plural, raise_errors
from recipes.rules.check import new_problems
from recipes.run import RunSpec, Setting, Settings

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
_NUMBERS = (int, float, Decimal)  # a Parquet file from a database holds decimals


@dataclass(frozen=True)
class Target:
    """The target of a classifier. `problem_type` is transformers' name for the kind of target.

    `names` are the names of the model's outputs, in the model's order. `numbers` maps each label to
    its class index, and is empty for regression and for multi-hot labels such as [0, 1, 1].
    """

    problem_type: str
    names: list[str]
    numbers: Mapping[Any, int] = field(default_factory=dict)

    def __str__(self) -> str:
        count, names = f"{len(self.names):,}", ", ".join(self.names[:6]) + ", ..." * (len(self.names) > 6)
        kinds = {SINGLE: f"{count} classes ({names})", MULTI: f"multi-label: {count} labels ({names})"}
        return kinds.get(self.problem_type, "regression")

    def encode(self, label: Any) -> int | float | tuple[float, ...]:
        """Convert a label for a batch: to a class's index, a number, or a number for each class.
        Raises `LookupError`, `TypeError` or `ValueError` for a label unlike the training labels.
        """
        if self.problem_type == SINGLE:
            return self.numbers[label]
        if self.problem_type == REGRESSION:
            return float(label)
        if not self.numbers:
            return tuple({0: 0.0, 1: 1.0}[one] for _, one in zip(self.names, label, strict=True))
        applying = {self.numbers[one] for one in label}
        return tuple(float(number in applying) for number in range(len(self.names)))


def recognise(run: Settings, rows: Dataset, classes: Sequence[str] = ()) -> Target:
    """Recognise the target by the values in the column `label`: texts and integers are classes,
    other numbers are targets of a regression, and lists are several classes at once.
    `--problem_type` may name another target that the values allow.

    `classes` are the class names of a model that was trained to classify, in the model's order.
    Raises `UserError` if labels are missing, mixed or all the same, or do not fit --problem_type.
    """
    name, wanted, feature = run["dataset_label_field"], run["problem_type"], rows.features["label"]
    labels = _labels(rows, name, "dataset_label_field")
    is_list = isinstance(feature, List)
    if wanted and is_list != (wanted == MULTI):
        holds = "lists" if is_list else "one label a row"
        fix = "leave problem_type out" + ", or write lists of labels in .jsonl or .parquet" * (not is_list)
        raise mistake("problem_type", f"is {wanted}, but the column {name!r} holds {holds}", fix)
    if wanted == REGRESSION or (wanted is None and any(isinstance(label, float | Decimal) for label in labels)):
        if not all(isinstance(label, _NUMBERS) for label in labels):
            what = f"regression learns numbers, but the column {name!r} holds other values"
            raise mistake("problem_type", what, "leave problem_type out, or use a column of numbers")
        return Target(REGRESSION, [name])
    kind, values = (feature.feature, {one for label in labels for one in label}) if is_list else (feature, labels)
    # Lists of equal length that hold only 0 and 1 name no classes, but hold a flag for each class.
    lengths = {len(label) for label in labels} if is_list and isinstance(kind, Value) and values <= {0, 1} else set()
    if len(lengths) == 1 and (outputs := max(lengths)) > 1:
        names = list(classes) if len(classes) == outputs else [str(number) for number in range(outputs)]
        return Target(MULTI, names)
    by_label = _classes(name, kind, values)
    names, numbers = list(by_label.values()), {label: number for number, label in enumerate(by_label)}
    every = [*classes, *(one.lower() for one in classes)]  # letter case matters only if it tells classes apart
    places = {label: one if one in every else one.lower() for label, one in by_label.items()}
    known = {label: every.index(one) % len(classes) for label, one in places.items() if one in every}
    if names and len({*known.values()}) == len(names):  # the model was trained on all these classes
        names, numbers = list(classes), known
    elif len(names) < 2:
        what = f"all rows have the same label: {''.join(names) or 'an empty list'}"
        raise mistake("dataset_label_field", what, "use data with two classes or more; shuffle rows that are sorted")
    return Target(MULTI if is_list else SINGLE, names, numbers)


def recognised(run: RunSpec, problem_type: str | None) -> tuple[RunSpec, list[Problem]]:
    """Return the run with the `problem_type` of its data, and the advice that `check` cannot give
    before the data is read. Raises `UserError` for settings that do not fit this `problem_type`.
    """
    if problem_type is None or run["problem_type"] == problem_type:
        return run, []
    setting = Setting(problem_type, "data", f"the labels in the column {run['dataset_label_field']}")
    known = replace(run, limits={**run.limits, "problem_type": setting})
    return known, raise_errors(new_problems(known, run))


def _labels(rows: Dataset, name: str, flag: str) -> set:
    """Return the set of labels, lists as tuples. Raises `UserError` if a row has no valid label."""
    found = rows.select_columns("label")[:]["label"]
    labels = [tuple(label) if isinstance(label, list) else label for label in found]
    if unusable := [row for row, label in enumerate(labels, start=1) if not _is_usable(label)]:
        what = f"the column {name!r} has {plural(len(unusable), 'row')} without a usable label"
        what += f" (first: row {unusable[0]:,} of the split)"
        fix = "give every row a class, a number or a list (which may be empty); None and NA in a .csv mean no label"
        raise mistake(flag, what, fix)
    return set(labels)


def _is_usable(label: Any) -> bool:
    each = label if isinstance(label, tuple) else (label,)
    return all(isinstance(one, str) or (isinstance(one, _NUMBERS) and math.isfinite(one)) for one in each)


def _classes(name: str, kind: Any, values: Collection) -> dict[Any, str]:
    """Map each label to the name of its class. A `ClassLabel` column keeps its order of classes. In
    other columns, texts and numbers are sorted. Raises `UserError` for fractions or mixed labels.
    """
    if isinstance(kind, ClassLabel):
        return dict(enumerate(kind.names))
    if all(isinstance(value, str) for value in values):
        return {value: value for value in sorted(values)}
    if all(isinstance(value, _NUMBERS) and value == int(value) for value in values):
        return {number: str(number) for number in sorted(map(int, values))}
    held = ", ".join(sorted(map(repr, values))[:5])
    what = f"the column {name!r} holds {held}: classes must be all texts or all whole numbers"
    fix = "write only texts or only whole numbers; or use --problem_type regression to learn numbers"
    raise mistake("dataset_label_field", what, fix)


# --- Rows ----------------------------------------------------------------------------------------


@dataclass
class Labelled(Cut):
    """Rows that hold a text's tokens and its encoded label. `labels` counts the distinct labels."""

    target: Target
    labels: int

    def __str__(self) -> str:
        few = self.target.problem_type == SINGLE and self.labels < len(self.target.names)
        classes = f"only {self.labels} of the {self.target}: shuffle the rows if sorted" if few else self.target
        return f"{super().__str__()}, {classes}"

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        rows = self.examples[numbers]
        labels = map(self.target.encode, rows["label"])
        return [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], labels, strict=True)]


def labelled(run: Settings, rows: Dataset, target: Target, flag: str) -> Labelled:
    """Return the examples whose text is not empty. Raises `UserError` if all texts are empty, if a
    row has no usable label, or for evaluation labels that the training data lacks.
    """
    unknown, labels = [], _labels(rows, run["dataset_label_field"], flag)
    for label in labels:
        try:
            target.encode(label)
        except (LookupError, TypeError, ValueError):
            unknown.append(label)
    if unknown:
        fix = "use only labels that the training data has; if the rows are sorted by label, shuffle them first"
        raise mistake(flag, f"has labels unlike the training labels: {', '.join(map(repr, unknown[:5]))}", fix)
    examples = rows.select(np.flatnonzero(lengths_of(rows)))
    if not len(examples):
        raise mistake(flag, f"all texts in the column {run['dataset_text_field']!r} are empty", "add texts")
    return Labelled(examples, run["max_length"], target, len(labels))
