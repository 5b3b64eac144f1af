"""The engine that runs the processes, read from an Accelerate YAML or a launcher's environment."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from recipes.errors import mistake
from recipes.flags import MOST_PROCESSES
from recipes.run.parallelism import Parallelism, autotp_size, from_section, from_variables

Json = dict[str, Any]  # an object of JSON or a mapping of YAML, as read or as it will be written


@dataclass(frozen=True)
class Engine:
    """`kind` is single, ddp, deepspeed, fsdp or another type of accelerate's in lower case.

    `source` is where it was read, `raw` the content of its Accelerate YAML. `num_processes` is what
    the command line says, or the YAML; None if neither does.
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
        """Its name for people, such as `FSDP2` or `DeepSpeed ZeRO-2, optimizer offload`."""
        return ", ".join(part for part in (self._name, str(self.parallelism)) if part)

    @property
    def _name(self) -> str:
        names = {"single": "one process", "ddp": "DDP", "fsdp": f"FSDP{self.fsdp_version}"}
        names["deepspeed"] = f"DeepSpeed ZeRO-{self.zero_stage}"
        devices = {"optimizer": self.offload_optimizer, "parameter": self.offload_param}
        offloaded = " and ".join(name for name, device in devices.items() if device != "none")
        return names.get(self.kind, self.kind) + (f", {offloaded} offload" if offloaded else "")


KINDS = {"NO": "single", "MULTI_GPU": "ddp", "DEEPSPEED": "deepspeed", "FSDP": "fsdp"}


def shipped(name: str, folder: str = "accelerate_configs") -> Path:
    """A shipped Accelerate YAML: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / folder / name
    return inside if inside.exists() else package.parent / folder / name


def launch_with(name: str) -> str:
    """The start of a command that launches with a shipped YAML, as a person would type it: its path
    is relative if it is below the current folder.
    """
    path = shipped(name)
    return (
        f"accelerate launch --config_file {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
    )


def find_yaml(name: str | Path) -> Path:
    """The Accelerate YAML of that path; or if there is none, the shipped one of that name.

    Raises `UserError` for anything else.
    """
    path = expanded(name)
    if os.path.exists(path) and not path.is_dir():  # noqa: PTH110, Path.exists raises for a name too long for a path
        return path
    known = sorted(file.stem for file in shipped("fast.yaml").parent.glob("*.yaml"))
    if str(name).removesuffix(".yaml") in known:
        return shipped(path.name if path.suffix else f"{name}.yaml")
    nearest = difflib.get_close_matches(str(name), known, n=1)
    fix = nearest[0] if nearest else f"the path of an existing file, or one of {', '.join(known)}"
    raise mistake("--accelerate_config", f"there is no file {name}, and no shipped YAML of that name", fix)


def expanded(name: str | Path) -> Path:
    """The path with ~ expanded. That of an unknown user stays, where Path.expanduser raises."""
    return Path(os.path.expanduser(name))  # noqa: PTH111


def is_argument(value: object) -> bool:
    """False for a text that no path and no argument of a program can be: one with a null byte, or
    with half a character. Bytes that are not UTF-8 can, and Python reads them as surrogates.
    """
    if not isinstance(value, str):
        return True
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def hf_home(environment: Mapping[str, str]) -> Path:
    """Where Hugging Face keeps what it downloads (huggingface_hub, constants.py).

    A user without a home folder has a folder that is named `~`, in the current one.
    """
    around = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(environment.get("HF_HOME") or f"{around}/huggingface")


def default_accelerate_config(environment: Mapping[str, str]) -> Path | None:
    """The user's own default, which `accelerate launch` reads if it is given no YAML."""
    names = ("default_config.yaml", "default_config.json")
    return next((file for name in names if (file := hf_home(environment) / "accelerate" / name).is_file()), None)


