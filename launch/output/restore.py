"""The files of a recorded run, to run it again: its own recipe, its Accelerate YAML, its JSONs.

If all are as they were, they are used where they are. Otherwise all are written from the record
into the new output folder, as they lay to each other: they name each other by that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from launch.host.files import write_whole
from launch.host.secrets import hashed
from launch.output.record import by_accelerate
from recipes.errors import Problem, mistake
from recipes.run import HIDDEN, Json
from recipes.run.files import expanded, read_yaml, shipped
from recipes.run.recorded import NAME

FOLDER = "again"
# Where the processes ran and met, and how many there were: rerun says that itself.
_PLACEMENT = (
    "num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf same_network "
    "max_restarts monitor_interval role log_dir tee quiet config_file deepspeed_multinode_launcher deepspeed_hostfile "
    "multi_gpu"
).split()


@dataclass
class Restored:
    """The YAML to launch with, flags for the files that settings name, and notes for a person."""

    accelerate_config: str
    flags: dict[str, str]
    notes: list[Problem] = field(default_factory=list)


def restore(record: Json, output_dir: str, processes: int) -> Restored:
    """Find the run's files, or write them if one is missing or has changed.

    `processes` will run, which decides only where there was no Accelerate YAML.
    Raises `UserError` if one held a secret, or cannot be written.
    """
    folder, notes = Path(output_dir).absolute() / FOLDER, list[Problem]()
    places = _places(record.get("files") or {}, folder, notes)
    flags = {}
    for name in ("recipe", "deepspeed", "fsdp_config", "accelerator_config"):
        path = (record.get("paths") or {}).get(name, "")
        if places.get(path, path) != path:
            function = str(record["settings"][name]["value"]).partition(".py")[2] if name == "recipe" else ""
            flags[name] = places[path] + function
    path = record.get("accelerate_config")
    if path not in places:
        path = str(shipped("standard.yaml" if processes > 1 else "single.yaml"))
    place = places.get(path, path)
    then = read_yaml(place, "accelerate_config")
    several = then.get("num_machines") not in (None, 1)
    content = {name: value for name, value in then.items() if not (several and name in _PLACEMENT)}
    _place_deepspeed_file(content, record, places)
    launcher = record.get("launcher") or []
    for word in launcher if by_accelerate(launcher) else []:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in _PLACEMENT:
            fix = "--accelerate_config with a YAML that says it"
            notes.append(Problem(f"--{name}", "was a flag of the launcher, and is left out", fix, severity="advice"))
    if content != then:
        import yaml

        place = _write(folder / "accelerate.yaml", yaml.safe_dump(content, sort_keys=False))
    return Restored(place, flags, notes)


def _places(contents: dict[str, str], folder: Path, notes: list[Problem]) -> dict[str, str]:
    """Where each recorded file is to be found. One that held a secret is recorded by its hash."""
    changed = [path for path, content in contents.items() if content not in ((text := _text(path)), hashed(text))]
    if not changed:
        return {path: path for path in contents}
    above = os.path.commonpath([os.path.dirname(path) for path in contents])  # noqa: PTH120
    places = {path: folder / os.path.relpath(path, above) for path in contents}
    for path, content in contents.items():
        if path in changed and HIDDEN in content:
            what = f"has changed or is missing, and it held a secret, which {NAME} does not keep"
            raise mistake(path, what, "write it as it was")
        _write(places[path], content if path in changed else _text(path))
        if path in changed:
            why = "has changed since" if Path(path).exists() else "is missing"
            what = f"{why}: the recorded content is used, in {places[path]}"
            notes.append(Problem(path, what, severity="advice"))
    return {path: str(place) for path, place in places.items()}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "\0"  # no recorded file holds it


def _write(target: Path, content: str) -> str:
    try:
        write_whole(target, content.encode())
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror}"
        raise mistake("output_dir", what, "another --output_dir") from None
    return str(target)


def _place_deepspeed_file(raw: Json, record: Json, places: dict[str, str]) -> None:
    """Name the DeepSpeed JSON by where it is: its path counts from where the run was started."""
    section = raw.get("deepspeed_config")
    if not isinstance(section, dict) or not section.get("deepspeed_config_file"):
        return
    named = expanded(str(section["deepspeed_config_file"]))
    then = str(Path(record.get("folder") or ".", named).resolve())
    if places.get(then, then) != str(named.resolve()):
        raw["deepspeed_config"] = {**section, "deepspeed_config_file": places.get(then, then)}
