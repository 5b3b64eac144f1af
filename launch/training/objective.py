"""The loss of a classifier, and the metrics of its evaluation."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from launch.data.encode import IGNORED


def mean_loss(
    outputs, labels: torch.Tensor, num_items_in_batch=None, *, problem_type: str, label_smoothing: float = 0.0
) -> torch.Tensor:
    """A loss for `Trainer(compute_loss_func=...)`, in which each example of a global batch has the
    same weight, whatever its micro-batch.

    The `problem_type` selects the loss as in transformers: cross entropy, binary cross entropy or
    squared error. The last two losses are averaged over an example's outputs. `label_smoothing` is
    for cross entropy only.
    """
    logits = outputs["logits"].float()
    if problem_type == "single_label_classification":
        total = functional.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
        )
    else:
        numbers = labels.reshape(logits.shape).float()
        counted, known = ~numbers.isnan(), numbers.nan_to_num()
        if problem_type == "multi_label_classification":
            losses = functional.binary_cross_entropy_with_logits(logits, known, reduction="none")
        else:
            losses = functional.mse_loss(logits, known, reduction="none")
        total = (losses * counted).mean(dim=-1).sum()
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def filler(labels: torch.Tensor) -> float:
    """Return the label that excludes an example from the loss: NaN for floats, else -100."""
    return float("nan") if labels.is_floating_point() else IGNORED


def countable(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch whose labels Trainer counts correctly. Trainer counts each label except -100,
    but regression may learn the number -100, and an example with several labels is one item.
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or not labels.is_floating_point():
        return batch
    left_out = labels.isnan().reshape(len(labels), -1).any(dim=1)
    return {"labels": torch.where(left_out, IGNORED, 0)}


# --- Metrics --------------------------------------------------------------------------------------


def metrics_of(problem_type: str, prediction) -> dict[str, float]:
    """Compute the metrics of `recipes.run.metrics`, for `Trainer(compute_metrics=...)`."""
    logits, labels = _joined(prediction.predictions), _joined(prediction.label_ids)
    if problem_type == "regression":
        return _of_numbers(logits, labels.reshape(logits.shape))
    if problem_type == "multi_label_classification":
        return _of_classes(logits > 0, labels > 0.5, ("micro", "macro", "weighted"))  # logit 0 is probability 0.5
    return _of_classes(logits.argmax(axis=-1), labels, ("macro", "weighted"))


def _of_classes(predicted: np.ndarray, right: np.ndarray, averages: tuple[str, ...]) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    # A class without examples or predictions gets 0, without a warning.
    figures = partial(precision_recall_fscore_support, right, predicted, zero_division=0.0)
    precision, recall, *_ = figures(average="macro")
    return {
        "accuracy": float(accuracy_score(right, predicted)),
        **{f"f1_{how}": float(figures(average=how)[2]) for how in averages},
        "precision_macro": float(precision),
        "recall_macro": float(recall),
    }


def _of_numbers(predicted: np.ndarray, right: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    return {
        "mse": float(mean_squared_error(right, predicted)),
        "mae": float(mean_absolute_error(right, predicted)),
        # The explained share of the variance; a single example has no variance.
        "r2": float(r2_score(right, predicted)) if len(right) > 1 else 0.0,
    }


def _joined(given: Any) -> np.ndarray:
    """Join all examples into one array. With `--eval_do_concat_batches false`, `given` is a list
    with one entry per batch.
    """
    return np.concatenate(given if isinstance(given, list) else [given])