def read_yaml(path: str | Path, subject: str, as_text: bool = False) -> Json:
    """The mapping in a YAML file. Raises `UserError` about the flag `subject` if there is none.

    With `as_text` every value is text, as it was written: `8:00:00` is otherwise 28800 to YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise mistake(subject, f"{path} cannot be read: {reason}", "the path of an existing YAML file") from None
    content = yaml_content(text, str(path), subject, as_text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise mistake(
            subject, f"{path} holds a {type(content).__name__}, not settings", "one `name: value` on each line"
        )
    return content


def yaml_content(text: str, path: str, subject: str, as_text: bool = False) -> Any:
    """What a YAML text holds. Raises `UserError` about `subject` if it is not valid."""
    import yaml

    try:
        content = yaml.load(text, _loader(as_text))
        if _entries(content, {}) > _MOST_ENTRIES:
            raise mistake(subject, f"{path} repeats its anchors without end", "each value written out", path)
        return content
    except KeyError as error:
        raise mistake(subject, f"{path} has {error.args[0]!r} twice", "write it once", path) from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:  # `2026-13-13`, `!!int x`
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise mistake(subject, f"{path} is not valid YAML{line}", "one `name: value` on each line") from None


_MOST_ENTRIES = 100_000  # aliases of aliases: a few lines that print as gigabytes


def _entries(value: Any, known: dict[int, float]) -> float:
    """How many values a YAML holds, an alias counted wherever it is used: endless inside itself."""
    if not isinstance(value, (list, dict)):
        return 1
    if id(value) not in known:
        known[id(value)] = float("inf")  # until all inside it are counted
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_entries(entry, known) for entry in inner)
    return known[id(value)]


def read_json(file: str | Path) -> tuple[Json | None, str]:
    """The object in a JSON file, and an empty text; or None, and what is wrong with the file."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError:
        return None, f"{file} cannot be read"
    except (ValueError, RecursionError) as error:
        return None, f"{file} is not valid JSON: {error}"
    if not isinstance(content, dict):
        return None, f"{file} holds a {type(content).__name__}"
    return content, ""


@cache
def _loader(as_text: bool) -> Any:
    """PyYAML's safe loader, or the one of texts, but `KeyError` for a key that is given twice."""
    import yaml

    class Loader(yaml.BaseLoader if as_text else yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            for key in keys:
                if keys.count(key) > 1:
                    raise KeyError(key)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node):
            """Raises ValueError for a hexadecimal number that Python refuses to print, too."""
            value = super().construct_yaml_int(node)
            return value if str(value) else None

    if not as_text:
        Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def from_yaml(path: str | Path) -> Engine:
    """The engine of an Accelerate YAML. Illegal values do not raise: the rules report them.

    Raises `UserError` for an empty file: accelerate launch dies of it in a traceback.
    """
    raw = read_yaml(path, "--accelerate_config")
    if not raw:
        fix = "a file with compute_environment, distributed_type and num_processes, or one of `recipes where`"
        raise mistake("--accelerate_config", f"{path} is empty, which accelerate launch refuses", fix)
    dynamo = _section(raw, "dynamo_config")
    kind = str(raw.get("distributed_type") or "NO").upper()  # YAML reads NO without quotes as false
    backend = dynamo.get("dynamo_backend", dynamo.get("backend", raw.get("dynamo_backend", "no")))
    processes = raw.get("num_processes")
    parallelism = from_section(_section(raw, "parallelism_config"), str(path))
    autotp = autotp_size(deepspeed_json(_section(raw, "deepspeed_config")) or {}) if kind == "DEEPSPEED" else 1
    return Engine(
        kind=KINDS.get(kind, kind.lower()),
        source=str(path),
        mixed_precision=_precision(raw.get("mixed_precision")),
        dynamo_backend=str(backend).lower(),
        num_processes=_count(processes, is_single=kind == "NO"),
        raw=raw,
        parallelism=replace(parallelism, autotp=autotp),
        **_sharding(kind, raw),
    )


def _sharding(kind: str, raw: Json) -> Json:
    """What only DeepSpeed and FSDP have. FSDP offloads parameters and optimizer together."""
    if kind == "FSDP":
        section = {str(key).removeprefix("fsdp_"): value for key, value in _section(raw, "fsdp_config").items()}
        return _fsdp(section.get("version", 1), section.get("offload_params", False))
    if kind != "DEEPSPEED":
        return {}
    section = _section(raw, "deepspeed_config")
    zero = _zero_of_json(section)
    return dict(
        zero_stage=_int(zero.get("stage", section.get("zero_stage", 2))),
        offload_optimizer=_device(zero.get("offload_optimizer"), section.get("offload_optimizer_device")),
        offload_param=_device(zero.get("offload_param"), section.get("offload_param_device")),
    )


