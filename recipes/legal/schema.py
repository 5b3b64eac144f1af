"""Names, types, choices and defaults that the installed libraries accept, without importing them.

A process of its own imports them once after an install (`recipes.legal.libraries`) and answers with
one JSON object, which is kept in the user's cache. Everything here reads that object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from recipes.errors import mistake
from recipes.flags import RunFlags

Json = dict[str, Any]

# New name -> the older name, which every supported version has: this package stores settings by it.
ALIASES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


# --- Settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One legal setting. `types` are among bool, int, float, str, list, dict and None."""

    name: str
    types: frozenset[str]
    default: Any = None
    choices: tuple[str, ...] = ()
    help: str = ""


@cache
def trainer_fields() -> dict[str, Field]:
    """Every field of the installed `transformers.TrainingArguments`."""
    kept = (Field(**entries) for entries in facts()["trainer_fields"].values())
    return {one.name: replace(one, types=frozenset(one.types), choices=tuple(one.choices)) for one in kept}


@cache
def run_flags() -> dict[str, Field]:
    """Every flag of our own, `recipes.flags.RunFlags`."""
    return fields_of(RunFlags)


@cache
def settings() -> dict[str, Field]:
    """Everything that train.py takes. An alias is listed beside the field that it renames."""
    return {**trainer_fields(), **run_flags()}


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass of settings."""
    hints = typing.get_type_hints(cls)
    return {field.name: _field(field, hints[field.name]) for field in dataclasses.fields(cls)}


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    """A field with the types that its hint allows, by name, and the values that it lists.

    A type that no command line can write, such as an enumeration, is written as text.
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
    if field.metadata.get("const") is True:  # a flag that may stand without a value
        types.add("bool")
    default = None if field.default is dataclasses.MISSING else field.default
    choices = field.metadata.get("choices") or listed
    return Field(field.name, frozenset(types), default, tuple(choices), field.metadata.get("help", ""))


# --- Names that a setting, a mapping or a file takes ----------------------------------------------


def names(of: str) -> tuple[str, ...]:
    """Legal names by what takes them: `report_to`, `fsdp_config`, `accelerate_yaml`, ...

    Empty if nothing is known, for example of `deepspeed_json` without DeepSpeed.
    """
    return tuple(facts().get(of, ()))


def accelerate_nested_keys(section: str) -> frozenset[str]:
    """Legal keys of a section of an Accelerate YAML, such as `deepspeed_config`.

    accelerate itself does not check them: it drops an unknown one silently.
    """
    return frozenset(facts()["accelerate_sections"].get(section, ()))


# --- The kept answer ------------------------------------------------------------------------------

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "liger_kernel")


@cache
def facts() -> Json:
    """The answer of `recipes.legal.libraries`, kept in a file and renewed after an install.

    Processes that start together ask once. A cache that cannot be written costs only time. Raises
    `UserError` if a library is missing or cannot be imported.
    """
    file = hf_home(os.environ) / "accelerate-recipes" / f"legal-{_fingerprint()}.json"
    if (kept := _kept(file)) is not None:
        return kept
    from filelock import FileLock

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # nothing can be written there, or no locks
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(file.with_name("legal.lock"), timeout=600))
        if (kept := _kept(file)) is not None:  # another process was first
            return kept
        answer = _ask()
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(answer), encoding="utf-8")
        return answer


def _fingerprint() -> str:
    """Paths, times and versions of the libraries and of the files that ask them, as one name."""
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
    """Imports the libraries in a process that finds the packages that this one finds."""
    waits = "Reading the settings that the installed transformers, accelerate and DeepSpeed accept"
    print(f"{waits}, once after an install: about ten seconds.", file=sys.stderr, flush=True)
    # Ours is found first, the libraries where this process finds them.
    code = "import sys; sys.path[:] = sys.argv[1:]; from recipes.legal.libraries import main; del sys.path[0]; main()"
    words = [sys.executable, "-c", code, str(Path(__file__).parents[2]), *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    try:
        return json.loads(done.stdout)
    except ValueError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        what = f"importing them ended with {ended}: {lines[-1] if lines else 'without a message'}"
        shows = f"{sys.executable} -c 'import torch, accelerate; from transformers import Trainer'"
        raise mistake("torch, transformers, accelerate", what, f"reinstall the package that `{shows}` names") from None


def hf_home(environment: Mapping[str, str]) -> Path:
    """The folder for Hugging Face's downloads, found as huggingface_hub's constants.py does.

    For a user without a home folder it is a folder named `~` in the current one.
    """
    around = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(environment.get("HF_HOME") or f"{around}/huggingface"))  # noqa: PTH111


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
