"""Evaluations, the metric that decides which model is best, and early stopping."""

from __future__ import annotations

from recipes.legal.liger import types_with_fused_loss
from recipes.rules.facts import advice, mapping, model_config, of_train_py, problem, rule
from recipes.run import nearest
from recipes.run.metrics import METRICS, smaller_is_better


@rule
def best_model_needs_matching_strategies(run):
    """`--load_best_model_at_end requires the save and eval strategy to match`"""
    if not run["load_best_model_at_end"]:
        return
    evaluation, saving = run["eval_strategy"], run["save_strategy"]
    if evaluation == saving == "no":  # they match, and Trainer keeps the last model
        what = "loads nothing without evaluations: the last model is kept"
        yield advice(run, "load_best_model_at_end", what, "--eval_strategy steps --save_strategy steps")
    elif evaluation == "no":
        yield problem(run, "load_best_model_at_end", "needs evaluations to find the best", "--eval_strategy steps")
    elif saving not in (evaluation, "best"):
        what = f"needs save_strategy {saving} and eval_strategy {evaluation} to match"
        yield problem(run, "load_best_model_at_end", what, f"--save_strategy {evaluation}, or best")
    elif evaluation == saving == "steps":
        every, save = run["eval_steps"] or run["logging_steps"], run["save_steps"]
        if _is_between_evaluations(save, every):
            what = f"needs save_steps {save:g} to be a multiple of eval_steps {every:g}"
            yield problem(run, "load_best_model_at_end", what, f"--save_steps {every:g}")


def _is_between_evaluations(save: float, every: float) -> bool:
    """Whether Trainer refuses to save so: not with an evaluation. Other rules report 0 and less."""
    if every <= 0 or save <= 0:
        return False
    return (every < 1) != (save < 1) or bool(round(save * 1_000_000) % round(every * 1_000_000))


@rule
def every_evaluation_is_saved(run):
    """Trainer loads the best model that was saved: an older one than the best, or none at all."""
    if not run["load_best_model_at_end"] or not run["eval_strategy"] == run["save_strategy"] == "steps":
        return
    every, save, steps = run["eval_steps"] or run["logging_steps"], run["save_steps"], run["max_steps"]
    if _is_between_evaluations(save, every):
        return  # an error already, with the same fix
    fix = f"--save_steps {every:g}" if every < 1 or steps < 1 or every <= steps else "a smaller --eval_steps"
    if save >= 1 and 0 < steps < save:
        what = f"{save:g} lies beyond max_steps {steps}: only the last step is saved, whether it is the best or not"
        if run.explicit("save_steps") or "save_steps" in run.recipe.settings:
            fix += ", or leave save_steps out: saving follows evaluation"
        yield advice(run, "save_steps", what, fix)
    elif 0 < every < save:
        what = f"{save:g} saves one of {save / every:.0f} evaluations, and maybe not the best"
        yield advice(run, "save_steps", what, f"{fix}, or leave it out: saving follows evaluation")


@rule
def saving_the_best_needs_evaluation(run):
    """With save_strategy 'best' and eval_strategy 'no', nothing is ever saved, silently."""
    if run["save_strategy"] != "best":
        return
    if run["eval_strategy"] == "no":
        yield problem(run, "save_strategy", "best never saves without evaluations", "--eval_strategy steps")
    elif not run["metric_for_best_model"] and not run["load_best_model_at_end"]:
        what = "best needs a metric to compare"
        yield problem(run, "save_strategy", what, "--metric_for_best_model loss")


@rule
def early_stopping_needs_evaluation(run):
    """`EarlyStoppingCallback requires IntervalStrategy of steps or epoch`, and a metric."""
    if run["early_stopping_patience"] is None:
        return
    if run["eval_strategy"] == "no":
        yield problem(run, "early_stopping_patience", "counts evaluations, and there are none", "--eval_strategy steps")
    elif not run["load_best_model_at_end"] and not run["metric_for_best_model"]:
        yield problem(run, "early_stopping_patience", "needs a metric to compare", "--load_best_model_at_end")


@rule
@of_train_py
def best_metric_is_reported(run):
    """`KeyError: The metric_for_best_model ... which is not found`, after the first evaluation."""
    wanted = run["metric_for_best_model"]
    if not wanted or run["eval_strategy"] == "no":
        return
    known = ["loss"]
    if run["task"] == "sequence_classification" and not run["prediction_loss_only"]:
        kinds = [run["problem_type"]] if run["problem_type"] else list(METRICS)  # None: the data will tell
        known += dict.fromkeys(metric for kind in kinds for metric in METRICS[kind])
    speeds = ("runtime", "samples_per_second", "steps_per_second")  # Trainer reports these too
    if wanted.removeprefix("eval_") not in (*known, *speeds):
        yield problem(run, "metric_for_best_model", f"{wanted} is not reported", _one_of(wanted, known))


def _one_of(wanted: str, known: list[str]) -> str:
    """What to write instead: those that begin alike, such as f1_macro for f1, or any."""
    near = [metric for metric in known if metric.startswith(f"{wanted.removeprefix('eval_')}_")]
    return " or ".join(near or ([nearest(wanted, known)] if nearest(wanted, known) else known))


