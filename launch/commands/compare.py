"""`recipes show`, `diff` and `compare`: recipes and recorded runs, alone and side by side."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from launch.commands.catalogue import RECIPE, run_as_json
from launch.commands.differences import MATERIAL, differing_settings, differs, gpu_names, rows, source_of
from launch.flags import Commands, count, spellings
from launch.output.fields import FIELDS
from launch.terminal import memory_size, plural, print_table, value_text
from recipes.catalog import RECIPES
from recipes.errors import UserError, mistake
from recipes.run import (
    LIBRARY,
    Json,
    RunSpec,
    here,
    nearest,
    recorded,
    resolve,
    shown,
)  # fmt: skip
from recipes.run.metrics import smaller_is_better

# Runs that differ in one of these did not train the same: their results are not comparable.
_TRAINING = {
    "task": ("task", "problem_type"),
    "model": ("model_name_or_path", "model_revision", "from_scratch"),
    "data": (
        "dataset_name dataset_config dataset_train_split dataset_test_split dataset_text_field dataset_label_field "
        "dataset_streaming max_length packing packing_strategy"
    ).split(),
    "loss": ("assistant_only_loss", "completion_only_loss", "label_smoothing_factor"),
    "global batch": ("global_batch_size",),
    "seed": ("seed", "data_seed"),
    "length": ("max_steps", "num_train_epochs"),
}

_RESULTS = ("global_step", "final_loss", "train_loss")
_COSTS = (
    "step_time", "samples_per_second", "tokens_per_second", "mfu", "peak_memory_bytes", "train_runtime",
)  # fmt: skip
_BY_NOISE = " ~"
# Numbers in a record that are not results.
_NO_RESULT = ("world_size", "data_parallel_size", "num_parameters", "step_time_off")


def add_parser(commands: Commands) -> None:
    _add_show(commands)
    _add_diff(commands)
    _add_compare(commands)


# --- show -----------------------------------------------------------------------------------------


def _add_show(commands: Commands) -> None:
    fields = "\n".join(f"  {name:<20}{meaning}" for name, meaning in FIELDS.items())
    parser = commands.add_parser(
        "show",
        allow_abbrev=False,
        epilog=f"fields of a run.json:\n{fields}\nand Trainer's own results, under its names",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"{RECIPE}; or a run: its output folder, or run.json")
    parser.add_argument("--diff", metavar="OTHER", help="only what differs from another recipe or run")
    parser.add_argument(*spellings("num_processes"), type=count, help="processes in all, one per GPU [1]")
    parser.add_argument(*spellings("global_batch_size"), type=count, help="examples per optimizer step [16]")
    parser.add_argument("--json", action="store_true", help="for scripts; of a run, its record as it is")
    parser.set_defaults(run=show)


def show(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.diff:
        options.names = [options.name, options.diff]
        return diff(options, rest)
    if _is_run(options.name):
        _show_run(options)
        return 0
    run = _resolve_recipe(options.name, options.num_processes, options.global_batch_size)
    settings = {name: setting for name, setting in run.chosen().items() if name != "recipe"}
    if options.json:
        print(json.dumps(run_as_json(run, settings), indent=2, default=str))
        return 0
    _print_heading(run)
    of_the_recipe = []  # its two values that are no settings of train.py
    for name in ("engine", "micro_batch_cap"):
        value, reason = run.recipe.fixed(name)
        by, _ = run.recipe.stated(name) or (run.recipe, None)
        of_the_recipe.append([name, value, by.source, reason])
    _print_settings([*of_the_recipe, *([name, s.value, s.source, s.reason] for name, s in settings.items())])
    return 0


def _show_run(options: argparse.Namespace) -> None:
    record = recorded.read(options.name, "NAME")
    if options.num_processes or options.global_batch_size:
        what = f"{options.name} is a run, which had its own processes and batch"
        raise mistake("NAME", what, "leave --num_processes and --global_batch_size out")
    if options.json:
        print(json.dumps(record, indent=2))
        return
    machine = record.get("hardware", {})
    hardware = gpu_names(machine) if machine.get("gpus") else f"CPU, {plural(machine.get('cores', 1), 'core')}"
    world = plural(record.get("world_size") or 1, "process")
    error = f": {record['error']}" if "error" in record else ""
    print(f"{record.get('recipe')}, {record['status']}{error}")
    print(f"on {hardware}, {world}, {record.get('engine')}, started {record.get('started')}\n")
    if table := _result_rows(results([record]), {}):
        print_table(["result", "value"], table)
        print()
    chosen = {name: entry for name, entry in record["settings"].items() if entry["source"] != LIBRARY}
    _print_settings(
        [[name, entry["value"], entry["source"], entry.get("reason", "")] for name, entry in chosen.items()]
    )


def _print_settings(rows: list[list]) -> None:
    print_table(
        ["setting", "value", "from", "reason"], [[name, value_text(value), *rest] for name, value, *rest in rows]
    )


def _is_run(name: str) -> bool:
    """True for the name of a folder or a .json, there or not. Any other is a recipe's."""
    is_recipe = name in RECIPES or name.endswith((".yaml", ".yml")) or ".py" in name
    return not is_recipe and ("/" in name or name.endswith(".json") or Path(name).is_dir())


