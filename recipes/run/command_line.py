"""Reads flags and configuration files into settings of the right type."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

from recipes import catalog, legal, mixture
from recipes.errors import Problem, mistake
from recipes.legal import moved
from recipes.run.files import expanded, nearest, read_yaml
from recipes.run.spec import COMMAND_LINE, Setting, Settings


def parse(argv: Sequence[str], problems: list[Problem]) -> dict[str, Setting]:
    """Read the settings of a command line. Mistakes are added to `problems`.

    Flags are `--name value`, `--name=value`, `--flag` or `--no_flag`. A dash in a name counts
    as an underscore, as in Hugging Face's parser.
    """
    raw: dict[str, str | list[str] | bool] = {}

    def wrong(flag: str, what: str, fix: str) -> None:
        problems.append(Problem(flag, what, fix, COMMAND_LINE))

    for flag, values in _flags(argv):
        if not flag.startswith("--"):
            wrong(flag, "is not a flag", f"--recipe {flag}" if flag in catalog.RECIPES else "write --name value")
            continue
        name, is_off = name_of(flag)
        if is_off:  # `--no_NAME VALUE` is not a legal flag
            name, values = (f"no_{name}", values) if values else (name, ["false"])
        known = legal.settings().get(name)
        if name in raw:
            wrong(f"--{name}", "is given twice", "write it once")
        if known and not values and "bool" not in known.types:
            wrong(f"--{name}", "needs a value", _expected(known, "--"))
            continue
        if known and len(values) > 1 and "list" not in known.types:
            wrong(f"--{name}", f"needs one value, got {' '.join(values)!r}", "put the value in quotes")
        raw[name] = values if len(values) > 1 else values[0] if values else True
    return accept(raw, COMMAND_LINE, problems)


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with its values, and each word that belongs to no flag, without values."""
    rest = list(argv)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            yield flag + equals + value, []
            continue
        values = [value] if equals else []
        while rest and not equals and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        yield flag, values


def name_of(flag: str) -> tuple[str, bool]:
    """Return the name of a flag's setting, and True if the flag turns it off (`--no_packing`)."""
    name = flag[2:].replace("-", "_")
    known = legal.settings().get(name.removeprefix("no_"))
    is_off = name not in legal.settings() and known is not None and "bool" in known.types
    return (name.removeprefix("no_"), True) if is_off else (name, False)


def with_flags(argv: Sequence[str], flags: Settings) -> list[str]:
    """Return a command line with `flags` replaced or added. A value of None removes the flag."""
    changed, replaced = [], False
    for argument in argv:
        if argument.startswith("--"):
            name, _ = name_of(argument.partition("=")[0])
            replaced = legal.ALIASES.get(name, name) in flags
        if not replaced:
            changed.append(argument)
    for name, value in flags.items():
        if value is not None:
            changed += [f"--{name}", *map(_as_word, value if isinstance(value, list) else [value])]
    return changed


def _as_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict) else str(value)


def read_config(path: str, problems: list[Problem]) -> dict[str, Setting]:
    """Read a --config file. Raises `UserError` if the file cannot be read, or is a recipe."""
    content = read_yaml(path, "--config")
    if "base" in content:
        raise mistake("config", f"{path} is a recipe", f"--recipe {path}")
    if content.pop("config", None) is not None:
        problems.append(Problem("config", "cannot be set in a configuration file", "leave it out", path))
    return accept(content, path, problems)


def accept(values: Mapping[Any, Any], source: str, problems: list[Problem]) -> dict[str, Setting]:
    """Return the settings with a known name and a legal value. Report the others in `problems`."""
    accepted = {}
    for name, value in values.items():
        known = legal.settings().get(str(name))
        if known is None:
            problems.append(unknown(str(name), source))
            continue
        used = legal.ALIASES.get(name, name)
        if used != name and used in values:
            problems.append(
                Problem(name, f"is the new name of {used}, and both are given", "write one of them", source)
            )
        try:
            value = coerce(value, known)
            if used == "output_dir" and value:  # otherwise only TrainingArguments expands ~
                value = str(expanded(value))
            accepted[used] = Setting(value, source)
        except ValueError as error:
            problems.append(Problem(name, str(error), _expected(known, "--" if source == COMMAND_LINE else ""), source))
    return accepted


