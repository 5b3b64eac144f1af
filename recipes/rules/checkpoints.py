"""What is saved, and whether a run can resume from it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from recipes.rules.facts import (
    accelerator_config,
    advice,
    deepspeed_file,
    fsdp_section,
    fsdp_version,
    in_yaml,
    is_true,
    problem,
    rule,
    uses_deepspeed,
    uses_fsdp,
    zero_section,
    zero_stage,
)
from recipes.run import Settings
from recipes.run.recorded import began_from


@rule
def output_has_a_folder(run):
    """An empty name is a `FileNotFoundError`; with none, Trainer writes into `trainer_output`."""
    if not run["output_dir"]:
        yield problem(run, "output_dir", "does not name a folder", "--output_dir FOLDER, or leave it out")


def pushed_to(run: Settings) -> str:
    """The repository's name as Trainer chooses it, with or without its owner."""
    return run["hub_model_id"] or Path(run["output_dir"]).absolute().name


@rule
def a_push_names_a_repository(run):
    """`HFValidationError: Repo id must use alphanumeric chars`, once model and data are loaded."""
    if not run["push_to_hub"] or not run["output_dir"]:
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(pushed_to(run))
    except HFValidationError:
        what = f"{pushed_to(run)!r} is not the name of a repository: [OWNER/]NAME, of letters, digits, - _ and ."
        yield problem(run, "hub_model_id", what, f"--hub_model_id {_as_repository(pushed_to(run))}")


