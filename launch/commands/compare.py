"""`recipes show`, `diff` and `compare`: print recipes and recorded runs, differences and results.

The function `differences` finds the differences. `recipes rerun` calls the function too.
"""

import argparse
import contextlib
import hashlib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.flags import Commands
from launch.output.record import FIELDS, MATERIAL, NO_DIFFERENCE, has_risen, several
from launch.terminal import duration, memory_size, plural, print_table, schedule, value_text
from recipes.catalog import RECIPES
from recipes.errors import mistake, raise_errors
from recipes.run import Json, here, nearest, recorded, resolve
from recipes.run.metrics import is_figure, smaller_is_better
from recipes.run.spec import COMMAND_LINE, LIBRARY, RunSpec, shown

_SHOW = """
NAME                   a recipe: a shipped name, mine.yaml or mine.py:function; or a run: its folder or its run.json
--diff OTHER           print only the differences from another recipe or run
--num_processes N      for a recipe: processes in all, one per GPU [1]
--global_batch_size N  for a recipe: examples per optimizer step [16]
"""
_DIFF = """
A                      a run's output folder or run.json, or a recipe
B                      another run or recipe
--num_processes N      for recipes: processes in all [the run's, or 1]
--global_batch_size N  for recipes: examples per optimizer step [the run's, or 16]
"""


def add_parser(commands: Commands) -> None:
    fields = "\n".join(f"  {name:<20}{meaning}" for name, meaning in FIELDS.items())
    epilog = f"fields of a run.json:\n{fields}\nand Trainer's own results, under Trainer's names"
    raw = argparse.RawDescriptionHelpFormatter
    commands.add_parser("show", epilog=epilog, formatter_class=raw).takes(show, _SHOW)
    commands.add_parser("diff").takes(diff, _DIFF)
    parser = commands.add_parser("compare")
    parser.add_argument("first", metavar="RUN", help="an output folder, or its run.json")
    parser.add_argument("others", metavar="RUN", nargs="+", help="other runs to compare with the first")
    target = "a result that a run should reach, such as eval_loss 2.5; repeat the flag if several must be met"
    parser.add_argument("--target", metavar=("METRIC", "VALUE"), nargs=2, action="append", default=[], help=target)
    parser.takes(compare, "")


# --- Differences ----------------------------------------------------------------------------------

ABSENT = {"value": None, "source": LIBRARY}  # for a setting that did not exist when the record was written
# Runs that differ in one of these settings, or in their data or model, are different trainings.
_TRAINING = (
    "task problem_type model_name_or_path model_revision from_scratch dataset_name dataset_config dataset_train_split "
    "dataset_test_split dataset_columns dataset_text_field dataset_label_field dataset_streaming max_length packing "
    "packing_strategy assistant_only_loss completion_only_loss label_smoothing_factor global_batch_size seed data_seed "
    "max_steps num_train_epochs learning_rate lr_scheduler_type warmup_steps weight_decay"
).split()


class Row(NamedTuple):
    """A setting or another fact about runs: `entries` holds one dict for each run.

    For a setting, the dicts have value, source and reason, and `part` is the source of highest
    precedence. For another fact, they have value and reason, and `part` is a group like machine.
    """

    part: str
    name: str
    entries: list[Json]

    @property
    def values(self) -> list[Any]:
        return [entry.get("value") for entry in self.entries]

    @property
    def is_setting(self) -> bool:
        return "source" in self.entries[0]


def differences(records: Sequence[Json]) -> list[Row]:
    """Return a row per difference between runs: settings first, led by those that the user typed,
    then engine, processes, contents of data and model, files, code, machine, versions, environment.

    Settings in NO_DIFFERENCE are ignored, and so are different paths to the same contents. If one
    record lacks a fact, this is a difference only for a setting, package or environment variable.
    """
    rows = []
    for name in sorted({name for record in records for name in record["settings"]} - NO_DIFFERENCE):
        row = Row(LIBRARY, name, [record["settings"].get(name, ABSENT) for record in records])
        contents = [record.get(MATERIAL.get(name, "")) for record in records]
        if _differ(row.values) and (None in contents or _differ(contents)):
            rows.append(row._replace(part=min((entry["source"] for entry in row.entries), key=_derivation)))
    rows.sort(key=lambda row: _derivation(row.part))
    tables = [_around(record) for record in records]
    for part, name in dict.fromkeys(key for table in tables for key in table):
        row = Row(part, name, [table.get((part, name), {}) for table in tables])
        known = all(row.entries) or (part == "environment" and all(part in record for record in records))
        if known and _differ(row.values):
            rows.append(row)
    return rows


