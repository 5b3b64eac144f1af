"""A run that somebody might write: its launch, its flags and its files, as plain data.

A case is written into a folder of its own, in which all its commands work as they are printed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from recipes.catalog import RECIPES
from recipes.run.files import Json, shipped
from tests.support.running import ROOT, SCRIPT

REMOVED = "(removed)"  # the value of a key that is taken out of a file
DEMONSTRATION = "demonstration"  # the name of the model and the data that a run does not name
YAML, DEEPSPEED_JSON, CONFIG = "accelerate.yaml", "ds.json", "run.yaml"
FSDP_JSON, OWN_RECIPE = "fsdp.json", "mine.yaml"
FILES = {"yaml": YAML, "json": DEEPSPEED_JSON, "config": CONFIG, "fsdp": FSDP_JSON, "own": OWN_RECIPE}
LIFTED = "LEGALITY_LIFTED"  # the variable that lets FSDP shard on CPU ranks


@dataclass(frozen=True)
class Change:
    """Something that a case does differently: a `flag`, a key of a file in FILES, or a `variable`.

    `name` is a flag, or the keys on the way into the file with dots between them. The value of a
    flag is a list of the words that follow it.
    """

    where: str
    name: str
    value: Any = None


@dataclass(frozen=True)
class Case:
    """`launcher` is python, torchrun or accelerate. `processes` is None where only the YAML says
    it. `yaml` is the shipped file that the Accelerate YAML begins with; without one, `accelerate`
    takes the recipe's own.
    With `lifted` accelerate does not refuse to shard on a CPU, as in tests/support/fsdp_on_cpu.py.
    """

    launcher: str = "python"
    processes: int | None = None
    yaml: str = ""
    model: str = "llama"
    data: str = "texts.jsonl"
    lifted: bool = False
    changes: tuple[Change, ...] = ()

    def of(self, where: str) -> list[Change]:
        return [change for change in self.changes if change.where == where]

    def without(self, dropped: Iterable[Change]) -> Case:
        gone = list(dropped)
        return replace(self, changes=tuple(change for change in self.changes if change not in gone))

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> Case:
    content = json.loads(text)
    return Case(**{**content, "changes": tuple(Change(**change) for change in content["changes"])})


# --- As commands and files ------------------------------------------------------------------------


def flags(case: Case) -> list[str]:
    """The command line of train.py: two steps of a tiny model, unless the case says otherwise."""
    ours = {"max_length": "64", "max_steps": "2", "output_dir": "out"}
    if case.model != DEMONSTRATION:
        ours = {"model_name_or_path": f"models/{case.model}", "dataset_name": f"data/{case.data}", **ours}
    changed = {change.name for change in case.changes if change.where in ("flag", "config")}
    words = [word for name, value in ours.items() if name not in changed for word in (f"--{name}", value)]
    if case.of("config"):
        words += ["--config", CONFIG]
    for change in case.of("flag"):
        words += [f"--{change.name}", *change.value]
    return words


def launch(case: Case) -> list[str]:
    """The words before train.py's own."""
    if case.launcher == "accelerate":
        asked = ["--num_processes", str(case.processes)] if case.processes is not None else []
        return ["accelerate", "launch", "--config_file", YAML if case.yaml else _own_yaml(case), *asked, str(SCRIPT)]
    if case.launcher == "torchrun":
        return ["torchrun", "--nproc_per_node", str(case.processes), str(SCRIPT)]
    return ["python", str(SCRIPT)]


def _own_yaml(case: Case) -> str:
    """As `recipes train` launches where no YAML is named: beside --deepspeed plain DDP's."""
    if any(change.name == "deepspeed" for change in case.changes if change.where in ("flag", "config", "own")):
        return str(shipped("standard.yaml"))
    asked = [change.value for change in case.changes if change.name == "recipe"]
    name = asked[-1] if asked and isinstance(asked[-1], str) else (asked or [["standard"]])[-1][0]
    own = contents(case).get(OWN_RECIPE, {}) if name == OWN_RECIPE else {}
    if (engine := shipped(str(own.get("engine", "missing.yaml")))).is_file():
        return str(engine)
    name = str(own.get("base", name))
    return str(shipped(RECIPES[name if name in RECIPES else "standard"]().engine))


def variables(case: Case) -> dict[str, str]:
    """What the environment of the launch holds besides."""
    return {change.name: str(change.value) for change in case.of("variable")}


def checking(case: Case) -> list[str]:
    """The command that checks this launch."""
    words = ["recipes", "check"]
    if case.yaml:
        words += ["--accelerate_config", YAML]
    if case.processes is not None:
        words += ["--num_processes", str(case.processes)]
    return [*words, *flags(case)]


def write(case: Case, folder: Path, material: Path) -> None:
    """Everything that the commands read, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("models", "data"):
        (folder / name).symlink_to(material / name)
    for name, content in contents(case).items():
        text = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
        (folder / name).write_text(text, encoding="utf-8")


def contents(case: Case) -> dict[str, Json]:
    """The files of a case by name."""
    found = {}
    if case.yaml:
        found[YAML] = _changed(yaml.safe_load(shipped(case.yaml).read_text(encoding="utf-8")), case.of("yaml"))
    for where in sorted(set(FILES) - {"yaml"}):
        if case.of(where):
            found[FILES[where]] = _changed({}, case.of(where))
    return found


def _changed(content: Json, changes: list[Change]) -> Json:
    for change in changes:
        *way, last = change.name.split(".")
        place = content
        for key in way:
            below = place.get(key)
            if not isinstance(below, dict):
                below = place[key] = {}
            place = below
        if change.value == REMOVED:
            place.pop(last, None)
        else:
            place[last] = deepcopy(change.value)
    return content


def described(case: Case) -> str:
    """The command that checks it, the launch, and what its files hold, for a person to copy."""
    script = str(SCRIPT.relative_to(ROOT))
    started = [script if word == str(SCRIPT) else word for word in [*launch(case), *flags(case)]]
    lines = [shlex.join(checking(case)), shlex.join(started)]
    if case.lifted:
        lines.insert(0, "FSDP shards on CPU ranks")
    if named := variables(case):
        lines.insert(0, "export " + shlex.join(f"{name}={value}" for name, value in named.items()))
    for name, content in contents(case).items():
        if name == YAML:
            changes = "; ".join(f"{change.name}: {json.dumps(change.value)}" for change in case.of("yaml"))
            lines.append(f"{name}: {case.yaml}" + (f" with {changes}" if changes else ""))
        else:
            lines.append(f"{name}: {json.dumps(content)}")
    return "\n".join(lines)
