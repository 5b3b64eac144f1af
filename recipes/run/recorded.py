"""run.json, read: the settings of a run that trained, to train them again.

What the user wrote is written again; the rest follows from it as it did then. Where it follows
otherwise here (another version, a limit of the model, a micro-batch that `--fit` found), the
recorded value is written too, unless the machine decided it and this is another machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from recipes.errors import Problem, mistake
from recipes.flags import MOST_PROCESSES
from recipes.mixture import paths_of
from recipes.run.command_line import accept
from recipes.run.engine import Json, expanded, is_argument, read_json
from recipes.run.hardware import Hardware
from recipes.run.local_model import existing_path
from recipes.run.spec import BATCH, BATCH_FIELDS, BEST_MODEL, FIT, HIDDEN, LIBRARY, RunSpec

NAME = "run.json"
# Settings that can name a file or folder that a run reads.
INPUTS = (
    "recipe", "model_name_or_path", "dataset_name", "deepspeed", "fsdp_config", "accelerator_config",
    "resume_from_checkpoint",
)  # fmt: skip
# They said what to do on the day: with a folder, which belongs to the run, or before the training.
_OF_THE_DAY = ("config", "fresh", "fit_only", "output_dir")
_DERIVED = (
    BATCH, FIT, BEST_MODEL, LIBRARY, "hardware", "limit", "data", "default", "demonstration", "metric_for_best_model",
)  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "status": (str,), "recipe": (str,), "recipe_files": (list,), "engine": (str,), "world_size": (int,),
    "local_world_size": (int,), "data_parallel_size": (int,), "started": (str,), "command": (list,), "folder": (str,),
    "launcher": (list,), "accelerate_config": (str,), "files": (dict,), "paths": (dict,), "environment": (dict,),
    "settings": (dict,), "versions": (dict,), "hardware": (dict,), "code": (dict,), "data": (str,), "model": (str,),
    "error": (str,), "ended": (str,), "peak_memory_of": (str,), "classes": (list,),
}  # fmt: skip
_OF_TEXT = ("recipe_files", "classes", "command", "launcher", "files", "paths", "environment")
_OF_TEXT_OR_NULL = ("versions", "code")  # a package that is not installed; whether the code was changed
_LARGEST = 1e300  # of any number


# --- Reading it -----------------------------------------------------------------------------------


def file_of(path: str | Path) -> Path:
    """The run.json in an output folder; any other path as it is."""
    return Path(path) / NAME if Path(path).is_dir() else Path(path)


def read(path: str | Path, subject: str) -> Json:
    """The record of a run, from its output folder or its run.json.

    Raises `UserError` about `subject` for anything else.
    """
    file = file_of(path)
    try:
        if Path(path).is_dir() and not file.exists():
            inner = sorted(str(found.parent) for found in Path(path).glob(f"*/{NAME}"))
            fix = f"one of {', '.join(inner)}" if inner else "the --output_dir of a run"
            raise mistake(subject, f"{path} holds no {NAME}", fix)
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise mistake(subject, f"{path} cannot be read: {error.strerror}", "the --output_dir of a run") from None
    except (ValueError, RecursionError) as error:
        raise mistake(subject, f"{file} is damaged: {error}", "the run's own record, as train.py wrote it") from None
    if fault := _fault(content):
        raise mistake(subject, f"{file} is not the record of a run: {fault}", f"a {NAME}, as train.py wrote it")
    return content


def began_from(output_dir: str, checkpoint: str) -> bool:
    """Whether the run in an output folder began from this checkpoint, as its record says."""
    file = os.path.join(output_dir, NAME)  # noqa: PTH118
    content = read_json(file)[0] if os.path.isfile(file) else None  # noqa: PTH113, Path.is_file may raise
    run = (content or {}).get("run")
    return isinstance(run, dict) and run.get("began_from") == os.path.realpath(checkpoint)


def is_record_at(path: str) -> bool:
    """Whether --config names a run.json, by its name or its content, or a folder."""
    file = file_of(path)
    if file.name == NAME or file.suffix != ".json":
        return file.name == NAME
    return is_record(read_json(file)[0])


def is_record(content: object) -> bool:
    """Whether a file's content is a run.json, be it damaged, and not plain settings."""
    return isinstance(content, dict) and {"status", "settings"} <= set(content)


