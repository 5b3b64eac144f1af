"""What can be wrong in an Accelerate YAML and in a DeepSpeed JSON, one small named rule each.

accelerate refuses an unknown key at the top, drops one inside a section without a word, and checks hardly any value:
most mistakes appear in the workers, or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from recipes import legal
from recipes.errors import Problem
from recipes.legal import moved
from recipes.rules.settings import deepspeed_file, is_true, rule, uses_deepspeed
from recipes.run import nearest
from recipes.run.command_line import belongs

if TYPE_CHECKING:
    from recipes.run import RunSpec

SECTIONS = (
    "deepspeed_config",
    "fsdp_config",
    "dynamo_config",
    "parallelism_config",
    "mpirun_config",
    "fp8_config",
    "megatron_lm_config",
)
# `accelerate config` itself writes keys into these that its launcher does not read: advice, not an error.
_LOOSE_SECTIONS = ("fp8_config", "megatron_lm_config")


def wrong(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem in the Accelerate YAML."""
    return Problem(subject, what, fix, run.engine.source, severity)


def sections(run: RunSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in SECTIONS:
        if isinstance(run.engine.raw.get(name), Mapping):
            yield name, run.engine.raw[name]


def deepspeed_section(run: RunSpec) -> Mapping[str, Any]:
    return dict(sections(run)).get("deepspeed_config", {})


# --- Names -----------------------------------------------------------------------------------------------------------


@rule
def yaml_keys_are_known(run):
    """`The config file at ... had unknown keys ([...])`: accelerate stops before it starts a process."""
    for key in run.engine.raw:
        if key not in legal.accelerate_keys():
            yield wrong(run, str(key), *_where_it_belongs(str(key), legal.accelerate_keys()))


@rule
def nested_yaml_keys_are_known(run):
    """accelerate drops them silently: `zero_stge: 3` trains with stage 2, `fsdp_verion: 2` with FSDP1."""
    for name, section in sections(run):
        known = legal.accelerate_nested_keys(name)
        severity = "advice" if name in _LOOSE_SECTIONS else "error"
        for key in section:
            if key in known:
                continue
            prefixed = f"{name}_{key}"
            if prefixed in known:
                yield wrong(run, str(key), f"is dropped silently in {name}", prefixed, severity)
                continue
            what, fix = _where_it_belongs(str(key), known)
            yield wrong(run, str(key), f"{what}; in {name} it is dropped silently", fix, severity)


def _where_it_belongs(key: str, known: Any) -> tuple[str, str]:
    """What is wrong with an unknown key, and what to write instead: the argument it is, its section, a near name."""
    argument = key if key in legal.settings() else belongs(key)
    if argument in legal.settings():
        return "is an argument of the run, no key of the Accelerate YAML", f"--{argument}"
    if key in moved.RENAMED:
        what, fix = moved.RENAMED[key]
        return f"is no key of the Accelerate YAML, and as an argument {what}", fix
    near = nearest(key, known)
    if near and near != key:
        return "is no key of the Accelerate YAML", near
    if key in legal.accelerate_keys():
        return "belongs at the top level", f"{key}, not indented"
    for section in SECTIONS:
        if key in legal.accelerate_nested_keys(section):
            return f"belongs in {section}", f"{section}: with {key} below it, indented"
    everything = {name: name for section in SECTIONS for name in legal.accelerate_nested_keys(section)}
    near = nearest(key, everything) or nearest(key, legal.settings())
    return "is no key of the Accelerate YAML", near or "one of " + ", ".join(sorted(known))


@rule
def sections_hold_settings(run):
    """`AttributeError: 'str' object has no attribute 'keys'` in the launcher."""
    for name in SECTIONS:
        value = run.engine.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            fix = (
                f"deepspeed_config_file: {value}, below deepspeed_config"
                if name == "deepspeed_config"
                else "name: value below it"
            )
            yield wrong(run, name, f"holds settings, got {value!r}", fix)


@rule
def sections_fit_the_type(run):
    """A section of another distributed type is not read."""
    for name, types in (
        ("deepspeed_config", ("DEEPSPEED",)),
        ("fsdp_config", ("FSDP",)),
        ("megatron_lm_config", ("MEGATRON_LM",)),
    ):
        given = run.engine.raw.get("distributed_type")
        if run.engine.raw.get(name) and given not in types:
            yield wrong(
                run, name, f"is not read with distributed_type {given}", f"distributed_type: {types[0]}", "advice"
            )


# --- Values at the top -----------------------------------------------------------------------------------------------


@rule
def compute_environment_is_known(run):
    """Anything else is read as a SageMaker configuration: `unknown keys (['num_processes'])`."""
    known = legal.accelerate_choices()["ComputeEnvironment"]
    value = run.engine.raw.get("compute_environment", "LOCAL_MACHINE")
    if value not in known:
        yield wrong(run, "compute_environment", f"there is no {value!r}", "LOCAL_MACHINE")


@rule
def distributed_type_is_known(run):
    """`A distributed_type must be specified`, or `'multi_gpu' is not a valid DistributedType`: capitals count."""
    if not run.engine.raw:
        return
    if "distributed_type" not in run.engine.raw:
        yield wrong(run, "distributed_type", "is missing", "distributed_type: MULTI_GPU, or 'NO' for one process")
        return
    value = run.engine.raw["distributed_type"]
    if value is False:  # what YAML makes of a bare NO; accelerate then wants num_processes too
        severity = "advice" if "num_processes" in run.engine.raw else "error"
        yield wrong(run, "distributed_type", "NO without quotes is false in YAML", "distributed_type: 'NO'", severity)
    elif value not in legal.distributed_types():
        near = nearest(str(value).upper(), legal.distributed_types())
        yield wrong(
            run, "distributed_type", f"there is no {value!r}", near or "one of " + ", ".join(legal.distributed_types())
        )


@rule
def mixed_precision_is_known(run):
    """`AttributeError: 'bool' object has no attribute 'lower'` for a bare `no`, `Unknown mixed_precision mode` else."""
    value = run.engine.raw.get("mixed_precision")
    if value is None:
        return
    if value is False:
        yield wrong(run, "mixed_precision", "no without quotes is false in YAML, which fails", "mixed_precision: 'no'")
    elif str(value).lower() not in legal.accelerate_choices()["PrecisionType"] or value is True:
        fix = "one of " + ", ".join(f"'{name}'" for name in legal.accelerate_choices()["PrecisionType"])
        yield wrong(run, "mixed_precision", f"there is no {value!r}", fix)


_WHOLE_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
_SWITCHES = (
    "use_cpu",
    "debug",
    "same_network",
    "enable_cpu_affinity",
    "downcast_bf16",
    "tpu_use_cluster",
    "tpu_use_sudo",
)


@rule
def top_level_values_have_the_right_type(run):
    """`TypeError: '>' not supported between instances of 'str' and 'int'`: accelerate takes them as YAML reads them."""
    raw = run.engine.raw
    for name in _WHOLE_NUMBERS:
        if raw.get(name) is None or type(raw[name]) is int:
            continue
        is_read_as_text = name in ("num_processes", "machine_rank") and run.engine.kind != "single"
        severity = "advice" if is_read_as_text and str(raw[name]).isdigit() else "error"
        fix = f"{name}: {raw[name] if str(raw[name]).isdigit() else 1}, without quotes"
        yield wrong(run, name, f"takes a whole number, got {raw[name]!r}", fix, severity)
    for name in _SWITCHES:
        if (
            raw.get(name) is not None
            and not isinstance(raw[name], bool)
            and str(raw[name]).lower() not in ("no", "yes")
        ):
            yield wrong(run, name, f"takes true or false, got {raw[name]!r}", f"{name}: false")
    if raw.get("gpu_ids") is not None and not isinstance(raw["gpu_ids"], str):
        yield wrong(run, "gpu_ids", f"takes text, got {raw['gpu_ids']!r}", "gpu_ids: '0,1', or all")


@rule
def num_processes_is_given(run):
    """`You need to manually pass in --num_processes using this config yaml.`"""
    raw = run.engine.raw
    value = raw.get("num_processes", 1 if raw.get("distributed_type") == "NO" else -1)
    if not raw or type(value) is not int or value >= 1:
        return
    if value == -1 or value is None:
        if run.world_size == 1:  # else somebody gave it
            fix = "num_processes: 1, or accelerate launch --num_processes N"
            yield wrong(run, "num_processes", "is not in the file, accelerate launch has to be given it", fix, "advice")
        return
    yield wrong(run, "num_processes", f"{value} starts nothing", "num_processes: 1")


@rule
def gpu_ids_name_enough_gpus(run):
    """`Less than two GPU ids were configured and tried to run on multiple GPUs.`"""
    ids = run.engine.raw.get("gpu_ids")
    if (
        not isinstance(ids, str)
        or ids == "all"
        or run.engine.kind != "ddp"
        or run.engine.raw.get("num_machines", 1) != 1
    ):
        return
    count = len(ids.split(","))
    if count < 2:
        yield wrong(
            run,
            "gpu_ids",
            f"{ids!r} is one GPU, and MULTI_GPU wants several",
            "gpu_ids: all, or distributed_type: 'NO'",
        )
    elif count < run.world_size and run.hardware.cuda and not run["use_cpu"]:
        yield wrong(run, "gpu_ids", f"names {count} GPUs for {run.world_size} processes", "gpu_ids: all")


@rule
def machines_share_the_processes(run):
    """The launcher divides and drops the rest: 3 processes on 2 machines start 1 each, and wait for the third."""
    machines, rank = run.engine.raw.get("num_machines", 1), run.engine.raw.get("machine_rank", 0)
    if type(machines) is not int:
        return
    if machines < 1:
        yield wrong(run, "num_machines", f"{machines} machines", "num_machines: 1")
        return
    if machines > 1 and run.world_size > 1 and run.world_size % machines:
        nearest_multiple = -(-run.world_size // machines) * machines
        what = f"{run.world_size} cannot be shared by {machines} machines"
        yield wrong(run, "num_processes", what, f"num_processes: {nearest_multiple}, over all machines")
    if type(rank) is int and not 0 <= rank < machines:
        yield wrong(
            run, "machine_rank", f"{rank} is not below num_machines {machines}", f"machine_rank: 0 to {machines - 1}"
        )


@rule
def machines_find_each_other(run):
    """Without an address every machine looks for one named None until the rendezvous times out."""
    machines = run.engine.raw.get("num_machines", 1)
    if type(machines) is not int or machines < 2:
        return
    for name, flag in (("main_process_ip", "ADDRESS"), ("main_process_port", "29500")):
        if run.engine.raw.get(name) is None:
            yield wrong(run, name, f"is not in the file, and {machines} machines need it", f"--{name} {flag}", "advice")


@rule
def ports_exist(run):
    """A port is a number from 0, which takes a free one, to 65535."""
    port = run.engine.raw.get("main_process_port")
    if type(port) is int and not 0 <= port <= 65535 and run.engine.kind != "single":
        yield wrong(
            run, "main_process_port", f"there is no port {port}", "main_process_port: 29500, or 0 for a free one"
        )


# --- Values in sections ----------------------------------------------------------------------------------------------

# The launcher compares these with "true", so that any other word is false; everywhere else it takes yes and 1 too.
_ONLY_TRUE = ("zero3_init_flag", "zero3_save_16bit_model")
_LISTED = {
    "fsdp_sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
    "dynamo_backend": "DynamoBackend",
    "dynamo_mode": "TORCH_DYNAMO_MODES",
    "deepspeed_multinode_launcher": "DEEPSPEED_MULTINODE_LAUNCHERS",
}


@rule
def nested_yaml_values_are_legal(run):
    """Nothing checks them in the launcher: they fail in every worker, or count as false."""
    for name, section in sections(run):
        known = legal.accelerate_nested_keys(name)
        for key, value in section.items():
            expected = _expected(known[key], value) if key in known and value is not None else ""
            if expected:
                yield wrong(run, str(key), f"{value!r} is none of its values", expected)


def _expected(field: legal.Field, value: Any) -> str:
    """What the key takes, where `value` is something else; empty where it is fine."""
    text = str(value).lower()
    names = {field.name, f"fsdp_{field.name}", f"dynamo_{field.name}"}
    listed = next((legal.accelerate_choices()[_LISTED[name]] for name in _LISTED if name in names), ())
    if listed:
        return "" if text in (choice.lower() for choice in listed) or text.isdigit() else "one of " + ", ".join(listed)
    if set(field.choices) == {"true", "false"}:
        words = (
            ("true", "false")
            if field.name in _ONLY_TRUE
            else ("true", "false", "yes", "no", "y", "n", "1", "0", "on", "off")
        )
        return "" if text in words else "true or false"
    if field.choices:
        return "" if text in (choice.lower() for choice in field.choices) else "one of " + ", ".join(field.choices)
    if field.name == "zero_stage":
        return "" if text in ("0", "1", "2", "3") and value is not True else "0, 1, 2 or 3"
    if field.annotation in ("int", "float"):
        return "" if text == "auto" or _is_number(value, field.annotation) else f"a number ({field.annotation})"
    return ""


def _is_number(value: Any, kind: str) -> bool:
    try:
        return not isinstance(value, bool) and (float(value) == int(float(value)) or kind == "float")
    except (TypeError, ValueError):
        return False


# --- DeepSpeed in the YAML -------------------------------------------------------------------------------------------


@rule
def nvme_paths_reach_the_workers(run):
    """The launcher exports no nvme path: DeepSpeed swaps to ./none/zero_stage_3 in the working directory."""
    for kind in ("optimizer", "param"):
        if str(deepspeed_section(run).get(f"offload_{kind}_device")).lower() == "nvme":
            fix = "a deepspeed_config_file with nvme_path, or device cpu"
            yield wrong(run, f"offload_{kind}_device", "nvme's path never reaches the processes", fix)


@rule
def parameters_are_offloaded_by_stage_three(run):
    """Below stage 3 offload_param_device is accepted and does nothing."""
    section = deepspeed_section(run)
    device = str(section.get("offload_param_device", "none")).lower()
    if device in ("cpu", "nvme") and str(section.get("zero_stage", 2)) in ("0", "1", "2"):
        yield wrong(
            run, "offload_param_device", "needs ZeRO stage 3", "zero_stage: 3, or offload_param_device: none", "advice"
        )


_SAID_IN_JSON = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)


@rule
def deepspeed_is_configured_once(run):
    """`When using deepspeed_config_file, the following accelerate config variables will be ignored`: an error."""
    section = deepspeed_section(run)
    if not section.get("deepspeed_config_file"):
        return
    for name in _SAID_IN_JSON:
        if name in section:
            yield wrong(
                run, name, "cannot be said beside deepspeed_config_file", "say it in the JSON, and remove it here"
            )
    if run.engine.raw.get("mixed_precision") is not None:
        what = "cannot be said beside deepspeed_config_file"
        yield wrong(run, "mixed_precision", what, "remove it here; bf16 or fp16 in the JSON with enabled: auto")


@rule
def deepspeed_file_can_be_read(run):
    """Read in the workers only: every rank fails with the same traceback."""
    import json
    from pathlib import Path

    file = deepspeed_section(run).get("deepspeed_config_file")
    if not file:
        return
    try:
        content = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except OSError:
        yield wrong(run, "deepspeed_config_file", f"{file} cannot be read", "the path of a JSON file")
    except ValueError as error:
        yield wrong(run, "deepspeed_config_file", f"{file} is not valid JSON: {error}", "a JSON object")
    else:
        if not isinstance(content, dict):
            yield wrong(run, "deepspeed_config_file", f"{file} holds a {type(content).__name__}", "a JSON object")
        elif "zero_optimization" not in content:
            yield wrong(run, "zero_optimization", f"is missing in {file}", '"zero_optimization": {"stage": 2}')


@rule
def yaml_agrees_with_the_batch(run):
    """`Please correct the following DeepSpeed config values that mismatch TrainingArguments`, in every worker."""
    if run.engine.kind != "deepspeed":
        return
    for name, argument in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        value = deepspeed_section(run).get(name)
        if value in (None, "auto") or not _is_number(value, "float"):
            continue
        if float(value) != run[argument]:
            yield wrong(run, name, f"{value} contradicts {argument} {run[argument]:g} of the run", "leave it out")


# --- FSDP in the YAML ------------------------------------------------------------------------------------------------


@rule
def fsdp_version_two_is_chosen(run):
    """The launcher's default is FSDP1, which Trainer deprecates; Trainer's own default is 2."""
    section = dict(sections(run)).get("fsdp_config")
    if run.engine.kind != "fsdp" or section is None:
        return
    version = section.get("fsdp_version", section.get("version", 1))
    if str(version) == "1":
        yield wrong(
            run, "fsdp_version", "1 is what accelerate takes without it, and is deprecated", "fsdp_version: 2", "advice"
        )


@rule
def efficient_loading_needs_synchronisation(run):
    """`When using --fsdp_cpu_ram_efficient_loading set --fsdp_sync_module_states to True`; the first is the default."""
    section = dict(sections(run)).get("fsdp_config", {})
    synchronises = section.get("fsdp_sync_module_states", section.get("sync_module_states", True))
    efficient = section.get("fsdp_cpu_ram_efficient_loading", section.get("cpu_ram_efficient_loading", True))
    if run.engine.kind == "fsdp" and not synchronises and efficient:
        fix = "fsdp_sync_module_states: true, or fsdp_cpu_ram_efficient_loading: false"
        yield wrong(run, "fsdp_sync_module_states", "is needed by fsdp_cpu_ram_efficient_loading", fix)


# --- The DeepSpeed JSON ----------------------------------------------------------------------------------------------


def _json_source(run: RunSpec) -> str:
    named = (
        run["deepspeed"] if isinstance(run["deepspeed"], str) else deepspeed_section(run).get("deepspeed_config_file")
    )
    return str(named or "DeepSpeed JSON")


@rule
def deepspeed_json_keys_are_known(run):
    """Unknown top-level keys pass silently (`gradient_cliping`); those in zero_optimization fail in every worker."""
    content = deepspeed_file(run)
    if not content or not legal.deepspeed_keys():
        return
    zero = content.get("zero_optimization")
    for names, known in ((content, legal.deepspeed_keys()), (zero, legal.deepspeed_zero_keys())):
        for key in names if isinstance(names, dict) else ():
            if key not in known:
                fix = nearest(str(key), known) or "a key of DeepSpeed's own reference"
                yield Problem(str(key), "is no key that DeepSpeed reads", fix, _json_source(run))


@rule
def deepspeed_json_agrees_with_arguments(run):
    """`Please correct the following DeepSpeed config values that mismatch TrainingArguments values`, or say "auto"."""
    content = deepspeed_file(run)
    if not content or not uses_deepspeed(run):
        return
    for path, expected, argument in _must_match(run):
        value = _at(content, path)
        if value is None or value == "auto" or value == expected:
            continue
        what = f"{value} contradicts {argument} {expected}"
        yield Problem(path, what, f'"{path.rpartition(".")[2]}": "auto"', _json_source(run))


def _must_match(run: RunSpec) -> Iterator[tuple[str, Any, str]]:
    """Where in the JSON, what the arguments say, and which argument that is."""
    yield "train_micro_batch_size_per_gpu", run["per_device_train_batch_size"], "per_device_train_batch_size"
    yield "gradient_accumulation_steps", run["gradient_accumulation_steps"], "gradient_accumulation_steps"
    yield "train_batch_size", run.batch.total, "the global batch"
    yield "gradient_clipping", run["max_grad_norm"], "max_grad_norm"
    yield "optimizer.params.lr", run["learning_rate"], "learning_rate"
    yield "optimizer.params.betas", [run["adam_beta1"], run["adam_beta2"]], "adam_beta1 and adam_beta2"
    yield "optimizer.params.eps", run["adam_epsilon"], "adam_epsilon"
    yield "optimizer.params.weight_decay", run["weight_decay"], "weight_decay"
    yield "scheduler.params.warmup_max_lr", run["learning_rate"], "learning_rate"
    yield "fp16.enabled", bool(run["fp16"] or run["fp16_full_eval"]), "fp16"
    yield "bf16.enabled", bool(run["bf16"] or run["bf16_full_eval"]), "bf16"
    if run["warmup_steps"] == 0 or run["warmup_steps"] >= 1:
        yield "scheduler.params.warmup_num_steps", max(1, int(run["warmup_steps"])), "warmup_steps"
    if run["max_steps"] > 0:
        yield "scheduler.params.total_num_steps", run["max_steps"], "max_steps"


def _at(content: Any, path: str) -> Any:
    for name in path.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


@rule
def deepspeed_json_has_one_precision(run):
    """`bfloat16 and fp16 modes cannot be simultaneously enabled` from DeepSpeed's own configuration."""
    content = deepspeed_file(run) or {}
    if is_true(_at(content, "bf16.enabled")) and is_true(_at(content, "fp16.enabled")):
        yield Problem("fp16.enabled", "and bf16.enabled are both on", '"enabled": "auto" in both', _json_source(run))


@rule
def zero_stages_exist(run):
    """`Input should be 0, 1, 2 or 3`, from every worker."""
    stage = _at(deepspeed_file(run) or {}, "zero_optimization.stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        yield Problem("zero_optimization.stage", f"there is no stage {stage}", "0, 1, 2 or 3", _json_source(run))
