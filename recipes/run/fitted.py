"""Reads fit.json: the micro-batch that `--fit` found for one training on certain devices."""

import json
from dataclasses import replace
from pathlib import Path

from recipes.run import fingerprints
from recipes.run.batch import Batch
from recipes.run.files import Json, read_json
from recipes.run.spec import FIT, RunSpec

# Settings that decide how much memory a micro-batch takes, or how the global batch is split.
_SETTINGS = (
    "recipe task model_name_or_path model_revision dtype bf16 fp16 tf32 use_peft lora_r lora_dropout "
    "lora_target_modules use_dora load_in_4bit use_bnb_nested_quant ddp_comm_hook attn_implementation dataset_name "
    "dataset_config dataset_train_split dataset_columns dataset_streaming max_length packing packing_strategy "
    "optim optim_args gradient_checkpointing gradient_checkpointing_kwargs gradient_as_bucket_view "
    "torch_compile use_liger_kernel label_smoothing_factor deepspeed fsdp fsdp_config global_batch_size memory_limit "
    "expandable_segments use_regional_compilation"
).split()


def identity(run: RunSpec) -> Json:
    """Return the conditions of a valid fit.json: settings, engine, world size, devices, data."""
    settings = {name: run[name] for name in _SETTINGS if name in run}
    devices = [f"{gpu.name}, {gpu.memory_bytes} bytes" for gpu in run.hardware.gpus] or ["CPU"]
    world = {"world_size": run.world_size, "local_world_size": run.local_world_size}
    conditions = {**settings, **world, "engine": run.engine_title, "devices": devices}
    conditions["data"] = fingerprints.of_data(run["dataset_name"])
    if conditions["data"]:  # the same files may be mounted elsewhere at the next start
        conditions.pop("dataset_name", None)
    return json.loads(json.dumps(conditions, default=str))


def read(folder: str | Path) -> Json:
    """Return the content of a fit.json; {} if it is missing or damaged."""
    return read_json(Path(folder) / FIT)[0] or {}


def asks_for_a_micro_batch(run: RunSpec) -> bool:
    """True if the user has set the micro-batch, directly or by the accumulation."""
    return run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps")


def with_fit(run: RunSpec) -> RunSpec:
    """Use a valid fit.json's batch sizes, unless the user set micro-batch or accumulation."""
    if asks_for_a_micro_batch(run) or not run["output_dir"]:
        return run
    fitted = batch(run, read(run["output_dir"]))
    return replace(run, batch=fitted) if fitted else run


def batch(run: RunSpec, fit: Json) -> Batch | None:
    """Return the batch sizes in `fit` (fit.json's content); None if they are not for this run."""
    if not fit or fit.get("holds_for") != identity(run):
        return None
    split = as_batch(run, fit)
    return split if split.total == run.batch.total else None


def as_batch(run: RunSpec, fit: Json) -> Batch:
    """Return the batch sizes in `fit`, with the measured memory peak as part of the reason."""
    file = Path(run["output_dir"]) / FIT
    reason = f"the largest that ran here: peak {fit['peak_bytes'] / 2**30:.2f} GiB ({file})"
    return Batch(fit["micro_batch"], fit["accumulation"], run.batch.data_parallel, reason, FIT)