def _resolve_recipe(name: str, processes: int | None, batch: int | None, demonstrates: bool = False) -> RunSpec:
    """A recipe's run here. Raises `UserError` with every problem."""
    settings = {"recipe": name} | ({"global_batch_size": batch} if batch else {})
    run = resolve(place=here(processes, trained_by="train.py" if demonstrates else "nobody"), settings=settings)
    if run.problems:
        raise UserError(*run.problems)
    return run


def _print_heading(run: RunSpec) -> None:
    print(f"{run.recipe.name}: {run.recipe.purpose}")
    world = plural(run.world_size, "process")
    print(f"on {run.hardware}, {world}, {run.engine_title} ({run.recipe.engine}), batch {run.batch}\n")


# --- diff -----------------------------------------------------------------------------------------


def _add_diff(commands: Commands) -> None:
    parser = commands.add_parser("diff", allow_abbrev=False, usage="recipes diff A B [--num_processes N] [--json]")
    parser.add_argument("names", metavar="A B", nargs=2, help="a run's output folder or run.json, or a recipe")
    parser.add_argument(*spellings("num_processes"), type=count, help="of recipes [the run's, or 1]")
    parser.add_argument(*spellings("global_batch_size"), type=count, help="of recipes [the run's, or 16]")
    parser.add_argument("--json", action="store_true", help="name -> value in A and in B")
    parser.set_defaults(run=diff)


def diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the differences of two runs or recipes. Recipes are resolved for the run's processes
    and global batch, or for those of the `options`. Raises `UserError`.
    """
    names = options.names
    records = {name: recorded.read(name, "RUN") for name in names if _is_run(name)}
    around: Json = next(iter(records.values()), {})
    trained = around.get("settings", {})
    processes = options.num_processes or around.get("world_size")
    batch = options.global_batch_size or trained.get("global_batch_size", {}).get("value")
    demonstrates = bool(trained) and not any(trained.get(name, {}).get("value") for name in MATERIAL)
    specs = {name: _resolve_recipe(name, processes, batch, demonstrates) for name in names if name not in records}
    for name, spec in specs.items():
        records[name] = _as_record(spec, spec.recipe.engine if len(specs) == len(names) else spec.engine_title)
    titles = _names_of([Path(name) for name in names]) if not specs else names
    contents = [records[name] for name in names]
    settings = differing_settings(contents)
    if specs:
        settings.pop("recipe", None)  # that they are two recipes is known
    values = {name: [entry["value"] for entry in entries] for name, entries in settings.items()}
    if not (options.json and specs):  # whose engine is named in the heading
        values = {name: found for _, name, found in rows(contents)} | values
    if options.json:
        pairs = {name: dict(zip(titles, found, strict=True)) for name, found in values.items()}
        print(json.dumps(_finite(pairs), indent=2))
        return 0
    if specs:
        _print_heading(next(iter(specs.values())))
    if not values:
        print("nothing differs")
        return 0
    table = [[name, *map(value_text, found), _reason(settings.get(name), titles)] for name, found in values.items()]
    print_table(["setting", *titles, "reason"], table)
    return 0


def _reason(entries: list[Json] | None, titles: Sequence[str]) -> str:
    """Why the first chose the value; if it kept the default, why the second did not."""
    mine, theirs = (entry.get("reason", "") for entry in entries or ({}, {}))
    return mine or (f"{titles[1]}: {theirs}" if theirs else "")


def _as_record(run: RunSpec, engine: str) -> Json:
    """As much of a record as is known of a run that has not begun."""
    entries = {name: vars(run.setting(name)) for name in run}
    settings = {name: {**entry, "value": shown(name, entry["value"])} for name, entry in entries.items()}
    return {"engine": engine, "settings": settings}


# --- compare --------------------------------------------------------------------------------------


def _add_compare(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        usage="recipes compare RUN RUN [RUN ...] [--target METRIC VALUE] [--json]",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="an output folder, or its run.json")
    parser.add_argument(
        "--target",
        metavar=("METRIC", "VALUE"),
        nargs=2,
        action="append",
        default=[],
        help="a result that a run should reach, such as eval_loss 2.5; of several, all",
    )
    parser.add_argument("--json", action="store_true", help="values in the order of the runs")
    parser.set_defaults(run=compare)


def compare(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Returns 0, or 1 if there are targets and no run meets all of them. Raises `UserError`."""
    if len(options.runs) < 2:
        raise mistake("RUN", "is only one run", "name two or more")
    paths = [Path(word) for word in options.runs]
    names, records = _names_of(paths), [_read(path) for path in paths]
    targets = [(metric, _wanted(metric, value, records)) for metric, value in options.target]
    found = comparison(records, targets)
    met = [
        name for name, *each in zip(names, *(target["met"] for target in found["targets"]), strict=True) if all(each)
    ]
    if options.json:
        runs = [
            {"name": name, "path": str(path)}
            | {key: record.get(key) for key in ("recipe", "status", "error") if key != "error" or key in record}
            for name, path, record in zip(names, paths, records, strict=True)
        ]
        print(json.dumps(_finite({"runs": runs, **found, **({"meets_all": met} if targets else {})}), indent=2))
    else:
        _print(names, records, found)
        if targets:
            print(f"all targets are met by {', '.join(met)}" if met else "no run meets all targets")
    return 0 if met or not targets else 1


def _read(path: Path) -> Json:
    """The record of a run that has ended. Raises `UserError` if there is none."""
    content = recorded.read(path, "RUN")
    if content["status"] == "running":
        file = recorded.file_of(path)
        fix = f"wait for its end: recipes status {quote(str(file.parent))}"
        raise mistake("RUN", f"{file} is unfinished: the run is still running, or was killed", fix)
    return content


