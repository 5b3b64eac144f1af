"""What the user wrote: flags and a configuration file, as settings of the right type."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from recipes import legal, mixture
from recipes.errors import Problem, mistake
from recipes.legal import moved
from recipes.run.engine import is_argument, read_yaml
from recipes.run.spec import COMMAND_LINE, Setting, Settings


def parse(argv: Sequence[str], problems: list[Problem]) -> dict[str, Setting]:
    """The settings of a command line, with whatever is wrong in it added to `problems`.

    Flags are `--name value`, `--name=value`, `--flag` or `--no_flag`. A dash in a name is an
    underscore, as for Hugging Face's parser.
    """
    raw: dict[str, str | list[str] | bool] = {}
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            problems.append(Problem(flag, "is not a flag", "flags are written --name value", COMMAND_LINE))
            continue
        name, equals, value = flag[2:].partition("=")
        name = name.replace("-", "_")
        values = [value] if equals else []
        while rest and not equals and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if name not in legal.settings() and name.startswith("no_") and _is_bool(name[3:]) and not values:
            name, values = name[3:], ["false"]
        if name in raw:
            problems.append(Problem(f"--{name}", "is given twice", "write it once", COMMAND_LINE))
        known = legal.settings().get(name)
        if known and not values and "bool" not in known.types:
            problems.append(Problem(f"--{name}", "needs a value", _expected(known), COMMAND_LINE))
        else:
            raw[name] = _join(name, values, problems)
    return accept(raw, COMMAND_LINE, problems)


def with_flags(argv: Sequence[str], flags: Settings) -> list[str]:
    """A command line with these flags in place of its own; a flag that is None is left out."""
    changed, replaced = [], False
    for argument in argv:
        if argument.startswith("--"):
            replaced = _name_of(argument) in flags
        if not replaced:
            changed.append(argument)
    for name, value in flags.items():
        if value is not None:
            changed += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return changed


def _name_of(flag: str) -> str:
    """The setting that a flag such as `--no_fit` or `--global-batch-size=8` sets."""
    name = flag[2:].partition("=")[0].replace("-", "_")
    if name not in legal.settings() and name.startswith("no_"):
        name = name[3:]
    return legal.ALIASES.get(name, name)


def _is_bool(name: str) -> bool:
    known = legal.settings().get(name)
    return known is not None and "bool" in known.types


def _join(name: str, values: list[str], problems: list[Problem]) -> str | list[str] | bool:
    known = legal.settings().get(name)
    if not values:
        return True
    if len(values) == 1:
        return values[0]
    if known and "list" not in known.types:
        problems.append(Problem(f"--{name}", f"takes one value, got {' '.join(values)!r}", "quote it", COMMAND_LINE))
    return values


def read_config(path: str, problems: list[Problem]) -> dict[str, Setting]:
    """The settings of a --config file. Raises `UserError` if it cannot be read."""
    content = read_yaml(path, "--config")
    if "base" in content:
        raise mistake("config", f"{path} is a recipe", f"--recipe {path}")
    if "config" in content:
        problems.append(Problem("config", "cannot be set in a configuration file", "leave it out", str(path)))
        del content["config"]
    return accept(content, str(path), problems)


def accept(values: Mapping[Any, Any], source: str, problems: list[Problem]) -> dict[str, Setting]:
    """The settings with a known name and a value of the right type. The others become problems."""
    accepted = {}
    for name, value in values.items():
        name = str(name)
        known = legal.settings().get(name)
        if known is None:
            problems.append(unknown(name, source))
            continue
        old_name = legal.ALIASES.get(name, name)
        if old_name != name and old_name in values:
            problems.append(Problem(name, f"is the new name of {old_name}, and both are given", "write one", source))
        try:
            value = coerce(value, known)
            if old_name == "output_dir" and value:  # only TrainingArguments would expand ~
                # As it does: Path.expanduser is a traceback for the home folder of an unknown user.
                value = os.path.expanduser(value)  # noqa: PTH111
            accepted[old_name] = Setting(value, source)
        except ValueError as error:
            problems.append(Problem(name, str(error), _expected(known), source))
    return accepted


NOTHING_SIMILAR = "`train.py --help` lists them"


def unknown(name: str, source: str) -> Problem:
    """Why `name` is not a legal setting: renamed, removed, in the wrong place, or misspelt."""
    if name in moved.RENAMED:
        what, fix = moved.RENAMED[name]
        return Problem(name, what, fix, source)
    if elsewhere := belongs(name):
        return Problem(name, "does not belong here", elsewhere, source)
    suggestion = nearest(name, legal.settings())
    fix = f"--{suggestion}" if suggestion and source == COMMAND_LINE else suggestion
    return Problem(name, "is not an argument of train.py or TrainingArguments", fix or NOTHING_SIMILAR, source)


def belongs(name: str) -> str:
    """What to write instead of a name that is legal elsewhere; empty if it is not."""
    if name in legal.ddp_keywords() and f"ddp_{name}" in legal.settings():
        return f"ddp_{name}"
    return moved.ELSEWHERE.get(name, "")


def nearest(name: object, names: Iterable[str]) -> str:
    """The most similar of `names`; empty if none is similar."""
    return next(iter(difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.6)), "")


# --- Values ---------------------------------------------------------------------------------------


def coerce(value: object, known: legal.Field) -> Any:
    """`value` in the type of the field. Raises `ValueError` that says what is wrong.

    Text may stand for a number: a command line has only text, and YAML reads `1e-5` as text.
    """
    types = known.types
    if known.name == "parallelism_config" and value not in (None, "None", "none"):
        if hasattr(value, "tp_size"):
            return value
        raise ValueError(f"takes accelerate's ParallelismConfig, got {value!r}")
    value = _plain(value)
    if value is False and "no" in known.choices:
        value = "no"  # YAML reads it as false without quotes
    if isinstance(value, str):
        value = _from_text(value, types)
    if value is None and known.name == "report_to":
        value = "none"  # transformers 5 refuses None
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise ValueError("takes a number that is not that large")
    if known.name == "dataset_name" and isinstance(value, list):
        texts = [text for entry in value for text in (entry.values() if isinstance(entry, dict) else [entry])]
        if all(map(is_argument, texts)):
            return mixture.checked(value)
    if isinstance(value, list) and not all(isinstance(entry, (str, Enum)) for entry in value):
        raise ValueError(f"takes a list of text, got {value!r}")
    if type(known.default) is float and type(value) is int:
        value = float(value)  # torch's AdamW refuses betas of (0, 0.999)
    if not all(map(is_argument, value if isinstance(value, list) else [value])):
        raise ValueError(f"takes text without null bytes and half characters, got {value!r}")
    if isinstance(value, dict) and not _has_text_keys(value):
        raise ValueError(f"takes names that are text, got {value!r}")
    if isinstance(value, dict):
        pattern = _ANY_NUMBER if known.name == "lr_scheduler_kwargs" else _EXPONENT
        value = {key: _number_in_yaml(entry, pattern) for key, entry in value.items()}
    fits = type(value).__name__ in types or (type(value) is int and "float" in types)
    if not fits and not (value is None and "None" in types):
        given = "nothing" if value is None else repr(value)
        raise ValueError(f"takes {_names(types)}, got {given}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"takes a finite number, got {value}")
    if known.choices and isinstance(value, str) and value not in known.choices:
        raise ValueError(f"{value!r} is not one of its values")
    return value


def _plain(value: object) -> object:
    """The plain value of an enumeration's member, a path, a numpy number or a tuple."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple):
        return list(value)
    return value.item() if hasattr(value, "item") and not isinstance(value, dict) else value


