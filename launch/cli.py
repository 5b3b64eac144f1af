"""The `recipes` command. What it imports at its start is neither torch nor transformers: it answers at once."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launch import scale
from launch.commands import compare, plan
from launch.doctor import command as doctor
from launch.explain import command as explain
from launch.jobs import status, submit
from recipes import __version__
from recipes.catalog import RECIPES, Recipe
from recipes.errors import Problem, UserError, mistake
from recipes.rules.check import check, check_deep
from recipes.run import FIT, RunSpec, Setting, nearest, resolve, shown, with_fit


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where what was asked for is not so or failed, or 2 for a mistake."""
    parser = _parser()
    own, passed_on = _at_dashes(sys.argv[1:] if argv is None else argv)
    options, rest = parser.parse_known_args(own)
    if rest and options.command not in ("check", "plan", "fit", "scale"):
        hint = " (train.py's flags come after --)" if options.command == "submit" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    try:
        return options.run(options, [*rest, *passed_on])
    except UserError as error:
        if getattr(options, "json", False):
            print(json.dumps({"legal": False, "problems": [vars(problem) for problem in error.problems]}, indent=2))
        else:
            _print_problems(error.problems)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0


def _at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Words before and after the first `--`."""
    border = argv.index("--") if "--" in argv else len(argv)
    return argv[:border], argv[border + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "recipes", description="Explained recipes for Hugging Face Trainer and Accelerate.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"accelerate-recipes {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="the recipes, a line each", allow_abbrev=False)
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=list_recipes)

    show = commands.add_parser("show", help="every setting of a recipe, its value and the reason", allow_abbrev=False)
    show.add_argument("name", metavar="NAME")
    show.add_argument("--diff", metavar="OTHER", help="only what differs from another recipe")
    _add_world(show)
    show.add_argument(
        "--global_batch_size", "--global-batch-size", type=_count, help="examples per optimizer step [16]"
    )
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=show_recipe)

    copy = commands.add_parser("copy", help="write a recipe as a YAML for --config", allow_abbrev=False)
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("file", metavar="FILE")
    copy.set_defaults(run=copy_recipe)

    checking = commands.add_parser(
        "check",
        help="say whether a run is legal before it starts",
        allow_abbrev=False,
        usage="recipes check [--recipe NAME] [--config FILE] [--accelerate_config FILE] [--num_processes N] [--deep] "
        "[--json] [any train.py flags] | --azureml FILE",
    )
    checking.add_argument("--accelerate_config", "--accelerate-config", metavar="FILE", help="the Accelerate YAML")
    _add_world(checking)
    checking.add_argument("--azureml", metavar="FILE", help="a job's YAML for Azure ML, and the training in it")
    checking.add_argument("--deep", action="store_true", help="also build the real TrainingArguments (seconds)")
    checking.add_argument("--json", action="store_true")
    checking.set_defaults(run=check_run)

    plan.add_parser(commands, _count)
    submit.add_parser(commands, _count)
    status.add_parsers(commands)
    doctor.add_parser(commands, _count)
    scale.add_parser(commands, _count)
    compare.add_parser(commands)
    explain.add_parser(commands)
    return parser


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num_processes", "--num-processes", type=_count, help="processes in all, one a GPU [1]")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


# --- The commands ----------------------------------------------------------------------------------------------------


def list_recipes(options: argparse.Namespace, rest: list[str]) -> int:
    recipes = [build() for build in RECIPES.values()]
    if options.json:
        fields = ("name", "purpose", "engine", "micro_batch_cap")
        print(json.dumps([{name: getattr(recipe, name) for name in fields} for recipe in recipes], indent=2))
        return 0
    from launch.terminal import print_table

    rows = [[recipe.name, recipe.engine, recipe.purpose] for recipe in recipes]
    print_table(["recipe", "accelerate_configs/", "what it is for"], rows)
    return 0


def show_recipe(options: argparse.Namespace, rest: list[str]) -> int:
    run = _resolve_recipe(options.name, options)
    settings = {name: setting for name, setting in run.chosen().items() if name != "recipe"}
    if options.diff:
        return _show_difference(run, _resolve_recipe(options.diff, options), options)
    if options.json:
        print(json.dumps(_as_json(run, settings), indent=2, default=str))
        return 0
    from launch.terminal import print_table

    _print_heading(run)
    print_table(
        ["setting", "value", "from", "reason"], [[n, _text(s.value), s.source, s.reason] for n, s in settings.items()]
    )
    return 0


def _show_difference(run: RunSpec, other: RunSpec, options: argparse.Namespace) -> int:
    names = [name for name in run if run[name] != other[name] and name not in ("recipe", "output_dir")]
    if options.json:
        differences = {name: {run.recipe.name: run[name], other.recipe.name: other[name]} for name in names}
        print(json.dumps(differences, indent=2, default=str))
        return 0
    from launch.terminal import print_table

    _print_heading(run)
    rows = [[name, _text(run[name]), _text(other[name]), _reason(name, run, other)] for name in names]
    if run.recipe.engine != other.recipe.engine:
        rows.insert(0, ["engine", run.recipe.engine, other.recipe.engine, run.engine.title])
    print_table(["setting", run.recipe.name, other.recipe.name, "reason"], rows)
    return 0


def _reason(name: str, run: RunSpec, other: RunSpec) -> str:
    """Why this recipe chose it; where it left the default, why the other one did not."""
    theirs = other.setting(name).reason
    return run.setting(name).reason or (f"{other.recipe.name}: {theirs}" if theirs else "")


def copy_recipe(options: argparse.Namespace, rest: list[str]) -> int:
    recipe = _find(options.name)
    target = Path(options.file)
    try:
        with target.open("x", encoding="utf-8") as stream:  # "x": an existing file is never overwritten
            stream.write(_as_yaml(recipe))
    except FileExistsError:
        raise mistake("FILE", f"{target} exists already", "another name") from None
    except OSError as error:
        raise mistake("FILE", f"{target} cannot be written: {error.strerror}", "a folder that can") from None
    print(f"{target}: edit it, then train with --config {target}")
    return 0


def check_run(options: argparse.Namespace, rest: list[str]) -> int:
    if options.azureml:
        run, problems = submit.read_azureml(Path(options.azureml), rest)
    else:
        run = with_fit(resolve(rest, world_size=options.num_processes, accelerate_config=options.accelerate_config))
        problems = check(run, accelerate_config_given=options.accelerate_config is not None)
    errors = [problem for problem in problems if problem.severity == "error"]
    if options.deep and not errors:
        errors = check_deep(run)
        problems += errors
    if options.json:
        found = {
            "legal": not errors,
            "problems": [vars(problem) for problem in problems],
            **_as_json(run, run.chosen()),
        }
        print(json.dumps(found, indent=2, default=str))
        return 2 if errors else 0
    _print_problems(problems)
    if errors:
        print(f"{len(errors)} error{'s' * (len(errors) > 1)}: this run would not start.", file=sys.stderr)
        return 2
    world = f"{run.world_size} process{'es' * (run.world_size > 1)}"
    fitted = f": {run.batch.reason}" if run.batch_source == FIT else ""
    print(f"legal: {run.recipe.name} on {run.engine.title}, {world}, batch {run.batch}{fitted}")
    return 0


# --- Helpers ---------------------------------------------------------------------------------------------------------


def _find(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]()
    raise mistake("NAME", f"there is no recipe {name!r}", nearest(name, RECIPES) or "one of " + ", ".join(RECIPES))


def _resolve_recipe(name: str, options: argparse.Namespace) -> RunSpec:
    _find(name)
    settings = {"recipe": name}
    if options.global_batch_size:
        settings["global_batch_size"] = options.global_batch_size
    run = resolve(settings=settings, world_size=options.num_processes, demonstrate=False)
    if run.problems:
        raise UserError(*run.problems)
    return run


def _as_json(run: RunSpec, settings: dict[str, Setting]) -> dict[str, Any]:
    return {
        "recipe": run.recipe.name,
        "purpose": run.recipe.purpose,
        "engine": run.recipe.engine,
        "num_processes": run.world_size,
        "hardware": str(run.hardware),
        "settings": {
            name: {**vars(setting), "value": shown(name, setting.value)} for name, setting in settings.items()
        },
    }


def _as_yaml(recipe: Recipe) -> str:
    """A configuration for --config: what is fixed as values, what depends on the run as comments."""
    lines = [f"# {recipe.purpose}", f"# Engine: accelerate_configs/{recipe.engine}", f"recipe: {recipe.name}", ""]
    for name, setting in recipe.settings.items():
        if callable(setting):
            lines += [
                f"# {name}: decided by the recipe for each machine and run ({setting.__name__.replace('_', ' ')})",
                "",
            ]
        else:
            value, reason = setting
            lines += [f"# {reason}", f"{name}: {json.dumps(value)}", ""]  # JSON is YAML
    return "\n".join(lines).rstrip() + "\n"


def _print_heading(run: RunSpec) -> None:
    print(f"{run.recipe.name}: {run.recipe.purpose}")
    world = f"{run.world_size} process{'es' * (run.world_size > 1)}"
    print(f"on {run.hardware}, {world}, {run.engine.title} ({run.recipe.engine}), batch {run.batch}\n")


def _print_problems(problems: list[Problem] | tuple[Problem, ...]) -> None:
    if not problems:
        return
    from launch.terminal import console, print_problems

    print_problems(problems, console(stderr=True))


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (bool, dict, list)) or value is None else str(value)
