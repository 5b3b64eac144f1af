"""Finds recipes by name: a shipped one, or a user's own in a YAML or a Python file.

A YAML states a base and the changes to it, each value with its reason, as in catalog.py:

    base: fast                 # a shipped recipe
    purpose: Fine-tuning on our support tickets.
    engine: standard.yaml      # optional: a shipped Accelerate YAML, or one relative to this file
    micro_batch_cap: 4         # optional: examples per process
    changes:
      learning_rate: [5.0e-5, best of the three that we tried]

A Python file holds a function without arguments that returns a `recipes.catalog.Recipe`. The flag
is `--recipe mine.py:function`. In Python, the base may also be a recipe of your own.
"""

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import legal
from recipes.catalog import RECIPES, Decision, Recipe, Value
from recipes.errors import Problem, UserError, mistake, one_line, raise_errors
from recipes.run.command_line import accept, unknown
from recipes.run.files import existing_path, find_yaml, nearest, read_yaml, shipped
from recipes.run.spec import BATCH_FIELDS, Setting

_OF_A_RECIPE = ("engine", "micro_batch_cap")  # keys that are not settings of train.py
_KEYS = ("base", "purpose", *_OF_A_RECIPE, "changes")
# The run itself depends on these values, so a function of the run cannot decide them.
_EARLY = (*BATCH_FIELDS, *_OF_A_RECIPE, "model_name_or_path", "dataset_name", "use_cpu", "output_dir", "deepspeed")