def _names_of(paths: list[Path]) -> list[str]:
    """The names of the folders; the paths as written if two folders have one name."""
    names = [(path.parent if path.is_file() else path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def _wanted(metric: str, value: str, records: list[Json]) -> float:
    known = sorted({name for record in records for name in _numbers(record)})
    if metric not in known:
        fix = nearest(metric, known) or ("one of " + ", ".join(known) if known else "a run that has ended well")
        raise mistake("target", f"no run has a result {metric!r}", fix)
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    raise mistake("target", f"{metric} {value!r} is not a number", f"--target {metric} NUMBER")


def comparison(records: list[Json], targets: Sequence[tuple[str, float]] = ()) -> Json:
    """The tables of a comparison. Lists are in the order of the runs.

    `margin`: by how much a target is met; negative if it is missed, None without such a number.
    """
    found = results(records)
    margins = [[margin(metric, value, record) for record in records] for metric, value in targets]
    return {
        "other_training": other_training(records),
        "settings": _settings_by_source(records),
        "surroundings": {row.name: row.values for row in rows(records)},
        "results": found,
        "noise_can_make": {name: marks for name in found if any(marks := by_noise(name, records))},
        "targets": [
            {"metric": metric, "value": value, "met": [by is not None and by >= 0 for by in each], "margin": each}
            for (metric, value), each in zip(targets, margins, strict=True)
        ],
    }


def other_training(records: list[Json]) -> list[str]:
    """The parts of the training itself that differ; empty if all runs trained the same."""
    settings, found = differing_settings(records), []
    for what, names in _TRAINING.items():
        differing = [name for name in names if name in settings]
        if what == "data" and not differing and any(row.name == "data" for row in rows(records)):
            differing = ["same name, other contents"]
        if differing:
            found.append(f"{what} ({', '.join(differing)})")
    return found


def _settings_by_source(records: list[Json]) -> dict[str, dict[str, list[Json]]]:
    """Source -> setting -> its value and source in each run."""
    groups: dict[str, dict[str, list[Json]]] = {}
    for name, entries in differing_settings(records).items():
        shortened = [{"value": entry["value"], "source": entry["source"]} for entry in entries]
        groups.setdefault(source_of(entries), {})[name] = shortened
    return groups


def _numbers(record: Json) -> dict[str, float]:
    """The results of a run, NaN (a diverged loss) among them."""
    return {name: value for name, value in record.items() if type(value) in (int, float) and name not in _NO_RESULT}


def results(records: list[Json]) -> dict[str, list[float | None]]:
    """Losses, metrics of the evaluation, speed and memory, as far as any run has them."""
    numbers = [_numbers(record) for record in records]
    evaluated = {name for found in numbers for name in found if name.startswith("eval_")}
    metrics = sorted(name for name in evaluated if not name.endswith(("_runtime", "_per_second")))
    names = [*_RESULTS, *metrics, "exchanges_per_step", *_COSTS]
    table = {name: [found.get(name) for found in numbers] for name in names}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def margin(metric: str, wanted: float, record: Json) -> float | None:
    """How much better a run is than asked, negative if worse; None if it has no such number."""
    value = _numbers(record).get(metric)
    if value is None or not math.isfinite(value):
        return None
    return wanted - value if _less_is_better(metric) else value - wanted


def _less_is_better(metric: str) -> bool:
    costs = any(word in metric for word in ("loss", "time", "memory", "perplexity"))
    return costs or smaller_is_better(metric) is True


def by_noise(name: str, records: list[Json]) -> list[bool]:
    """For each run, True if noise can make its difference from the first."""
    return [noise_can_make(name, records[0], record) for record in records]


def _finite(content: Json) -> Json:
    """NaN and infinity become null: JSON has neither."""
    return json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)


def _print(names: list[str], records: list[Json], found: Json) -> None:
    if found["other_training"]:
        other = ", ".join(found["other_training"])
        print(f"not the same training, which changes the results too: other {other}\n")
    if not found["settings"]:
        print("no setting differs\n")
    _table(["set by", "setting", *names], _setting_rows(found["settings"]))
    _table(["ran with", *names], [[name, *map(value_text, values)] for name, values in found["surroundings"].items()])
    status = ["status", *(record["status"] for record in records)]
    _table(["result", *names], [status, *_result_rows(found["results"], found["noise_can_make"])])
    if found["noise_can_make"]:
        print(f"{_BY_NOISE.strip()} noise can make this difference: repeat both runs to tell\n")
    for name, record in zip(names, records, strict=True):
        if "error" in record:
            print(f"{name}: {record['error']}")
    _table(["target", *names], [_target_row(target, records) for target in found["targets"]])


def _table(headings: list[str], rows: list[list[str]]) -> None:
    if rows:
        print_table(headings, rows, whole=not sys.stdout.isatty())
        print()


def _setting_rows(groups: dict[str, dict[str, list[Json]]]) -> list[list[str]]:
    rows = []
    for source, settings in groups.items():
        for index, (name, entries) in enumerate(settings.items()):
            one_source = not differs([entry["source"] for entry in entries])
            cells = [value_text(entry["value"]) + ("" if one_source else f" ({entry['source']})") for entry in entries]
            rows.append(["" if index else source, name, *cells])
    return rows


def _result_rows(table: dict[str, list[float | None]], noise: Mapping[str, list[bool]]) -> list[list[str]]:
    """Each value beside the first run's: a ratio for time, speed and memory, else a difference."""
    found = []
    for name, values in table.items():
        marks = noise.get(name) or [False] * len(values)
        cells = [_cell(name, value, values[0]) for value in values]
        found.append([name, *(cell + _BY_NOISE * marked for cell, marked in zip(cells, marks, strict=True))])
    return found


def _cell(name: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    shown = _format(name)(value)
    if first is None or first == value or not math.isfinite(first - value):
        return shown
    beside = f"x {value / first:.2f}" if name in _COSTS and first else f"{value - first:+.4g}"
    return f"{shown} ({beside})"


def _format(name: str) -> Callable[[float], str]:
    if name == "peak_memory_bytes":
        return memory_size
    if name == "mfu":
        return lambda value: f"{value:.1%}"
    unit = " s" if name in ("step_time", "train_runtime") else ""
    return lambda value: f"{value:,.4g}{unit}" if abs(value) < 10_000 else f"{value:,.0f}{unit}"


def _target_row(target: Json, records: list[Json]) -> list[str]:
    metric, wanted = target["metric"], target["value"]
    cells = []
    for by, record in zip(target["margin"], records, strict=True):
        if by is None:
            cells.append("missed: it is not a number" if metric in _numbers(record) else "missed: no such result")
        else:
            share = f" ({abs(by / wanted):.1%})" if wanted else ""
            cells.append(f"{'met' if by >= 0 else 'missed'} by {abs(by):.4g}{share}")
    return [f"{metric} {'at most' if _less_is_better(metric) else 'at least'} {wanted:g}", *cells]


# --- Differences that noise can make --------------------------------------------------------------

_OF_STEPS = ("step_time", "samples_per_second", "tokens_per_second", "mfu", "train_runtime")
_ALIKE = 0.02  # of a time: the same training differs by as much from run to run
_SURE = 3  # typical changes of a difference from one log to the next
_LAST_LOGS = 10


def noise_can_make(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if noise can make the difference of a result between two records.

    False too where the records do not tell, as for an evaluation: there is one of each.
    """
    values = first.get(name), other.get(name)
    if None in values or values[0] == values[1]:
        return False
    if name in _OF_STEPS:
        ratio = values[1] / values[0] if values[0] else math.inf
        return 0 < ratio < math.inf and abs(math.log(ratio)) <= max(_ALIKE, math.hypot(_off(first), _off(other)))
    return name == "final_loss" and _losses_cross(first, other)


def _off(record: Mapping[str, Any]) -> float:
    """By which share a record's step time may be off."""
    return (record.get("step_time_off") or 0.0) / (record.get("step_time") or math.inf)


def _losses_cross(first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if the difference of the logged losses changes as much from log to log as it is large.

    Runs that see the same examples share the noise of the batches: their difference has none.
    """
    logged = [
        {entry.get("step"): entry["loss"] for entry in record.get("log_history") or () if "loss" in entry}
        for record in (first, other)
    ]
    steps = sorted(set(logged[0]) & set(logged[1]))[-_LAST_LOGS:]
    apart = [logged[1][step] - logged[0][step] for step in steps]
    changes = [abs(now - before) for before, now in pairwise(apart)]
    return len(changes) > 1 and abs(apart[-1]) <= _SURE * median(changes)
