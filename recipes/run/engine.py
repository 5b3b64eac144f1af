"""Engines (DDP, FSDP, DeepSpeed, one process): which one trains a run, and where each is read.

`engine_for` decides for a run, before a launch and inside a launched process. Below it are the
sources: Accelerate YAMLs, DeepSpeed JSONs, arguments and the launcher's variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.catalog import Recipe
from recipes.errors import mistake
from recipes.run.files import Json, read_json, read_yaml, shipped

if TYPE_CHECKING:
    from recipes.run.place import Place

# --- Processes that share a model or its examples -------------------------------------------------

# Field -> name of the size in accelerate's ParallelismConfig, its YAML section and its variables.
SIZES = {
    "replicate": "dp_replicate_size",
    "shard": "dp_shard_size",
    "tensor": "tp_size",
    "context": "cp_size",
    "sequence": "sp_size",
}
_SIZE = "parallelism_config_"  # before each name in a YAML and in variables


@dataclass(frozen=True)
class Parallelism:
    """The sizes of accelerate's ParallelismConfig, and `autotp`, that of a DeepSpeed JSON.

    Tensor parallelism gives several processes the same examples, so the data are divided over fewer
    groups (Trainer's `get_total_train_batch_size`). Context and sequence parallelism would too:
    a rule refuses both. Replicas and shards (HSDP) are processes with examples of their own.
    `source` is where the sizes were read; empty if nothing sets them. What is no count is 1 here:
    the probe asks accelerate and DeepSpeed.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    sequence: int = 1
    source: str = ""
    autotp: int = 1

    @property
    def sharing(self) -> int:
        """Processes that train on the same examples."""
        return self.tensor * self.autotp

    def __str__(self) -> str:
        """The sizes above 1 in words, such as `tensor parallel 2`; empty if there are none."""
        words = [f"tensor parallel {self.sharing}"] if self.sharing > 1 else []
        if self.replicate > 1:
            words.append(f"{self.replicate} replicas of {self.shard} shards")
        return ", ".join(words)


def sizes_of(values: Mapping[str, Any], source: str, prefix: str = "") -> Parallelism:
    """The sizes among keyword arguments, keys of a YAML or variables. Text may be a number."""
    read = {field: _count(values.get(f"{prefix}{name}")) for field, name in SIZES.items()}
    return Parallelism(**read, source=source)


def _count(value: object) -> int:
    number = _number(value)
    return number if type(number) is int and number > 1 else 1


def exported_sizes(environment: Mapping[str, str]) -> Parallelism:
    """The sizes that `accelerate launch` exports for its processes."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return Parallelism()
    return sizes_of({name.lower(): value for name, value in environment.items()}, "the launcher", _SIZE)


# --- The engine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """`kind` is single, ddp, deepspeed, fsdp or another type of accelerate's in lower case.

    `source` is where it was read, `raw` the content of its Accelerate YAML. `num_processes` is the
    number on the command line, or the YAML's; None if neither has one.
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

    @property
    def title(self) -> str:
        """The display name, such as `FSDP2` or `DeepSpeed ZeRO-2, optimizer offload`."""
        names = {"single": "one process", "ddp": "DDP", "fsdp": f"FSDP{self.fsdp_version}"}
        names["deepspeed"] = f"DeepSpeed ZeRO-{self.zero_stage}"
        devices = {"optimizer": self.offload_optimizer, "parameter": self.offload_param}
        offloaded = " and ".join(name for name, device in devices.items() if device != "none")
        words = (names.get(self.kind, self.kind), f"{offloaded} offload" if offloaded else "", str(self.parallelism))
        return ", ".join(filter(None, words))


# --- Which engine trains --------------------------------------------------------------------------


def launch_yaml(recipe: Recipe, deepspeed: object) -> Path:
    """The Accelerate YAML to launch with if the user names none: the recipe's. With `--deepspeed`
    it is plain DDP's, because accelerate refuses DeepSpeed settings in a YAML then.
    """
    return shipped("standard.yaml" if deepspeed else recipe.engine)


def engine_for(recipe: Recipe, place: Place, given: Mapping[str, Any]) -> Engine:
    """The engine that trains; of a script of the user's own, the one to launch it with. `given` are
    the values that the user wrote.

    The launch sets up an engine. train.py replaces that engine in two cases: the user gives
    `--deepspeed` or `--fsdp`; or the recipe shards or offloads, and the launch is plain DDP or one
    process. The sizes of groups are those of the argument parallelism_config, else of the
    engine's YAML, else of the launcher's variables.
    """
    deepspeed, can_shard = given.get("deepspeed"), place.hardware.can_shard
    launch = _launched_engine(place) if place.launched else place.yaml or from_yaml(launch_yaml(recipe, deepspeed))
    engine = launch
    if deepspeed:
        engine = _inside(launch, from_deepspeed(deepspeed))
    elif launch.kind in ("single", "ddp"):
        own = from_yaml(shipped(recipe.engine))
        if own.kind == "deepspeed" or (own.kind == "fsdp" and can_shard):
            engine = _inside(launch, own)
    if engine.kind in ("ddp", "fsdp") and can_shard and given.get("fsdp"):
        engine = with_fsdp(engine, given["fsdp"], given.get("fsdp_config"))
    sizes, autotp = engine.parallelism, engine.parallelism.autotp
    around = from_environment(place.environment) if place.own_script else None  # a script asks once it is launched
    if around is not None and around.kind == "deepspeed" and not deepspeed:
        autotp = around.parallelism.autotp
    if (config := given.get("parallelism_config")) is not None:
        sizes = sizes_of(vars(config), "argument")
    elif not sizes.source:
        sizes = exported_sizes(place.environment)
    return replace(engine, parallelism=replace(sizes, autotp=autotp))


def _launched_engine(place: Place) -> Engine:
    """The engine that a launcher has set up for this process. accelerate uses FSDP on GPUs only: on
    a CPU the same launch is DDP.
    """
    ignored = () if place.hardware.can_shard else ("ACCELERATE_USE_FSDP",)
    around = from_environment({name: value for name, value in place.environment.items() if name not in ignored})
    return around or from_yaml(shipped("single.yaml"))


def _inside(launch: Engine, engine: Engine) -> Engine:
    """An engine that train.py starts inside a launch, with the launch's processes and sizes."""
    sizes = replace(launch.parallelism, autotp=engine.parallelism.autotp)
    return replace(engine, num_processes=launch.num_processes, parallelism=sizes)


# --- Where engines are read -----------------------------------------------------------------------

_KINDS = {"NO": "single", "MULTI_GPU": "ddp", "DEEPSPEED": "deepspeed", "FSDP": "fsdp"}


def from_yaml(path: str | Path) -> Engine:
    """The engine of an Accelerate YAML. Illegal values do not raise: the rules report them.

    Raises `UserError` for an empty file, on which accelerate launch ends in a traceback.
    """
    raw = read_yaml(path, "--accelerate_config")
    if not raw:
        fix = "a file with compute_environment, distributed_type and num_processes, or one of `recipes where`"
        raise mistake("--accelerate_config", f"{path} is empty, which accelerate launch refuses", fix)
    kind = str(raw.get("distributed_type") or "NO").upper()  # YAML reads NO without quotes as false
    dynamo, sizes = _section(raw, "dynamo_config"), _section(raw, "parallelism_config")
    processes = _number(raw.get("num_processes"))
    backend = dynamo.get("dynamo_backend", dynamo.get("backend", raw.get("dynamo_backend", "no")))
    engine = Engine(
        kind=_KINDS.get(kind, kind.lower()),
        source=str(path),
        mixed_precision=str(raw.get("mixed_precision") or "no").lower(),
        dynamo_backend=str(backend).lower(),
        num_processes=processes if type(processes) is int else None,
        raw=raw,
        parallelism=sizes_of(sizes, str(path), _SIZE) if sizes else Parallelism(),
    )
    if kind == "FSDP":
        options = {str(key).removeprefix("fsdp_"): value for key, value in _section(raw, "fsdp_config").items()}
        return _as_fsdp(engine, options.get("version", 1), options.get("offload_params"))
    return _as_deepspeed(engine, _section(raw, "deepspeed_config")) if kind == "DEEPSPEED" else engine


def from_deepspeed(config: str | Json) -> Engine:
    """The engine of Trainer's own `--deepspeed`: a DeepSpeed JSON, or its content."""
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
    """The engine that `accelerate launch` or torchrun has set up; None if neither started us."""
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
        return _as_fsdp(engine, environment.get("FSDP_VERSION", "1"), environment.get("FSDP_OFFLOAD_PARAMS"))
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return replace(engine, kind="ddp")
    return engine if {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} & set(environment) else None


def launch_environment(engine: Engine) -> dict[str, str]:
    """The variables that `accelerate launch` would export for a DeepSpeed or FSDP YAML."""
    if engine.kind == "fsdp":
        section = _section(engine.raw, "fsdp_config")
        given = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in section.items()}
        return {"ACCELERATE_USE_FSDP": "true", **{key.upper(): value for key, value in given.items()}}
    section = _section(engine.raw, "deepspeed_config")
    given = {name: str(section[key]).lower() for key, name in _DEEPSPEED_VARIABLES.items() if key in section}
    steps = str(section.get("gradient_accumulation_steps", "auto"))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps, **given}


