"""The metrics that train.py reports for a classifier, and the direction in which each improves."""

# Metrics by transformers' `problem_type`. macro: the mean over the classes; weighted: the mean
# weighted by examples per class; micro: over all labels of all examples at once.
METRICS = {
    "single_label_classification": ("accuracy", "f1_macro", "f1_weighted", "precision_macro", "recall_macro"),
    "multi_label_classification": (
        "accuracy", "f1_micro", "f1_macro", "f1_weighted", "precision_macro", "recall_macro",
    ),
    "regression": ("mse", "mae", "r2"),
}  # fmt: skip
IN_SHORT = ("accuracy", "f1_macro", "mae", "r2")  # the metrics in the line that an evaluation prints
_SMALLER = ("loss", "mse", "mae")


def smaller_is_better(metric: str) -> bool | None:
    """True if a smaller value of this metric is better. The name may start with `eval_`. None for a
    metric that train.py does not report.
    """
    name = metric.removeprefix("eval_")
    if name in _SMALLER:
        return True
    return False if any(name in names for names in METRICS.values()) else None


def is_figure(metric: str) -> bool:
    """True for a metric; False for the times and speeds that Trainer reports beside the metrics."""
    return not metric.endswith(("_runtime", "_per_second", "_time"))
