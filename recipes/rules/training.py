"""Rules about training: nested settings, precision and the GPU, optimizer and schedule, evaluation,
and checkpoints. Most rules of one expression, such as those about bf16 and tf32, are in `table`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import (
    advice,
    available,
    deepspeed_section,
    fsdp_version,
    gradient_accumulation_kwargs,
    in_yaml,
    is_true,
    mapping,
    missing,
    rule,
    rule_of_train_py,
    uses_deepspeed,
    uses_fsdp,
)
from recipes.rules.table import advice_row, error_row, setting_is_read
from recipes.run import RunSpec, Settings, nearest
from recipes.run.files import read_json
from recipes.run.metrics import METRICS, smaller_is_better
from recipes.run.recorded import began_from

# --- Nested settings ------------------------------------------------------------------------------


@rule
def nested_settings_are_known(run):
    """fsdp_config silently accepts any key. In other nested settings a misspelt key fails only in
    the first step, or the library's error does not name the setting.
    """
    names = ("accelerator_config", "gradient_checkpointing_kwargs", "fsdp_config")
    sections = {name: mapping(run[name]) for name in names}
    sections["gradient_accumulation_kwargs"] = gradient_accumulation_kwargs(run)
    for section, content in sections.items():
        name = section if section in names else "accelerator_config"
        known = legal.names(section) if setting_is_read(run, name) else ()
        for key in sorted({str(key).removeprefix("fsdp_") for key in content} - {*known}) if known else ():
            yield Problem(name, f"has no key {key!r}", nearest(key, known) or "use one of " + ", ".join(sorted(known)))


@rule
def nested_files_can_be_read(run):
    """Rules cannot judge settings in a missing file, and every rank ends in `FileNotFoundError`."""
    for name in ("deepspeed", "fsdp_config", "accelerator_config"):
        if isinstance(run[name], str) and setting_is_read(run, name) and (what := read_json(run[name])[1]):
            yield Problem(name, what, "give a JSON object, or the path of a file with one")


# Name in `report_to` -> its modules, if they have other names: one is needed. kubeflow needs none.
_REPORTED_BY = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": "", "tensorboard": "tensorboard tensorboardX"}


@rule
def reports_have_their_packages(run):
    """Without a tracker's package, the run ends after loading: `... to be installed`."""
    asked = [run["report_to"]] if isinstance(run["report_to"], str) else run["report_to"] or []
    for name in (name for name in asked if name in legal.names("report_to")):
        modules = _REPORTED_BY.get(name, name).split()
        if modules and not any(available(run, module) for module in modules):
            yield missing(run, "report_to", modules[0], f"{name} needs the package {modules[0]}")


@rule
def fit_chooses_the_micro_batch(run):
    """--fit searches for the micro-batch. If the user sets one, nothing is left to search for."""
    searches = run["fit"] or run["fit_only"]
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps") if searches else ():
        if run.explicit(name):
            yield Problem(name, "is the value that --fit searches for", "leave it out, or train without --fit")


# --- Compilation, precision and the GPU -----------------------------------------------------------


@rule
def yaml_compiles_what_the_arguments_do_not(run):
    """A YAML's dynamo backend compiles despite `torch_compile=False`, but not under DeepSpeed."""
    backend = run.engine.dynamo_backend
    if backend == "no":
        return
    if run.engine.kind == "deepspeed":
        yield in_yaml(run, "dynamo_config", "is ignored under DeepSpeed", "use --torch_compile", "advice")
    elif not run["torch_compile"]:
        what = f"{backend} compiles the model although torch_compile is off"
        from_a_file = "remove it from the YAML" if run.engine.raw else "unset ACCELERATE_DYNAMO_BACKEND"
        yield in_yaml(run, "dynamo_config", what, f"{from_a_file}, or use --torch_compile")


@rule
def yaml_precision_agrees_with_arguments(run):
    """`mixed_precision: bf16` in the YAML turns bf16 on, despite `bf16=False`.

    If the user wrote --bf16 or --fp16, the flag wins over a 16-bit YAML, and the rule only advises.
    """
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    given = run.engine.mixed_precision
    if given in ("no", asked) or (given == "fp8" and asked == "no") or given not in ("bf16", "fp16", "fp8"):
        return
    if given != "fp8" and asked != "no" and run.explicit(asked):
        yield in_yaml(run, "mixed_precision", f"{given} is ignored: --{asked} wins", "mixed_precision: 'no'", "advice")
        return
    what = f"{given} contradicts the run, which asks for {'fp32' if asked == 'no' else asked}"
    instead = f"--{asked} false for fp8" if given == "fp8" else f"--{given} for the run"
    yield in_yaml(run, "mixed_precision", what, f"mixed_precision: '{asked}', or {instead}")