def unknown(name: str, source: str) -> Problem:
    """Say why a name is unknown: it was renamed or removed, or it is misplaced or misspelt."""
    if name in moved.RENAMED:
        what, new = moved.RENAMED[name]
        return Problem(name, what, f"--{new}" if source == COMMAND_LINE and new in legal.settings() else new, source)
    if elsewhere := belongs(name):
        return Problem(name, "does not belong here", elsewhere, source)
    suggestion = nearest(name, legal.settings())
    fix = f"--{suggestion}" if suggestion and source == COMMAND_LINE else suggestion
    fix = fix or "see `recipes train --help` for all names"
    return Problem(name, "is not an argument of train.py or TrainingArguments", fix, source)


def names_with_a_fix() -> set[str]:
    """The names of all settings, and the renamed, removed and misplaced names in moved.py."""
    return {*legal.settings(), *moved.RENAMED, *moved.ELSEWHERE}


def belongs(name: str) -> str:
    """Return the fix for a misplaced name: the name or the place to use instead; else ''."""
    if name in legal.names("ddp") and f"ddp_{name}" in legal.settings():
        return f"ddp_{name}"
    return moved.ELSEWHERE.get(name, "")


# --- Values ---------------------------------------------------------------------------------------

_NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "list",
          "dict": "a JSON object"}  # fmt: skip
_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")  # as Hugging Face's parser reads them
_EXPONENT = r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"


def coerce(value: object, known: legal.Field) -> Any:
    """Convert `value` to the field's type. Raises `ValueError` for a value that is not legal.

    Text becomes a number, boolean, JSON object or None if the field allows that, because a command
    line has only text, and YAML reads `1e-5` as text.
    """
    types = known.types
    if hasattr(value, "tp_size"):  # accelerate's ParallelismConfig
        return value
    value = _plain(value)
    if value is False and "no" in known.choices:
        value = "no"  # YAML reads `no` without quotes as false
    if isinstance(value, str):
        value = _from_text(value, types)
    if value is None and known.name == "report_to":
        value = "none"  # transformers 5 refuses None
    if known.name == "dataset_name" and isinstance(value, list):
        return mixture.checked(value)
    if known.name == "dataset_columns" and isinstance(value, list):
        mixture.new_columns(value)
    if isinstance(value, list) and not all(isinstance(entry, (str, Enum)) for entry in value):
        raise ValueError(f"needs a list of strings, got {value!r}")
    if type(known.default) is float and type(value) is int:
        value = float(value)  # torch's AdamW refuses betas of (0, 0.999)
    if isinstance(value, dict):  # YAML reads only `1.0e-6` as a number, and `1e-6` as text
        value = {key: float(entry) if re.fullmatch(_EXPONENT, str(entry)) else entry for key, entry in value.items()}
    fits = type(value).__name__ in types or (type(value) is int and "float" in types)
    if not fits and not (value is None and "None" in types):
        raise ValueError(f"needs {_names(types)}, got {'nothing' if value is None else repr(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"needs a finite number, got {value}")
    if known.choices and isinstance(value, str) and value not in known.choices:
        raise ValueError(f"{value!r} is not a value of this setting")
    return value


def _plain(value: Any) -> Any:
    """Replace an enumeration's member, a path, a numpy number or a tuple by its plain value."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple):
        return list(value)
    return value.item() if hasattr(value, "item") else value


def _from_text(text: str, types: frozenset[str]) -> object:
    lowered = text.lower()
    if "bool" in types and lowered in (*_TRUE, *_FALSE) and not ("str" in types and lowered == "no"):
        return lowered in _TRUE
    for name, convert in (("int", int), ("float", float)):
        if name in types:
            with suppress(ValueError):
                return convert(text)
    if "dict" in types and text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
    if "None" in types and lowered in ("none", "null"):
        return None
    return [text] if "list" in types and "str" not in types else text


def _names(types: frozenset[str]) -> str:
    return " or ".join(name for kind, name in _NAMES.items() if kind in types) or "accelerate's ParallelismConfig"


def _expected(known: legal.Field, dashes: str) -> str:
    """Return the fix for a wrong value. `dashes` is `--` if the value is from a command line."""
    if known.name == "parallelism_config":
        return '"tensor_parallel": {"autotp_size": 2} in a DeepSpeed JSON, or parallelism_config in an Accelerate YAML'
    if known.choices:
        return "one of " + ", ".join(known.choices)
    if known.name == "dataset_name":
        return "a name, a list of names, or, in a file, entries such as {name: data.jsonl, weight: 2}"
    if known.name == "dataset_columns":
        return f"{dashes}dataset_columns question=prompt answer=completion"
    # A setting of type dict accepts a JSON object; some also accept the path of a JSON file.
    kind = 'a JSON object: {"name": value}' if "dict" in known.types else _names(known.types)
    return f"{dashes}{known.name} with {kind}"