def _derivation(source: str) -> tuple[bool, bool, bool]:
    """Return a sort key: how far a setting's source is from the user's command line."""
    return source != COMMAND_LINE, recorded.is_derived(source), source == LIBRARY


def _around(record: Json) -> dict[tuple[str, str], Json]:
    """Return a run's facts, except settings and results, by (part, name); None: no such package."""
    hardware, world = record.get("hardware") or {}, record.get("world_size")
    gpus, code = hardware.get("gpus"), record.get("code") or {}
    nodes = world // (record.get("local_world_size") or world) if world else None
    launch = {name: record.get(name) for name in ("engine", "world_size", "peak_memory_of")}
    parts = {
        "launch": launch | {"nodes": nodes},
        "contents": {what: record.get(what) for what in MATERIAL.values()},
        "files": {
            Path(path).name: f"sha256-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
            for path, content in (record.get("files") or {}).items()
        },
        "code": {"code": code.get("source")},
        "machine": hardware | {"gpus": gpus and [gpu["name"] for gpu in gpus]},
        "versions": record.get("versions") or {},
        "environment": record.get("environment") or {},
    }
    rows = ((part, name, value) for part, table in parts.items() for name, value in table.items())
    why = {"code": f"commit {code['commit']}" if "commit" in code else ""}
    return {
        (part, name): {"value": value, "reason": why.get(part, "")}
        for part, name, value in rows
        if value is not None or part == "versions"
    }


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values[1:])


def other_training(rows: Sequence[Row]) -> list[str]:
    """List the differing settings that change the training; if none do, differing data or model."""
    contents = [f"the contents of the {row.name}" for row in rows if row.part == "contents"]
    return [row.name for row in rows if row.name in _TRAINING] or contents


# --- The commands ---------------------------------------------------------------------------------


