"""Whether Azure ML runs a job's YAML as intended: what its parser misses, and what it reports."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.host.secrets import SECRET
from recipes.errors import Problem
from recipes.flags import MOST_PROCESSES
from recipes.run import Json
from recipes.run.files import nearest

_SIZE = re.compile(r"\d+[bkmg]")
_COMPUTE = re.compile(r"(azureml:)?[A-Za-z][\w-]*|azureml:/subscriptions/\S+")  # a cluster's name, or its ARM id
_ENVIRONMENT = re.compile(r"azureml:([\w.-]+([:@][\w.-]+)?|//?(registries|subscriptions|locations)/\S+)")
_REFERENCE = re.compile(r"\$\{\{\s*(\w+)\.([^}\s]*)\s*\}\}")
_EXAMPLE = "azureml/fast.yaml"
BUILD = "environment.build.path"
_OLD_REFERENCE = re.compile(r"(?<!\$)(?<!\{)\{(?:inputs|outputs)\.\w+\}(?!\})")


def missed_by_azure(content: Json, folder: Path) -> list[Problem]:
    """What is wrong with a job although Azure's SDK accepts it. `content` is the YAML as data,
    `folder` where its relative paths start.
    """
    checks = (
        _type,
        _command,
        _compute,
        _environment,
        _resources,
        _environment_variables,
        _processes,
        _inputs,
        _outputs,
        _secrets,
    )
    found = [problem for check in checks for problem in check(content)]
    return [*found, *_build(content, folder)]


def misshapen(content: Json) -> list[Problem]:
    """The sections that are no mappings: Azure's parser stops at some of them with a traceback."""
    sections = "tags resources distribution environment_variables inputs outputs limits queue_settings identity"
    found = [name for name in sections.split() if not isinstance(content.get(name, {}), dict)]
    outputs = _section(content, "outputs")
    found += [f"outputs.{name}" for name, value in outputs.items() if not isinstance(value, dict)]
    fix = "lines below it, each with a name and its value"
    return [Problem(name, "is not a mapping of names to values", fix) for name in found]


def _type(content: Json) -> Iterator[Problem]:
    kind = content.get("type", "command")
    if kind != "command":
        yield Problem("type", f"{kind!r} is not a job that trains", "type: command")


def _command(content: Json) -> Iterator[Problem]:
    command = str(content.get("command", ""))
    for kind, name in dict.fromkeys(_REFERENCE.findall(command)):
        known = _section(content, kind) if kind in ("inputs", "outputs") else {}
        if name not in known:
            fix = f"one of {', '.join(map(str, known))}" if known else f"an entry {name} under {kind}"
            yield Problem("command", f"{kind}.{name} is not defined", fix)
    for old in dict.fromkeys(_OLD_REFERENCE.findall(command)):
        yield Problem("command", f"{old} is deprecated syntax: Azure passes it on literally", f"${{{old}}}")


def _compute(content: Json) -> Iterator[Problem]:
    compute = content.get("compute")
    if compute is None and "instance_type" not in _section(content, "resources"):
        yield Problem("compute", "is missing", "compute: azureml:NAME, or resources.instance_type for serverless")
    elif compute is not None and not _COMPUTE.fullmatch(str(compute)):
        yield Problem("compute", f"{compute!r} is not the name of a compute", "azureml:NAME")


def _environment(content: Json) -> Iterator[Problem]:
    environment = content.get("environment")
    if isinstance(environment, str) and not _ENVIRONMENT.fullmatch(environment):
        fix = "azureml:NAME:VERSION, azureml:NAME@latest or azureml://registries/..."
        yield Problem("environment", f"{environment!r} is not the name of an environment", fix)


def _build(content: Json, folder: Path) -> Iterator[Problem]:
    """The SDK reads every file of the folder, whatever it is, to see whether it is a known one."""
    build = _section(_section(content, "environment"), "build")
    path, dockerfile = str(build.get("path", "")), str(build.get("dockerfile_path") or "Dockerfile")
    if "path" in build and (folder / path).is_dir() and not (folder / path / dockerfile).is_file():
        what = f"the folder {path} has no {dockerfile}"
        yield Problem(BUILD, what, f"the folder of the image's Dockerfile, as in {_EXAMPLE}")


def _resources(content: Json) -> Iterator[Problem]:
    resources = _section(content, "resources")
    size = resources.get("shm_size", "2g")
    if not _SIZE.fullmatch(str(size)):
        yield Problem("resources.shm_size", f"{size!r} is not a size", "a whole number and b, k, m or g: 16g")
    count = resources.get("instance_count", 1)
    if isinstance(count, float) or (isinstance(count, int) and count < 1):
        yield Problem("resources.instance_count", f"{count} is not a number of nodes", "a whole number, 1 or more")