@rule
def torch_has_kernels_for_the_card(run):
    """The first kernel fails: `no kernel image is available for execution on the device`.

    Since torch 2.11 only the cu126 wheels contain kernels for GPUs before Turing, such as the V100:
    https://github.com/pytorch/pytorch/pull/175253
    """
    release, _, built = str(legal.version("torch")).partition("+")
    if not run.hardware.cuda or run.hardware.capability >= (7, 5) or built == "cu126":
        return
    what = f"torch {release} has kernels for {run.hardware.gpus[0].name} only if built for CUDA 12.6"
    fix = "install a torch built for CUDA 12.6: see torch's installation page"
    is_certain = built[:2] in ("", "cu") and not run.place.is_elsewhere  # the other machine may have another torch
    yield Problem("gpu", what, fix, "torch's release notes", "error" if is_certain else "advice")


# --- Optimizer and schedule -----------------------------------------------------------------------


@rule
def optim_args_are_known(run):
    """transformers silently drops the keys that its code for this optimizer does not read."""
    known = legal.names(f"optim_args of {run['optim']}")
    keys = [pair.partition("=")[0].strip() for pair in (run["optim_args"] or "").split(",")]
    for key in sorted({*keys} - {*known, ""}) if known else ():
        yield advice("optim_args", f"{key} is ignored by {run['optim']}", nearest(key, known) or f"leave {key} out")


@rule
def warmup_ends_before_the_run(run):
    """With a longer warm-up, the learning rate silently never reaches its full value.

    If epochs set the length of the run, train.py calls `warmup_within` after loading the data.
    """
    if run["max_steps"] > 0:
        yield from warmup_within(run, run["max_steps"])


def warmup_within(run: RunSpec, steps: int) -> Iterator[Problem]:
    """Yield advice if the user's warm-up does not end within `steps` optimizer steps."""
    warmup = run["warmup_steps"] if run["warmup_steps"] >= 1 else round(run["warmup_steps"] * steps)
    if setting_is_read(run, "warmup_steps") and run.explicit("warmup_steps") and warmup >= steps:
        what = f"the warm-up ({warmup:g} steps) is at least as long as the run ({steps} steps)"
        yield advice("warmup_steps", what, f"use fewer than {steps}, or a value below 1 for a fraction of the run")


# --- The best model -------------------------------------------------------------------------------


@rule_of_train_py
def best_metric_is_reported(run):
    """An unreported metric ends the first evaluation in `KeyError: ... which is not found`."""
    wanted = run["metric_for_best_model"]
    if not wanted or run["eval_strategy"] == "no":
        return
    known = usual = ["loss"]
    if run["task"] == "sequence_classification" and not run["prediction_loss_only"]:
        kinds = [run["problem_type"]] if run["problem_type"] else list(METRICS)  # None: the data decides later
        usual = [*known, *METRICS[kinds[0]]]  # of the first kind
        known = [*known, *dict.fromkeys(metric for kind in kinds for metric in METRICS[kind])]
    speeds = ("runtime", "samples_per_second", "steps_per_second")  # Trainer reports these too
    if wanted.removeprefix("eval_") not in (*known, *speeds):
        fix = nearest(wanted, known) or " or ".join([name for name in usual if wanted in name] or known)
        yield Problem("metric_for_best_model", f"{wanted} is not reported by the evaluation", fix)


# --- Checkpoints and the Hub ----------------------------------------------------------------------


def pushed_to(run: Settings) -> str:
    """The name of the Hub repository that Trainer pushes to, with or without the owner."""
    return run["hub_model_id"] or Path(run["output_dir"]).absolute().name


def _resumes_from_nothing(run: RunSpec) -> bool:
    """True if --resume_from_checkpoint names a missing folder, unless the run in the output folder
    began from that checkpoint: then the run has later checkpoints of its own.
    """
    wanted = run["resume_from_checkpoint"]
    if not wanted or str(wanted).lower() == "true" or run["fresh"]:
        return False
    return not os.path.isdir(wanted) and not began_from(run["output_dir"] or "", wanted)  # noqa: PTH112, Path.is_dir raises for a name too long for a path


