"""The global batch, the workers that load it, packing and padding, and data for the task."""

from __future__ import annotations

from recipes.rules.facts import (
    accelerator_config,
    advice,
    gradient_accumulation_kwargs,
    is_true,
    of_train_py,
    on_gpu,
    problem,
    rule,
)


@rule
def batch_size_is_not_searched(run):
    """`auto_find_batch_size` lowers the micro-batch alone, so the global batch changes silently."""
    if run["auto_find_batch_size"]:
        fix = "leave it out, and lower --per_device_train_batch_size: accumulation follows"
        yield problem(run, "auto_find_batch_size", "would change the global batch", fix)


@rule
def accumulation_is_said_once(run):
    """`num_steps` fails together with `gradient_accumulation_steps`, or silently replaces it."""
    steps = gradient_accumulation_kwargs(run).get("num_steps")
    if steps is not None and (steps != 1 or run["gradient_accumulation_steps"] != 1):
        fix = f"--gradient_accumulation_steps {steps}, without num_steps"
        yield problem(run, "accelerator_config", "num_steps changes the global batch", fix)


@rule
def fit_chooses_the_micro_batch(run):
    """With a given micro-batch or accumulation, `--fit` has nothing left to find."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if run["fit"] and run.explicit(name):
            yield problem(run, name, "is what --fit finds", "leave it out, or leave --fit out")


@rule
def batches_are_not_split(run):
    """`split_batches` divides the micro-batch by the processes: the global batch gets smaller."""
    if is_true(accelerator_config(run).get("split_batches")) and run.world_size > 1:
        yield problem(run, "accelerator_config", "split_batches changes the global batch", "leave split_batches out")


@rule
def batches_come_out_even(run):
    """If a rank has one batch fewer, the others wait for it until a timeout, if there is one."""
    evens = accelerator_config(run).get("even_batches", True)
    if evens is False and run.world_size > 1 and not run["dataloader_drop_last"]:
        fix = "leave even_batches on: examples that only fill up the last batch are not counted"
        yield problem(
            run, "accelerator_config", "even_batches false can leave ranks waiting for each other for ever", fix
        )


@rule
def worker_settings_need_workers(run):
    """`... option could only be specified in multi-process loading`, as training begins."""
    if run["dataloader_num_workers"] != 0:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if run[name]:
            yield problem(
                run, name, "needs dataloader_num_workers above 0", "--dataloader_num_workers 2, or leave it out"
            )


@rule
@of_train_py
def dispatched_batches_have_one_shape(run):
    """`You can't use batches of different size with dispatch_batches=True`, on several processes.

    train.py pads each micro-batch to its own longest example; packed rows are all as long.
    """
    if not is_true(accelerator_config(run).get("dispatch_batches")) or run.world_size == 1:
        return
    if not run["packing"]:
        what = "dispatch_batches needs batches of one length, and these vary"
        yield problem(run, "accelerator_config", what, "--packing, or leave dispatch_batches out")


@rule
@of_train_py
def no_state_is_configured_before(run):
    """`Passing 'use_configured_state':True ... requires a pre-configured AcceleratorState`

    A script of its own may have one; train.py builds TrainingArguments first.
    """
    if is_true(accelerator_config(run).get("use_configured_state")):
        what = "use_configured_state needs an Accelerator that exists before, and train.py builds none"
        yield problem(run, "accelerator_config", what, "leave use_configured_state out")


@rule
@of_train_py
def packing_frees_the_padding(run):
    """Packed rows have no padding: the two are alternatives."""
    if run["packing"] and run["padding_free"]:
        yield problem(
            run, "padding_free", "and packing exclude each other", "--packing false, or leave padding_free out"
        )


@rule
@of_train_py
def padding_free_needs_flash_attention(run):
    """Other kernels mask the joined row: correct, but the cost is quadratic in its whole length."""
    attention = run["attn_implementation"] or "sdpa"
    if run["padding_free"] and "flash" not in attention:
        what = f"is slow with {attention} attention, which computes the whole joined row"
        fix = "--packing instead" + (", or --attn_implementation flash_attention_2" if on_gpu(run) else "")
        yield advice(run, "padding_free", what, fix)


@rule
@of_train_py
def classification_takes_rows_as_they_are(run):
    """Joined examples would share one label, and a label has no assistant or completion part."""
    if run["task"] != "sequence_classification":
        return
    for name in ("packing", "padding_free", "assistant_only_loss", "completion_only_loss"):
        if run[name]:
            yield problem(run, name, "is for language models, not for sequence_classification", "leave it out")


@rule
@of_train_py
def label_settings_need_labels(run):
    """A language model has no labels of its own, and only cross entropy smooths them."""
    kind = run["problem_type"]
    if run["task"] != "sequence_classification":
        for name in ("problem_type", "dataset_label_field"):
            if run.explicit(name) and run[name] is not None:
                yield advice(
                    run, name, f"is ignored by {run['task']}", "--task sequence_classification, or leave it out"
                )
    elif run["label_smoothing_factor"] and kind not in (None, "single_label_classification"):
        yield advice(run, "label_smoothing_factor", f"is ignored by {kind}", "leave it out")


@rule
@of_train_py
def classification_needs_data(run):
    """The demonstration has no labels. A plan or a user's own script needs no data set."""
    if run["task"] == "sequence_classification" and run["dataset_name"] is None and run.demonstrate:
        yield problem(run, "task", "sequence_classification needs labelled data", "--dataset_name FILE_OR_HUB_ID")