def _environment_variables(content: Json) -> Iterator[Problem]:
    for name, value in _section(content, "environment_variables").items():
        if not isinstance(value, (str, int, float)):
            yield Problem(f"environment_variables.{name}", f"{value!r} is not text", f"one value: {name}: '...'")


def _processes(content: Json) -> Iterator[Problem]:
    if "accelerate launch" not in str(content.get("command")):
        return
    distribution = _section(content, "distribution")
    if distribution.get("process_count_per_instance", 1) != 1:
        what = "accelerate launch starts the processes of a node, and would be started once for each"
        yield Problem("distribution.process_count_per_instance", what, "1")
    elif str(_section(content, "inputs").get("processes_per_node", 1)) == "0":
        yield Problem("inputs.processes_per_node", "0 processes train nothing", "1 or more, one per GPU")
    elif distribution.get("type") != "pytorch":
        what = "WORLD_SIZE, NODE_RANK and MASTER_ADDR are only set for pytorch"
        yield Problem("distribution.type", what, "type: pytorch, process_count_per_instance: 1")


def _inputs(content: Json) -> Iterator[Problem]:
    for name, given in _section(content, "inputs").items():
        if not isinstance(given, dict):
            continue
        path = str(given.get("path", ""))
        if given.get("type") == "mltable":
            what = "an mltable is a description of data that train.py cannot read"
            yield Problem(f"inputs.{name}.type", what, "uri_file or uri_folder, and the path of the data themselves")
        elif re.fullmatch(r"azureml:[^:@/]+", path):
            yield Problem(f"inputs.{name}.path", f"{path} names no version", f"{path}:VERSION or {path}@latest")


def _outputs(content: Json) -> Iterator[Problem]:
    training = training_in(content)
    if training is None:
        return
    name = next((word.split("/")[3] for word in training.flags if word.startswith("/mnt/outputs/")), None)
    if name is None:
        yield Problem("command", "writes to a folder that is deleted with the job", "--output_dir ${{outputs.run}}")
        return
    output = _section(content, "outputs").get(name)
    if isinstance(output, dict) and output.get("mode", "rw_mount") != "rw_mount":
        what = f"{output['mode']} keeps nothing if the job is preempted"
        yield Problem(f"outputs.{name}.mode", what, "rw_mount")


def _secrets(content: Json) -> Iterator[Problem]:
    for name, value in content.items():
        if SECRET.search(str(value)):
            what = "holds what looks like a secret, and everybody in the workspace can read it"
            yield Problem(str(name), what, "a secret of the workspace's key vault, read by the job")


def _section(content: Json, name: str) -> Json:
    """A mapping in the YAML; empty if missing or of another type, which Azure's parser reports."""
    section = content.get(name)
    return section if isinstance(section, dict) else {}


# --- The training in it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What a job's command starts: train.py's flags, the Accelerate YAML if any, and the world."""

    flags: list[str]
    config: str | None
    nodes: int
    processes_per_node: int


def training_in(content: Json) -> Training | None:
    """The training in a job's command, inputs filled in; None if it does not start train.py."""
    inputs = _section(content, "inputs")
    command = _REFERENCE.sub(lambda found: _value(inputs, *found.groups()), str(content.get("command", "")))
    words = next((words for words in _commands(command) if any(map(_is_train, words))), None)
    if words is None:
        return None
    script = next(at for at, word in enumerate(words) if _is_train(word))
    before = " ".join(words[:script]).replace("=", " ").split()
    config = before[before.index("--config_file") + 1] if "--config_file" in before[:-1] else None
    counts = (_section(content, "resources").get("instance_count", 1), inputs.get("processes_per_node", 1))
    nodes, processes = (min(MOST_PROCESSES, int(str(count))) if str(count).isdecimal() else 1 for count in counts)
    elastic = not (config or "").endswith("single.yaml")
    flags = [
        word.replace("$$", "$") if elastic else word for word in words[script + 1 :]
    ]  # as `Job.command` writes them
    return Training(flags, config, max(1, nodes), max(1, processes))


def _is_train(word: str) -> bool:
    return word.endswith("launch/train.py")


_OPERATORS = ";&|()<>\n"
_QUOTED = {ord(char): chr(0xE000 + at) for at, char in enumerate(_OPERATORS)}  # private use: in no real argument
_PLAIN = {ord(quoted): chr(char) for char, quoted in _QUOTED.items()}


