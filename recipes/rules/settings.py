"""What cannot work together, one small named rule each, with the failure it prevents in its docstring.

A rule takes a `RunSpec` and yields `Problem`s. An error stops the run, an advice does not. A rule never refuses a run
that would train as it was asked to: where a setting is only ignored, it advises.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes import legal
from recipes.errors import Problem
from recipes.run.engine import deepspeed_json, read_yaml, shipped
from recipes.scaling.timings import SUFFIXES, WARM_UP_STEPS

if TYPE_CHECKING:
    from recipes.run import RunSpec

Rule = Callable[["RunSpec"], Iterator[Problem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def problem(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """An error about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source)


def advice(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    return Problem(subject, what, fix, run.setting(subject).source, severity="advice")


def missing(run: RunSpec, subject: str, package: str, what: str = "") -> Problem:
    """A package that is not installed: an error here, an advice where the run goes to an installation of its own."""
    what = what or f"needs the package {package}"
    if run.elsewhere is not None:
        return advice(run, subject, f"{what}, and it is not installed here", f"have {package} where it will run")
    return problem(run, subject, what, f"pip install {package}")


# --- What the rules ask about a run ----------------------------------------------------------------------------------


def installed(package: str) -> bool:
    """Whether a top-level package can be imported here; it is not."""
    return importlib.util.find_spec(package) is not None


def available(run: RunSpec, package: str) -> bool:
    """Whether a package is known to be where the run is to be; elsewhere what is here counts until more is known."""
    return package in (run.elsewhere or ()) or installed(package)


def deepspeed_file(run: RunSpec) -> dict[str, Any] | None:
    """The DeepSpeed JSON of this run: `--deepspeed`, the Accelerate YAML's, or the launcher's. None without one."""
    if isinstance(run["deepspeed"], dict):
        return run["deepspeed"]
    section = run.engine.raw.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    launched = run.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if run.engine.kind == "deepspeed" else None
    return deepspeed_json({"deepspeed_config_file": run["deepspeed"] or named or launched})


def uses_deepspeed(run: RunSpec) -> bool:
    return run.engine.kind == "deepspeed" or run["deepspeed"] is not None


def zero_section(run: RunSpec) -> dict[str, Any]:
    section = (deepspeed_file(run) or {}).get("zero_optimization")
    return section if isinstance(section, dict) else {}


def zero_stage(run: RunSpec) -> int:
    return zero_section(run).get("stage", run.engine.zero_stage) if uses_deepspeed(run) else 0


def optimizer_is_offloaded(run: RunSpec) -> bool:
    if not uses_deepspeed(run):
        return False
    section = zero_section(run).get("offload_optimizer")
    if isinstance(section, dict):
        return section.get("device", "none") not in (None, "none")
    return run.engine.offload_optimizer != "none"


def uses_fsdp(run: RunSpec) -> bool:
    return run.engine.kind == "fsdp" or bool(run["fsdp"])


def uses_ddp(run: RunSpec) -> bool:
    """Whether DDP wraps the model. Which engine runs several processes of a `single` one is up to the launcher."""
    if uses_deepspeed(run) or uses_fsdp(run):
        return False
    return run.engine.kind == "ddp" or run.engine.kind.startswith("multi_") or run.world_size > 1


def precision(run: RunSpec) -> str:
    """What trains: the arguments win over the Accelerate YAML."""
    if run["bf16"] or run["fp16"]:
        return "bf16" if run["bf16"] else "fp16"
    return run.engine.mixed_precision


def accelerator_config(run: RunSpec) -> dict[str, Any]:
    return _mapping(run["accelerator_config"])


def gradient_accumulation_kwargs(run: RunSpec) -> dict[str, Any]:
    return _mapping(accelerator_config(run).get("gradient_accumulation_kwargs"))


def fsdp_section(run: RunSpec) -> dict[str, Any]:
    """fsdp_config of the YAML and of the arguments, keys without `fsdp_`."""
    both = {**_mapping(run.engine.raw.get("fsdp_config")), **_mapping(run["fsdp_config"])}
    return {str(key).removeprefix("fsdp_"): value for key, value in both.items()}


def _mapping(value: Any) -> dict[str, Any]:
    """`value` if it is settings, else what the JSON file it names holds, else nothing."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        return {}
    try:
        content = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


# --- Ranges ----------------------------------------------------------------------------------------------------------

_COUNT = (lambda value: value >= 1, "is a whole number from 1 up")
_NOT_NEGATIVE = (lambda value: value >= 0, "is 0 or more")
_POSITIVE = (lambda value: value > 0, "is more than 0")
_BELOW_ONE = (lambda value: 0 <= value < 1, "is from 0 to below 1")
_FRACTION = (lambda value: 0 <= value <= 1, "is from 0 to 1")
_SEED = (lambda value: 0 <= value < 2**32, "is a whole number from 0 to 4294967295")

# Values of the right type that the constructor takes without a word. None always means: not given.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "global_batch_size": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "max_steps": (lambda value: value == -1 or value > 0, "is a number of steps, or -1 for num_train_epochs"),
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _NOT_NEGATIVE,
    "max_grad_norm": (lambda value: value >= 0, "is 0 or more, and 0 turns clipping off"),
    "label_smoothing_factor": _FRACTION,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "torch_empty_cache_steps": _COUNT,
    "eval_steps": (lambda value: value >= 0, "is a number of steps, or a fraction of the run below 1"),
    "eval_delay": _NOT_NEGATIVE,
    "save_total_limit": (
        lambda value: value >= 1,
        "is a whole number from 1 up; 0 would keep them all, as leaving it out",
    ),
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _COUNT,
    "seed": _SEED,
    "data_seed": _SEED,
    "ddp_bucket_cap_mb": _COUNT,
    "ddp_timeout": _COUNT,
    "early_stopping_patience": _COUNT,
    "memory_limit": _POSITIVE,
    "max_length": (lambda value: value >= 2, "is at least 2: a token and the one to predict"),
    "lora_r": _COUNT,
    "lora_alpha": _POSITIVE,
    "lora_dropout": _BELOW_ONE,
    "log_level": (lambda value: value in legal.log_levels(), "is a level such as info, warning or error"),
    "log_level_replica": (lambda value: value in legal.log_levels(), "is a level such as info, warning or error"),
    "include_num_input_tokens_seen": (
        lambda value: value in (True, False, "all", "non_padding", "no"),
        "is all, non_padding or no",
    ),
}


@rule
def values_are_in_range(run):
    """The constructor takes them; they fail in the first step, or mean something else (`save_total_limit=0`)."""
    for name, (is_legal, words) in RANGES.items():
        if name not in legal.settings():
            continue
        value = run[name]
        if value is not None and not is_legal(value):
            yield problem(run, name, f"{value} is out of range", f"{name} {words}")


@rule
def a_run_has_steps(run):
    """No epochs train nothing and say so nowhere; a step count of 0 divides by zero where it is read."""
    if run["num_train_epochs"] <= 0 and run["max_steps"] <= 0:
        yield problem(run, "num_train_epochs", f"{run['num_train_epochs']:g} trains nothing", "a number above 0")
    for name in ("logging_steps", "save_steps"):
        if run[name] <= 0 and run[name.replace("steps", "strategy")] == "steps":
            fix = f"a number of steps, a fraction of the run below 1, or --{name.replace('steps', 'strategy')} no"
            yield problem(run, name, f"{run[name]:g} is out of range", fix)


@rule
def steps_above_one_are_whole(run):
    """`ValueError: --logging_steps must be an integer if bigger than 1`, from the constructor of every rank."""
    for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
        value = run[name]
        used = name == "warmup_steps" or run[name.replace("steps", "strategy")] == "steps"
        if value and value > 1 and value != int(value) and used:
            yield problem(run, name, f"{value} is no whole number of steps", f"{name} {round(value)}")


# --- Precision -------------------------------------------------------------------------------------------------------


@rule
def one_precision(run):
    """`At most one of fp16 and bf16 can be True, but not both`"""
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if run[first] and run[second]:
            yield problem(run, first, f"and {second} are both on", f"--{first} false, or --{second} false")


@rule
def bf16_needs_sm80(run):
    """A T4 or V100 only emulates bf16, several times slower than fp16; torch calls that supported."""
    if not run.hardware.cuda or run["use_cpu"] or run.hardware.capability >= (8, 0):
        return
    capability = ".".join(map(str, run.hardware.capability))
    for name in ("bf16", "bf16_full_eval"):
        if run[name]:
            yield problem(
                run, name, f"is only emulated on compute capability {capability}", "--fp16, with --bf16 false"
            )


@rule
def fp16_needs_a_gpu(run):
    """On a CPU `fp16=True` changes nothing: the run trains in fp32 and reports fp16."""
    if run["fp16"] and (run["use_cpu"] or not run.hardware.cuda) and not uses_deepspeed(run):
        yield advice(run, "fp16", "does nothing on a CPU: this run trains in fp32", "--bf16, or leave it out")


@rule
def tf32_needs_sm80(run):
    """`ValueError: --tf32 requires Ampere or a newer GPU arch, cuda>=11 and torch>=1.7`"""
    if run["tf32"] and run.hardware.capability < (8, 0):
        yield problem(run, "tf32", "needs a GPU of compute capability 8.0", "leave it out")


@rule
def yaml_precision_agrees_with_arguments(run):
    """`mixed_precision: bf16` in the YAML turns bf16 on behind `bf16=False`; under DeepSpeed the two mismatch."""
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    given = run.engine.mixed_precision
    if given in ("no", asked) or (given == "fp8" and asked == "no") or given not in ("bf16", "fp16", "fp8"):
        return
    fix = f"mixed_precision: '{asked}'" if given == "fp8" else f"mixed_precision: 'no', or --{given} for the run"
    what = f"{given} contradicts the run, which asks for {'fp32' if asked == 'no' else asked}"
    yield Problem("mixed_precision", what, fix, run.engine.source)


@rule
def fp16_weights_cannot_be_unscaled(run):
    """`ValueError: Attempting to unscale FP16 gradients.` in the first step."""
    if run["dtype"] == "float16" and precision(run) == "fp16" and not run["use_peft"] and not uses_deepspeed(run):
        yield problem(
            run, "dtype", "float16 weights cannot be trained with fp16", "--dtype float32: fp16 computes in 16 bits"
        )


@rule
def sixteen_bit_weights_lose_small_updates(run):
    """Master weights in 16 bits round most AdamW updates away."""
    if run["dtype"] == "float32" or run["use_peft"] or uses_deepspeed(run):
        return
    if run["dtype"] == "float16" and precision(run) == "fp16":
        return  # which fails altogether
    yield advice(
        run,
        "dtype",
        f"{run['dtype']} weights round small updates away",
        "--dtype float32 with --bf16: computes in 16 bits",
    )


# --- The processes ---------------------------------------------------------------------------------------------------


@rule
def several_processes_on_a_cpu_need_use_cpu(run):
    """Two ranks without an accelerator and without `use_cpu` train two separate models into the same folder."""
    if run.world_size > 1 and not run.hardware.cuda and not run["use_cpu"]:
        yield problem(
            run, "use_cpu", f"off without a GPU: {run.world_size} processes would train separate models", "--use_cpu"
        )


@rule
def single_engine_starts_one_process(run):
    """`distributed_type: 'NO'` and `MULTI_CPU` start one process, whatever --num_processes says; it trains alone."""
    kind = run.engine.kind
    if run.world_size == 1 or not run.engine.raw or kind not in ("single", "multi_cpu"):
        return
    if run.engine.raw.get("mpirun_config"):
        return  # mpirun starts them
    what = f"{run.engine.raw.get('distributed_type', 'NO')} starts one process, {run.world_size} are asked for"
    is_default = kind == "single" and run.engine.source == str(shipped(run.recipe.engine))
    severity = "advice" if is_default else "error"  # nobody chose that file: another one can still be launched
    yield Problem(
        "distributed_type",
        what,
        "distributed_type: MULTI_GPU, also for several CPU processes",
        run.engine.source,
        severity,
    )


@rule
def processes_have_a_gpu_each(run):
    """`CUDA error: invalid device ordinal`, or NCCL's `Duplicate GPU detected`."""
    if not run.hardware.cuda or run["use_cpu"] or run["ddp_backend"] == "gloo":
        return  # with gloo, processes may share a GPU
    machines = run.engine.raw.get("num_machines", 1)
    machines = machines if isinstance(machines, int) and machines > 0 else 1
    here = min(run.local_world_size, -(-run.world_size // machines))
    if here > len(run.hardware.gpus):
        what = (
            f"{here} on this machine, which has {len(run.hardware.gpus)} GPU{'s' if len(run.hardware.gpus) > 1 else ''}"
        )
        yield Problem("num_processes", what, f"--num_processes {len(run.hardware.gpus)}", "the launch")


@rule
def one_process_uses_one_gpu(run):
    """The others stay idle: Trainer's own answer, DataParallel, would multiply the global batch and is switched off."""
    if run.engine.kind != "single" or run.world_size > 1 or len(run.hardware.gpus) < 2 or run["use_cpu"]:
        return
    count = len(run.hardware.gpus)
    fix = f"accelerate launch --config_file accelerate_configs/standard.yaml --num_processes {count}"
    yield Problem("num_processes", f"1 uses one of {count} GPUs", fix, "the launch", "advice")


@rule
def recipe_has_its_own_engine(run):
    """A memory recipe under plain DDP offloads nothing and runs out of memory."""
    own = read_yaml(shipped(run.recipe.engine), "engine").get("distributed_type")
    if own == "DEEPSPEED" and not uses_deepspeed(run):
        what = f"is made for DeepSpeed, and the launch says {run.engine.title}"
        fix = f"accelerate launch --config_file {_for_people(shipped(run.recipe.engine))}; or let train.py start it"
        yield advice(run, "recipe", what, fix)


def _for_people(path: Path) -> str:
    """A path as it would be typed: short where it is below the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@rule
def fsdp_needs_a_gpu(run):
    """On a CPU an FSDP YAML trains plain DDP, nothing is sharded, and nothing says so."""
    if run.engine.kind == "fsdp" and not run.hardware.cuda:
        yield Problem(
            "distributed_type",
            "FSDP shards nothing on a CPU: this is plain DDP",
            "MULTI_GPU",
            run.engine.source,
            "advice",
        )


@rule
def fsdp_and_deepspeed_exclude_each_other(run):
    """`Using --fsdp xxx together with --deepspeed is not possible, deactivate one of those flags.`"""
    if run["fsdp"] and uses_deepspeed(run):
        yield problem(run, "fsdp", "and DeepSpeed exclude each other", "leave one of them out")


@rule
def fsdp_argument_needs_a_distributed_launch(run):
    """`ValueError: Using fsdp only works in distributed training.`"""
    if run["fsdp"] and run.engine.kind == "single" and run.world_size == 1:
        yield problem(run, "fsdp", "needs a distributed launch", "accelerate launch --config_file fsdp2.yaml")


@rule
def fsdp_checkpoints_activations_once(run):
    """`fsdp_config['activation_checkpointing']` and the training argument `can't both be set to True`."""
    if not uses_fsdp(run) or not run["gradient_checkpointing"]:
        return
    if is_true(fsdp_section(run).get("activation_checkpointing")):
        yield problem(run, "gradient_checkpointing", "is on in fsdp_config too", "keep the one in fsdp_config")


@rule
def ddp_backend_needs_processes(run):
    """`Default process group has not been initialized`: the constructor with `ddp_backend` in a run of one process."""
    if run.explicit("ddp_backend") and run["ddp_backend"] and run.engine.kind == "single" and run.world_size == 1:
        yield problem(run, "ddp_backend", "is for several processes, this run has one", "leave it out")


@rule
def nccl_needs_a_gpu(run):
    """`ValueError: Your assigned backend nccl is not available, please use gloo`"""
    if run["ddp_backend"] == "nccl" and (not run.hardware.cuda or run["use_cpu"]):
        yield problem(run, "ddp_backend", "nccl needs GPUs", "leave it out: gloo is used on a CPU")


# --- Distributed data parallel ---------------------------------------------------------------------------------------


@rule
def static_graph_needs_accumulation_one(run):
    """DDP's static graph expects a reduction in the first backward; with accumulation it aborts in the reducer.

    One process, and accumulation that reduces every micro-batch (`sync_each_batch`), do work.
    """
    if not run["ddp_static_graph"] or run["gradient_accumulation_steps"] == 1 or run.world_size == 1:
        return
    if uses_ddp(run) and not is_true(gradient_accumulation_kwargs(run).get("sync_each_batch")):
        yield problem(
            run,
            "ddp_static_graph",
            f"cannot be combined with gradient_accumulation_steps {run['gradient_accumulation_steps']}",
            "leave it out, or raise per_device_train_batch_size until accumulation is 1",
        )


@rule
def reentrant_checkpointing_needs_find_unused_off(run):
    """`Expected to mark a variable ready only once`, in the first backward, also with one process under DDP."""
    kwargs = _mapping(run["gradient_checkpointing_kwargs"])
    if (
        not run["gradient_checkpointing"]
        or not kwargs.get("use_reentrant")
        or run["ddp_static_graph"]
        or not uses_ddp(run)
    ):
        return
    if run["ddp_find_unused_parameters"] or (run["ddp_find_unused_parameters"] is None and run["use_peft"]):
        fix = "gradient_checkpointing_kwargs '{\"use_reentrant\": false}', or --ddp_find_unused_parameters false"
        yield problem(run, "gradient_checkpointing_kwargs", "use_reentrant fails with ddp_find_unused_parameters", fix)


_ONLY_DDP = (
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "gradient_as_bucket_view",
)


@rule
def ddp_settings_need_ddp(run):
    """Without DDP, under DeepSpeed, FSDP or in one process, they reach nothing."""
    if uses_ddp(run):
        return
    for name in _ONLY_DDP:
        if run.explicit(name) and run[name] is not None:
            yield advice(run, name, f"is ignored: the engine is {run.engine.title}, not DDP", "leave it out")
    if run["ddp_comm_hook"] != "no":
        yield advice(run, "ddp_comm_hook", f"is ignored: the engine is {run.engine.title}, not DDP", "leave it out")


@rule
def bf16_compression_needs_nccl(run):
    """`TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+` before the first step."""
    if run["ddp_comm_hook"] == "bf16" and uses_ddp(run) and (run["use_cpu"] or not run.hardware.cuda):
        yield problem(run, "ddp_comm_hook", "bf16 needs NCCL, so GPUs", "--ddp_comm_hook fp16, or leave it out")


@rule
def ddp_timeout_is_not_for_cpus(run):
    """With `use_cpu` Trainer creates the process group without the timeout."""
    if run.explicit("ddp_timeout") and run["use_cpu"]:
        yield advice(run, "ddp_timeout", "is ignored with use_cpu", "leave it out")


@rule
def syncing_each_batch_is_slow(run):
    """`sync_each_batch` reduces gradients in every micro-step: as many times as the accumulation."""
    if is_true(gradient_accumulation_kwargs(run).get("sync_each_batch")) and run["gradient_accumulation_steps"] > 1:
        what = f"sync_each_batch reduces gradients {run['gradient_accumulation_steps']} times a step"
        yield advice(run, "accelerator_config", what, "leave it out unless memory demands it")


# --- The batch -------------------------------------------------------------------------------------------------------


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
def memory_can_be_limited(run):
    """RLIMIT_DATA counts what a process allocates on Linux alone; elsewhere the limit would limit nothing."""
    if run["memory_limit"] is not None and not run.hardware.cuda and run.hardware.platform != "linux":
        yield problem(run, "memory_limit", "limits RAM on Linux only", "leave it out")


@rule
def timings_go_to_a_table(run):
    """The suffix says how the row is written; a run no longer than its warm-up has nothing to write."""
    if run["measure"] is None:
        return
    if not run["measure"].endswith(SUFFIXES):
        yield problem(run, "measure", f"{run['measure']!r} is no table", "a name that ends in .jsonl or .csv")
    if 0 < run["max_steps"] <= WARM_UP_STEPS:
        yield problem(run, "max_steps", f"{WARM_UP_STEPS} steps are warm-up and not measured", "a larger --max_steps")


@rule
def batches_are_not_split(run):
    """split_batches divides the micro-batch by the processes: the global batch is no longer what was asked for."""
    if is_true(accelerator_config(run).get("split_batches")) and run.world_size > 1:
        yield problem(run, "accelerator_config", "split_batches changes the global batch", "leave split_batches out")


@rule
def packing_frees_the_padding(run):
    """Packed rows hold no padding: the two are different ways to the same end."""
    if run["packing"] and run["padding_free"]:
        yield problem(
            run, "padding_free", "and packing exclude each other", "--packing false, or leave padding_free out"
        )


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


@rule
def padding_free_needs_flash_attention(run):
    """Without a kernel for varying lengths the joined row is masked: correct, and quadratic in its whole length."""
    attention = run["attn_implementation"] or "sdpa"
    if run["padding_free"] and "flash" not in attention:
        what = f"is slow with {attention} attention, which computes the whole joined row"
        yield advice(run, "padding_free", what, "--attn_implementation flash_attention_2, or --packing")


@rule
def compiling_needs_one_shape(run):
    """`accelerate launch` compiles with dynamic=False: every new length compiles the model again."""
    if run["torch_compile"] and not run["packing"]:
        yield advice(
            run, "torch_compile", "compiles again for every new length of a batch", "--packing, or leave it out"
        )


# --- Optimizer and schedule ------------------------------------------------------------------------------------------

_SURVIVES_OFFLOAD = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit")


@rule
def offload_needs_adamw(run):
    """accelerate replaces the optimizer by DeepSpeedCPUAdam: SGD and 8-bit Adam silently, as L2 Adam; others crash."""
    content = deepspeed_file(run) or {}
    keeps_the_choice = "optimizer" in content or content.get("zero_force_ds_cpu_optimizer") is False
    if not optimizer_is_offloaded(run) or keeps_the_choice or run["optim"] in _SURVIVES_OFFLOAD:
        return
    becomes = (
        "fails with"
        if run["optim"]
        in ("adafactor", "adagrad", "lion_32bit", "paged_lion_32bit", "ademamix", "paged_ademamix_32bit")
        else "is replaced by DeepSpeedCPUAdam under"
    )
    yield problem(run, "optim", f"{run['optim']} {becomes} ZeRO's optimizer offload", "--optim adamw_torch")


@rule
def deepspeed_json_chooses_the_optimizer(run):
    """An `optimizer` or `scheduler` in the DeepSpeed JSON replaces Trainer's without a word."""
    content = deepspeed_file(run) or {}
    for section, name in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        if section in content and run.explicit(name) and uses_deepspeed(run):
            yield advice(
                run, name, f"is ignored: the DeepSpeed JSON has its own {section}", f"remove {section} from the JSON"
            )


# optimizer -> (import name, distribution), by the first entry that matches
_OPTIMIZER_PACKAGES = (
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
    (("adamw_anyprecision",), "torchdistx", "torchdistx"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("adamw_torch_xla",), "torch_xla", "torch_xla"),
    (("adamw_torch_npu_fused",), "torch_npu", "torch_npu"),
    (("adamw_bnb_8bit", "adamw_8bit", "ademamix", "lion_", "paged_", "rmsprop_bnb"), "bitsandbytes", "bitsandbytes"),
)


@rule
def optimizer_is_installed(run):
    """`ImportError: You need to install ... in order to use ... optimizers`, when the first step is prepared."""
    for names, module, distribution in _OPTIMIZER_PACKAGES:
        if run["optim"].startswith(names):
            if not available(run, module):
                yield missing(run, "optim", distribution, f"{run['optim']} needs the package {distribution}")
            return


@rule
def optimizer_arguments_are_read(run):
    """`ValueError: not enough values to unpack` for text without `=`; AdamW of torch looks at none of them."""
    given = run["optim_args"]
    if not given:
        return
    if any(part.count("=") != 1 for part in given.split(",")):
        yield problem(run, "optim_args", f"{given!r} is not name=value,name=value", "--optim_args rank=64,scale=0.5")
    elif run["optim"] in legal.optimizers_without_arguments():
        fix = "--adam_beta1, --adam_beta2, --adam_epsilon and --weight_decay, or leave them out"
        yield advice(run, "optim_args", f"are ignored by {run['optim']}", fix)


@rule
def layerwise_optimizers_work_alone(run):
    """`Layer-wise ... does not support DDP at this time`, `Layerwise ... does not support gradient accumulation!`"""
    if not run["optim"].endswith("_layerwise"):
        return
    if run.world_size > 1 or "RANK" in run.environment:  # torchrun makes a DDP world of one process too
        yield problem(run, "optim", f"{run['optim']} does not work with DDP", run["optim"].removesuffix("_layerwise"))
    elif run["gradient_accumulation_steps"] > 1:
        fix = f"--gradient_accumulation_steps 1, or --optim {run['optim'].removesuffix('_layerwise')}"
        yield problem(run, "optim", f"{run['optim']} does not work with accumulation", fix)


@rule
def target_modules_are_named(run):
    """`You need to define optim_target_modules to use GaLore / APOLLO optimizers`"""
    if run["optim"].startswith(("galore_", "apollo_")) and not run["optim_target_modules"]:
        yield problem(run, "optim", f"{run['optim']} needs to know its modules", "--optim_target_modules all-linear")


@rule
def schedule_needs_evaluation(run):
    """`lr_scheduler_type reduce_lr_on_plateau requires an eval strategy`"""
    if run["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy") and run["eval_strategy"] == "no":
        yield problem(
            run, "lr_scheduler_type", f"{run['lr_scheduler_type']} needs evaluations", "--eval_strategy epoch"
        )


@rule
def least_rate_is_named_once(run):
    """`ValueError: One of min_lr or min_lr_rate should be set through the lr_scheduler_kwargs`, at train()."""
    named = {"min_lr", "min_lr_rate"} & set(run["lr_scheduler_kwargs"] or {})
    schedule = run["lr_scheduler_type"]
    if schedule in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and len(named) != 1:
        what = "needs the least rate" if not named else "takes one least rate, not two"
        fix = "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'"
        yield problem(run, "lr_scheduler_type", f"{schedule} {what}", fix)


@rule
def schedule_settings_are_its_own(run):
    """`TypeError: get_..._schedule_with_warmup() got an unexpected keyword argument`, once everything is loaded."""
    given = set(run["lr_scheduler_kwargs"] or {})
    schedule = run["lr_scheduler_type"]
    if not given and schedule != "warmup_stable_decay":  # the others need nothing: no source need be read
        return
    keys = legal.schedule_keys().get(schedule)
    if keys is None:
        return
    if schedule in ("constant", "constant_with_warmup"):
        yield advice(run, "lr_scheduler_kwargs", f"are ignored by the schedule {schedule}", "leave them out")
        return
    for key in sorted(given - set(keys)):
        fix = _closest(key, keys) or ("one of " + ", ".join(keys) if keys else "leave it out")
        yield problem(run, "lr_scheduler_kwargs", f"the schedule {schedule} has no {key!r}", fix)
    for key, required in keys.items():
        if required and key not in given:
            yield problem(run, "lr_scheduler_type", f"{schedule} needs {key}", f"lr_scheduler_kwargs with {key}")


@rule
def one_warmup_step_is_one_step(run):
    """Below 1 it is a fraction of the run, and 1.0 is one step, not all of it."""
    if run.explicit("warmup_steps") and run["warmup_steps"] == 1:
        yield advice(
            run, "warmup_steps", "1.0 is one step, not the whole run", "a value below 1 for a fraction of the run"
        )


@rule
def max_steps_wins_over_epochs(run):
    """With `max_steps` the epochs are not read."""
    if run.explicit("num_train_epochs") and run["max_steps"] > 0:
        yield advice(run, "num_train_epochs", "is ignored: max_steps wins", "leave one of them out")


# --- Evaluation and checkpoints --------------------------------------------------------------------------------------


@rule
def best_model_needs_matching_strategies(run):
    """`--load_best_model_at_end requires the save and eval strategy to match`; save 'best' without eval: nothing."""
    if not run["load_best_model_at_end"]:
        return
    evaluation, saving = run["eval_strategy"], run["save_strategy"]
    if evaluation == "no":
        yield problem(run, "load_best_model_at_end", "needs evaluations to find the best", "--eval_strategy steps")
    elif saving not in (evaluation, "best"):
        what = f"needs save_strategy {saving} and eval_strategy {evaluation} to match"
        yield problem(run, "load_best_model_at_end", what, f"--save_strategy {evaluation}, or best")
    elif evaluation == saving == "steps":
        every, save = run["eval_steps"] or run["logging_steps"], run["save_steps"]
        if every <= 0 or save <= 0:
            return  # out of range
        if (every < 1) != (save < 1) or round(save * 1_000_000) % round(every * 1_000_000):
            what = f"needs save_steps {save:g} to be a multiple of eval_steps {every:g}"
            yield problem(run, "load_best_model_at_end", what, f"--save_steps {every:g}")


@rule
def saving_the_best_needs_evaluation(run):
    """With save_strategy 'best' and eval_strategy 'no' nothing is ever saved, without a word."""
    if run["save_strategy"] != "best":
        return
    if run["eval_strategy"] == "no":
        yield problem(run, "save_strategy", "best never saves without evaluations", "--eval_strategy steps")
    elif not run["metric_for_best_model"] and not run["load_best_model_at_end"]:
        what = "best needs to know what is best"
        yield problem(run, "save_strategy", what, "--metric_for_best_model loss")


@rule
def early_stopping_needs_evaluation(run):
    """`EarlyStoppingCallback requires IntervalStrategy of steps or epoch`, and metric_for_best_model to be defined."""
    if run["early_stopping_patience"] is None:
        return
    if run["eval_strategy"] == "no":
        yield problem(run, "early_stopping_patience", "counts evaluations, and there are none", "--eval_strategy steps")
    elif not run["load_best_model_at_end"] and not run["metric_for_best_model"]:
        yield problem(run, "early_stopping_patience", "needs to know what is best", "--load_best_model_at_end")


@rule
def best_metric_is_reported(run):
    """`KeyError: The metric_for_best_model training argument is set to 'eval_foo', which is not found`, hours in."""
    wanted = run["metric_for_best_model"]
    if not wanted or run["eval_strategy"] == "no":
        return
    classifies = run["task"] == "sequence_classification" and not run["prediction_loss_only"]
    known = ["loss", "accuracy"] if classifies else ["loss"]
    speeds = ("runtime", "samples_per_second", "steps_per_second")  # reported by Trainer, whoever wants them
    if wanted.removeprefix("eval_") not in (*known, *speeds):
        yield problem(run, "metric_for_best_model", f"{wanted} is not reported", " or ".join(known))


@rule
def evaluating_needs_data(run):
    """`ValueError: Trainer: evaluation requires an eval_dataset.`; `do_eval` alone evaluates nothing."""
    if run["eval_strategy"] != "no":
        return
    if run["eval_on_start"]:
        yield problem(
            run, "eval_on_start", "loads no data to evaluate on without eval_strategy", "--eval_strategy steps"
        )
    if run.explicit("do_eval") and run["do_eval"]:
        yield advice(run, "do_eval", "evaluates nothing without eval_strategy", "--eval_strategy epoch")


@rule
def accuracy_is_computed_at_the_end(run):
    """`batch_eval_metrics` calls it with an argument it does not take; batches that stay apart are no one array."""
    if run["task"] != "sequence_classification":
        return
    apart = run["eval_strategy"] != "no" and not run["eval_do_concat_batches"]
    for name, fails in (("batch_eval_metrics", run["batch_eval_metrics"]), ("eval_do_concat_batches", apart)):
        if fails:
            yield problem(run, name, "cannot be combined with the accuracy of train.py", "leave it out")


@rule
def labels_have_one_name(run):
    """`KeyError: ... 'eval_loss', which is not found`: train.py's batches call their labels `labels`."""
    if run["label_names"] not in (None, ["labels"]):
        yield problem(run, "label_names", f"{run['label_names']} are not in the batches of train.py", "leave it out")


@rule
def batches_come_out_even(run):
    """A rank that gets a batch less leaves the others waiting for it, until a timeout if there is one."""
    evens = accelerator_config(run).get("even_batches", True)
    if evens is False and run.world_size > 1 and not run["dataloader_drop_last"]:
        fix = "leave even_batches on: an example that fills up the last batch is not counted"
        yield problem(run, "accelerator_config", "even_batches false lets ranks wait for each other for ever", fix)


@rule
def a_training_trains(run):
    """train.py trains, and evaluates when `eval_strategy` says; these flags are for scripts that look at them."""
    if run.explicit("do_train") and not run["do_train"]:
        yield problem(run, "do_train", "false, and train.py does nothing else", "leave it out")
    if run.explicit("do_predict") and run["do_predict"]:
        yield advice(run, "do_predict", "predicts nothing: train.py trains and evaluates", "leave it out")


@rule
def a_resume_skips_what_was_trained(run):
    """With `ignore_data_skip` a resumed run begins the epoch anew: some examples twice, others never."""
    if run["ignore_data_skip"]:
        yield advice(run, "ignore_data_skip", "a resumed run sees some examples twice, others never", "leave it out")


@rule
def test_split_is_used(run):
    """Without an evaluation strategy the split is loaded by nobody."""
    if run["eval_strategy"] == "no" and run.explicit("dataset_test_split") and run["dataset_test_split"]:
        yield advice(run, "dataset_test_split", "is not used without evaluations", "--eval_strategy epoch")


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


# --- Workers ---------------------------------------------------------------------------------------------------------


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
def persistent_workers_change_a_resume(run):
    """Persistent workers carry random state into the next epoch, which a resumed run does not have.

    That shows where random numbers are drawn: with dropout, or data that is augmented.
    """
    if run["dataloader_persistent_workers"] and run["dataloader_num_workers"]:
        what = "a resumed run draws other random numbers than an uninterrupted one from the next epoch on"
        yield advice(run, "dataloader_persistent_workers", what, "leave it out where runs are resumed")


# --- Adapters and quantisation ---------------------------------------------------------------------------------------


@rule
def four_bits_need_adapters(run):
    """`You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters`"""
    if run["load_in_4bit"] and not run["use_peft"]:
        yield problem(run, "load_in_4bit", "weights in 4 bits cannot be trained", "--use_peft")


@rule
def qlora_loads_whole_weights(run):
    """ZeRO-3 shards 4-bit weights only after loading: until then every process holds the whole quantised model."""
    if run["load_in_4bit"] and zero_stage(run) == 3:
        what = "weights are sharded by ZeRO-3 only once every process has loaded them all"
        yield advice(run, "load_in_4bit", what, "--recipe memory (ZeRO-2) where one process cannot hold them")


@rule
def quantised_loading_is_installed(run):
    """`ImportError: Using bitsandbytes 4-bit quantization requires bitsandbytes`, `PEFT is not installed`"""
    for name, package in (("load_in_4bit", "bitsandbytes"), ("use_peft", "peft")):
        if run[name] and not available(run, package):
            yield missing(run, name, package)


_ONLY_WITH = {
    "use_peft": ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant"),
}


@rule
def adapter_settings_need_adapters(run):
    """Without `use_peft` the whole model trains, whatever lora_r says."""
    for switch, names in _ONLY_WITH.items():
        for name in names:
            if run.explicit(name) and not run[switch]:
                yield advice(run, name, f"is ignored without {switch}", f"--{switch}, or leave it out")


# --- What is installed -----------------------------------------------------------------------------------------------


@rule
def deepspeed_is_installed(run):
    """`ImportError: DeepSpeed is not available`, after every process has started; it is built for Linux."""
    if not uses_deepspeed(run):
        return
    if run.hardware.platform != "linux":
        yield problem(
            run, "recipe", f"needs DeepSpeed, which does not run on {run.hardware.platform}", "--recipe standard"
        )
    elif not available(run, "deepspeed"):
        yield missing(run, "recipe", "deepspeed")


@rule
def liger_is_installed(run):
    """`ImportError: You have set use_liger_kernel to True but liger-kernel >= 0.3.0 is not available`"""
    if run["use_liger_kernel"] and not run.hardware.liger:
        yield missing(run, "use_liger_kernel", "liger-kernel")


# Import names of reporting integrations, where they differ from what `report_to` calls them.
_REPORT_MODULES = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": ""}


@rule
def reports_go_somewhere(run):
    """`... is not supported, only ... are supported`, or `RuntimeError: ... requires ... to be installed`."""
    asked = run["report_to"]
    for name in [asked] if isinstance(asked, str) else asked or []:
        if name in ("all", "none"):
            continue
        if name not in legal.report_integrations():
            near = _closest(name, legal.report_integrations())
            several = " ".join(name.split(","))
            fix = (
                f"--report_to {several if ',' in name else near}"
                if near or "," in name
                else "one of none, " + ", ".join(legal.report_integrations())
            )
            yield problem(run, "report_to", f"there is no {name!r}", fix)
            continue
        module = _REPORT_MODULES.get(name, name)
        alternative = name == "tensorboard" and available(run, "tensorboardX")
        if module and not available(run, module) and not alternative:
            yield missing(run, "report_to", module, f"{name} needs the package {module}")


def _closest(name: str, names: Any) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(name, list(names), 1, 0.6)), "")


# --- Speed and the environment ---------------------------------------------------------------------------------------


@rule
def yaml_compiles_what_the_arguments_do_not(run):
    """A dynamo backend in the YAML turns compilation on behind `torch_compile=False`; DeepSpeed ignores it."""
    backend = run.engine.dynamo_backend
    if backend == "no":
        return
    if run.engine.kind == "deepspeed":
        yield Problem("dynamo_config", "is ignored under DeepSpeed", "--torch_compile", run.engine.source, "advice")
    elif not run["torch_compile"]:
        what = f"{backend} compiles a run whose torch_compile is off"
        yield Problem("dynamo_config", what, "remove it from the YAML, or --torch_compile", run.engine.source)


@rule
def compile_backend_is_known(run):
    """`ValueError: 'FOO' is not a valid DynamoBackend`, when the Trainer is built."""
    backend = run["torch_compile_backend"]
    known = [name.lower() for name in legal.accelerate_choices()["DynamoBackend"]] if backend else []
    if backend and backend.lower() not in known:
        fix = _closest(backend.lower(), known) or "one of " + ", ".join(known)
        yield problem(run, "torch_compile_backend", f"there is no backend {backend!r}", fix)


@rule
def compile_settings_compile(run):
    """A backend or a mode turns `torch_compile` on, even beside `torch_compile false`."""
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if run[name] and run.explicit("torch_compile") and not run["torch_compile"]:
            yield problem(run, name, "turns torch_compile on, which is switched off", f"leave {name} out")


@rule
def counting_tokens_costs_a_sync(run):
    """A gather and a host sync in every micro-step."""
    if run["include_num_input_tokens_seen"] not in (False, "no"):
        what = "costs a gather and a host sync in every micro-step"
        yield advice(run, "include_num_input_tokens_seen", what, "leave it out: the summary counts tokens")


@rule
def logging_costs_a_sync(run):
    """Every log is an all-gather and a host sync."""
    if run.explicit("logging_steps") and run["logging_steps"] == 1 and run["logging_strategy"] == "steps":
        yield advice(run, "logging_steps", "1 costs an all-gather and a host sync every step", "--logging_steps 10")


@rule
def nccl_timeout_is_an_argument(run):
    """NCCL_TIMEOUT is read by nobody: the process group's timeout is `ddp_timeout`."""
    if "NCCL_TIMEOUT" in run.environment:
        what = "has no effect on the process group's timeout"
        yield Problem("NCCL_TIMEOUT", what, "--ddp_timeout SECONDS", "environment", "advice")


@rule
def shared_memory_is_fast(run):
    """NCCL_SHM_DISABLE=1 is a workaround for a broken or tiny /dev/shm, and slower everywhere else."""
    if is_true(run.environment.get("NCCL_SHM_DISABLE", "0")):
        what = "turns off NCCL's shared-memory transport, which is slower"
        yield Problem("NCCL_SHM_DISABLE", what, "unset it, unless /dev/shm is broken or tiny", "environment", "advice")


# --- Nested settings -------------------------------------------------------------------------------------------------


@rule
def nested_settings_are_known(run):
    """fsdp_config takes any key silently; the others fail with a TypeError or ValueError in every rank."""
    fsdp = {str(key).removeprefix("fsdp_") for key in _mapping(run["fsdp_config"])}
    nested = (
        ("accelerator_config", accelerator_config(run), legal.accelerator_config_keys),
        ("accelerator_config", gradient_accumulation_kwargs(run), legal.gradient_accumulation_keys),
        ("gradient_checkpointing_kwargs", _mapping(run["gradient_checkpointing_kwargs"]), legal.checkpoint_keys),
        ("fsdp_config", fsdp, legal.fsdp_config_keys),
    )
    for name, keys, read_known in nested:
        known = read_known() if keys else frozenset()  # read from a source only where there is something to look up
        for key in sorted(set(keys) - known):
            fix = _closest(key, known) or "one of " + ", ".join(sorted(known))
            yield problem(run, name, f"has no key {key!r}", fix)


# Settings that may be the name of a JSON file, and those that are one mapping or nothing.
_MAY_BE_A_FILE = ("accelerator_config", "fsdp_config", "deepspeed")
_NO_FILE = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs")
_READ_ONLY_WITH = {"fsdp_config": "fsdp", "gradient_checkpointing_kwargs": "gradient_checkpointing"}


@rule
def nested_settings_can_be_read(run):
    """Text is the name of a JSON file for some of them, `TypeError: ... must be a mapping, not str` for the others."""
    for name in (*_MAY_BE_A_FILE, *_NO_FILE):
        value = run[name]
        if not isinstance(value, str) or value.lstrip().startswith("{") or _is_unread(run, name):
            continue
        if name in _NO_FILE:
            yield problem(run, name, f"{value!r} is no JSON, and its file is read by nobody", 'JSON: {"name": value}')
        elif not (name == "deepspeed" and _base64_json(value)):
            yield from _readable(run, name, value)


def _is_unread(run: RunSpec, name: str) -> bool:
    if name == "lr_scheduler_kwargs":
        return run["lr_scheduler_type"] in ("constant", "constant_with_warmup")
    return name in _READ_ONLY_WITH and not run[_READ_ONLY_WITH[name]]


def _base64_json(text: str) -> bool:
    """DeepSpeed takes its configuration in base64 too."""
    try:
        return isinstance(json.loads(base64.urlsafe_b64decode(text)), dict)
    except ValueError:
        return False


def _readable(run: RunSpec, name: str, file: str) -> Iterator[Problem]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError:
        yield problem(run, name, f"{file} cannot be read", "the path of a JSON file, or JSON")
    except ValueError as error:
        yield problem(run, name, f"{file} is not valid JSON: {error}", "a JSON object")
    else:
        if not isinstance(content, dict):
            yield problem(run, name, f"{file} holds a {type(content).__name__}", "a JSON object")
