"""The Accelerate YAML: its keys, its values, and what the launcher makes of them.

accelerate refuses an unknown key at the top, silently drops one inside a section, and checks hardly
any value: most mistakes appear in the workers, or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipes import legal
from recipes.errors import Problem, plural
from recipes.flags import MOST_PROCESSES
from recipes.legal import moved
from recipes.rules.facts import (
    READ_BY,
    SECTIONS,
    deepspeed_file,
    deepspeed_section,
    fsdp_section,
    fsdp_version,
    in_yaml,
    is_read,
    is_true,
    on_gpu,
    rule,
    sections,
)
from recipes.run import RunSpec, nearest
from recipes.run.command_line import belongs
from recipes.run.engine import DEEPSPEED_VARIABLES
from recipes.run.parallelism import SIZES


@rule
def yaml_keys_are_known(run):
    """`The config file at ... had unknown keys ([...])`, from the launcher."""
    for key in run.engine.raw:
        if key not in legal.accelerate_keys():
            yield in_yaml(run, str(key), *_where_it_belongs(str(key), legal.accelerate_keys()))


# `accelerate config` writes keys into these that its launcher does not read: advice, not an error.
_LOOSE_SECTIONS = ("fp8_config", "megatron_lm_config")


@rule
def nested_yaml_keys_are_known(run):
    """accelerate drops unknown keys: `zero_stge: 3` trains stage 2, `fsdp_verion: 2` FSDP1."""
    for name, section in sections(run):
        known = legal.accelerate_nested_keys(name)
        severity = "advice" if name in _LOOSE_SECTIONS else "error"
        for key in section:
            if key in known:
                continue
            prefixed = f"{name}_{key}"
            if prefixed in known:
                yield in_yaml(run, str(key), f"is dropped silently in {name}", prefixed, severity)
                continue
            what, fix = _where_it_belongs(str(key), known)
            yield in_yaml(run, str(key), f"{what}; in {name} it is dropped silently", fix, severity)


def _where_it_belongs(key: str, known: Iterable[str]) -> tuple[str, str]:
    """What is wrong with an unknown key, and the argument, section or name to write instead."""
    argument = key if key in legal.settings() else belongs(key)
    if argument in legal.settings():
        return "is an argument of the run, not a key of the Accelerate YAML", f"--{argument}"
    if key in moved.RENAMED:
        what, fix = moved.RENAMED[key]
        return f"is not a key of the Accelerate YAML, and as an argument {what}", fix
    near = nearest(key, known)
    if near and near != key:
        return "is not a key of the Accelerate YAML", near
    if key in legal.accelerate_keys():
        return "belongs at the top level", f"{key}, not indented"
    for section in SECTIONS:
        if key in legal.accelerate_nested_keys(section):
            return f"belongs in {section}", f"{section}: with {key} below it, indented"
    everything = {name: name for section in SECTIONS for name in legal.accelerate_nested_keys(section)}
    near = nearest(key, everything) or nearest(key, legal.settings())
    return "is not a key of the Accelerate YAML", near or "one of " + ", ".join(sorted(known))


@rule
def sections_hold_settings(run):
    """`AttributeError: 'str' object has no attribute 'keys'` in the launcher, if it reads them."""
    for name in SECTIONS:
        value = run.engine.raw.get(name)
        if is_read(run, name) and value is not None and not isinstance(value, Mapping):
            is_deepspeed = name == "deepspeed_config"
            fix = f"deepspeed_config_file: {value}, below {name}" if is_deepspeed else "name: value below it"
            yield in_yaml(run, name, f"takes settings, got {value!r}", fix)


@rule
def sections_fit_the_type(run):
    """A section of another distributed type is not read."""
    given = run.engine.raw.get("distributed_type")
    for name, kind in READ_BY.items():
        if run.engine.raw.get(name) and not is_read(run, name):
            what = f"is not read with distributed_type {given}"
            yield in_yaml(run, name, what, f"distributed_type: {kind.upper()}", "advice")


@rule
def compute_environment_is_known(run):
    """Anything else is read as a SageMaker configuration: `unknown keys (['num_processes'])`."""
    known = legal.accelerate_choices()["ComputeEnvironment"]
    value = run.engine.raw.get("compute_environment", "LOCAL_MACHINE")
    if value not in known:
        yield in_yaml(run, "compute_environment", f"{value!r} is not one of its values", "LOCAL_MACHINE")


@rule
def distributed_type_is_known(run):
    """`A distributed_type must be specified`, or `'multi_gpu' is not a valid DistributedType`."""
    if not run.engine.raw:
        return
    if "distributed_type" not in run.engine.raw:
        yield in_yaml(run, "distributed_type", "is missing", "distributed_type: MULTI_GPU, or 'NO' for one process")
        return
    value = run.engine.raw["distributed_type"]
    if value is False:  # YAML reads NO as false, and then accelerate requires num_processes
        severity = "advice" if run.engine.num_processes else "error"
        yield in_yaml(run, "distributed_type", "NO without quotes is false in YAML", "distributed_type: 'NO'", severity)
    elif value not in legal.distributed_types():
        near = nearest(str(value).upper(), legal.distributed_types())
        yield in_yaml(
            run,
            "distributed_type",
            f"{value!r} is not one of its values",
            near or "one of " + ", ".join(legal.distributed_types()),
        )


@rule
def mixed_precision_is_known(run):
    """`'bool' object has no attribute 'lower'` for a bare no, or `Unknown mixed_precision`."""
    value = run.engine.raw.get("mixed_precision")
    if value is None:
        return
    if value is False:
        yield in_yaml(
            run, "mixed_precision", "no without quotes is false in YAML, which fails", "mixed_precision: 'no'"
        )
    elif str(value).lower() not in legal.accelerate_choices()["PrecisionType"] or value is True:
        fix = "one of " + ", ".join(f"'{name}'" for name in legal.accelerate_choices()["PrecisionType"])
        yield in_yaml(run, "mixed_precision", f"{value!r} is not one of its values", fix)


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
    """`TypeError: '>' not supported between instances of 'str' and 'int'`, from the launcher."""
    raw = run.engine.raw
    for name in _WHOLE_NUMBERS:
        if raw.get(name) is None or type(raw[name]) is int:
            continue
        if name == "num_processes" and run.engine.kind == "single" and run.engine.num_processes is not None:
            continue  # the command line's count is taken
        is_read_as_text = name in ("num_processes", "machine_rank") and run.engine.kind != "single"
        severity = "advice" if is_read_as_text and str(raw[name]).isdigit() else "error"
        fix = f"{name}: {raw[name] if str(raw[name]).isdigit() else 1}, without quotes"
        yield in_yaml(run, name, f"takes a whole number, got {raw[name]!r}", fix, severity)
    for name in _SWITCHES:
        if (
            raw.get(name) is not None
            and not isinstance(raw[name], bool)
            and str(raw[name]).lower() not in ("no", "yes")
        ):
            yield in_yaml(run, name, f"takes true or false, got {raw[name]!r}", f"{name}: false")
    if raw.get("gpu_ids") is not None and not isinstance(raw["gpu_ids"], str):
        yield in_yaml(run, "gpu_ids", f"takes text, got {raw['gpu_ids']!r}", "gpu_ids: '0,1', or all")


@rule
def num_processes_is_given(run):
    """`You need to manually pass in `--num_processes` using this config yaml.`

    A null is `Unsupported nproc_per_node value: None`. 'NO' needs no count, and ignores a 0.
    """
    raw, launched = run.engine.raw, run.engine.num_processes
    if type(raw.get("num_processes")) is int and raw["num_processes"] > MOST_PROCESSES:
        yield in_yaml(run, "num_processes", "is not a possible number of processes", "num_processes: 1, one per GPU")
        return
    is_single = raw.get("distributed_type") in ("NO", False)
    value = raw.get("num_processes", 1 if is_single else None)
    if not raw or launched not in (None, value):
        return  # --num_processes was given
    if value in (None, -1):
        fix = "num_processes: 1, or --num_processes N, here and for accelerate launch"
        yield in_yaml(run, "num_processes", "is not in the file, and accelerate launch needs it", fix)
    elif type(value) is int and value < 1 and not is_single:
        yield in_yaml(run, "num_processes", f"{value} starts no process", "num_processes: 1")


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
        yield in_yaml(
            run,
            "gpu_ids",
            f"{ids!r} is one GPU, and MULTI_GPU wants several",
            "gpu_ids: all, or distributed_type: 'NO'",
        )
    elif count < run.world_size and on_gpu(run):
        yield in_yaml(run, "gpu_ids", f"names {plural(count, 'GPU')} for {run.world_size} processes", "gpu_ids: all")


@rule
def machines_share_the_processes(run):
    """The launcher rounds down: 3 processes on 2 machines start 1 on each, which hang."""
    machines, rank = run.engine.raw.get("num_machines", 1), run.engine.raw.get("machine_rank", 0)
    if machines is None:  # `TypeError: '>' not supported between instances of 'NoneType' and 'int'`
        yield in_yaml(run, "num_machines", "is empty", "num_machines: 1, or leave it out")
    if type(machines) is not int:
        return
    if machines < 1:
        yield in_yaml(run, "num_machines", f"{machines} is not a number of machines", "num_machines: 1")
        return
    if machines > 1 and run.world_size > 1 and run.world_size % machines:
        nearest_multiple = -(-run.world_size // machines) * machines
        what = f"{run.world_size} cannot be divided over {machines} machines"
        yield in_yaml(run, "num_processes", what, f"num_processes: {nearest_multiple}, over all machines")
    if type(rank) is int and not 0 <= rank < machines:
        yield in_yaml(
            run, "machine_rank", f"{rank} is not below num_machines {machines}", f"machine_rank: 0 to {machines - 1}"
        )


@rule
def machines_find_each_other(run):
    """Without an address every machine looks for a host named None, until a timeout."""
    machines = run.engine.raw.get("num_machines", 1)
    if type(machines) is not int or machines < 2:
        return
    for name, flag in (("main_process_ip", "ADDRESS"), ("main_process_port", "29500")):
        if run.engine.raw.get(name) is None:
            yield in_yaml(
                run,
                name,
                f"is not in the file, and {machines} machines need it",
                f"{name}: {flag}, or --{name} {flag} for accelerate launch",
                "advice",
            )


@rule
def ports_exist(run):
    """`OverflowError: bind(): port must be 0-65535`; 0 takes a free port."""
    port = run.engine.raw.get("main_process_port")
    if type(port) is int and not 0 <= port <= 65535 and run.engine.kind != "single":
        yield in_yaml(
            run, "main_process_port", f"there is no port {port}", "main_process_port: 29500, or 0 for a free one"
        )


# The launcher compares these with "true", so any other word means false.
_ONLY_TRUE = ("zero3_init_flag", "zero3_save_16bit_model")
_SWITCH_WORDS = ("true", "false", "yes", "no", "y", "n", "1", "0", "on", "off")

# Keys whose legal values accelerate has in a list: key -> name of the list.
_LISTED = {
    "fsdp_sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
    "dynamo_backend": "DynamoBackend",
    "deepspeed_multinode_launcher": "DEEPSPEED_MULTINODE_LAUNCHERS",
}


@rule
def nested_yaml_values_are_legal(run):
    """The launcher does not check them: they fail in every worker, or mean false."""
    for name, section in sections(run):
        known = legal.accelerate_nested_keys(name)
        for key, value in section.items():
            if str(key).removeprefix(f"{name}_") in SIZES.values():
                continue  # sizes_of_groups_are_counts
            expected = _expected(known[key], value) if key in known and value is not None else ""
            if expected:
                severity = "advice" if _is_unread(run, str(key)) else "error"
                yield in_yaml(run, str(key), f"{value!r} is not one of its values", expected, severity)


def _is_unread(run: RunSpec, key: str) -> bool:
    """Whether nothing in this run looks at this key of its section."""
    name = key.removeprefix("fsdp_")
    if name == "deepspeed_multinode_launcher":
        return run.engine.raw.get("num_machines", 1) == 1
    if name == "min_num_params":
        return str(fsdp_section(run).get("auto_wrap_policy")).upper() != "SIZE_BASED_WRAP"
    return name == "sharding_strategy" and fsdp_version(run) == 2


@rule
def variables_hold_legal_values(run):
    """The same in the variables of a launcher, set by hand: `Input should be 0, 1, 2 or 3`"""
    by_variables = is_true(run.environment.get("ACCELERATE_USE_DEEPSPEED")) and run["deepspeed"] is None
    overridden = run.engine.raw.get("distributed_type") == "DEEPSPEED" or deepspeed_file(run) is not None
    if not by_variables or overridden:
        return
    known = legal.accelerate_nested_keys("deepspeed_config")
    for key, variable in DEEPSPEED_VARIABLES.items():
        value = run.environment.get(variable)
        expected = _expected(known[key], value) if value is not None else ""
        if expected:
            yield Problem(variable, f"{value!r} is not one of its values", expected, "environment")


def _expected(field: legal.Field, value: object) -> str:
    """The legal values of a key if `value` is not one of them, else empty."""
    text = str(value).lower()
    names = {field.name, f"fsdp_{field.name}", f"dynamo_{field.name}"}
    listed = next((legal.accelerate_choices()[_LISTED[name]] for name in _LISTED if name in names), ())
    if listed:
        return "" if text in (choice.lower() for choice in listed) or text.isdigit() else "one of " + ", ".join(listed)
    if set(field.choices) == {"true", "false"}:
        switches = ("true", "false") if field.name in _ONLY_TRUE else _SWITCH_WORDS
        return "" if text in switches else "true or false"
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


@rule
def nvme_paths_reach_the_workers(run):
    """The launcher does not pass the NVMe path on: DeepSpeed swaps to ./none/zero_stage_3."""
    for kind in ("optimizer", "param"):
        if str(deepspeed_section(run).get(f"offload_{kind}_device")).lower() == "nvme":
            fix = "a deepspeed_config_file with nvme_path, or device cpu"
            yield in_yaml(
                run, f"offload_{kind}_device", "the launcher does not pass the NVMe path on to the processes", fix
            )


@rule
def parameters_are_offloaded_by_stage_three(run):
    """Below stage 3, offload_param_device is accepted and does nothing."""
    section = deepspeed_section(run)
    device = str(section.get("offload_param_device", "none")).lower()
    if device in ("cpu", "nvme") and str(section.get("zero_stage", 2)) in ("0", "1", "2"):
        yield in_yaml(
            run, "offload_param_device", "needs ZeRO stage 3", "zero_stage: 3, or offload_param_device: none", "advice"
        )


@rule
def yaml_agrees_with_the_batch(run):
    """`Please correct the following DeepSpeed config values that mismatch TrainingArguments`"""
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
            yield in_yaml(run, name, f"{value} contradicts {argument} {run[argument]:g} of the run", "leave it out")
