"""The site file: a target's flags that are the same for every job of a site, written once.

Such as, in ~/.config/accelerate-recipes/site.yaml:

    slurm: {partition: gpu, account: lab, module: [cuda/12.6], venv: /shared/venv}
    azureml: {compute: gpu-cluster, workspace_name: lab}

The command line wins over it. A dry run says which values came from where.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from shlex import join
from typing import Any

from launch.flags import value_type
from launch.jobs.targets import TARGETS
from recipes.errors import Problem, UserError
from recipes.run.files import existing_path, read_yaml

_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOTHING = ("", "null", "~")  # as YAML writes a value that is not there


def path() -> Path:
    """Where the site file is, or would be: in the user's configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path(os.environ.get("HOME", "/")) / ".config"
    return Path(folder) / "accelerate-recipes" / "site.yaml"


def defaults(target: str) -> dict[str, Any]:
    """A target's flags in the site file, with values as the command line would give them.

    Empty without a site file. The names of other targets are checked too.
    Raises `UserError` with everything wrong in the file.
    """
    file = existing_path(str(path()))
    if file is None:
        return {}
    content = read_yaml(file, "site.yaml", as_text=True)
    problems = list(_unknown(content, TARGETS, "target"))
    section = content.get(target) or {}
    if not isinstance(section, Mapping):
        raise UserError(_problem(target, "holds no flags", "`name: value` on each line below it, indented"))
    section = {name.replace("-", "_"): value for name, value in section.items() if value not in _NOTHING}
    fields = {field.name: field for field in dataclasses.fields(TARGETS[target].FLAGS)}
    problems += _unknown(section, fields, f"flag of `recipes submit {target}`")
    values = {}
    for name in section.keys() & fields.keys():
        try:
            values[name] = _value(fields[name], section[name])
        except (ValueError, argparse.ArgumentTypeError) as error:
            problems.append(_problem(name, str(error), f"what --{name} takes on the command line"))
    if problems:
        raise UserError(*problems)
    return {name: values[name] for name in fields if name in values}


def origins(site: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Comment lines that say which flags came from the site file and which from the command line.

    Empty if nothing came from the site file.
    """
    used = {name: value for name, value in site.items() if name not in given}
    if not used:
        return ""
    lines = [f"# From {path()}: {_flags(used)}"]
    if given:
        lines.append(f"# From the command line: {_flags(given)}")
    return "".join(f"{line}\n" for line in lines)


def commented(text: str, comment: str) -> str:
    """A job's text with comment lines at its top: behind `#!`, which must be the first line."""
    if not comment or not text.startswith("#!"):
        return comment + text
    first, _, rest = text.partition("\n")
    return f"{first}\n{comment}{rest}"


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Raises ValueError or `ArgumentTypeError` if the field cannot have this value."""
    if isinstance(field.default, tuple):
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{value!r} is not a list of texts")
        return tuple(texts)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a single value")
    if isinstance(field.default, bool):
        if value.lower() not in _SWITCHES:
            raise ValueError(f"{value!r} is not true or false")
        return _SWITCHES[value.lower()]
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
    return value_type(field)(value)


def _unknown(names: Mapping[str, Any], known: Mapping[str, Any], kind: str) -> Iterator[Problem]:
    for name in names.keys() - known.keys():
        similar = get_close_matches(name, known, n=1)
        yield _problem(name, f"is not a {kind}", similar[0] if similar else "one of " + ", ".join(known))


def _problem(subject: str, what: str, fix: str) -> Problem:
    return Problem(subject, what, fix, source=str(path()))


def _flags(values: Mapping[str, Any]) -> str:
    """The values as the command line spells them, on one line."""
    words: list[str] = []
    for name, value in values.items():
        if value is False:  # a switch that is off has no flag
            continue
        words.append(f"--{name}")
        if value is not True:
            words += map(str, value) if isinstance(value, tuple | list) else [str(value)]
    return " ".join(join(words).splitlines())
