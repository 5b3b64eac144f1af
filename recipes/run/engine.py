"""Reads engines (DDP, FSDP, DeepSpeed, one process) from YAMLs, JSONs, flags and the environment.

`place.engine_for` decides which of these sources wins in a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recipes.errors import mistake
from recipes.run.files import Json, read_json, read_yaml

# --- Processes that share a model or its examples -------------------------------------------------

_SIZE = "parallelism_config_"  # the prefix of each name in a YAML and in variables


@dataclass(frozen=True)
class Parallelism:
    """The sizes of accelerate's ParallelismConfig, and `autotp`, DeepSpeed's `autotp_size`.

    Tensor parallelism gives several processes the same examples, so the data are divided over fewer
    groups (Trainer's `get_total_train_batch_size`). Context and sequence parallelism would do the
    same, but a rule refuses both. With replicas and shards (HSDP) a process has its own examples.
    `source` is the file, argument or launcher that sets the sizes, empty if none does. A value that
    is not a whole number above 0 is read as 1; a later check reports the value.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    source: str = ""
    autotp: int = 1

    @property
    def sharing(self) -> int:
        """The number of processes that train on the same examples."""
        return self.tp_size * self.autotp

    def __str__(self) -> str:
        """Tensor parallelism and replicas in words, such as `tensor parallel 2`; else empty."""
        words = [f"tensor parallel {self.sharing}"] if self.sharing > 1 else []
        if self.dp_replicate_size > 1:
            words.append(f"{self.dp_replicate_size} replicas of {self.dp_shard_size} shards")
        return ", ".join(words)


def sizes_of(values: Mapping[str, Any], source: str, prefix: str = "") -> Parallelism:
    """Read ParallelismConfig's sizes from arguments, a YAML or variables. Numbers may be text."""
    names = (field.name for field in fields(Parallelism) if field.name.endswith("_size"))
    read = {name: max(1, _int(values.get(f"{prefix}{name}"))) for name in names}
    return Parallelism(**read, source=source)


def exported_sizes(environment: Mapping[str, str]) -> Parallelism:
    """ParallelismConfig's sizes, as `accelerate launch` exports them in environment variables."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return Parallelism()
    return sizes_of({name.lower(): value for name, value in environment.items()}, "the launcher", _SIZE)


# --- The engine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """The engine of a run (one process, DDP, FSDP, DeepSpeed, ...), with its settings.

    `kind` is single, ddp, deepspeed, fsdp or another of accelerate's distributed types in lower
    case. `source` is the file, argument or launcher that names the engine. `raw` is the content of
    its Accelerate YAML. `num_processes` comes from the command line, else from the YAML, else None.
    `json` is the DeepSpeed JSON, None without a readable one. `fsdp` holds FSDP's settings, by
    their names without the prefix `fsdp_`.
    """

    kind: str
    source: str
    zero_stage: int = 0
    fsdp_version: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    mixed_precision: str = "no"
    dynamo_backend: str = "no"
    num_processes: int | None = None
    raw: Json = field(default_factory=dict)
    parallelism: Parallelism = Parallelism()
    json: Json | None = None
    json_source: str = ""
    fsdp: Json = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The display name, such as `FSDP2` or `DeepSpeed ZeRO-2, optimizer offload`."""
        names = {"single": "one process", "ddp": "DDP", "fsdp": f"FSDP{self.fsdp_version}"}
        names["deepspeed"] = f"DeepSpeed ZeRO-{self.zero_stage}"
        devices = {"optimizer": self.offload_optimizer, "parameter": self.offload_param}
        offloaded = " and ".join(name for name, device in devices.items() if device != "none")
        words = (names.get(self.kind, self.kind), f"{offloaded} offload" if offloaded else "", str(self.parallelism))
        return ", ".join(filter(None, words))


# --- Where engines are read -----------------------------------------------------------------------

_KINDS = {"NO": "single", "MULTI_GPU": "ddp"}  # any other type in lower case


def from_yaml(path: str | Path) -> Engine:
    """Read the engine of an Accelerate YAML. Illegal values are kept: later checks report them.

    Raises `UserError` if the file cannot be read, is not a YAML mapping, or is empty.
    """
    raw = read_yaml(path, "--accelerate_config")
    if not raw:
        fix = "use a file that `recipes where` lists, or write compute_environment, distributed_type and num_processes"
        raise mistake("--accelerate_config", f"{path} is empty, and accelerate launch refuses an empty file", fix)
    kind = str(raw.get("distributed_type") or "NO").upper()  # YAML reads NO without quotes as false
    dynamo, sizes = _section(raw, "dynamo_config"), _section(raw, "parallelism_config")
    backend = dynamo.get("dynamo_backend", dynamo.get("backend", raw.get("dynamo_backend", "no")))
    engine = Engine(
        kind=_KINDS.get(kind, kind.lower()),
        source=str(path),
        mixed_precision=str(raw.get("mixed_precision") or "no").lower(),
        dynamo_backend=str(backend).lower(),
        num_processes=_int(raw.get("num_processes")) or None,
        raw=raw,
        parallelism=sizes_of(sizes, str(path), _SIZE) if sizes else Parallelism(),
    )
    if kind == "FSDP":
        return _as_fsdp(engine, _without_prefix(_section(raw, "fsdp_config")))
    return _as_deepspeed(engine, _section(raw, "deepspeed_config")) if kind == "DEEPSPEED" else engine


def from_deepspeed(config: str | Json) -> Engine:
    """Read the engine of Trainer's own `--deepspeed`: a DeepSpeed JSON's path, or its content."""
    source = config if isinstance(config, str) else "--deepspeed"
    return _as_deepspeed(Engine("deepspeed", source), {"deepspeed_config_file": config})


# Key of `deepspeed_config` -> the variable that `accelerate launch` exports for it.
_DEEPSPEED_VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}


