"""Resolving: command line > file > recipe > library default, into one `RunSpec` that everything else reads.

Every value keeps where it came from and why. Nothing raises for a wrong setting: problems are collected, so that one
run of the check reports them all.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from recipes import catalog, legal
from recipes.catalog import Recipe
from recipes.errors import Problem, UserError
from recipes.legal import moved
from recipes.run import fitted
from recipes.run.batch import Batch, split
from recipes.run.engine import Engine, from_deepspeed, from_yaml, read_yaml, shipped
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware


@dataclass(frozen=True)
class Setting:
    """A value, where it came from (`command line`, a file, `recipe fast`, ...), and the reason if one is known."""

    value: Any
    source: str
    reason: str = ""


LIBRARY = "library default"
COMMAND_LINE = "command line"
BATCH = "batch arithmetic"
FIT = fitted.NAME
_BATCH_FIELDS = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


HIDDEN = "***"


def shown(name: str, value: Any) -> Any:
    """A value as it may be printed and recorded: a token is a secret."""
    return HIDDEN if value and name.endswith("_token") else value


@dataclass
class RunSpec(Mapping):
    """One resolved run. `run[name]` is the value of any legal setting, `run.setting(name)` says where it is from.

    `elsewhere`: packages that are known where it is to run; None where it runs with those installed here.
    `batch_source`: what chose the micro-batch where nobody wrote it, arithmetic or `--fit`.
    """

    recipe: Recipe
    hardware: Hardware
    engine: Engine
    world_size: int
    local_world_size: int
    given: dict[str, Setting]
    batch: Batch
    problems: list[Problem] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    demonstrate: bool = True
    elsewhere: frozenset[str] | None = None
    batch_source: str = BATCH
    _resolved: dict[str, Setting] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.setting(name).value

    def __iter__(self) -> Iterator[str]:
        return (name for name in legal.settings() if name not in legal.ALIASES)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def setting(self, name: str) -> Setting:
        name = legal.ALIASES.get(name, name)
        if name not in self._resolved:
            self._resolved[name] = self._resolve(name)
        return self._resolved[name]

    def explicit(self, name: str) -> bool:
        """Whether the user wrote it, on the command line or in a file."""
        return legal.ALIASES.get(name, name) in self.given

    def lower(self, name: str, limit: int | None, reason: str) -> None:
        """Lower a value that nobody wrote to a limit that has turned up, such as the model's longest sequence."""
        if limit is not None and not self.explicit(name) and self[name] > limit:
            self._resolved[name] = Setting(limit, "limit", reason)

    def with_source(self, problem: Problem) -> Problem:
        """The problem with where its setting came from, if it does not say so itself."""
        if problem.source or problem.subject not in legal.settings():
            return problem
        return replace(problem, source=self.setting(problem.subject).source)

    @property
    def demonstration(self) -> bool:
        """Whether train.py trains its demonstration: nobody named a model or data."""
        return self.demonstrate and "model_name_or_path" not in self.given and "dataset_name" not in self.given

    def chosen(self) -> dict[str, Setting]:
        """Every setting that somebody or something chose: all but the libraries' defaults."""
        settings = {name: self.setting(name) for name in self}
        return {name: setting for name, setting in settings.items() if setting.source != LIBRARY}

    def training_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the installed TrainingArguments, under the names it has."""
        fields = legal.training_arguments()
        newest = {old: new for new, old in legal.ALIASES.items() if new in fields}
        chosen = {name: setting.value for name, setting in self.chosen().items() if name in fields}
        return {newest.get(name, name): value for name, value in chosen.items()}

    def _resolve(self, name: str) -> Setting:
        if name in self.given:
            return self.given[name]
        for source, found in self._layers(name):
            if found is not None:
                value, reason = found(self) if callable(found) else found
                return Setting(value, source, reason)
        return Setting(legal.settings()[name].default, LIBRARY)

    def _layers(self, name: str) -> Iterator[tuple[str, Any]]:
        yield BATCH if name == "global_batch_size" else self.batch_source, self._from_batch(name)
        if name == "use_cpu":
            yield "hardware", None if self.hardware.cuda else (True, "no GPU: CPU training, chosen explicitly")
        if name == "output_dir":
            yield "default", (f"outputs/{self.recipe.name}", "one folder a recipe")
        yield f"recipe {self.recipe.name}", self.recipe.settings.get(name)
        epochs_were_asked_for = name == "max_steps" and "num_train_epochs" in self.given  # max_steps would win
        if name in catalog.DEMONSTRATION and self.demonstration and not epochs_were_asked_for:
            yield "demonstration", catalog.DEMONSTRATION[name]

    def _from_batch(self, name: str) -> catalog.Choice | None:
        if name not in _BATCH_FIELDS:
            return None
        values = (self.batch.total, self.batch.micro, self.batch.accumulation)
        value = dict(zip(_BATCH_FIELDS, values, strict=True))[name]
        return value, self.batch.reason if name != "global_batch_size" else f"{self.batch}"


def resolve(
    argv: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    hardware: Hardware | None = None,
    engine: Engine | None = None,
    accelerate_config: str | None = None,
    environment: Mapping[str, str] | None = None,
    demonstrate: bool = True,
    elsewhere: frozenset[str] | None = None,
) -> RunSpec:
    """Resolve train.py's command line `argv` (and keyword `settings`, which count the same) into a run.

    The world size is the given one, else the Accelerate YAML's, else 1. Problems are in `run.problems`.
    `demonstrate` false leaves the demonstration's settings out where no model and data are named.
    """
    problems: list[Problem] = []
    given = _parse_command_line(argv, problems)
    given |= _accept(settings or {}, "argument", problems)
    if "config" in given:
        given = {**_read_config(given["config"].value, problems), **given}
    recipe = _find_recipe(given, problems)
    yaml_engine = from_yaml(accelerate_config) if accelerate_config else None
    own = given.get("deepspeed")
    engine = engine or yaml_engine or (from_deepspeed(own.value) if own else from_yaml(shipped(recipe.engine)))
    world = world_size or (yaml_engine.num_processes if yaml_engine else None) or 1
    hardware = hardware if hardware is not None else read_hardware()
    if "use_cpu" in given and given["use_cpu"].value:
        hardware = replace(hardware, gpus=())  # GPUs that are not to be used decide nothing
    run = RunSpec(
        recipe,
        hardware,
        engine,
        world,
        local_world_size or world,
        given,
        _split(recipe, world, given, problems),
        problems,
        os.environ if environment is None else environment,
        demonstrate,
        elsewhere,
    )
    return with_fit(run)


def with_fit(run: RunSpec) -> RunSpec:
    """The run at the micro-batch that `--fit` found for it on its engine, if its output folder holds one."""
    run = at_batch(run, _split(run.recipe, run.world_size, run.given, []), BATCH)  # an earlier engine's fit is gone
    if run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps"):
        return run
    if not run["output_dir"]:
        return run
    found = fitted.batch(run, fitted.read(run["output_dir"]))
    return at_batch(run, found, FIT) if found else run


def at_batch(run: RunSpec, batch: Batch, source: str) -> RunSpec:
    """The run with its global batch split like this. What depends on the micro-batch is decided again."""
    return replace(run, batch=batch, batch_source=source, _resolved={})


def _find_recipe(given: dict[str, Setting], problems: list[Problem]) -> Recipe:
    asked = given.get("recipe", Setting("standard", LIBRARY))
    if asked.value in catalog.RECIPES:
        return catalog.RECIPES[asked.value]()
    fix = nearest(str(asked.value), catalog.RECIPES) or "one of " + ", ".join(catalog.RECIPES)
    problems.append(Problem("recipe", f"there is no recipe {asked.value!r}", fix, asked.source))
    return catalog.standard()


def _split(recipe: Recipe, world: int, given: dict[str, Setting], problems: list[Problem]) -> Batch:
    total, micro, accumulation = (given.get(name) for name in _BATCH_FIELDS)
    if any(setting and setting.value < 1 for setting in (total, micro, accumulation)):
        return Batch(1, 1, world, "unknown: a size below 1 was given")  # which the range rules report
    try:
        return split(
            total.value if total else legal.run_flags()["global_batch_size"].default,
            world,
            recipe.micro_batch_cap,
            micro.value if micro else None,
            accumulation.value if accumulation else None,
            total is not None,
        )
    except UserError as error:
        sources = {setting.source for setting in (total, micro, accumulation) if setting} or {"default 16"}
        problems.extend(replace(problem, source=" and ".join(sorted(sources))) for problem in error.problems)
        return Batch(1, 1, world, "unknown: the global batch cannot be split")


# --- What the user wrote ---------------------------------------------------------------------------------------------


def _parse_command_line(argv: Sequence[str], problems: list[Problem]) -> dict[str, Setting]:
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
    return _accept(raw, COMMAND_LINE, problems)


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


def _read_config(path: Any, problems: list[Problem]) -> dict[str, Setting]:
    content = read_yaml(path, "--config")
    if "config" in content:
        problems.append(Problem("config", "a configuration cannot name another one", "leave it out", str(path)))
        del content["config"]
    return _accept(content, str(path), problems)


def _accept(values: Mapping[Any, Any], source: str, problems: list[Problem]) -> dict[str, Setting]:
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
