"""Differences between the records of runs, or between a record and the same run here.

There is one table of them: `compare` and `diff` print it, `rerun` adds to each row how to undo it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from shlex import quote
from typing import Any, NamedTuple

from launch.output import surroundings
from launch.output.record import NO_DIFFERENCE, started
from launch.terminal import value_text
from recipes.errors import Problem
from recipes.mixture import title
from recipes.run import BATCH, BEST_MODEL, COMMAND_LINE, FIT, HIDDEN, LIBRARY, Json, RunSpec, fingerprints, recorded

MATERIAL = {"dataset_name": "data", "model_name_or_path": "model"}  # their contents count, not their paths
_ABSENT = {"value": None, "source": LIBRARY}  # of a version that did not have this setting
# Where the Hub is, and which GPUs are seen: model, data and GPUs are compared themselves.
_SEEN_OTHERWISE = ("HF_", "TRANSFORMERS_", "CUDA_VISIBLE_DEVICES")

# Where a setting can come from, the most deliberate first.
_SOURCES = (
    COMMAND_LINE, "argument", "file", FIT, BATCH, "hardware", "limit", "data", "default", "recipe", "demonstration",
    BEST_MODEL, LIBRARY,
)  # fmt: skip


# --- Between records ------------------------------------------------------------------------------


class Row(NamedTuple):
    """A value besides the settings, of which not all records have the same."""

    part: str
    name: str
    values: list[Any]


def rows(records: Sequence[Json]) -> list[Row]:
    """Engine, world, contents of data and model, code, hardware, versions and environment, as far
    as they differ. What one of the records does not hold cannot differ; a package or a variable
    that it knows to be absent can.
    """
    tables = [_surroundings(record) for record in records]
    found = []
    for part, name in dict.fromkeys(chain.from_iterable(tables)):
        values = [table.get((part, name)) for table in tables]
        if part == "environment":
            known = all("environment" in record for record in records)
        else:
            known = (part == "versions" and all((part, name) in table for table in tables)) or None not in values
        if known and differs(values):
            found.append(Row(part, name, values))
    return found


def _surroundings(record: Json) -> dict[tuple[str, str], Any]:
    hardware, world = record.get("hardware") or {}, record.get("world_size")
    nodes = world // (record.get("local_world_size") or world) if world else None
    launch = {"engine": record.get("engine"), "world_size": world, "nodes": nodes}
    parts = {
        "launch": launch | {"peak_memory_of": record.get("peak_memory_of")},
        "contents": {what: record.get(what) for what in MATERIAL.values()},
        "code": {"code": (record.get("code") or {}).get("source")},
        "hardware": hardware | ({"gpus": gpu_names(hardware)} if "gpus" in hardware else {}),
        "versions": record.get("versions") or {},
        "environment": record.get("environment") or {},
    }
    return {(part, name): value for part, table in parts.items() for name, value in table.items()}


def differing_settings(records: Sequence[Json]) -> dict[str, list[Json]]:
    """Setting -> its entry in each record, those of the most deliberate source first. Where a run
    writes and what it prints is no difference, and neither is another path to the same contents.
    """
    names = sorted({name for record in records for name in record["settings"]} - NO_DIFFERENCE)
    entries = {name: [record["settings"].get(name, _ABSENT) for record in records] for name in names}
    found = {
        name: each
        for name, each in entries.items()
        if differs([entry["value"] for entry in each]) and not _same_contents(records, name)
    }
    return dict(sorted(found.items(), key=lambda item: _SOURCES.index(source_of(item[1]))))


def source_of(entries: Sequence[Json]) -> str:
    """The most deliberate source of a setting in any record. Recipes and files have names."""
    kinds = ["recipe" if entry["source"].startswith("recipe ") else entry["source"] for entry in entries]
    return min((kind if kind in _SOURCES else "file" for kind in kinds), key=_SOURCES.index)


def _same_contents(records: Sequence[Json], name: str) -> bool:
    """True if a setting names the same model or data in all records, at any path."""
    prints = {record.get(MATERIAL.get(name, "")) for record in records}
    return len(prints) == 1 and None not in prints


def differs(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values[1:])


def gpu_names(hardware: Json) -> str:
    """A machine's GPUs by name: `2 x NVIDIA H100`, or `none`."""
    names = [str(gpu["name"]) for gpu in hardware.get("gpus") or ()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


# --- Between a record and here --------------------------------------------------------------------

_FIXES = {
    "python": "Python {then}",
    "gpus": "a machine with those GPUs",
    "cpu": "a machine with such a CPU",
    "cores": "a machine with as many cores: threads add up in another order",
    "world_size": "--num_processes {then}",
    "nodes": f"recipes submit slurm --nodes {{then}} ... -- --config with this {recorded.NAME}",
    "engine": "leave --accelerate_config and --deepspeed out",
}
_TITLES = {"gpus": "GPUs", "world_size": "num_processes"}


def differences(record: Json, run: RunSpec, restored: Collection[str]) -> list[Problem]:
    """One problem for each difference that can change what is trained, as an error: with its fix
    the run repeats exactly. `restored` are settings whose files have their recorded content.

    What cannot be compared is advice.
    """
    here = recorded.plain(started(run, run.world_size))
    if record.get("engine") != run.engine.title:
        here["engine"] = run.engine_title
    found = [problem for row in rows([record, here]) for problem in _with_fix(row, record, here, run)]
    if not record.get("code"):
        what = f"of accelerate-recipes was not recorded, is {_describe(here['code'])}"
        found.append(Problem("code", what, severity="advice"))
    return [*found, *_material(record, here, run), *_settings(record, here, run, restored)]


def _with_fix(row: Row, record: Json, here: Json, run: RunSpec) -> Iterator[Problem]:
    part, name, (then, now) = row
    if part == "environment" and not name.startswith(_SEEN_OTHERWISE):
        fix = f"unset {name}" if then is None else f"export {name}={quote(then)}"
        then, now = ("not set" if value is None else value for value in (then, now))
        yield _is_not(name, then, f"{now} ({surroundings.why_it_matters(name)})", fix)
    elif part == "code":
        code = record["code"]
        commit, changed = code.get("commit"), ", and the changes that were not committed then"
        fix = f"git checkout {commit}" if commit else f"pip install accelerate-recipes=={code.get('version')}"
        yield _is_not(
            "accelerate-recipes", _describe(code), _describe(here["code"]), fix + changed * bool(code.get("changed"))
        )
    elif name in _FIXES:
        if not (name in ("cpu", "cores") and run.hardware.gpus) and (name, then) != ("nodes", 1):
            yield _is_not(_TITLES.get(name, name), then, now, _FIXES[name].format(then=then))
    elif part == "versions" and then is not None:
        yield _is_not(name, then, now or "not installed", f"pip install {name}=={then.partition('+')[0]}")


def _is_not(subject: str, then: object, here: object, fix: str) -> Problem:
    return Problem(subject, f"was {then}, is {here} here", fix)


def _describe(code: Json) -> str:
    changed = " with changes" if code.get("changed") else ""
    commit = f", commit {str(code['commit'])[:10]}{changed}" if "commit" in code else ""
    return f"{code.get('version')} (source {code.get('source')}{commit})"


def _material(record: Json, here: Json, run: RunSpec) -> Iterator[Problem]:
    for name, what in MATERIAL.items():
        if not run[name] and record["settings"].get(name, {}).get("value"):
            continue  # it is missing here, which is a problem of the record itself, or left out by the user
        then, now = record.get(what), here[what]
        subject = (run[name] or "the model") if what == "model" else (title(run[name]) or "Python's standard library")
        if fingerprints.differ(then, now):
            fix = f"the {what} as it was, or --{name} with its path"
            if what == "data" and not run[name]:
                fix = f"Python {(record.get('versions') or {}).get('python')}: the demonstration trains on its source"
            yield Problem(name, f"{subject} has other contents than then ({then}, here {now})", fix)
        elif run[name] and None in (then, now):
            as_it_was = f"as it was ({then})" if then else "as it was"
            words = f"whether {subject} is {as_it_was} cannot be told before it is loaded"
            yield Problem(name, words, severity="advice")


def _settings(record: Json, here: Json, run: RunSpec, restored: Collection[str]) -> Iterator[Problem]:
    at_its_place, skipped = recorded.at_a_place(record), {*restored}
    if record.get("world_size") not in (None, run.world_size):
        skipped |= {"per_device_train_batch_size", "gradient_accumulation_steps"}  # they follow from it
    for name, (then, now) in differing_settings([record, here]).items():
        if name in skipped or then["value"] == HIDDEN or then is _ABSENT or now is _ABSENT:
            continue
        setting = run.setting(name)
        typed = setting.source == COMMAND_LINE
        if name in at_its_place and not typed:
            continue
        fix = f"leave --{name} out" if typed else f"--{name} {quote(value_text(then['value']))}"
        if not recorded.is_legal(name, then["value"]):
            if not typed and not recorded.is_derived(then["source"]):
                continue  # it is given again, and refused for that
            fix = "the libraries' versions of then: these do not take it"
        why = f" ({setting.reason})" if setting.reason and not typed else ""
        yield _is_not(name, value_text(then["value"]), f"{value_text(now['value'])}{why}", fix)
