"""Settings that are a mapping of their own, or the name of a JSON file that holds one."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import accelerator_config, gradient_accumulation_kwargs, mapping, problem, rule
from recipes.run import RunSpec, nearest


@rule
def nested_settings_are_known(run):
    """fsdp_config takes any key silently; the others fail with a TypeError or ValueError in every rank."""
    fsdp = {str(key).removeprefix("fsdp_") for key in mapping(run["fsdp_config"])}
    nested = (
        ("accelerator_config", accelerator_config(run), legal.accelerator_config_keys),
        ("accelerator_config", gradient_accumulation_kwargs(run), legal.gradient_accumulation_keys),
        ("gradient_checkpointing_kwargs", mapping(run["gradient_checkpointing_kwargs"]), legal.checkpoint_keys),
        ("fsdp_config", fsdp, legal.fsdp_config_keys),
    )
    for name, keys, read_known in nested:
        known = read_known() if keys else frozenset()  # read from a source only where there is something to look up
        for key in sorted(set(keys) - known):
            fix = nearest(key, known) or "one of " + ", ".join(sorted(known))
            yield problem(run, name, f"has no key {key!r}", fix)


# Settings that may be the name of a JSON file, and those that are one mapping or nothing.
_MAY_BE_A_FILE = ("accelerator_config", "fsdp_config", "deepspeed")

_NO_FILE = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs")

_READ_ONLY_WITH = {"fsdp_config": "fsdp", "gradient_checkpointing_kwargs": "gradient_checkpointing"}


@rule
def nested_settings_can_be_read(run):
    """Text is the name of a JSON file for some of them, `TypeError: ... must be a mapping, not str` for the others."""
    for name in (*_MAY_BE_A_FILE, *_NO_FILE):
        value = run[name]
        if not isinstance(value, str) or value.lstrip().startswith("{") or _is_unread(run, name):
            continue
        if name in _NO_FILE:
            yield problem(run, name, f"{value!r} is no JSON, and its file is read by nobody", 'JSON: {"name": value}')
        elif not (name == "deepspeed" and _base64_json(value)):
            yield from _readable(run, name, value)


def _is_unread(run: RunSpec, name: str) -> bool:
    if name == "lr_scheduler_kwargs":
        return run["lr_scheduler_type"] in ("constant", "constant_with_warmup")
    return name in _READ_ONLY_WITH and not run[_READ_ONLY_WITH[name]]


def _base64_json(text: str) -> bool:
    """DeepSpeed takes its configuration in base64 too."""
    try:
        return isinstance(json.loads(base64.urlsafe_b64decode(text)), dict)
    except ValueError:
        return False


def _readable(run: RunSpec, name: str, file: str) -> Iterator[Problem]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError:
        yield problem(run, name, f"{file} cannot be read", "the path of a JSON file, or JSON")
    except ValueError as error:
        yield problem(run, name, f"{file} is not valid JSON: {error}", "a JSON object")
    else:
        if not isinstance(content, dict):
            yield problem(run, name, f"{file} holds a {type(content).__name__}", "a JSON object")