def show(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.diff:
        options.a, options.b = options.name, options.diff
        return diff(options, rest)
    if _is_run(options.name):
        record = recorded.read(options.name, "NAME")
        chosen = {name: entry for name, entry in record["settings"].items() if entry["source"] != LIBRARY}
        world = plural(record.get("world_size") or 1, "process")
        heading = f"{record.get('recipe')}, {_status(record)}\n"
        heading += f"{record.get('engine')}, {world}, started {record.get('started')}\n"
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # an old or edited record
            heading += f"{changes}\n" if (changes := several(record)) else ""
            heading += "the loss has risen: start again with --fresh, and a lower --learning_rate\n" * has_risen(record)
            course = schedule({name: entry["value"] for name, entry in record["settings"].items()})
            heading += f"schedule: {course}\n"
    else:
        run, record = _recipe_run(options.name, options.num_processes, options.global_batch_size), {}
        heading, chosen = f"{_heading(run)}schedule: {schedule(run)}\n", {}
        for name in ("engine", "micro_batch_cap"):  # two values of a recipe that are not settings of train.py
            by, (value, reason) = run.recipe.stated(name)  # type: ignore[misc] # the same for every run
            chosen[name] = {"value": value, "source": by.source, "reason": reason}
        settings = {name: {**vars(each), "value": shown(name, each.value)} for name, each in run.chosen().items()}
        chosen |= {name: entry for name, entry in settings.items() if name != "recipe"}
    print(heading)
    _print_table(["result", "value"], _result_rows([record]))
    print_settings(["value"], [Row(entry["source"], name, [entry]) for name, entry in chosen.items()])
    return 0


def diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the differences between two runs or recipes. A recipe is resolved with num_processes
    and global_batch_size of `options` or of the other run. Raises `UserError` for unknown names.
    """
    names = [options.a, options.b]
    records = {name: recorded.read(name, "RUN") for name in names if _is_run(name)}
    around: Json = next(iter(records.values()), {})
    trained = {name: entry["value"] for name, entry in around.get("settings", {}).items()}
    processes = options.num_processes or around.get("world_size")
    batch = options.global_batch_size or trained.get("global_batch_size")
    by = "train.py" if trained and not any(map(trained.get, MATERIAL)) else "nobody"  # no data, no model: demonstration
    recipes = {name: _recipe_run(name, processes, batch, by) for name in names if name not in records}
    for name, run in recipes.items():  # the part of a record that is known before a run begins
        settings = {each: {**vars(run.setting(each)), "value": shown(each, run[each])} for each in run}
        engine = run.engine_title if trained else run.recipe.engine
        records[name] = {"settings": settings, "engine": engine}
    titles = names if recipes else _names_of(list(map(Path, names)))
    rows = differences([records[name] for name in names])
    if recipes:  # two recipes always differ in their name
        rows = [row for row in rows if row.name != "recipe"]
        print(_heading(next(iter(recipes.values()))))
    print_settings(titles, rows)
    return 0


def compare(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compare runs. Return 1 if no run meets all targets. Raises `UserError` for unknown runs."""
    paths = [Path(word) for word in (options.first, *options.others)]
    names, records = _names_of(paths), [recorded.read(path, "RUN") for path in paths]
    rows, cells = differences(records), _result_rows(records)
    margins = [_margins(metric, value, records) for metric, value in options.target]
    if others := other_training(rows):
        print(f"these runs train differently ({', '.join(others)}), which also changes their results\n")
    print_settings(names, rows)
    _print_table(["result", *names], [["status", *map(_status, records)], *cells])
    if any(cell.endswith(_BY_NOISE) for row in cells for cell in row):
        print(f"{_BY_NOISE.strip()} noise alone can cause this difference: repeat both runs to find out\n")
    if not margins:
        return 0
    targets = zip(options.target, margins, strict=True)
    _print_table(["target", *names], [_target_row(metric, value, by) for (metric, value), by in targets])
    met = [name for place, name in enumerate(names) if all(by[place] >= 0 for by in margins)]
    print(f"all targets are met by {', '.join(met)}" if met else "no run meets all targets")
    return 0 if met else 1


# --- Runs and recipes -----------------------------------------------------------------------------


def _is_run(name: str) -> bool:
    """True for an existing folder, and for any path with a slash or .json; False for a recipe."""
    is_recipe = name in RECIPES or name.endswith((".yaml", ".yml")) or re.search(r"\.py(:\w*)?$", name)
    return not is_recipe and ("/" in name or name.endswith(".json") or Path(name).is_dir())


def _recipe_run(name: str, processes: int | None, batch: int | None, trained_by: str = "nobody") -> RunSpec:
    """Return a recipe's run on this machine. Raises `UserError` with every problem."""
    settings = {"recipe": name} | ({"global_batch_size": batch} if batch else {})
    run = resolve(place=here(processes, trained_by=trained_by), settings=settings)
    raise_errors(list(run.problems))
    return run


def _heading(run: RunSpec) -> str:
    world = f"{plural(run.world_size, 'process')}, {run.engine_title} ({run.recipe.engine}), batch {run.batch}"
    return f"{run.recipe.name}: {run.recipe.purpose}\non {run.hardware}, {world}\n"


def _status(record: Json) -> str:
    return f"{record['status']}: {record['error']}" if "error" in record else record["status"]


def _names_of(paths: list[Path]) -> list[str]:
    """Return the folders' names or, if two folders have the same name, the paths as written."""
    names = [(path.parent if path.is_file() else path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


# --- Printing -------------------------------------------------------------------------------------

_RESULTS = ("global_step", "final_loss", "train_loss")
_SECONDS, _SPEEDS = ("step_time", "train_runtime"), ("samples_per_second", "tokens_per_second")
_COSTS = ("step_time", *_SPEEDS, "peak_memory_bytes", "train_runtime")
# Numbers in a record that are not results.
_NO_RESULT = ("world_size", "data_parallel_size", "num_parameters", "step_time_off")
_BY_NOISE = " ~"


def print_settings(titles: Sequence[str], rows: Sequence[Row], stderr: bool = False) -> None:
    """Print the settings of one run, or the differences between several, as a table."""
    if not rows:
        print("nothing differs")
    table = [[row.name, *map(value_text, row.values), _from(row), _reason(row.entries, titles)] for row in rows]
    _print_table(["setting", *titles, "from", "reason"], table, stderr)


def _from(row: Row) -> str:
    sources = dict.fromkeys(entry["source"] for entry in row.entries) if row.is_setting else {}
    return " and ".join(source for source in sources if not recorded.is_derived(source)) or row.part


def _reason(entries: list[Json], titles: Sequence[str]) -> str:
    """Return the first reason in `entries`. With several runs, put the run's name before it."""
    reasons = [(title, entry.get("reason") or "") for title, entry in zip(titles, entries, strict=True)]
    title, reason = next((pair for pair in reasons if pair[1]), ("", ""))
    return f"{title}: {reason}" if reason and len(reasons) > 1 else reason


def _print_table(headings: list[str], rows: list[list[str]], stderr: bool = False) -> None:
    if rows:
        print_table(headings, rows, stderr)
        print(file=sys.stderr if stderr else sys.stdout)


def results(records: list[Json]) -> dict[str, list[float | None]]:
    """Map the name of each loss, metric, speed and memory to a list: its value in each run."""
    numbers = [_numbers(record) for record in records]
    metrics = sorted({name for found in numbers for name in found if name.startswith("eval_") and is_figure(name)})
    names = [*_RESULTS, *metrics, "exchanges_per_step", *_COSTS]
    table = {name: [found.get(name) for found in numbers] for name in names}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def _numbers(record: Json) -> dict[str, float]:
    """Return the results of a run; a diverged loss is NaN. `train_runtime` is the sum over all
    starts of the run, and is left out if an earlier start was killed.
    """
    found = {name: value for name, value in record.items() if type(value) in (int, float) and name not in _NO_RESULT}
    earlier = [session.get("seconds") for session in record.get("sessions", [])[:-1]]
    if None in earlier:
        found.pop("train_runtime", None)
    elif "train_runtime" in found:
        found["train_runtime"] += sum(earlier)
    return found


def _result_rows(records: list[Json]) -> list[list[str]]:
    """Return a row per result, which compares each run with the first, by ratio or difference."""
    rows = []
    for name, (first, *others) in results(records).items():
        noise = [noise_can_make(name, records[0], record) for record in records[1:]]
        cells = [_cell(name, value, first) + _BY_NOISE * mark for value, mark in zip(others, noise, strict=True)]
        rows.append([name, _cell(name, first, None), *cells])
    return rows


def _cell(name: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    if name == "peak_memory_bytes":
        text = memory_size(value)
    elif name in _SECONDS:
        text = duration(value)
    if first is None or first == value or not math.isfinite(first - value):
        return text
    return f"{text} (x {value / first:.2f})" if name in _COSTS and first else f"{text} ({value - first:+.4g})"


# --- Targets --------------------------------------------------------------------------------------


def _margins(metric: str, wanted: str, records: list[Json]) -> list[float]:
    """Return each run's margin to a target: negative if missed, NaN if the run has no value.
    Raises `UserError` if no run has the metric, or if `wanted` is not a number.
    """
    known = sorted({name for record in records for name in _numbers(record)})
    if metric not in known:
        fix = nearest(metric, known) or ("one of " + ", ".join(known) if known else "use a run that has finished")
        raise mistake("target", f"no run has a result {metric!r}", fix)
    try:
        number = float(wanted)
    except ValueError:
        raise mistake("target", f"{metric} {wanted!r} is not a number", f"--target {metric} NUMBER") from None
    sign = 1 if _less_is_better(metric) else -1
    return [sign * (number - _numbers(record).get(metric, math.nan)) for record in records]


def _less_is_better(metric: str) -> bool:
    costs = any(word in metric for word in ("loss", "time", "memory", "perplexity"))
    return costs or smaller_is_better(metric) is True


def _target_row(metric: str, wanted: str, margins: list[float]) -> list[str]:
    bound = "at most" if _less_is_better(metric) else "at least"
    cells = [f"{'met' if by >= 0 else 'missed'} by {abs(by):.4g}" if math.isfinite(by) else "missed" for by in margins]
    return [f"{metric} {bound} {wanted}", *cells]


# --- Differences that noise can make --------------------------------------------------------------

_ALIKE = 0.02  # two runs of the same training can differ by this share of their time


def noise_can_make(name: str, *both: Json) -> bool:
    """True if noise alone can cause the difference of a time or speed between two runs. The noise
    is estimated from the scatter of each run's step times, and is at least 2 %.
    """
    first, other = (record.get(name) for record in both)
    if name not in (*_SECONDS, *_SPEEDS) or first is None or other is None or first == other:
        return False
    off = [(record.get("step_time_off") or 0.0) / (record.get("step_time") or math.inf) for record in both]
    return min(first, other) > 0 and abs(math.log(other / first)) <= max(_ALIKE, math.hypot(*off))