def find_recipe(name: str) -> Recipe:
    """Find the shipped recipe of this name, or read the recipe in the file of this name.

    Raises `UserError` if there is no such recipe, or if its file has mistakes.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith((".yaml", ".yml")):
        return _from_yaml(name)
    if python := re.fullmatch(r"(.+\.py):?(\w*)", name):
        return _from_python(python[1], python[2])
    fix = nearest(name, RECIPES) or f"one of {', '.join(RECIPES)}, or a file: mine.yaml"
    raise mistake("recipe", f"there is no recipe {name!r}", fix)


def own_settings(recipe: Recipe) -> dict[str, Setting]:
    """Return the fixed values of a user's own recipe as settings that the user wrote.

    `run.explicit` is then True for these settings. Values of the shipped base, and values that
    depend on the run, are decided as in every recipe. Empty for a shipped recipe.
    """
    values = recipe.changes.items() if recipe.file else ()
    stated = {name: value for name, value in values if isinstance(value, tuple) and name not in _OF_A_RECIPE}
    return {name: Setting(value, recipe.source, reason) for name, (value, reason) in stated.items()}


def _from_yaml(file: str) -> Recipe:
    content = read_yaml(file, "recipe")
    if "base" not in content:
        fix = "write `base: fast`; or give a settings file to --config, an Accelerate YAML to --accelerate_config"
        raise mistake("recipe", f"{file} has no base", fix)
    base = str(content["base"])
    if base not in RECIPES:
        fix = nearest(base, RECIPES) or f"one of {', '.join(RECIPES)}"
        raise mistake("base", f"{base} is not a shipped recipe", fix, file)
    changes = content.get("changes") or {}
    problems = [_unknown_key(str(key), file) for key in content if key not in _KEYS]
    if not isinstance(changes, dict):
        problems.append(Problem("changes", "is not a mapping", 'write lines such as seed: [3, "the reason"]', file))
        changes = {}
    own = {name: content[name] for name in _OF_A_RECIPE if name in content}
    purpose = content.get("purpose") or ""
    return _checked(Recipe(Path(file).stem, purpose, {**changes, **own}, RECIPES[base](), file), problems)


def _unknown_key(key: str, file: str) -> Problem:
    fix = f'in changes, write {key}: [value, "the reason"]' if key in legal.settings() else nearest(key, _KEYS)
    return Problem(key, "is not a key of a recipe", fix or f"one of {', '.join(_KEYS)}", file)


# --- A Python file --------------------------------------------------------------------------------


def _from_python(file: str, name: str) -> Recipe:
    if existing_path(file) is None:
        raise mistake("recipe", f"there is no file {file}", "give the path of an existing Python file")
    module = _run(file, runpy.run_path, file)
    recipe = _run(file, module[name]) if callable(module.get(name)) else None
    if not isinstance(recipe, Recipe):
        what = f"{file} has no function {name!r} that returns a Recipe"
        example = 'from recipes.catalog import fast; return fast().but("NAME", "PURPOSE", seed=(3, "REASON"))'
        raise mistake("recipe", what, f"use {file}:NAME, where NAME is a function such as `{example}`")
    while recipe.base and recipe.base.name not in RECIPES:  # the base is the user's own too
        recipe = replace(recipe, changes={**recipe.base.changes, **recipe.changes}, base=recipe.base.base)
    return _checked(replace(recipe, file=file), [])


def _run(file: str, function: Callable, *arguments: object) -> Any:
    """Call a function of a user's file. Raises `UserError` for any error in that function."""
    try:
        return function(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{file} raises {type(error).__name__}: {one_line(error)}"
        raise mistake("recipe", what, "correct the file (recipes/README.md has an example)", file) from None


# --- The values of a recipe -----------------------------------------------------------------------


def _checked(recipe: Recipe, problems: list[Problem]) -> Recipe:
    """Check a recipe's name, purpose and changes, and find its engine's YAML.

    Raises `UserError` if there are problems: the given `problems`, or others that are found here.
    """
    file, changes = recipe.file, {}
    if recipe.name in RECIPES or not re.fullmatch(r"[\w.-]+", recipe.name):
        taken = "is the name of a shipped recipe" if recipe.name in RECIPES else "cannot name a recipe"
        fix = "use another name, of letters, digits, dots, - and _: folders and jobs will have this name"
        problems.append(Problem("recipe", f"{recipe.name!r} {taken}", fix, file))
    if not _is_text(recipe.purpose):
        problems.append(Problem("purpose", "is missing", "add a line that says what the recipe is for", file))
    for name, value in recipe.changes.items():
        try:
            changes[legal.ALIASES.get(name, name)] = _change(str(name), value, file)
        except UserError as error:
            problems += error.problems
    raise_errors(problems)
    return replace(recipe, changes=changes)


def _change(name: str, value: Any, file: str) -> Value | None:
    """Return a change as a `Value` of catalog.py. Raises `UserError` if the change is illegal."""
    if name in _OF_A_RECIPE:
        return _of_a_recipe(name, value, file)
    if name not in legal.settings():
        raise UserError(unknown(name, file))
    if name in ("recipe", "config"):
        raise mistake(name, "cannot be changed by a recipe", "leave it out", file)
    if callable(value):
        if name in _EARLY:
            raise mistake(name, "cannot be computed from the run", "write a fixed value and its reason", file)
        return lambda run: _decision(name, _run(file, value, run), file)
    return None if value is None else _decision(name, value, file)


def _of_a_recipe(name: str, value: Any, file: str) -> Decision:
    value, reason = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, f"stated in {file}")
    if name == "engine":
        found = find_yaml(str(value), name, beside=file, source=file)
        return found.name if found == shipped(found.name) else str(found.resolve()), reason
    if type(value) is not int or value < 1:
        raise mistake(name, f"is {value!r}", "write a whole number above 0: the examples per process", file)
    return value, reason


def _decision(name: str, pair: Any, file: str) -> Decision:
    """Convert the value in `pair` to its setting's type. Raises `UserError` for an illegal pair."""
    is_words = _is_pair(pair) and "list" in legal.settings()[name].types and isinstance(pair[0], str)
    if not _is_pair(pair) or (is_words and " " not in pair[1].strip()):  # [q_proj, v_proj] is a value, not a pair
        value = repr(pair) if isinstance(pair, (str, int, float)) else "value"
        raise mistake(name, "needs a value and its reason", f'write [{value}, "the reason"]', file)
    problems: list[Problem] = []
    accepted = accept({name: pair[0]}, file, problems)
    raise_errors(problems)
    return next(iter(accepted.values())).value, pair[1]


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and _is_text(value[1])


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