def _commands(text: str) -> list[list[str]]:
    """The words of each simple command; as in bash, a line's end or an operator ends it."""
    # Everything between quotes is literal; elsewhere a backslash joins its line with the next.
    text = re.sub(r"('[^']*'|\"[^\"]*\")|\\\n", lambda found: found[1].translate(_QUOTED) if found[1] else " ", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word and set(word) <= set(_OPERATORS):
                commands.append([])
            else:
                commands[-1].append(word.translate(_PLAIN))
    except ValueError:  # a quotation that never ends
        return []
    return commands


def _value(inputs: Json, kind: str, name: str) -> str:
    value = inputs.get(name) if kind == "inputs" else None
    return str(value) if isinstance(value, (str, int, float)) else f"/mnt/{kind}/{name}"


# --- What Azure's parser reports ------------------------------------------------------------------


def as_problems(
    error: Exception, legal_at: Callable[[Sequence[str]], Sequence[str]] = lambda path: ()
) -> list[Problem]:
    """An error of Azure's parser, one line each: the place in the YAML, what is wrong, the fix.

    `legal_at` returns the names that are legal at a place in the YAML.
    """
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    details = _innermost(text)
    if details:
        return [_explained(path, what, legal_at) for path, what in _leaves(details)]
    named = re.search(r"\(x\) (.+)", text)
    what = (named.group(1) if named else text.strip().partition("\n")[0]).rstrip(".")
    for words, subject, fix in _WHOLE:
        if words in text:
            return [Problem(subject, what, fix)]
    return [Problem("azureml", f"Azure's parser cannot read it: {what}", f"compare it with {_EXAMPLE}")]


_WHOLE = (  # errors about the job as a whole, by words in them: which part of the YAML, and what to write
    ("both Docker image and Dockerfile", "environment", "image: NAME, or build: with the path of a Dockerfile"),
    ("Docker", "environment", "image: NAME, or build: with the path of a Dockerfile"),
    ("conda", "environment", "image: NAME, or build: with the path of a Dockerfile"),
    ("referenced in command", "command", "an entry of that name under inputs"),
)
_FIXES = {  # by the words of the marshmallow library
    "Not a valid integer": "a whole number",
    "Not a valid number": "a number",
    "Not a valid string": "text in quotes",
    "Not a valid boolean": "true or false",
    "Missing data for required field": f"write it, as in {_EXAMPLE}",
    "Not a valid mapping type": f"a mapping of names to values, as in {_EXAMPLE}",
    "Invalid input type": f"as in {_EXAMPLE}",
    "Field may not be null": "a value, or leave the name out",
}


def _explained(path: Sequence[str], what: str, legal_at: Callable[[Sequence[str]], Sequence[str]]) -> Problem:
    place = ".".join(path) or "azureml"
    if found := re.match(r"Value '?(.*?)'? passed is not in set \[(.*)\]", what):
        return _not_one_of(path, found[1], re.findall(r"'([^']*)'", found[2]))
    if found := re.match(r"Can't find directory or file in resolved absolute path: (.*)", what):
        return Problem(place, f"there is no {found[1]}", "a path that starts at the folder of the YAML")
    if what == "Unknown field":
        legal = legal_at(path[:-1])
        close = nearest(path[-1], legal)
        names = close or (f"one of {', '.join(sorted(legal))}" if legal else f"leave it out; see {_EXAMPLE}")
        return Problem(place, "is not a field that Azure ML knows", names)
    return Problem(place, what, _FIXES.get(what, f"as in {_EXAMPLE}"))


def _not_one_of(path: Sequence[str], value: str, choices: list[str]) -> Problem:
    what = f"{value} is not one of {', '.join(choices)}"
    return Problem(".".join(path), what, nearest(value, choices) or "one of them")


def _innermost(text: str) -> Json:
    """The JSON in an error's text; it holds one error whose text holds JSON again."""
    start = text.find("{")
    if start < 0:
        return {}
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return {}
    inner = found.get("errors", [{}])[0].get("message") if "errors" in found else None
    return _innermost(inner) or {"job": [inner.partition("\n")[0]]} if inner else found


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every error with its place.

    A list of mappings holds the errors of alternatives: only those of the likely one are taken.
    """
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _leaves(inner, path if name in ("value", "_schema") else (*path, name))
    elif any(isinstance(item, dict) for item in node):
        yield from _meant(node, path)
    else:
        yield path, "; ".join(str(item).partition("\n")[0].rstrip(".:") for item in node)


def _meant(alternatives: list, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
    """The errors of the alternative with the written `type`; else one that names the choices."""
    other_kinds = {"type", "null", "_schema"}  # another type; no mapping at all
    of_type = [item for item in alternatives if isinstance(item, dict) and not other_kinds & item.keys()]
    found = [list(_leaves(item, path)) for item in alternatives]
    choices = [what for leaves in found for _, what in leaves if "is not in set" in what]
    if len(of_type) == 1 and len(alternatives) > 1:
        return list(_leaves(of_type[0], path))
    if not choices:
        return found[0]
    place = next(place for leaves in found for place, what in leaves if what == choices[0])
    names = [name for what in choices for name in re.findall(r"'([^']*)'", what.partition("in set")[2])]
    value = re.match(r"Value '?(.*?)'? passed", choices[0])
    quoted = ", ".join(f"'{name}'" for name in dict.fromkeys(names))
    return [(place, f"Value '{value.group(1) if value else 'this'}' passed is not in set [{quoted}]")]
