"""Recipes by name: a shipped one, or a user's own in a YAML or a Python file.

A YAML states a base and what it changes, each value with its reason, as the catalogue does:

    base: fast                 # a shipped recipe, or another such file, relative to this one
    purpose: Fine-tuning on our support tickets.
    engine: standard.yaml      # optional: a shipped Accelerate YAML, or one relative to this file
    micro_batch_cap: 4         # optional: examples per process
    changes:
      learning_rate: [5.0e-5, best of the three that we tried]

A Python file holds a function without arguments that returns a `recipes.catalog.Recipe`. It is
named as `mine.py:function`, or `mine.py` if it is the file's only public function.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes import legal
from recipes.catalog import RECIPES, Decision, Recipe, Value
from recipes.errors import Problem, UserError, mistake
from recipes.run.command_line import accept, nearest, unknown
from recipes.run.engine import Json, read_yaml, shipped
from recipes.run.spec import BATCH_FIELDS, Setting

_KEYS = ("base", "purpose", "engine", "micro_batch_cap", "changes")
_A_PAIR = '[value, "the reason"]'
# What `resolve` reads before a function of the run could decide it.
_EARLY = (*BATCH_FIELDS, "model_name_or_path", "dataset_name", "use_cpu", "output_dir", "deepspeed")
_IN_A_NAME = "letters, digits, dots, - and _: folders and jobs are named after it"


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or the one in the file of this name.

    Raises `UserError` with everything that is wrong with the name or the file.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith((".yaml", ".yml")):
        return _from_yaml(name, ())
    python = re.fullmatch(r"(.+\.py)(?::(\w*))?", name)
    if python:
        return _from_python(python[1], python[2] or "")
    raise _no_recipe("recipe", name)


def own_settings(recipe: Recipe) -> dict[str, Setting]:
    """What a user's own recipe states itself, as settings that the user wrote.

    So they count as written by the user wherever that makes a difference. Empty for a shipped
    recipe. What its base states, and what depends on the run, is decided as for every recipe.
    """
    if not recipe.files:
        return {}
    stated = {name: value for name, value in _own(recipe).items() if not callable(value)}
    return {name: Setting(value, recipe.source, reason) for name, (value, reason) in stated.items()}


def _own(recipe: Recipe) -> dict[str, Value]:
    """The settings that no shipped recipe states in the same way."""
    inherited = [item for build in RECIPES.values() for item in build().settings.items()]
    return {name: value for name, value in recipe.settings.items() if (name, value) not in inherited}


def _no_recipe(subject: str, name: str, source: str = "") -> UserError:
    fix = nearest(name, RECIPES) or f"one of {', '.join(RECIPES)}, or a file: mine.yaml"
    return mistake(subject, f"there is no recipe {name!r}", fix, source)


# --- A YAML ---------------------------------------------------------------------------------------


def _from_yaml(file: str, above: tuple[str, ...]) -> Recipe:
    """`above` are the files whose bases led to this one."""
    if Path(file).resolve() in [Path(other).resolve() for other in above]:
        raise mistake("base", f"leads back to {file}: {' > '.join([*above, file])}", "a shipped recipe", above[-1])
    content = read_yaml(file, "recipe")
    if "base" not in content:
        raise mistake("recipe", f"{file} has no base", _without_base(file, content))
    base = _base(content["base"], file, above)
    changes = content.get("changes") or {}
    problems = [_unknown_key(str(key), file) for key in content if key not in _KEYS]
    if not isinstance(changes, dict):
        problems.append(Problem("changes", "are not settings", f"changes: with lines such as name: {_A_PAIR}", file))
        changes = {}
    own = {name: content[name] for name in ("engine", "micro_batch_cap") if name in content}
    recipe = base.but(Path(file).stem, content.get("purpose", ""), **own)
    recipe = replace(recipe, files=(file, *base.files))
    checked = _checked(recipe, {str(name): value for name, value in changes.items()}, problems)
    # A base's own engine is not the file of that name beside this recipe.
    return checked if "engine" in own else replace(checked, engine=base.engine)


def _base(name: object, file: str, above: tuple[str, ...]) -> Recipe:
    if str(name) in RECIPES:
        return RECIPES[str(name)]()
    if str(name).endswith((".yaml", ".yml")):
        beside = Path(file).parent / str(name)
        if not _is_file(beside):
            raise mistake("base", f"there is no file {beside}", "a path that starts at this file", file)
        return _from_yaml(str(beside), (*above, file))
    if str(name).endswith(".py"):
        raise mistake("base", f"{name} is a Python file", "a shipped recipe, or a YAML", file)
    raise _no_recipe("base", str(name), file)


def _without_base(file: str, content: Json) -> str:
    """What to write instead of a YAML that is for something else."""
    if "distributed_type" in content:
        return f"it is for `accelerate launch --config_file {file}`"
    if content and all(str(name) in legal.settings() for name in content):
        return f"--config {file}, which takes settings"
    return "base: fast, or another recipe"


def _unknown_key(key: str, file: str) -> Problem:
    if key in legal.settings():
        return Problem(key, "is not below changes", f"changes: with a line {key}: {_A_PAIR}", file)
    return Problem(key, "is not a key of a recipe", nearest(key, _KEYS) or "one of " + ", ".join(_KEYS), file)


# --- A Python file --------------------------------------------------------------------------------


def _from_python(file: str, function: str) -> Recipe:
    module = _guarded(_import, file)(file)
    build = _function(module, function, file)
    recipe = _guarded(build, file)()
    if not isinstance(recipe, Recipe):
        what = f"{build.__name__} of {file} returns {type(recipe).__name__}, not a Recipe"
        raise mistake("recipe", what, "return fast().but(...), with `from recipes.catalog import fast`")
    return _checked(replace(recipe, files=(file,)), _own(recipe), [])


def _import(file: str) -> ModuleType:
    if not Path(file).is_file():
        raise mistake("recipe", f"{file} cannot be read: no such file", "the path of an existing Python file")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str, file: str) -> Callable[[], object]:
    own = {
        key: item
        for key, item in vars(module).items()
        if inspect.isfunction(item) and item.__module__ == module.__name__ and not key.startswith("_")
    }
    if name and inspect.isfunction(getattr(module, name, None)):
        return getattr(module, name)
    if name:
        fix = nearest(name, own) or ("one of " + ", ".join(own) if own else "the name of a function")
        raise mistake("recipe", f"{file} has no function {name!r}", fix)
    if len(own) != 1:
        what = f"{file} has {len(own)} public functions: {', '.join(own)}" if own else f"{file} has no public function"
        raise mistake("recipe", what, f"{file}:NAME of the one that returns the recipe")
    return next(iter(own.values()))


def _guarded(function: Callable, file: str) -> Callable:
    """The function of a user's file. What it raises becomes a `UserError` with the line."""

    @functools.wraps(function)
    def guarded(*arguments: object) -> Any:
        try:
            return function(*arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(Path(file).absolute())]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
            first = " ".join(str(error).splitlines()[:1])
            what = f"{file} raises {type(error).__name__}: {first}"
            raise mistake("recipe", what, f"mend line {line}" if line else "mend the file", file) from None

    return guarded


