"""Looks up the names, types, choices and defaults that the installed libraries accept.

After an install, a separate process (`recipes.legal.libraries`) imports the libraries once, and
its answer is cached as a JSON file. The functions here read this file and import no library.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import typing
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from recipes.errors import mistake
from recipes.flags import RunFlags

Json = dict[str, Any]

# New name -> older name. Settings are stored under the older name, which every transformers 5 has.
ALIASES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


# --- Settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One legal setting. `types` are names such as bool, int, float, str, list, dict and None."""

    name: str
    types: frozenset[str]
    default: Any = None
    choices: tuple[str, ...] = ()
    help: str = ""


@cache
def trainer_fields() -> dict[str, Field]:
    """Every field of the installed `transformers.TrainingArguments`, by name."""
    kept = (Field(**entries) for entries in facts()["trainer_fields"].values())
    return {one.name: replace(one, types=frozenset(one.types), choices=tuple(one.choices)) for one in kept}


@cache
def run_flags() -> dict[str, Field]:
    """Every flag of this package itself, by name, from `recipes.flags.RunFlags`."""
    return fields_of(RunFlags)


@cache
def settings() -> dict[str, Field]:
    """Every setting of train.py, by name. A renamed setting is listed under each legal name."""
    return {**trainer_fields(), **run_flags()}


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass of settings, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: _field(field, hints[field.name]) for field in dataclasses.fields(cls)}


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    """Return a `Field` with the types and choices that the type hint and the metadata allow.

    A type that a command line cannot hold, such as an enumeration, counts as text.
    """
    types: set[str] = set()
    listed: list[str] = []
    for part in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,):
        kind = typing.get_origin(part) or part
        if kind in (bool, int, float, str, list, dict):
            types.add(kind.__name__)
        elif kind is NoneType:
            types.add("None")
        elif kind is typing.Literal:
            listed += [value for value in typing.get_args(part) if isinstance(value, str)]
        elif isinstance(kind, type) and issubclass(kind, Enum):
            listed += [member.value for member in kind]
    if listed or not types:
        types.add("str")
    if field.metadata.get("const") is True:  # a flag that may be given without a value
        types.add("bool")
    default = None if field.default is dataclasses.MISSING else field.default
    choices = field.metadata.get("choices") or listed
    return Field(field.name, frozenset(types), default, tuple(choices), field.metadata.get("help", ""))


# --- Names that a setting, a mapping or a file accepts --------------------------------------------


def names(of: str) -> tuple[str, ...]:
    """The names that a setting (`report_to`), a kind of file (`accelerate_yaml`) or its section
    (`fsdp_config of accelerate_yaml`) accepts.

    Empty if the names are unknown, for example those of `deepspeed_json` without DeepSpeed.
    """
    return tuple(facts().get(of, ()))


# The model types of liger-kernel 0.8.5, for plans on a machine without this package.
_LIGER = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v glm4v_moe "
    "gpt_oss internvl llama llama4 llama4_text llava mllama mllama_text_model ministral mistral mixtral muse_glimmer "
    "nemotron olmo2 olmo3 qwen2 qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_next qwen3_5 "
    "qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smollm3 phi3 "
    "paligemma falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4".split()
)


def model_class(model_type: str, task: str) -> str | None:
    """The class name of a model type for a task, such as `LlamaForCausalLM`; None if unknown."""
    return facts().get("model_classes", {}).get(task.upper(), {}).get(model_type)


def types_with_fused_loss() -> frozenset[str]:
    """The model types for which Liger by default computes the loss without the full logits."""
    return frozenset(names("liger")) or _LIGER


# --- The cached answer ----------------------------------------------------------------------------

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "liger_kernel")


@cache
def facts() -> Json:
    """Return the facts that `recipes.legal.libraries` collects, cached until the next install.

    If several processes start together, only one imports the libraries, provided that the cache can
    be written. Raises `UserError` if torch, transformers or accelerate cannot be imported.
    """
    file = hf_home() / "accelerate-recipes" / f"legal-{_fingerprint()}.json"
    if (kept := _kept(file)) is not None:
        return kept
    from filelock import FileLock

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # the folder cannot be written, or has no locks
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(file.with_name("legal.lock"), timeout=600))
        if (kept := _kept(file)) is not None:  # another process was first
            return kept
        answer = _ask()
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(answer), encoding="utf-8")
        return answer


def _fingerprint() -> str:
    """Hash path, modification time and version of each library, schema.py and libraries.py."""
    files = [Path(__file__), Path(__file__).with_name("libraries.py")]
    files += [folder / "__init__.py" for name in _PACKAGES if (folder := package_folder(name))]
    installed = [
        (str(file), file.stat().st_mtime_ns, *file.parent.parent.glob(f"{file.parent.name}-*.dist-info"))
        for file in files
    ]
    return hashlib.sha256(repr(installed).encode()).hexdigest()[:12]


def _kept(file: Path) -> Json | None:
    """The facts in the file. None if the file is missing or incomplete."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _ask() -> Json:
    """Let a child process with our sys.path collect the facts. Raises `UserError` if it fails."""
    waits = "Reading the settings that the installed transformers, accelerate and DeepSpeed accept"
    print(f"{waits} (once after an install): about ten seconds.", file=sys.stderr, flush=True)
    # This package is imported from its own folder, the libraries from this process's sys.path.
    code = "import sys; sys.path[:] = sys.argv[1:]; from recipes.legal.libraries import main; del sys.path[0]; main()"
    words = [sys.executable, "-c", code, str(Path(__file__).parents[2]), *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    try:
        return json.loads(done.stdout)
    except ValueError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        what = f"the import ended with {ended}: {lines[-1] if lines else 'without a message'}"
        shows = f"run `{sys.executable} -c 'import torch, accelerate; from transformers import Trainer'`, and reinstall"
        raise mistake("torch, transformers, accelerate", what, f"{shows} the package that fails") from None


def hf_home() -> Path:
    """The folder for Hugging Face's downloads, as in huggingface_hub's constants.py. An empty
    HF_HOME or XDG_CACHE_HOME counts as unset. If the user has no home folder, `~` stays in the
    path, as the name of a folder in the current folder.
    """
    around = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.path.expandvars(os.environ.get("HF_HOME") or f"{around}/huggingface")
    return Path(os.path.expanduser(home))  # noqa: PTH111


def version(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def package_folder(package: str) -> Path | None:
    """The folder of an installed package, found without an import; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None