def _fault(content: object) -> str:
    """What is wrong with a record; empty if nothing is."""
    if not is_record(content) or not isinstance(content, dict):
        return "it lacks status or settings"
    if content["status"] is None:
        return "its status is null"
    for name, types in _TYPES.items():
        unknown = name in content and content[name] is None and types not in ((dict,), (list,))
        if name in content and not unknown and type(content[name]) not in types:
            return f"{name} is {content[name]!r:.40}"
    if _holds_no_argument({name: value for name, value in content.items() if name != "files"}):
        return "a text in it cannot be that of a path or an argument"
    if any(type(value) is int and abs(value) > _LARGEST for value in content.values()):
        return "a number in it is out of range"
    sizes = [content.get(name) for name in ("world_size", "local_world_size", "data_parallel_size")]
    if any(size is not None and not 1 <= size <= MOST_PROCESSES for size in sizes):
        return "a number of processes is not possible"
    for name in (*_OF_TEXT, *_OF_TEXT_OR_NULL):
        part = content.get(name) or ()
        kinds = (str, bool, type(None)) if name in _OF_TEXT_OR_NULL else (str,)
        if not all(isinstance(text, kinds) for text in (part.values() if isinstance(part, dict) else part)):
            return f"{name} holds something else than text"
    if not all(Path(path).is_absolute() and is_argument(path) for path in content.get("files") or ()):
        return "files have no absolute paths"
    return _fault_of_hardware(content.get("hardware") or {}) or _fault_of_settings(content["settings"])


def _fault_of_hardware(hardware: Json) -> str:
    gpus = hardware.get("gpus", [])
    named = isinstance(gpus, list) and all(isinstance(gpu, dict) and isinstance(gpu.get("name"), str) for gpu in gpus)
    if not named:
        return "hardware has GPUs without names"
    return "" if type(hardware.get("cores", 1)) is int else "hardware has no number of cores"


def _fault_of_settings(settings: Json) -> str:
    entries = list(settings.values())
    whole = entries and all(isinstance(entry, dict) and {"value", "source"} <= set(entry) for entry in entries)
    if not whole or not all(
        isinstance(text, str) for entry in entries for text in (entry["source"], entry.get("reason", ""))
    ):
        return "its settings have no values with their sources"
    return ""


def _holds_no_argument(value: object) -> bool:
    """Whether any text in it, or name, is one that no path and no argument can be."""
    if isinstance(value, dict):
        return any(_holds_no_argument(part) for pair in value.items() for part in pair)
    return any(map(_holds_no_argument, value)) if isinstance(value, list) else not is_argument(value)


# --- Its settings, to be given again --------------------------------------------------------------


def written(record: Json, same_world: bool) -> Json:
    """What the user of the run wrote, on the command line or in a file, and its global batch."""
    settings = record["settings"]
    values = {name: entry["value"] for name, entry in settings.items() if not is_derived(entry["source"])}
    for name in _of_the_day(settings):
        values.pop(name, None)
    for name in ("recipe", "global_batch_size"):
        if name in settings:
            values[name] = settings[name]["value"]
    if same_world and settings.get("per_device_train_batch_size", {}).get("source") == FIT:
        values.pop("fit", None)  # what it found is known
    return values


def _of_the_day(settings: Json) -> set[str]:
    """Names of settings that do not count again. A run may be named after its folder."""
    run_name, output_dir = (settings.get(name, {}).get("value") for name in ("run_name", "output_dir"))
    return {*_OF_THE_DAY, "run_name"} if run_name == output_dir else {*_OF_THE_DAY}


def is_derived(source: str) -> bool:
    return source in _DERIVED or source.startswith("recipe ")


def at_their_place(values: Json, record: Json, replaced: Collection[str], problems: list[Problem], source: str) -> Json:
    """`values` with the paths of files where the run found them, or where they are found from here.

    A file that is at neither place is a problem, unless its setting is among the `replaced`.
    """
    found = dict(values)
    recorded = {name: record["settings"].get(name, {}).get("value") for name in INPUTS}
    named = {key: (name, value) for name in recorded for key, value in _named(name, recorded[name]).items()}
    for key, then in (record.get("paths") or {}).items():
        name, value = named.get(key, ("", ""))
        if not name or name in replaced:
            continue
        path, colon, function = _parts(value)
        here = _absolute(path)
        if here != then and paths_of(then):
            place = then + colon + function
            found[name] = place if key == name else _renamed(found.get(name, recorded[name]), value, place)
        elif not paths_of(path):
            places = then if here == then else f"{then}, where the run found it, nor at {here}"
            problems.append(Problem(name, f"{value} is not at {places}", f"--{name} with its path", source))
            found.pop(name, None)
    return found