# --- What it states -------------------------------------------------------------------------------


def _checked(recipe: Recipe, changes: Mapping[str, object], problems: list[Problem]) -> Recipe:
    """The recipe with its changes under their names and in their types, and with its engine found.

    Raises `UserError` with these problems and all others.
    """
    file, settings = recipe.files[0], dict(recipe.settings)
    problems = [*problems, *_about_itself(recipe, file)]
    for name, value in changes.items():
        settings.pop(legal.ALIASES.get(name, name), None)
        try:
            settings |= {} if _is_left_to_the_library(name, value) else _setting(name, value, file)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return replace(recipe, settings=settings, engine=str(_engine(recipe.engine, file)))


def _about_itself(recipe: Recipe, file: str) -> Iterator[Problem]:
    if not re.fullmatch(r"[\w.-]+", recipe.name) or recipe.name in RECIPES:
        taken = "is the name of a shipped recipe" if recipe.name in RECIPES else "cannot name a recipe"
        yield Problem("recipe", f"{recipe.name!r} {taken}", f"another name, of {_IN_A_NAME}", file)
    if not _is_text(recipe.purpose):
        what = "is not text" if recipe.purpose else "is missing"
        yield Problem("purpose", what, "a line that says what the recipe is for", file)
    if type(recipe.micro_batch_cap) is not int or recipe.micro_batch_cap < 1:
        what = f"is {recipe.micro_batch_cap!r}"
        yield Problem("micro_batch_cap", what, "a whole number of examples per process", file)
    if _engine(recipe.engine, file) is None:
        names = [item.stem for item in sorted(shipped("").glob("*.yaml"))]
        near = nearest(Path(str(recipe.engine)).stem, names)  # without .yaml, which all share
        fix = f"{near}.yaml" if near else f"one of {'.yaml, '.join(names)}.yaml, or a path that starts at this file"
        yield Problem("engine", f"there is no {recipe.engine}", fix, file)