@rule
def best_is_the_better_value(run):
    """The worst model is kept as the best, and early stopping waits for a model to get worse.

    It trains as asked, so this is advice.
    """
    decides = run["load_best_model_at_end"] or run["save_strategy"] == "best" or run["early_stopping_patience"]
    smaller = smaller_is_better(run["metric_for_best_model"] or "loss")
    if not decides or smaller is None or run["greater_is_better"] is None:
        return
    if run["greater_is_better"] == smaller:
        metric, better = run["metric_for_best_model"] or "loss", "smaller" if smaller else "greater"
        what = f"is {str(run['greater_is_better']).lower()}, but a {better} {metric} is better"
        yield advice(run, "greater_is_better", what, "leave it out")


@rule
def plateaus_look_the_right_way(run):
    """With mode `min`, the default, the learning rate falls while the accuracy rises."""
    metric = run["metric_for_best_model"] or "loss"
    smaller = smaller_is_better(metric)
    if run["lr_scheduler_type"] not in ("reduce_lr_on_plateau", "greedy") or smaller is None:
        return
    mode = mapping(run["lr_scheduler_kwargs"]).get("mode", "min")
    if mode in ("min", "max") and (mode == "min") != smaller:
        what = f"mode {mode} looks for a {'smaller' if mode == 'min' else 'greater'} {metric}"
        fix = "lr_scheduler_kwargs with " + ("mode: min" if smaller else "mode: max")
        yield advice(run, "lr_scheduler_type", what, fix)


@rule
@of_train_py
def evaluating_needs_data(run):
    """`ValueError: Trainer: evaluation requires an eval_dataset.`; `do_eval` alone does nothing."""
    if run["eval_strategy"] != "no":
        return
    if run["eval_on_start"]:
        yield problem(run, "eval_on_start", "has no data to evaluate on without eval_strategy", "--eval_strategy steps")
    if run.explicit("do_eval") and run["do_eval"]:
        yield advice(run, "do_eval", "evaluates nothing without eval_strategy", "--eval_strategy epoch")


@rule
@of_train_py
def evaluations_gather_tensors(run):
    """`zero-dimensional arrays cannot be concatenated`: train.py's losses are tensors.

    In a process that no launcher started, nothing is gathered.
    """
    if not run["eval_use_gather_object"] or run["eval_strategy"] == "no" or run.engine.kind == "single":
        return
    what, fix = "gathers objects, and train.py evaluates tensors", "leave it out"
    if run.world_size > 1 or run.launched:
        yield problem(run, "eval_use_gather_object", what, fix)
    else:
        yield advice(run, "eval_use_gather_object", f"{what}: it fails if a launcher starts the process", fix)


@rule
@of_train_py
def accuracy_is_computed_at_the_end(run):
    """train.py's metrics need all predictions, and take no `compute_result`."""
    if run["task"] == "sequence_classification" and run["batch_eval_metrics"]:
        what = "cannot be combined with the metrics of train.py"
        yield problem(run, "batch_eval_metrics", what, "leave it out")


@rule
@of_train_py
def labels_have_one_name(run):
    """`KeyError: ... 'eval_loss', which is not found`: in train.py's batches they are `labels`.

    Only evaluations read it.
    """
    if run["label_names"] in (None, ["labels"]):
        return
    if run["eval_strategy"] == "no":
        yield advice(run, "label_names", "are read by evaluations, and there are none", "leave it out")
    else:
        yield problem(run, "label_names", f"{run['label_names']} are not in the batches of train.py", "leave it out")


@rule
@of_train_py
def a_training_trains(run):
    """train.py always trains, and evaluates by `eval_strategy`: other scripts read these flags."""
    if run.explicit("do_train") and not run["do_train"]:
        yield problem(run, "do_train", "is off, and train.py does nothing but train", "leave it out")
    if run.explicit("do_predict") and run["do_predict"]:
        yield advice(run, "do_predict", "predicts nothing: train.py trains and evaluates", "leave it out")


@rule
@of_train_py
def test_split_is_used(run):
    """Without an evaluation strategy, nothing loads the split."""
    if run["eval_strategy"] == "no" and run.explicit("dataset_test_split") and run["dataset_test_split"]:
        yield advice(run, "dataset_test_split", "is not used without evaluations", "--eval_strategy epoch")


@rule
@of_train_py
def liger_evaluates_plain_labels(run):
    """`skip_logits is True, but labels and shift_labels are None`, in the first evaluation.

    Trainer takes the labels out for its LabelSmoother, and asks a Liger model for the loss alone
    (`prediction_step`); some types die of a missing tensor instead. Training works, with logits:
    Liger's fused loss is not used then. Seen with liger-kernel 0.8.5 on a CPU, with this loss alone
    of its kernels, since the others need Triton on a GPU.
    """
    smooths = run["use_liger_kernel"] and run["label_smoothing_factor"] and run["task"] == "causal_lm"
    if not smooths or run["eval_strategy"] == "no":
        return
    fused = mapping(run["liger_kernel_config"]).get("fused_linear_cross_entropy", True)
    if fused and (model_config(run) or {}).get("model_type") in types_with_fused_loss():
        what = "cannot evaluate with label_smoothing_factor, and its fused loss is not used with it"
        yield problem(run, "use_liger_kernel", what, "--use_liger_kernel false, or --label_smoothing_factor 0")
