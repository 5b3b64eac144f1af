"""`recipes compare`: the records of runs side by side: settings, machine, results, targets."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from launch.flags import Commands
from launch.output import record
from launch.output.differences import gpu_names
from launch.output.surroundings import PACKAGES
from launch.terminal import memory_size, plural, print_table, value_text
from recipes.errors import mistake
from recipes.run import BATCH, BEST_MODEL, COMMAND_LINE, FIT, LIBRARY, Json, fingerprints, nearest, recorded
from recipes.run.metrics import smaller_is_better

# Where a setting can come from, the most deliberate first.
_SOURCES = (
    COMMAND_LINE, "argument", "file", FIT, BATCH, "hardware", "limit", "data", "default", "recipe", "demonstration",
    BEST_MODEL, LIBRARY,
)  # fmt: skip

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
_ABSENT = {"value": None, "source": LIBRARY}  # of a version that did not have this setting
_NO_RESULT = (
    "world_size",
    "data_parallel_size",
    "num_parameters",
    "step_time_off",
)  # numbers in a record that are not results


@dataclass(frozen=True)
class Run:
    """A record, and the name it has in the tables."""

    name: str
    path: Path
    record: Json

    @property
    def settings(self) -> dict[str, Json]:
        return self.record["settings"]

    @property
    def numbers(self) -> dict[str, float]:
        """Its results, NaN (a diverged loss) among them."""
        return {
            name: value for name, value in self.record.items() if type(value) in (int, float) and name not in _NO_RESULT
        }


@dataclass(frozen=True)
class Target:
    """A value that a result should reach: at least, or at most if less is better."""

    metric: str
    value: float

    @property
    def less_is_better(self) -> bool:
        costs = any(word in self.metric for word in ("loss", "time", "memory", "perplexity"))
        return costs or smaller_is_better(self.metric) is True

    def margin(self, run: Run) -> float | None:
        """How much better a run is than asked, negative if worse; None if it has no such number."""
        value = run.numbers.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        return self.value - value if self.less_is_better else value - self.value

    def met(self, run: Run) -> bool:
        margin = self.margin(run)
        return margin is not None and margin >= 0

    def __str__(self) -> str:
        return f"{self.metric} {'at most' if self.less_is_better else 'at least'} {self.value:g}"


def add_parser(commands: Commands) -> None:
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
    records = [_read(path) for path in paths]
    runs = [Run(*entry) for entry in zip(names_of(paths), paths, records, strict=True)]
    targets = [_target(metric, value, runs) for metric, value in options.target]
    print(json.dumps(finite(as_json(runs, targets)), indent=2)) if options.json else _print(runs, targets)
    return 0 if not targets or _meet_all(runs, targets) else 1


# --- Reading --------------------------------------------------------------------------------------


def _read(path: Path) -> Json:
    """The record of a run that has ended. Raises `UserError` if there is none."""
    content = recorded.read(path, "RUN")
    if content["status"] == "running":
        file = recorded.file_of(path)
        fix = f"wait for its end: recipes status {quote(str(file.parent))}"
        raise mistake("RUN", f"{file} is unfinished: the run is still running, or was killed", fix)
    return content


def names_of(paths: list[Path]) -> list[str]:
    """The names of the folders; the paths as written if two folders have one name."""
    names = [(path.parent if path.is_file() else path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def _target(metric: str, value: str, runs: list[Run]) -> Target:
    known = sorted({name for run in runs for name in run.numbers})
    if metric not in known:
        fix = nearest(metric, known) or ("one of " + ", ".join(known) if known else "a run that has ended well")
        raise mistake("target", f"no run has a result {metric!r}", fix)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise mistake("target", f"{metric} {value!r} is not a number", f"--target {metric} NUMBER")
    return Target(metric, number)


# --- What differs ---------------------------------------------------------------------------------


def other_training(runs: list[Run]) -> list[str]:
    """What differs in the training itself; empty if all runs trained the same."""
    found = []
    for what, names in _TRAINING.items():
        values = {name: [run.settings.get(name, {}).get("value") for run in runs] for name in names}
        differing = [name for name in names if _differs(values[name]) and not _same_contents(runs, name)]
        if what == "data" and not differing and _other_data(runs):
            differing = ["same name, other contents"]
        if differing:
            found.append(f"{what} ({', '.join(differing)})")
    return found


def _same_contents(runs: list[Run], name: str) -> bool:
    """Whether a setting names the same model or data in all runs, if in other folders."""
    field = {"model_name_or_path": "model", "dataset_name": "data"}.get(name, "")
    prints = {run.record.get(field) for run in runs}
    names = {Path(str(run.settings.get(name, _ABSENT)["value"])).name for run in runs}
    return len(prints) == len(names) == 1 and None not in prints


def _other_data(runs: list[Run]) -> bool:
    return any(fingerprints.differ(runs[0].record.get("data"), run.record.get("data")) for run in runs[1:])


def differing_settings(runs: list[Run]) -> dict[str, dict[str, list[Json]]]:
    """Source -> setting -> its entry in each run.

    The source is the most deliberate one that it has in any of them.
    """
    groups: dict[str, dict[str, list[Json]]] = {source: {} for source in _SOURCES}
    for name in sorted({name for run in runs for name in run.settings} - record.NO_DIFFERENCE):
        entries = [run.settings.get(name, _ABSENT) for run in runs]
        if _differs([entry["value"] for entry in entries]) and not _same_contents(runs, name):
            source = min((_group(entry["source"]) for entry in entries), key=_SOURCES.index)
            groups[source][name] = [{"value": entry["value"], "source": entry["source"]} for entry in entries]
    return {source: settings for source, settings in groups.items() if settings}


def _group(source: str) -> str:
    """The kind of a source: recipes and files have names of their own."""
    if source.startswith("recipe "):
        return "recipe"
    return source if source in _SOURCES else "file"


def surroundings(runs: list[Run]) -> dict[str, list]:
    """What differs besides settings: engine, world, hardware, versions, code, environment, and the
    contents of model and data. What one of the records does not have cannot differ.
    """
    records = [run.record for run in runs]
    found = {name: [content.get(name) for content in records] for name in ("engine", "world_size", "peak_memory_of")}
    found |= {name: _contents(records, name) for name in ("data", "model")}
    found["code"] = [content.get("code", {}).get("source") for content in records]
    for part in ("hardware", "versions"):
        inner = [content.get(part, {}) for content in records]
        names = [name for name in inner[0] if all(name in entries for entries in inner)]
        found |= {name: [entries[name] for entries in inner] for name in names}
    if all("gpus" in content.get("hardware", {}) for content in records):
        found["gpus"] = [gpu_names(content["hardware"]) for content in records]
    known = {name: values for name, values in found.items() if name in PACKAGES or None not in values}
    if all("environment" in content for content in records):
        variables = sorted({name for content in records for name in content["environment"]})
        known |= {name: [content["environment"].get(name) for content in records] for name in variables}
    return {name: values for name, values in known.items() if _differs(values)}


def _contents(records: list[Json], name: str) -> list[Any]:
    """The fingerprints of data or model; all the same if they cannot be compared."""
    prints = [content.get(name) for content in records]
    return prints if any(fingerprints.differ(prints[0], other) for other in prints[1:]) else [None] * len(prints)


def results(runs: list[Run]) -> dict[str, list[float | None]]:
    """Losses, metrics of the evaluation, speed and memory, as far as any run has them."""
    speed_of_evaluation = ("_runtime", "_per_second")
    evaluated = {name for run in runs for name in run.numbers if name.startswith("eval_")}
    metrics = sorted(name for name in evaluated if not name.endswith(speed_of_evaluation))
    names = [*_RESULTS, *metrics, "exchanges_per_step", *_COSTS]
    found = {name: [run.numbers.get(name) for run in runs] for name in names}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def by_noise(name: str, runs: list[Run]) -> list[bool]:
    """Of each run, whether noise can make its difference from the first."""
    return [noise_can_make(name, runs[0].record, run.record) for run in runs]


def _differs(values: list) -> bool:
    return any(value != values[0] for value in values[1:])


def _meet_all(runs: list[Run], targets: list[Target]) -> list[Run]:
    return [run for run in runs if all(target.met(run) for target in targets)]


# --- Showing --------------------------------------------------------------------------------------


def as_json(runs: list[Run], targets: list[Target]) -> Json:
    """Lists are in the order of the runs.

    `margin`: by how much a target is met; negative if it is missed.
    """
    return {
        "runs": [
            {
                "name": run.name,
                "path": str(run.path),
                "recipe": run.record.get("recipe"),
                "status": run.record["status"],
            }
            | ({"error": run.record["error"]} if "error" in run.record else {})
            for run in runs
        ],
        "other_training": other_training(runs),
        "settings": differing_settings(runs),
        "surroundings": surroundings(runs),
        "results": results(runs),
        "noise_can_make": {name: marks for name in results(runs) if any(marks := by_noise(name, runs))},
        "targets": [
            {
                "metric": target.metric,
                "value": target.value,
                "met": [target.met(run) for run in runs],
                "margin": [target.margin(run) for run in runs],
            }
            for target in targets
        ],
        **({"meets_all": [run.name for run in _meet_all(runs, targets)]} if targets else {}),
    }


def finite(content: object) -> object:
    """NaN and infinity become null: JSON has neither."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _print(runs: list[Run], targets: list[Target]) -> None:
    other = other_training(runs)
    if other:
        print(f"not the same training, which changes the results too: other {', '.join(other)}\n")
    names = [run.name for run in runs]
    settings = _setting_rows(runs)
    _table(["set by", "setting", *names], settings) if settings else print("no setting differs\n")
    _table(["ran with", *names], [[name, *map(value_text, values)] for name, values in surroundings(runs).items()])
    rows = result_rows(runs)
    _table(["result", *names], [["status", *(run.record["status"] for run in runs)], *rows])
    if any(cell.endswith(_BY_NOISE) for row in rows for cell in row):
        print(f"{_BY_NOISE.strip()} noise can make this difference: repeat both runs to tell\n")
    for run in runs:
        if "error" in run.record:
            print(f"{run.name}: {run.record['error']}")
    if targets:
        _table(["target", *names], [[str(target), *(_verdict(target, run) for run in runs)] for target in targets])
        met = [run.name for run in _meet_all(runs, targets)]
        print(f"all targets are met by {', '.join(met)}" if met else "no run meets all targets")


