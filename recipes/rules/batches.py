"""The global batch, the workers that load it, packing and padding, and data for the task."""

from __future__ import annotations

from recipes.rules.facts import accelerator_config, advice, gradient_accumulation_kwargs, is_true, problem, rule


@rule
def batch_size_is_not_searched(run):
    """`auto_find_batch_size` shrinks the micro-batch alone, so that the global batch changes silently."""
    if run["auto_find_batch_size"]:
        fix = "leave it out, and lower --per_device_train_batch_size: accumulation follows"
        yield problem(run, "auto_find_batch_size", "would change the global batch", fix)


@rule
def accumulation_is_said_once(run):
    """accelerator_config's num_steps fails beside `gradient_accumulation_steps`, or silently replaces it."""
    steps = gradient_accumulation_kwargs(run).get("num_steps")
    if steps is not None and (steps != 1 or run["gradient_accumulation_steps"] != 1):
        fix = f"--gradient_accumulation_steps {steps}, without num_steps"
        yield problem(run, "accelerator_config", "num_steps changes the global batch", fix)


@rule
def fit_chooses_the_micro_batch(run):
    """A micro-batch or an accumulation that is written down leaves nothing to find."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if run["fit"] and run.explicit(name):
            yield problem(run, name, "is what --fit finds", "leave it out, or leave --fit out")


@rule
def batches_are_not_split(run):
    """split_batches divides the micro-batch by the processes: the global batch is no longer what was asked for."""
    if is_true(accelerator_config(run).get("split_batches")) and run.world_size > 1:
        yield problem(run, "accelerator_config", "split_batches changes the global batch", "leave split_batches out")


@rule
def batches_come_out_even(run):
    """A rank that gets a batch less leaves the others waiting for it, until a timeout if there is one."""
    evens = accelerator_config(run).get("even_batches", True)
    if evens is False and run.world_size > 1 and not run["dataloader_drop_last"]:
        fix = "leave even_batches on: an example that fills up the last batch is not counted"
        yield problem(run, "accelerator_config", "even_batches false lets ranks wait for each other for ever", fix)


@rule
def worker_settings_need_workers(run):
    """`can only be set when data is loaded in a different process`; persistent workers fail at train()."""
    if run["dataloader_num_workers"] != 0:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if run[name]:
            yield problem(
                run, name, "needs dataloader_num_workers above 0", "--dataloader_num_workers 2, or leave it out"
            )


@rule
def packing_frees_the_padding(run):
    """Packed rows hold no padding: the two are different ways to the same end."""
    if run["packing"] and run["padding_free"]:
        yield problem(
            run, "padding_free", "and packing exclude each other", "--packing false, or leave padding_free out"
        )


@rule
def padding_free_needs_flash_attention(run):
    """Without a kernel for varying lengths the joined row is masked: correct, and quadratic in its whole length."""
    attention = run["attn_implementation"] or "sdpa"
    if run["padding_free"] and "flash" not in attention:
        what = f"is slow with {attention} attention, which computes the whole joined row"
        yield advice(run, "padding_free", what, "--attn_implementation flash_attention_2, or --packing")


@rule
def classification_takes_rows_as_they_are(run):
    """Joined examples would share one label; a class is not the assistant's words."""
    if run["task"] != "sequence_classification":
        return
    for name in ("packing", "padding_free", "assistant_only_loss", "completion_only_loss"):
        if run[name]:
            yield problem(run, name, "is for language models, not for sequence_classification", "leave it out")


@rule
def classification_needs_data(run):
    """The demonstration's text has no labels; a plan, or a script of one's own, needs no data to be named."""
    if run["task"] == "sequence_classification" and run["dataset_name"] is None and run.demonstrate:
        yield problem(run, "task", "sequence_classification needs labelled data", "--dataset_name FILE_OR_HUB_ID")