def with_fsdp(engine: Engine, words: object, config: object) -> Engine:
    """The engine of Trainer's own `--fsdp` with these words, and of its `fsdp_config`.

    Trainer's version wins over that of an FSDP launch; offload is on if either asks for it.
    """
    content = config if isinstance(config, Mapping) else read_json(str(config or ""))[0] or {}
    section = {str(key).removeprefix("fsdp_"): value for key, value in content.items()}
    offload = section.get("cpu_offload") or "offload" in str(words).split() or engine.offload_param != "none"
    return replace(engine, kind="fsdp", **_fsdp(section.get("version", 2), offload))


def _fsdp(version: object, offload: object) -> Json:
    device = "cpu" if str(offload).lower() in ("true", "1") else "none"
    return dict(fsdp_version=_int(version), offload_optimizer=device, offload_param=device)


def _count(value: object, is_single: bool) -> int | None:
    """A number of processes. The launchers of several processes read it as text, too."""
    if isinstance(value, str) and value.isdecimal() and not is_single:
        value = int(value)
    return value if type(value) is int and value <= MOST_PROCESSES else None


def from_deepspeed(config: str | Json) -> Engine:
    """The engine of Trainer's own `--deepspeed`: a DeepSpeed JSON, or its content."""
    content = config if isinstance(config, Mapping) else deepspeed_json({"deepspeed_config_file": config}) or {}
    zero = _section(content, "zero_optimization")
    return Engine(
        kind="deepspeed",
        source="--deepspeed" if isinstance(config, Mapping) else config,
        zero_stage=_int(zero.get("stage", 0)),
        offload_optimizer=_device(zero.get("offload_optimizer"), None),
        offload_param=_device(zero.get("offload_param"), None),
        parallelism=Parallelism(autotp=autotp_size(content)),
    )


def from_environment(environment: Mapping[str, str]) -> Engine | None:
    """The engine that `accelerate launch` or torchrun has set up; None if neither started us."""
    single = Engine(
        kind="single",
        source="the launcher",
        mixed_precision=environment.get("ACCELERATE_MIXED_PRECISION", "no"),
        dynamo_backend=environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
        parallelism=from_variables(environment),
    )
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("true", "1"):
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if file.lower() != "none":
            engine = from_deepspeed(file)
            parallelism = replace(single.parallelism, autotp=engine.parallelism.autotp)
            return replace(engine, mixed_precision=single.mixed_precision, parallelism=parallelism)
        return replace(
            single,
            kind="deepspeed",
            zero_stage=_int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)),
            offload_optimizer=environment.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
            offload_param=environment.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
        )
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):
        offload = environment.get("FSDP_OFFLOAD_PARAMS", "false")
        return replace(single, kind="fsdp", **_fsdp(environment.get("FSDP_VERSION", "1"), offload))
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return replace(single, kind="ddp")
    if {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} & set(environment):
        return single
    return None


# Key of `deepspeed_config` -> the variable that `accelerate launch` exports for it.
DEEPSPEED_VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}


def launch_environment(engine: Engine) -> dict[str, str]:
    """The variables that `accelerate launch` would export for a DeepSpeed or FSDP YAML."""
    if engine.kind == "fsdp":
        section = engine.raw.get("fsdp_config") or {}
        given = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in section.items()}
        return {"ACCELERATE_USE_FSDP": "true", **{key.upper(): value for key, value in given.items()}}
    section = engine.raw.get("deepspeed_config") or {}
    given = {name: str(section[key]).lower() for key, name in DEEPSPEED_VARIABLES.items() if key in section}
    steps = str(section.get("gradient_accumulation_steps", "auto"))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps, **given}


def _section(raw: Json, name: str) -> Json:
    section = raw.get(name)
    return section if isinstance(section, dict) else {}


def _zero_of_json(section: Json) -> Json:
    content = deepspeed_json(section)
    zero = content.get("zero_optimization", {}) if content else {}
    return zero if isinstance(zero, dict) else {}


def deepspeed_json(section: Json) -> Json | None:
    """The DeepSpeed JSON that a YAML names; None if it names none, or it cannot be read."""
    named = section.get("deepspeed_config_file")
    return read_json(str(named))[0] if named else None


def _device(section: object, plain: object) -> str:
    if isinstance(section, dict):
        return str(section.get("device", "none"))
    return str(plain).lower() if plain else "none"


def _precision(value: object) -> str:
    return "no" if value in (None, False) else str(value).lower()


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
