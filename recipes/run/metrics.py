"""What train.py measures of a run: a classifier's metrics, and what noise can make of a result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

# By transformers' `problem_type`. macro: the mean over the classes; weighted: by their examples;
# micro: over all labels of all examples at once.
METRICS = {
    "single_label_classification": ("accuracy", "f1_macro", "f1_weighted", "precision_macro", "recall_macro"),
    "multi_label_classification": (
        "accuracy", "f1_micro", "f1_macro", "f1_weighted", "precision_macro", "recall_macro",
    ),
    "regression": ("mse", "mae", "r2"),
}  # fmt: skip
IN_SHORT = ("accuracy", "f1_macro", "mae", "r2")  # of these, in the line that an evaluation prints
PER_CLASS = ("precision", "recall", "f1", "examples")  # of each class, in run.json
_SMALLER = ("loss", "mse", "mae")


def smaller_is_better(metric: str) -> bool | None:
    """Of a metric, with or without `eval_`. None for one that only its script knows."""
    name = metric.removeprefix("eval_")
    if name in _SMALLER:
        return True
    return False if any(name in names for names in METRICS.values()) else None


# --- Noise ----------------------------------------------------------------------------------------

_OF_STEPS = ("step_time", "samples_per_second", "tokens_per_second", "mfu", "train_runtime")
_ALIKE = 0.02  # of a time: the same training differs by as much from run to run
_SURE = 3  # typical changes of a difference from one log to the next
_LAST_LOGS = 10


def noise_can_make(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether noise can make the difference of a result between two records.

    False too where the records do not tell, as for an evaluation: there is one of each.
    """
    values = first.get(name), other.get(name)
    if None in values or values[0] == values[1]:
        return False
    if name in _OF_STEPS:
        ratio = values[1] / values[0] if values[0] else math.inf
        return 0 < ratio < math.inf and abs(math.log(ratio)) <= max(_ALIKE, math.hypot(_off(first), _off(other)))
    return name == "final_loss" and _losses_cross(first, other)


def _off(record: Mapping[str, Any]) -> float:
    """By which share a record's step time may be off."""
    return (record.get("step_time_off") or 0.0) / (record.get("step_time") or math.inf)


def _losses_cross(first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the difference of the logged losses changes as much from log to log as it is large.

    Runs that see the same examples share the noise of the batches: their difference has none.
    """
    logged = [
        {entry.get("step"): entry["loss"] for entry in record.get("log_history") or () if "loss" in entry}
        for record in (first, other)
    ]
    steps = sorted(set(logged[0]) & set(logged[1]))[-_LAST_LOGS:]
    apart = [logged[1][step] - logged[0][step] for step in steps]
    changes = [abs(now - before) for before, now in pairwise(apart)]
    return len(changes) > 1 and abs(apart[-1]) <= _SURE * median(changes)