def _table(headings: list[str], rows: list[list[str]]) -> None:
    if rows:
        print_table(headings, rows, whole=not sys.stdout.isatty())
        print()


def _setting_rows(runs: list[Run]) -> list[list[str]]:
    rows = []
    for source, settings in differing_settings(runs).items():
        for index, (name, entries) in enumerate(settings.items()):
            one_source = not _differs([entry["source"] for entry in entries])
            cells = [value_text(entry["value"]) + ("" if one_source else f" ({entry['source']})") for entry in entries]
            rows.append(["" if index else source, name, *cells])
    return rows


def result_rows(runs: list[Run]) -> list[list[str]]:
    """Each value beside the first run's: a ratio for time, speed and memory, else a difference."""
    return [
        [
            name,
            *(_cell(name, value, values[0], noise) for value, noise in zip(values, by_noise(name, runs), strict=True)),
        ]
        for name, values in results(runs).items()
    ]


def _cell(name: str, value: float | None, first: float | None, noise: bool) -> str:
    if value is None:
        return "-"
    shown = _format(name)(value)
    if first is None or first == value or not math.isfinite(first - value):
        return shown
    beside = f"x {value / first:.2f}" if name in _COSTS and first else f"{value - first:+.4g}"
    return f"{shown} ({beside}){_BY_NOISE if noise else ''}"