def from_environment(environment: Mapping[str, str]) -> Engine | None:
    """The engine that `accelerate launch` or torchrun has set up; None if no launcher did."""
    engine = Engine(
        kind="single",
        source="the launcher",
        mixed_precision=environment.get("ACCELERATE_MIXED_PRECISION", "no"),
        dynamo_backend=environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
        parallelism=exported_sizes(environment),
    )
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("true", "1"):
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if file.lower() != "none":
            return _as_deepspeed(replace(engine, source=file), {"deepspeed_config_file": file})
        exported = {key: environment[name] for key, name in _DEEPSPEED_VARIABLES.items() if name in environment}
        return _as_deepspeed(engine, exported)
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):
        section: Json = {key.lower(): value for key, value in environment.items() if key.startswith("FSDP_")}
        section["transformer_layer_cls_to_wrap"] = section.pop("fsdp_transformer_cls_to_wrap", None)
        return _as_fsdp(engine, _without_prefix(section))
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return replace(engine, kind="ddp")
    return engine if {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} & set(environment) else None


def launch_environment(engine: Engine) -> dict[str, str]:
    """The variables that `accelerate launch` exports for the keys of a DeepSpeed or FSDP YAML."""
    if engine.kind == "fsdp":
        given = {"ACCELERATE_USE_FSDP": True, **_section(engine.raw, "fsdp_config")}
        words = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}
        return {key.upper().replace("_LAYER_CLS_", "_CLS_"): value for key, value in words.items()}
    section = _section(engine.raw, "deepspeed_config")
    given = {name: str(section[key]).lower() for key, name in _DEEPSPEED_VARIABLES.items() if key in section}
    steps = str(section.get("gradient_accumulation_steps", "auto"))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps, **given}


def _as_deepspeed(engine: Engine, section: Json) -> Engine:
    """Add the stage and offload of a YAML's `deepspeed_config`, or of the DeepSpeed JSON it names.

    A missing stage counts as 2 in a YAML (accelerate's default) and as 0 in a JSON (DeepSpeed's).
    """
    file = section.get("deepspeed_config_file")
    named = file if isinstance(file, dict) else read_json(str(file))[0] if file else None
    content = named or {}
    zero, tensor = _section(content, "zero_optimization"), _section(content, "tensor_parallel")
    return replace(
        engine,
        kind="deepspeed",
        zero_stage=_int(zero.get("stage", section.get("zero_stage", 2) if named is None else 0)),
        offload_optimizer=_device(zero.get("offload_optimizer"), section.get("offload_optimizer_device")),
        offload_param=_device(zero.get("offload_param"), section.get("offload_param_device")),
        parallelism=replace(engine.parallelism, autotp=max(1, _int(tensor.get("autotp_size")))),
        json=named,
        json_source=file if isinstance(file, str) else "DeepSpeed JSON",
    )


def _device(section: object, plain: object) -> str:
    if isinstance(section, dict):
        return str(section.get("device") or "none")
    return str(plain or "none").lower()


# Trainer's defaults with `--fsdp` (`_process_fsdp_args`), which win over an Accelerate YAML.
_SET_BY_TRAINER = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "min_num_params": 0,
    "cpu_ram_efficient_loading": False,
    "reshard_after_forward": True,
    "state_dict_type": "FULL_STATE_DICT",
}


def with_fsdp(engine: Engine, words: object, config: object) -> Engine:
    """Return the engine with Trainer's own `--fsdp` (`words`) and `--fsdp_config` (`config`). Both
    flags win over the launch's settings, but cannot turn the launch's offload off.
    """
    content = config if isinstance(config, Mapping) else read_json(str(config or ""))[0] or {}
    own = _without_prefix(content)
    offload = own.get("cpu_offload") or "offload" in str(words).split() or engine.offload_param != "none"
    return _as_fsdp(engine, {**engine.fsdp, **_SET_BY_TRAINER, **own, "offload_params": offload})


def _as_fsdp(engine: Engine, section: Json) -> Engine:
    """Return the engine as FSDP with these settings. FSDP offloads both parameters and optimizer
    states, or neither. `accelerate launch` defaults to version 1.
    """
    device = "cpu" if str(section.get("offload_params")).lower() in ("true", "1") else "none"
    engine = replace(engine, kind="fsdp", fsdp_version=_int(section.get("version", 1)), fsdp=section)
    return replace(engine, offload_optimizer=device, offload_param=device)


def _without_prefix(section: Mapping[Any, Any]) -> Json:
    return {str(key).removeprefix("fsdp_"): value for key, value in section.items()}


def _section(content: Mapping[str, Any], name: str) -> Json:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _int(value: Any) -> int:
    """Read an int or a string of digits, as the launchers do. Other values give 0."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if type(value) is int else 0
