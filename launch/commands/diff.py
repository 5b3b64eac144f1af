"""`recipes diff`: what differs between two runs, a run and a recipe, or two recipes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from launch.commands.compare import Run, differing_settings, finite, names_of, surroundings
from launch.commands.named import is_run, print_heading, resolve_recipe
from launch.flags import Commands, count, spellings
from launch.terminal import print_table, value_text
from recipes.run import Json, RunSpec, recorded, shown

_MATERIAL = ("model_name_or_path", "dataset_name")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("diff", allow_abbrev=False, usage="recipes diff A B [--num_processes N] [--json]")
    parser.add_argument("names", metavar="A B", nargs=2, help="a run's output folder or run.json, or a recipe")
    parser.add_argument(*spellings("num_processes"), type=count, help="of recipes [the run's, or 1]")
    parser.add_argument(*spellings("global_batch_size"), type=count, help="of recipes [the run's, or 16]")
    parser.add_argument("--json", action="store_true", help="name -> value in A and in B")
    parser.set_defaults(run=diff)


def diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    return show_difference(options.names, options)


def show_difference(names: Sequence[str], options: argparse.Namespace) -> int:
    """Print what differs between two runs or recipes. Recipes are resolved for the run's processes
    and global batch, or for those of the `options`. Raises `UserError`.
    """
    records = {name: recorded.read(name, "RUN") for name in names if is_run(name)}
    around: Json = next(iter(records.values()), {})
    processes = options.num_processes or around.get("world_size")
    batch = options.global_batch_size or around.get("settings", {}).get("global_batch_size", {}).get("value")
    trained = around.get("settings", {})
    demonstrates = bool(trained) and not any(trained.get(name, {}).get("value") for name in _MATERIAL)
    specs = {name: resolve_recipe(name, processes, batch, demonstrates) for name in names if name not in records}
    engines = {name: spec.engine_title if records else spec.recipe.engine for name, spec in specs.items()}
    contents = [records[name] if name in records else _as_record(specs[name], engines[name]) for name in names]
    titles = (
        names_of([Path(name) for name in names])
        if len(records) == 2
        else [name if name in records else specs[name]["recipe"] for name in names]
    )
    runs = [Run(title, Path(name), content) for title, name, content in zip(titles, names, contents, strict=True)]
    own = {"recipe"} if specs else set()  # that they are two recipes is known
    settings = {
        name: entries
        for group in differing_settings(runs).values()
        for name, entries in group.items()
        if name not in own
    }
    if options.json:
        differences = {name: [entry["value"] for entry in entries] for name, entries in settings.items()}
        differences |= surroundings(runs) if len(records) == 2 else {}
        pairs = {name: dict(zip(titles, values, strict=True)) for name, values in differences.items()}
        print(json.dumps(finite(pairs), indent=2, default=str))
        return 0
    if specs:
        print_heading(next(iter(specs.values())))
    rows = [[name, *values, ""] for name, values in surroundings(runs).items()]
    rows += [[name, *(entry["value"] for entry in entries), _reason(name, runs)] for name, entries in settings.items()]
    if not rows:
        print("nothing differs")
        return 0
    print_table(["setting", *titles, "reason"], [[*map(value_text, row)] for row in rows])
    return 0


def _reason(name: str, runs: list[Run]) -> str:
    """Why the first chose the value; if it kept the default, why the second did not."""
    mine, theirs = (run.settings.get(name, {}).get("reason", "") for run in runs)
    return mine or (f"{runs[1].name}: {theirs}" if theirs else "")


def _as_record(run: RunSpec, engine: str) -> Json:
    """As much of a record as is known of a run that has not begun."""
    entries = {name: vars(run.setting(name)) for name in run}
    return {
        "engine": engine,
        "settings": {name: {**entry, "value": shown(name, entry["value"])} for name, entry in entries.items()},
    }