def _has_text_keys(value: object) -> bool:
    """Whether all names are text, which YAML does not ask for, in an object and those inside it."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _has_text_keys(entry) for name, entry in value.items())
    return all(map(_has_text_keys, value)) if isinstance(value, list) else True


_TOO_LARGE = 2**1023  # for a float
_EXPONENT = r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"
_ANY_NUMBER = r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?"  # some schedules read "2" as a number, others fail


def _number_in_yaml(value: object, pattern: str) -> object:
    """A number in place of text such as `1e-6`: YAML reads only `1.0e-6` as a number."""
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return float(value)
    return value


_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")  # as Hugging Face's parser reads them


def _from_text(text: str, types: frozenset[str]) -> object:
    lowered = text.lower()
    if "bool" in types and lowered in (*_TRUE, *_FALSE) and not ("str" in types and lowered == "no"):
        return lowered in _TRUE
    for name, convert in (("int", int), ("float", float)):
        if name in types:
            try:
                return convert(text)
            except ValueError:
                pass
    if "dict" in types and text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
    if "None" in types and lowered in ("none", "null"):
        return None
    if "list" in types and "str" not in types:
        return [text]
    return text


def _names(types: frozenset[str]) -> str:
    names = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "dict": "a JSON object",
    }
    return " or ".join([names.get(t, t) for t in ("bool", "int", "float", "str", "list", "dict") if t in types])


def _expected(known: legal.Field) -> str:
    if known.name == "parallelism_config":
        return 'a DeepSpeed JSON with "tensor_parallel": {"autotp_size": 2}; for FSDP, dp_ sizes in an Accelerate YAML'
    if known.choices:
        return "one of " + ", ".join(known.choices)
    if "dict" in known.types:  # some may be the path of a file, others not: an object is right for all
        return f'--{known.name} with a JSON object: {{"name": value}}'
    if known.name == "dataset_name":
        return "a name, a list of names, or in a file entries such as {name: data.jsonl, weight: 2}"
    return f"--{known.name} with {_names(known.types)}"
