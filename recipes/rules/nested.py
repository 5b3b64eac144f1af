"""Settings that are a mapping, or the name of a JSON file that holds one."""

from __future__ import annotations

import base64
import json

from recipes import legal
from recipes.rules.facts import accelerator_config, advice, gradient_accumulation_kwargs, mapping, problem, rule
from recipes.run import RunSpec, nearest
from recipes.run.engine import read_json


@rule
def nested_settings_are_known(run):
    """fsdp_config silently accepts any key. The others raise TypeError or ValueError."""
    fsdp = {str(key).removeprefix("fsdp_") for key in mapping(run["fsdp_config"])}
    nested = (
        ("accelerator_config", accelerator_config(run), legal.accelerator_config_keys),
        ("accelerator_config", gradient_accumulation_kwargs(run), legal.gradient_accumulation_keys),
        ("gradient_checkpointing_kwargs", mapping(run["gradient_checkpointing_kwargs"]), legal.checkpoint_keys),
        ("fsdp_config", fsdp, legal.fsdp_config_keys),
    )
    for name, keys, read_known in nested:
        if not keys or _is_unread(run, name):  # reading a source takes time
            continue
        known = read_known()
        for key in sorted(set(keys) - known):
            fix = nearest(key, known) or "one of " + ", ".join(sorted(known))
            yield problem(run, name, f"has no key {key!r}", fix)


# Settings that may name a JSON file, and those that must be a mapping.
_MAY_BE_A_FILE = ("accelerator_config", "fsdp_config", "deepspeed")
_NO_FILE = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs")
_READ_ONLY_WITH = {"fsdp_config": "fsdp", "gradient_checkpointing_kwargs": "gradient_checkpointing"}


@rule
def nested_settings_are_switched_on(run):
    """Trainer ignores them without a word if what they are about is off."""
    for name, switch in _READ_ONLY_WITH.items():
        if run.explicit(name) and run[name] and not run[switch]:
            yield advice(run, name, f"is ignored without {switch}", f"--{switch}, or leave it out")


@rule
def nested_settings_can_be_read(run):
    """`FileNotFoundError`, or `TypeError: ... must be a mapping` where a file cannot be named."""
    for name in (*_MAY_BE_A_FILE, *_NO_FILE):
        value = run[name]
        if not isinstance(value, str) or value.lstrip().startswith("{") or _is_unread(run, name):
            continue
        if name in _NO_FILE:
            yield problem(run, name, f"{value!r} is not JSON, and a file cannot be given here", 'JSON: {"name": value}')
        elif not (name == "deepspeed" and _base64_json(value)):
            what = read_json(value)[1]
            if what:
                yield problem(run, name, what, "a JSON object, or the path of a JSON file that holds one")


def _is_unread(run: RunSpec, name: str) -> bool:
    if name == "lr_scheduler_kwargs":
        return run["lr_scheduler_type"] in ("constant", "constant_with_warmup")
    return name in _READ_ONLY_WITH and not run[_READ_ONLY_WITH[name]]


def _base64_json(text: str) -> bool:
    """Whether a text is JSON in base64, which DeepSpeed takes too."""
    try:
        return isinstance(json.loads(base64.urlsafe_b64decode(text)), dict)
    except ValueError:
        return False
