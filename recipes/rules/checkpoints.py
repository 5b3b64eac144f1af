"""What is saved, and whether a run can resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipes.errors import Problem
from recipes.rules.facts import (
    advice,
    fsdp_section,
    is_true,
    problem,
    rule,
    uses_deepspeed,
    uses_fsdp,
    zero_section,
    zero_stage,
)


@rule
def output_has_a_folder(run):
    """Without a name Trainer writes into `trainer_output`, and with an empty one `FileNotFoundError` ends the run."""
    if not run["output_dir"]:
        yield problem(run, "output_dir", "names no folder", "--output_dir FOLDER, or leave it out")


@rule
def resume_starts_from_something(run):
    """`Can't find a valid checkpoint at ...`, after model and data were loaded."""
    wanted = run["resume_from_checkpoint"]
    if not wanted or str(wanted).lower() == "true":
        return
    if run["fresh"]:
        yield problem(run, "resume_from_checkpoint", "contradicts --fresh", "leave one of them out")
    elif not Path(wanted).is_dir():
        yield problem(run, "resume_from_checkpoint", f"{wanted} is no folder", "leave it out: resuming is automatic")


@rule
def a_resume_skips_what_was_trained(run):
    """With `ignore_data_skip` a resumed run begins the epoch anew: some examples twice, others never."""
    if run["ignore_data_skip"]:
        yield advice(run, "ignore_data_skip", "a resumed run sees some examples twice, others never", "leave it out")


@rule
def persistent_workers_change_a_resume(run):
    """Persistent workers carry random state into the next epoch, which a resumed run does not have.

    That shows where random numbers are drawn: with dropout, or data that is augmented.
    """
    if run["dataloader_persistent_workers"] and run["dataloader_num_workers"]:
        what = "a resumed run draws other random numbers than an uninterrupted one from the next epoch on"
        yield advice(run, "dataloader_persistent_workers", what, "leave it out where runs are resumed")


@rule
def weights_alone_cannot_find_the_best(run):
    """`DeepSpeed can't be used with save_only_model along with load_best_model_at_end`, nor can FSDP."""
    sharded = "DeepSpeed" if uses_deepspeed(run) else "FSDP" if uses_fsdp(run) else ""
    if sharded and run["save_only_model"] and run["load_best_model_at_end"]:
        yield problem(
            run, "save_only_model", f"cannot be combined with load_best_model_at_end under {sharded}", "leave it out"
        )


@rule
def sharded_checkpoints_hold_the_optimizer(run):
    """`save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'`"""
    is_sharded = fsdp_section(run).get("state_dict_type") == "SHARDED_STATE_DICT"
    if uses_fsdp(run) and run["save_only_model"] and is_sharded:
        yield problem(run, "save_only_model", "needs whole weights", "fsdp_state_dict_type: FULL_STATE_DICT")


@rule
def weights_alone_do_not_resume(run):
    """A checkpoint without optimizer, schedule and random state resumes silently with fresh ones."""
    if run["save_only_model"]:
        yield advice(run, "save_only_model", "a resume would start with a fresh optimizer", "leave it out")


@rule
def signal_checkpoints_may_be_incomplete(run):
    """`enable_jit_checkpoint` leaves a folder with a sentinel alone when one rank gets SIGTERM, and mid-step states."""
    if run["enable_jit_checkpoint"]:
        what = "saves in the middle of a step, so that a resume is not exact, and can leave an incomplete checkpoint"
        yield advice(run, "enable_jit_checkpoint", what, "leave it out: train.py saves when it is told to stop")


@rule
def zero3_saves_whole_weights(run):
    """Without it ZeRO-3 writes no model.safetensors, only a warning: there is nothing to load afterwards."""
    if zero_stage(run) != 3 or run["save_strategy"] == "no":
        return
    content = zero_section(run)
    section = run.engine.raw.get("deepspeed_config")
    gathered = content.get(
        "stage3_gather_16bit_weights_on_model_save", content.get("gather_16bit_weights_on_model_save")
    )
    if gathered is None and isinstance(section, Mapping) and not content:
        gathered = section.get("zero3_save_16bit_model")
    if gathered is None and not content and not run.engine.raw:
        gathered = run.environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
    if not is_true(gathered):
        key = "stage3_gather_16bit_weights_on_model_save" if content else "zero3_save_16bit_model"
        yield Problem(key, "is off: checkpoints hold no model.safetensors", f"{key}: true", run.engine.source, "advice")