def _engine(name: str, file: str) -> str | None:
    """The path of an engine beside the file, or a shipped one's name; None if there is neither."""
    beside = Path(file).parent / str(name)
    if _is_file(beside):
        return str(beside.resolve())
    return name if _is_file(shipped(str(name))) else None


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113, Path.is_file raises for a name too long for a path


def _setting(name: str, value: object, file: str) -> dict[str, Value]:
    """One change under the name that is used inside. Raises `UserError` if it is not legal."""
    if name not in legal.settings():
        raise UserError(unknown(name, file))
    if name in ("recipe", "config"):
        raise mistake(name, "cannot be changed by a recipe", "leave it out", file)
    if callable(value):
        if name in _EARLY:
            raise mistake(name, "cannot depend on the run", f"a value: {_pair(name, None, file)}", file)
        return {legal.ALIASES.get(name, name): _guarded(_typed(name, value, file), file)}
    return _decision(name, value, file)


def _is_left_to_the_library(name: str, value: object) -> bool:
    """Whether a change is null with its reason, for a setting that has no such value."""
    field = legal.settings().get(name)
    takes_none = field is None or "None" in field.types or name in ("recipe", "config", "report_to")
    is_null = isinstance(value, (list, tuple)) and len(value) == 2 and value[0] is None and _is_text(value[1])
    return is_null and not takes_none


def _decision(name: str, value: object, file: str) -> dict[str, Value]:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not _is_text(value[1]):
        shown = value if isinstance(value, (str, int, float)) else None
        raise mistake(name, "has no reason", _pair(name, shown, file), file)
    takes_list = "list" in legal.settings()[name].types
    if takes_list and isinstance(value[0], str) and " " not in value[1].strip():  # [q_proj, v_proj] is a list of two
        raise mistake(
            name, f"has no reason, or {value[1]!r} is one", _pair(name, [], file).replace("[]", "[...]"), file
        )
    problems: list[Problem] = []
    accepted = accept({name: value[0]}, file, problems)
    if problems:
        raise UserError(*(replace(problem, fix=_in_a_pair(problem, file)) for problem in problems))
    return {used: (setting.value, value[1]) for used, setting in accepted.items()}


def _in_a_pair(problem: Problem, file: str) -> str:
    """The fix as a line of the file, for a value of which a flag's fix says the type."""
    kind = problem.fix.removeprefix(f"--{problem.subject} with ")
    return problem.fix if kind == problem.fix else _pair(problem.subject, kind, file, quoted=False)


def _pair(name: str, value: object, file: str, quoted: bool = True) -> str:
    """A value with its reason as the file is written, YAML or Python. None stands for any value."""
    in_python = file.endswith(".py")
    shown = value if not quoted else "value" if value is None else repr(value) if in_python else json.dumps(value)
    return f'{name}=({shown}, "the reason")' if in_python else f'{name}: [{shown}, "the reason"]'


def _typed(name: str, function: Callable[[Any], Any], file: str) -> Callable[[Any], Decision]:
    """A function of the run, whose decisions are checked as fixed values are."""

    @functools.wraps(function)
    def typed(run: Any) -> Decision:
        (decision,) = _decision(name, function(run), file).values()
        assert not callable(decision)
        return decision

    return typed


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
