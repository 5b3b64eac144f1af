"""Reads the settings of an earlier run from its run.json, to train the run once more.

The new run gets the values that the user wrote, except secrets and flags for one start, such as
--fresh. The other values are derived again. If a derived value would now differ (another library
version, a limit of the model, a micro-batch that `--fit` found), the new run gets the recorded
value. Secrets, paths, illegal values and the decisions of another machine are not taken over.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.errors import Problem, mistake
from recipes.mixture import paths_of
from recipes.run.command_line import accept
from recipes.run.files import Json, expanded, nearest, read_json
from recipes.run.place import Place
from recipes.run.spec import BATCH, BATCH_FIELDS, BEST_MODEL, FIT, HIDDEN, LIBRARY, RunSpec, Setting

NAME = "run.json"
_RUN = f"give the --output_dir of a run, or its {NAME} as train.py wrote it"
# Settings that can name a file or folder that a run reads.
_INPUTS = (
    "recipe", "model_name_or_path", "dataset_name", "deepspeed", "fsdp_config", "accelerator_config",
    "resume_from_checkpoint",
)  # fmt: skip
# These settings are only for one start: the settings file, flags to start over or to train
# nothing, and the output folder, which belongs to the recorded run.
_NOT_REPEATED = ("config", "fresh", "fit_only", "output_dir")
_DERIVED = (
    BATCH, FIT, BEST_MODEL, LIBRARY, "hardware", "limit", "data", "default", "demonstration", "metric_for_best_model",
)  # fmt: skip


# --- Reading run.json -----------------------------------------------------------------------------


def file_of(path: str | Path) -> Path:
    """Return the path of run.json in an output folder. A path that is no folder stays as it is."""
    return Path(path) / NAME if os.path.isdir(path) else Path(path)  # noqa: PTH112, Path's raises for a long name


def read(path: str | Path, subject: str) -> Json:
    """Read the record of a run from its output folder or its run.json. Raises `UserError` about the
    flag `subject` if the path is neither, or if the record is damaged.
    """
    content, fault = read_json(file_of(path))
    if content is None or not _is_record(content):
        inner = ", ".join(sorted(str(found.parent) for found in Path(path).glob(f"*/{NAME}")))
        beside = {found.parent.name: str(found.parent) for found in Path(path).parent.glob(f"*/{NAME}")}
        fix = f"one of {inner}" if inner else beside.get(nearest(Path(path).name, beside), _RUN)
        if not file_of(path).is_file():
            fault = f"the folder {path} has no {NAME}" if Path(path).is_dir() else f"there is no folder {path}"
        raise mistake(subject, fault or f"{file_of(path)} is not the record of a run", fix)
    return content


def _is_record(content: Json) -> bool:
    settings = content.get("settings")
    is_written = isinstance(settings, dict) and all(isinstance(entry, dict) for entry in settings.values())
    return is_written and isinstance(content.get("status"), str)


def is_record_at(path: str) -> bool:
    """True if the path is a folder, a run.json, or a JSON file with the content of a run.json."""
    file = file_of(path)
    return file.name == NAME or (file.suffix == ".json" and _is_record(read_json(file)[0] or {}))


def began_from(output_dir: str, checkpoint: str) -> bool:
    """True if the run.json of an output folder records that its run began from this checkpoint."""
    run = (read_json(Path(output_dir, NAME))[0] or {}).get("run")
    return isinstance(run, dict) and run.get("began_from") == os.path.realpath(checkpoint)


# --- The settings to give again -------------------------------------------------------------------


def to_repeat(record: Json, given: Mapping[str, Setting], place: Place, problems: list[Problem]) -> Json:
    """Return the settings for repeating a run: those that the user wrote, the recipe and the global
    batch, without secrets and _NOT_REPEATED. Report each needed secret that is not in `given`.
    """
    values = {name: entry["value"] for name, entry in record["settings"].items() if not is_derived(entry["source"])}
    values |= {name: _value(record, name) for name in ("recipe", "global_batch_size") if name in record["settings"]}
    micro = record["settings"].get("per_device_train_batch_size", {})
    if micro.get("source") == FIT and record.get("world_size") == place.world_size:
        values.pop("fit", None)  # no new search: --fit found the recorded micro-batch
    repeated = {name: _found(record, name, value) for name, value in values.items() if name not in _NOT_REPEATED}
    pushed = given["push_to_hub"].value if "push_to_hub" in given else _value(record, "push_to_hub")
    for name in [name for name, value in repeated.items() if HIDDEN in json.dumps(value)]:
        del repeated[name]
        is_token = name.endswith("_token")  # only a push needs a token, and a login replaces it
        if name in given or (is_token and not (pushed and not place.environment.get("HF_TOKEN"))):
            continue
        fix = f"give --{name} again" + ", or set HF_TOKEN, or run `hf auth login`" * is_token
        severity = "advice" if is_token else "error"
        problems.append(Problem(name, f"holds a secret, which {NAME} does not keep", fix, severity=severity))
    return repeated


def otherwise_here(record: Json, derived: RunSpec, place: Place) -> Json:
    """Return the recorded values that differ from `derived`, the user's settings resolved on this
    machine. Omit files, secrets, illegal values and another machine's decisions. Of the batch
    sizes, return only the micro-batch, and only at the recorded world size.
    """
    values = {}
    skipped = {"fit", *_NOT_REPEATED, *BATCH_FIELDS, *at_a_place(record)}
    here, then = plain(asdict(derived.hardware)), record.get("hardware") or {}
    same_machine = bool(then) and all(here[name] == value for name, value in then.items() if name in here)
    for name, entry in record["settings"].items():
        if name in skipped or name not in derived or HIDDEN in json.dumps(entry["value"]):
            continue
        if plain(derived[name]) != entry["value"] and is_legal(name, entry["value"]):
            decided_by_machine = callable(derived.recipe.settings.get(name))
            decided_by_machine |= "hardware" in (entry["source"], derived.setting(name).source)
            if same_machine or not decided_by_machine:
                values[name] = entry["value"]
    micro = _value(record, "per_device_train_batch_size")
    if record.get("world_size") == place.world_size and micro not in (None, derived.batch.micro):
        values["per_device_train_batch_size"] = micro
    return values


def _value(record: Json, name: str) -> Any:
    return record["settings"].get(name, {}).get("value")


def is_derived(source: str) -> bool:
    return source in _DERIVED or source.startswith("recipe ")


def is_legal(name: str, value: Any) -> bool:
    """True if the installed libraries have this setting and accept the recorded value."""
    problems: list[Problem] = []
    return bool(accept({name: value}, NAME, problems)) and not problems


def plain(value: Any) -> Any:
    """Convert a value to its JSON form: a tuple becomes a list, a path becomes text."""
    return json.loads(json.dumps(value, default=str))


# --- Files that run.json names --------------------------------------------------------------------


def places_of(run: RunSpec) -> dict[str, str]:
    """Map settings to the absolute paths they name. Omit mixtures, and paths that do not exist."""
    named = {name: re.sub(r"(?<=\.py):\w*$", "", run[name]) for name in _INPUTS if isinstance(run[name], str)}
    return {name: str(expanded(path).resolve()) for name, path in named.items() if paths_of(path)}


def _found(record: Json, name: str, value: Any) -> Any:
    """Return a setting's value. If the value is a path that is not found here, return the recorded
    absolute path, provided that this path exists.
    """
    then = (record.get("paths") or {}).get(name)
    is_lost = isinstance(value, str) and ":" not in value and not paths_of(value)  # mine.py:mine names a function
    return then if is_lost and paths_of(then) else value


def at_a_place(record: Json) -> set[str]:
    """Return the names of recorded settings whose value is a path, or a mixture of data."""
    several = {"dataset_name"} if isinstance(_value(record, "dataset_name"), list) else set()
    return several | (record.get("paths") or {}).keys()