def _parts(value: str) -> tuple[str, str, str]:
    """`mine.py:function` in three parts; any other path as the first of them."""
    match = re.fullmatch(r"(.+\.py)(:)(\w*)", value)
    return (match[1], match[2], match[3]) if match else (value, "", "")


def places_of(name: str, value: object) -> dict[str, str]:
    """The file or folder that a setting names, absolute, if it is there. Those of the parts of a
    mixture are `dataset_name[0]` and so on.
    """
    paths = {key: _parts(text)[0] for key, text in _named(name, value).items()}
    return {key: _absolute(path) for key, path in paths.items() if paths_of(path)}


def at_a_place(record: Json) -> set[str]:
    """The settings that named files or folders."""
    return {key.partition("[")[0] for key in record.get("paths") or {}}


def _named(name: str, value: object) -> dict[str, str]:
    """What a setting names, as `places_of` has it."""
    entries = {f"{name}[{number}]": entry for number, entry in enumerate(value)} if isinstance(value, list) else {}
    texts = {key: entry.get("name") if isinstance(entry, dict) else entry for key, entry in entries.items()}
    return {key: text for key, text in (texts or {name: value}).items() if isinstance(text, str)}


def _renamed(entries: list[Any], name: str, place: str) -> list[Any]:
    """The parts of a mixture, with those of this name at their place."""
    return [
        {**entry, "name": place}
        if isinstance(entry, dict) and entry.get("name") == name
        else place
        if entry == name
        else entry
        for entry in entries
    ]


def _absolute(path: str) -> str:
    """The real path of a file or folder; a pattern stays one."""
    return str(expanded(path).resolve() if existing_path(path) else expanded(path).absolute())


def without_secrets(
    values: Json, replaced: Collection[str], has_token: bool, pushes: object, problems: list[Problem]
) -> Json:
    """`values` without what is hidden in a record. Each is a problem, unless it is given now.

    A token is only advice, as a login stands for it, and it may be set only where the run goes. Not
    even that without `push_to_hub`, for which alone it is used, or if the environment `has_token`.
    """
    hidden = [name for name, value in values.items() if HIDDEN in json.dumps(value)]
    for name in hidden:
        what, given = f"holds a secret, which {NAME} does not keep", f"--{name} with its value"
        if name in replaced:
            continue
        if not name.endswith("_token"):
            problems.append(Problem(name, what, given))
        elif pushes and not has_token:
            fix = f"any HF_TOKEN in the environment, or `hf auth login`, or {given}"
            problems.append(Problem(name, what, fix, severity="advice"))
    return {name: value for name, value in values.items() if name not in hidden}


def otherwise_here(record: Json, derived: RunSpec, same_world: bool) -> Json:
    """The recorded values of settings that `derived` has otherwise: the same settings written, and
    everything else derived here, for the recorded number of processes.
    """
    values = {}
    skipped = {"fit", *_of_the_day(record["settings"]), *BATCH_FIELDS, *at_a_place(record)}
    same_machine = is_same_machine(record, derived.hardware)
    for name, entry in record["settings"].items():
        if name not in derived or name in skipped:
            continue
        if plain(derived[name]) != entry["value"] and HIDDEN not in json.dumps(entry["value"]):
            by_machine = callable(derived.recipe.settings.get(name)) or "hardware" in (
                entry["source"],
                derived.setting(name).source,
            )
            if (same_machine or not by_machine) and is_legal(name, entry["value"]):
                values[name] = entry["value"]
    micro = record["settings"].get("per_device_train_batch_size", {}).get("value")
    if same_world and micro is not None and micro != derived.batch.micro:
        values["per_device_train_batch_size"] = micro
    return values


def is_legal(name: str, value: Any) -> bool:
    """Whether the installed libraries take the value: another version's default may be none."""
    problems: list[Problem] = []
    return bool(accept({name: value}, NAME, problems)) and not problems


def is_same_machine(record: Json, hardware: Hardware) -> bool:
    """Whether everything that decides a setting is as it was; false if it was not recorded."""
    here, then = plain(hardware.as_dict()), record.get("hardware") or {}
    return bool(then) and all(here[name] == value for name, value in then.items() if name in here)


def plain(value: Any) -> Any:
    """A value as JSON has it: a tuple is a list, a path text."""
    return json.loads(json.dumps(value, default=str))
