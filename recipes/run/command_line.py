"""What the user wrote: flags and a configuration file, turned into settings of the right type, or into problems."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from recipes import legal
from recipes.errors import Problem
from recipes.legal import moved
from recipes.run.engine import read_yaml
from recipes.run.spec import COMMAND_LINE, Setting


def parse(argv: Sequence[str], problems: list[Problem]) -> dict[str, Setting]:
    """`--name value`, `--name=value`, `--flag`, `--no_flag`; dashes are underscores, as for HF's parser."""
    raw: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(Problem(word, "is not a flag", "flags are written --name value", COMMAND_LINE))
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        values = [value] if equals else []
        while words and not equals and not words[0].startswith("--"):
            values.append(words.pop(0))
        if name not in legal.settings() and name.startswith("no_") and _is_bool(name[3:]) and not values:
            name, values = name[3:], ["false"]
        if name in raw:
            problems.append(Problem(f"--{name}", "is given twice", "write it once", COMMAND_LINE))
        raw[name] = _join(name, values, problems)
    return accept(raw, COMMAND_LINE, problems)


def with_flags(argv: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """A command line with these flags instead of what it said about them; a flag of None is left out."""
    words, leaving_out = [], False
    for word in argv:
        if word.startswith("--"):
            leaving_out = _name_of(word) in flags
        if not leaving_out:
            words.append(word)
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def _name_of(word: str) -> str:
    """The setting that a flag such as `--no_fit` or `--global-batch-size=8` is about."""
    name = word[2:].partition("=")[0].replace("-", "_")
    if name not in legal.settings() and name.startswith("no_"):
        name = name[3:]
    return legal.ALIASES.get(name, name)


def _is_bool(name: str) -> bool:
    known = legal.settings().get(name)
    return known is not None and "bool" in known.types


def _join(name: str, values: list[str], problems: list[Problem]) -> Any:
    known = legal.settings().get(name)
    if not values:
        return True if known is None or "bool" in known.types else None
    if len(values) == 1:
        return values[0]
    if known and "list" not in known.types:
        problems.append(Problem(f"--{name}", f"takes one value, got {' '.join(values)!r}", "quote it", COMMAND_LINE))
    return values


def read_config(path: Any, problems: list[Problem]) -> dict[str, Setting]:
    content = read_yaml(path, "--config")
    if "config" in content:
        problems.append(Problem("config", "a configuration cannot name another one", "leave it out", str(path)))
        del content["config"]
    return accept(content, str(path), problems)


def accept(values: Mapping[Any, Any], source: str, problems: list[Problem]) -> dict[str, Setting]:
    """Known names with values of the right type; everything else becomes a problem."""
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
            if old_name == "output_dir" and value:  # TrainingArguments would, and nobody else
                value = str(Path(value).expanduser())
            accepted[old_name] = Setting(value, source)
        except ValueError as error:
            problems.append(Problem(name, str(error), _expected(known), source))
    return accepted


def unknown(name: str, source: str) -> Problem:
    """Why `name` is no legal setting: renamed, removed, in the wrong place, or misspelt."""
    if name in moved.RENAMED:
        what, fix = moved.RENAMED[name]
        return Problem(name, what, fix, source)
    if elsewhere := belongs(name):
        return Problem(name, "does not belong here", elsewhere, source)
    suggestion = nearest(name, legal.settings())
    fix = f"--{suggestion}" if suggestion and source == COMMAND_LINE else suggestion
    return Problem(
        name, "is no argument of train.py or of TrainingArguments", fix or "`train.py --help` lists them", source
    )


def belongs(name: str) -> str:
    """What to write instead of a name that is legal elsewhere, DDP's own keywords among them; empty if it is not."""
    if name in legal.ddp_keywords() and f"ddp_{name}" in legal.settings():
        return f"ddp_{name}"
    return moved.ELSEWHERE.get(name, "")


def nearest(name: str, names: Any) -> str:
    """The most similar legal name, or an empty string where none is similar."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return found[0] if found else ""


# --- Values ----------------------------------------------------------------------------------------------------------


def coerce(value: Any, known: legal.Field) -> Any:
    """`value` as the type the field wants. Raises ValueError with what is wrong.

    Text is read as a command line would give it; YAML reads `1e-5` as text too, so text is fine for a number.
    """
    types = known.types
    value = _plain(value)
    if value is False and "no" in known.choices:
        value = "no"  # which YAML reads as false where it is not quoted
    if isinstance(value, str):
        value = _from_text(value, types)
    if value is None and known.name == "report_to":
        value = "none"  # a word of its own: transformers 5 refuses None
    accepted = types | {"int"} if "float" in types else types  # 2 stays 2 where 2.0 would do
    if type(value).__name__ not in accepted and not (value is None and "None" in types):
        given = "nothing" if value is None else repr(value)
        raise ValueError(f"takes {_names(types)}, got {given}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"takes a finite number, got {value}")
    if known.choices and isinstance(value, str) and value not in known.choices:
        raise ValueError(f"{value!r} is none of its values")
    return value


def _plain(value: Any) -> Any:
    """What Python callers pass for a plain value: an enumeration's member, a path, a number of numpy's, a tuple."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple):
        return list(value)
    return value.item() if hasattr(value, "item") and not isinstance(value, dict) else value


_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")  # as Hugging Face's parser reads them


def _from_text(text: str, types: frozenset[str]) -> Any:
    lowered = text.lower()
    if "bool" in types and lowered in (*_TRUE, *_FALSE) and not ("str" in types and lowered == "no"):
        return lowered in _TRUE
    for convert in (int, float) if "float" in types else (int,) if "int" in types else ():
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
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "dict": "JSON"}
    return " or ".join([words.get(t, t) for t in ("bool", "int", "float", "str", "list", "dict") if t in types])


def _expected(known: legal.Field) -> str:
    if known.choices:
        return "one of " + ", ".join(known.choices)
    return f"--{known.name} with {_names(known.types)}"
