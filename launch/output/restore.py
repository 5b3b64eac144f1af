"""The files of a recorded run, to run it again: its own recipe, its Accelerate YAML, its JSONs.

A file that is as it was is used where it is. Of any other the recorded content is written into the
new output folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.host.files import write_whole
from launch.host.secrets import hashed
from launch.output.surroundings import by_accelerate
from recipes import legal
from recipes.errors import Problem, UserError, mistake
from recipes.run import HIDDEN, Json
from recipes.run.files import expanded, read_yaml, shipped, yaml_content
from recipes.run.recorded import NAME

FOLDER = "again"
# Where the processes ran and met, and how many there were: rerun says that itself.
_PLACEMENT = (
    "num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf same_network "
    "max_restarts monitor_interval role log_dir tee quiet config_file deepspeed_multinode_launcher deepspeed_hostfile"
).split()
_LAUNCHERS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}


@dataclass
class Restored:
    """The YAML to launch with, flags for the files that settings name, and notes for a person."""

    accelerate_config: str
    flags: dict[str, str] = field(default_factory=dict)
    notes: list[Problem] = field(default_factory=list)


def restore(record: Json, output_dir: str, processes: int) -> Restored:
    """Find the run's files, and write those that are missing or have changed.

    `processes` will run, which decides only where there was no Accelerate YAML.
    Raises `UserError` if one held a secret, or cannot be written.
    """
    files = _Files(record, Path(output_dir).absolute() / FOLDER)
    restored = Restored(_accelerate_config(record, files, processes), notes=files.notes)
    paths = record.get("paths") or {}
    for name in ("deepspeed", "fsdp_config", "accelerator_config"):
        place = files.place(paths[name]) if name in paths else None
        if place and place != paths[name]:
            restored.flags[name] = place
    if "recipe" in paths:
        place = files.place_of_recipe(paths["recipe"], record.get("recipe_files") or [])
        if place != paths["recipe"]:
            function = str(record["settings"]["recipe"]["value"]).partition(".py")[2]
            restored.flags["recipe"] = place + function
    return restored


class _Files:
    """The recorded files, and where each is to be found: at its old place, or below `folder`."""

    def __init__(self, record: Json, folder: Path) -> None:
        self.contents: dict[str, str] = record.get("files") or {}
        self.folder = folder
        self.notes: list[Problem] = []

    def place(self, path: str) -> str:
        """Where the file is with its recorded content. A file that was not recorded stays."""
        return path if self._is_as_it_was(path) else self.write(path, self.text(path), Path(path).name)

    def text(self, path: str) -> str:
        """The recorded content. A file that held a secret is read anew: it has a hash."""
        content = self.contents[path]
        if HIDDEN not in content:
            return content
        if not self._is_as_it_was(path):
            what = f"has changed or is missing, and it held a secret, which {NAME} does not keep"
            raise mistake(path, what, "write it as it was")
        return Path(path).read_text(encoding="utf-8")

    def place_of_recipe(self, path: str, others: list[str]) -> str:
        """As `place`, for a recipe. If one of its files has changed all are written, as they lay
        to each other: they name each other by that.
        """
        if path not in self.contents or all(self._is_as_it_was(file) for file in (path, *others)):
            return path
        group = [file for file in self.contents if file in (path, *others) or file.endswith((".yaml", ".yml"))]
        above = os.path.commonpath([str(Path(file).parent) for file in group])
        places = {file: self.write(file, self.text(file), os.path.relpath(file, above)) for file in group}
        return places[path]

    def write(self, path: str, content: str, name: str) -> str:
        """Write the content of a file under a name in the folder. Returns its place."""
        target = self.folder / name
        try:
            write_whole(target, content.encode())
        except OSError as error:
            what = f"{target} cannot be written: {error.strerror}"
            raise mistake("output_dir", what, "another --output_dir") from None
        if not self._is_as_it_was(path):
            why = "has changed since" if Path(path).exists() else "is missing"
            self.notes.append(Problem(path, f"{why}: the recorded content is used, in {target}", severity="advice"))
        return str(target)

    def _is_as_it_was(self, path: str) -> bool:
        return path not in self.contents or _reads(path, self.contents[path])


def _reads(path: str, content: str) -> bool:
    """True if a file has this content, of which the hash is recorded if it held a secret."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return content in (text, hashed(text))


# --- The Accelerate YAML --------------------------------------------------------------------------


def _accelerate_config(record: Json, files: _Files, processes: int) -> str:
    """The YAML to launch with: the recorded one, as the flags that the launcher was given changed
    it. Without one, plain DDP's, or one process's.
    """
    path = record.get("accelerate_config")
    if path not in files.contents:
        path = str(shipped("standard.yaml" if processes > 1 else "single.yaml"))
    text = files.text(path) if path in files.contents else None
    recorded = yaml_content(text, path, "accelerate_config") if text else read_yaml(path, "accelerate_config")
    raw = _with_flags(recorded, record.get("launcher") or [], files.notes)
    _place_deepspeed_file(raw, record, files)
    if raw == recorded:
        return files.place(path)
    import yaml

    return files.write(path, yaml.safe_dump(raw, sort_keys=False), "accelerate.yaml")


def _with_flags(recorded: Json, launcher: list[str], notes: list[Problem]) -> Json:
    """The YAML as the launcher's own flags have changed it, without where the processes met."""
    several = recorded.get("num_machines") not in (None, 1)
    raw = {name: value for name, value in recorded.items() if not (several and name in _PLACEMENT)}
    for name, value in _flags_of(launcher):
        section = next((part for part in _SECTIONS if name in legal.accelerate_nested_keys(part)), None)
        if name in _PLACEMENT:
            continue
        if name in _LAUNCHERS:
            raw["distributed_type"] = _LAUNCHERS[name]
        elif name == "cpu":
            raw["use_cpu"] = True
        elif section:
            raw[section] = {**(raw.get(section) or {}), name: value}
        elif name in legal.names("accelerate_yaml"):
            raw[name] = value
        else:
            fix = f"export OMP_NUM_THREADS={value}" if name == "num_cpu_threads_per_process" else ""
            notes.append(Problem(f"--{name}", "was a flag of the launcher, and is left out", fix, severity="advice"))
    return raw


_SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config", "fp8_config")


def _flags_of(launcher: list[str]) -> Iterator[tuple[str, Any]]:
    """The flags of `accelerate launch` with their values. None of torchrun, which has no engine."""
    if not by_accelerate(launcher):
        return
    flags: list[tuple[str, list[str]]] = []
    for word in launcher:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if value else []))
        elif flags:
            flags[-1][1].append(word)
    for name, values in flags:
        try:
            yield name, yaml_content(values[0], NAME, f"--{name}") if values else True
        except UserError:  # text, such as a folder's name
            yield name, values[0]


def _place_deepspeed_file(raw: Json, record: Json, files: _Files) -> None:
    """Name the DeepSpeed JSON by where it is: its path counts from where the run was started."""
    section = raw.get("deepspeed_config")
    if not isinstance(section, dict) or not section.get("deepspeed_config_file"):
        return
    named = str(section["deepspeed_config_file"])
    place = files.place(str(Path(record.get("folder") or ".", expanded(named)).resolve()))
    if place != str(expanded(named).resolve()):
        raw["deepspeed_config"] = {**section, "deepspeed_config_file": place}