def hardware(content: Json) -> str:
    """The GPUs of a record's machine, or its CPU."""
    machine = content.get("hardware", {})
    return gpu_names(machine) if machine.get("gpus") else f"CPU, {plural(machine.get('cores', 1), 'core')}"


def _format(name: str) -> Callable[[float], str]:
    if name == "peak_memory_bytes":
        return memory_size
    if name == "mfu":
        return lambda value: f"{value:.1%}"
    unit = " s" if name in ("step_time", "train_runtime") else ""
    return lambda value: f"{value:,.4g}{unit}" if abs(value) < 10_000 else f"{value:,.0f}{unit}"


def _verdict(target: Target, run: Run) -> str:
    margin = target.margin(run)
    if margin is None:
        return "missed: no such result" if target.metric not in run.numbers else "missed: it is not a number"
    share = f" ({abs(margin / target.value):.1%})" if target.value else ""
    return f"{'met' if margin >= 0 else 'missed'} by {abs(margin):.4g}{share}"


# --- Differences that noise can make --------------------------------------------------------------

_OF_STEPS = ("step_time", "samples_per_second", "tokens_per_second", "mfu", "train_runtime")
_ALIKE = 0.02  # of a time: the same training differs by as much from run to run
_SURE = 3  # typical changes of a difference from one log to the next
_LAST_LOGS = 10


def noise_can_make(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether noise can make the difference of a result between two records.

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
    """Whether the difference of the logged losses changes as much from log to log as it is large.

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