def _saves_in_shards(run: RunSpec) -> bool:
    """True if FSDP saves a SHARDED_STATE_DICT, which is accelerate's default for FSDP2."""
    default = "SHARDED_STATE_DICT" if fsdp_version(run) == 2 else "FULL_STATE_DICT"
    saved_as = str(run.engine.fsdp.get("state_dict_type") or default).upper()
    return uses_fsdp(run) and saved_as in ("SHARDED_STATE_DICT", "3")  # 3: the number in torch's StateDictType


@rule
def zero3_saves_whole_weights(run):
    """If zero3_save_16bit_model is off, ZeRO-3 prints a warning and saves no model.safetensors.

    Under DeepSpeed's tensor parallelism the same holds at any stage, and `zero_to_fp32.py` cannot
    read the checkpoints either. In all cases train.py saves a whole model at the end.
    """
    divided = run.engine.zero_stage == 3 or (uses_deepspeed(run) and run.engine.parallelism.autotp > 1)
    if not divided or run["save_strategy"] == "no":
        return
    if (content := run.engine.json) is not None:
        key, section = "stage3_gather_16bit_weights_on_model_save", mapping(content.get("zero_optimization"))
        gathered = section.get(key, section.get(key.removeprefix("stage3_")))
        fix = f'"{key}": true below "zero_optimization"'
    else:
        key = "zero3_save_16bit_model"
        launched = run.place.environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
        gathered = deepspeed_section(run).get(key) if run.engine.raw else launched
        fix = f"{key}: true"
    if not is_true(gathered):
        yield in_yaml(run, key, "is off: checkpoints will not have a model.safetensors", fix, "advice")


# --- Rules of one expression ----------------------------------------------------------------------

_WORKS_WITH_OFFLOAD = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit")


def _replaces_the_optimizer(run: RunSpec) -> bool:
    """True if ZeRO's optimizer offload runs DeepSpeedCPUAdam in place of the optimizer `optim`."""
    content = run.engine.json or {}
    if not uses_deepspeed(run) or "optimizer" in content or content.get("zero_force_ds_cpu_optimizer") is False:
        return False
    return run.engine.offload_optimizer != "none"


ROWS = (
    error_row("offload_needs_adamw", "optim",
              lambda run: _replaces_the_optimizer(run) and run["optim"] not in _WORKS_WITH_OFFLOAD,
              "{optim} fails or is replaced by DeepSpeedCPUAdam under ZeRO's optimizer offload", "--optim adamw_torch",
              "Offload runs DeepSpeedCPUAdam, which silently replaces SGD and 8-bit Adam; other optimizers crash."),
    advice_row("norms_and_biases_do_not_decay", "weight_decay",
               lambda run: run["weight_decay"] and "optimizer" in (run.engine.json or {}) and not run["use_peft"],
               "also applies to norms and biases, because the DeepSpeed JSON has its own optimizer",
               "remove optimizer from the JSON", "DeepSpeed's optimizer gets all weights in one group."),
    advice_row("every_evaluation_is_saved", "save_steps",
               lambda run: run["load_best_model_at_end"] and run["eval_strategy"] == run["save_strategy"] == "steps"
               and 0 < (run["eval_steps"] or run["logging_steps"]) < run["save_steps"],
               "is {save_steps:g}: fewer models are saved than evaluated, so the best one may be missed",
               "leave it out: saving follows evaluation",
               "If the best model was not saved, Trainer loads another saved model, or none at all."),
    advice_row("best_is_the_better_value", "greater_is_better",
               lambda run: run["greater_is_better"] is not None
               and run["greater_is_better"] == smaller_is_better(run["metric_for_best_model"] or "loss")
               and (run["load_best_model_at_end"] or run["save_strategy"] == "best" or run["early_stopping_patience"]),
               lambda run: ("is true, but a smaller " if run["greater_is_better"] else "is false, but a greater ")
               + f"{run['metric_for_best_model'] or 'loss'} is better",
               "leave it out", "Trainer keeps the worst model as the best, and early stopping waits for a worse one."),
    error_row("resume_starts_from_something", "resume_from_checkpoint", _resumes_from_nothing,
              "{resume_from_checkpoint} is not a folder", "leave it out: resuming is automatic",
              "After model and data are loaded, the run ends in `Can't find a valid checkpoint at ...`."),
    error_row("sharded_checkpoints_hold_the_optimizer", "save_only_model",
              lambda run: run["save_only_model"] and _saves_in_shards(run), "needs whole weights: FSDP saves shards",
              lambda run: f"{'' if run['fsdp'] else 'fsdp_'}state_dict_type: FULL_STATE_DICT in fsdp_config",
              "Once the model is loaded: `save_only_model option is not compatible with FSDP state dict type`."),
)  # fmt: skip