def _as_repository(name: str) -> str:
    """The most similar name that the Hub takes."""
    owner, _, own = name.rpartition("/")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", own).removesuffix(".git")
    plain = re.sub(r"[-.]{2,}", "-", plain).strip("-.")[:60].strip("-.") or "model"
    return f"{owner}/{plain}" if re.fullmatch(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*", owner) else plain


@rule
def a_push_has_a_login(run):
    """`LocalTokenNotFoundError`, or `OfflineModeIsEnabled`, once model and data are loaded.

    Whether the Hub takes the token is asked as train.py starts.
    """
    if not run["push_to_hub"]:
        return
    if run.elsewhere is not None:
        what, fix = "pushes from where the run goes, whose login is not known here", "have HF_TOKEN in its environment"
        yield advice(run, "push_to_hub", what, fix)
        return
    if any(is_true(run.environment.get(name)) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        what = "pushes, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE says that the Hub must not be asked"
        yield problem(run, "push_to_hub", what, "unset them; or leave it out, and `hf upload` the folder afterwards")
        return
    from huggingface_hub import get_token

    if not (run["hub_token"] or run.environment.get("HF_TOKEN") or get_token()):
        yield problem(run, "push_to_hub", "nobody is logged in to the Hub", "`hf auth login`, or a token in HF_TOKEN")


@rule
def resume_starts_from_something(run):
    """`Can't find a valid checkpoint at ...`, after model and data are loaded.

    A run that began there goes on from its own checkpoints when the same command starts it again.
    """
    wanted = run["resume_from_checkpoint"]
    if not wanted or str(wanted).lower() == "true":
        return
    if run["fresh"]:
        yield problem(run, "resume_from_checkpoint", "contradicts --fresh", "leave one of them out")
    elif not os.path.isdir(wanted) and not began_from(run["output_dir"] or "", wanted):  # noqa: PTH112, Path.is_dir raises for a name too long for a path
        yield problem(run, "resume_from_checkpoint", f"{wanted} is not a folder", "leave it out: resuming is automatic")


@rule
def a_resume_skips_what_was_trained(run):
    """A resumed run starts the epoch again: it sees some examples twice, and others never."""
    if run["ignore_data_skip"]:
        yield advice(run, "ignore_data_skip", "a resumed run sees some examples twice, others never", "leave it out")


@rule
def persistent_workers_change_a_resume(run):
    """Persistent workers keep their random state from epoch to epoch, and a resume loses it.

    It matters if random numbers are drawn: for dropout, or to augment data.
    """
    several_epochs = not run["dataset_streaming"]
    if several_epochs and run["dataloader_persistent_workers"] and run["dataloader_num_workers"]:
        what = "from its next epoch, a resumed run draws other random numbers than an uninterrupted one"
        yield advice(run, "dataloader_persistent_workers", what, "leave it out if a resume must be exact")


@rule
def an_unseeded_sampler_changes_a_resume(run):
    """Seen on one and on two processes: in its second epoch, a resumed run trains other examples.

    accelerate's own sampler is seeded with the epoch. torch's goes on from the epochs before.
    """
    unseeded = str(accelerator_config(run).get("use_seedable_sampler")).lower() == "false"
    if unseeded and run["train_sampling_strategy"] == "random" and not run["dataset_streaming"]:
        what = "without use_seedable_sampler, a resume after the first epoch trains other examples"
        yield advice(run, "accelerator_config", what, "leave use_seedable_sampler out if a resume must be exact")


@rule
def weights_alone_cannot_find_the_best(run):
    """`DeepSpeed can't be used with save_only_model along with load_best_model_at_end`"""
    sharded = "DeepSpeed" if uses_deepspeed(run) else "FSDP" if uses_fsdp(run) else ""
    if sharded and run["save_only_model"] and run["load_best_model_at_end"]:
        yield problem(
            run, "save_only_model", f"cannot be combined with load_best_model_at_end under {sharded}", "leave it out"
        )


@rule
def sharded_checkpoints_hold_the_optimizer(run):
    """`save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'`

    It is what accelerate takes for FSDP2 if a YAML does not say.
    """
    if not uses_fsdp(run) or not run["save_only_model"]:
        return
    default = "SHARDED_STATE_DICT" if fsdp_version(run) == 2 else "FULL_STATE_DICT"
    saved_as = str(fsdp_section(run).get("state_dict_type") or default).upper()
    if saved_as in ("SHARDED_STATE_DICT", "3"):  # its number in torch's StateDictType
        fix = (
            "state_dict_type: FULL_STATE_DICT in fsdp_config"
            if run["fsdp"]
            else "fsdp_state_dict_type: FULL_STATE_DICT"
        )
        yield problem(run, "save_only_model", "needs whole weights", fix)


@rule
def weights_alone_do_not_resume(run):
    """Without optimizer, schedule and random state, a resume silently starts new ones."""
    if run["save_only_model"]:
        yield advice(run, "save_only_model", "a resume would start with a new optimizer", "leave it out")


@rule
def signal_checkpoints_may_be_incomplete(run):
    """`enable_jit_checkpoint` saves mid-step, and nothing if one rank alone gets SIGTERM."""
    if run["enable_jit_checkpoint"]:
        what = "saves in the middle of a step, so a resume is not exact, and a checkpoint may be incomplete"
        yield advice(run, "enable_jit_checkpoint", what, "leave it out: train.py saves on SIGTERM by itself")


@rule
def zero3_saves_whole_weights(run):
    """Otherwise ZeRO-3 writes a warning instead of model.safetensors: there is nothing to load.

    So does DeepSpeed's tensor parallelism, at any stage, whose checkpoints `zero_to_fp32.py` cannot
    read either. train.py saves a whole model at the end all the same.
    """
    divided = zero_stage(run) == 3 or (uses_deepspeed(run) and run.engine.parallelism.autotp not in (0, 1))
    if not divided or run["save_strategy"] == "no":
        return
    content, in_json = zero_section(run), deepspeed_file(run) is not None
    section = run.engine.raw.get("deepspeed_config")
    gathered = content.get(
        "stage3_gather_16bit_weights_on_model_save", content.get("gather_16bit_weights_on_model_save")
    )
    if gathered is None and isinstance(section, Mapping) and not in_json:
        gathered = section.get("zero3_save_16bit_model")
    if gathered is None and not in_json and not run.engine.raw:
        gathered = run.environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
    if not is_true(gathered):
        key, fix = "zero3_save_16bit_model", "zero3_save_16bit_model: true"
        if in_json:
            key = "stage3_gather_16bit_weights_on_model_save"
            fix = f'"{key}": true below "zero_optimization"'
        yield in_yaml(run, key, "is off: checkpoints will not have a model.safetensors", fix, "advice")