def deepspeed_json(section: Json) -> Json | None:
    """The DeepSpeed JSON that a YAML's section names or holds; None if none can be read."""
    named = section.get("deepspeed_config_file")
    return named if isinstance(named, dict) else read_json(str(named))[0] if named else None


def _as_deepspeed(engine: Engine, section: Json) -> Engine:
    """The engine with the stage and offload of a YAML's `deepspeed_config`, or of its DeepSpeed
    JSON.

    A stage that the YAML leaves out is 2, accelerate's default; in a JSON it is 0, DeepSpeed's.
    """
    named = deepspeed_json(section)
    content = named or {}
    zero = _section(content, "zero_optimization")
    return replace(
        engine,
        kind="deepspeed",
        zero_stage=_int(zero.get("stage", section.get("zero_stage", 2) if named is None else 0)),
        offload_optimizer=_device(zero.get("offload_optimizer"), section.get("offload_optimizer_device")),
        offload_param=_device(zero.get("offload_param"), section.get("offload_param_device")),
        parallelism=replace(engine.parallelism, autotp=_count(_section(content, "tensor_parallel").get("autotp_size"))),
    )


def _device(section: object, plain: object) -> str:
    if isinstance(section, dict):
        return str(section.get("device", "none"))
    return str(plain or "none").lower()


def with_fsdp(engine: Engine, words: object, config: object) -> Engine:
    """The engine of Trainer's own `--fsdp` with these words, and of its `fsdp_config`.

    Trainer's version wins over that of an FSDP launch; offload is on if either asks for it.
    """
    content = config if isinstance(config, Mapping) else read_json(str(config or ""))[0] or {}
    section = {str(key).removeprefix("fsdp_"): value for key, value in content.items()}
    offload = section.get("cpu_offload") or "offload" in str(words).split() or engine.offload_param != "none"
    return _as_fsdp(engine, section.get("version", 2), offload)


def _as_fsdp(engine: Engine, version: object, offload: object) -> Engine:
    """The engine as FSDP of this version, which offloads parameters and optimizer together."""
    device = "cpu" if str(offload).lower() in ("true", "1") else "none"
    return replace(engine, kind="fsdp", fsdp_version=_int(version), offload_optimizer=device, offload_param=device)


def _section(content: Mapping[str, Any], name: str) -> Json:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _number(value: Any) -> Any:
    """Text of digits as a number, as the launchers read it; anything else as it is."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def _int(value: Any) -> int:
    number = _number(value)
    return number if type(number) is int else 0
