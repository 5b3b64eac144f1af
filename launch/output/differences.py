"""What differs between a recorded run and the same run here, before it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from shlex import quote

from launch.output import surroundings
from launch.output.record import NO_DIFFERENCE
from launch.terminal import value_text
from recipes.errors import Problem
from recipes.mixture import title
from recipes.run import COMMAND_LINE, HIDDEN, Json, RunSpec, fingerprints, recorded

_NOT_RECORDED = "not recorded"
# Where the Hub is, and which GPUs are seen: model, data and GPUs are compared themselves.
_SEEN_OTHERWISE = ("HF_", "TRANSFORMERS_", "CUDA_VISIBLE_DEVICES")

_MATERIAL = {"dataset_name": "data", "model_name_or_path": "model"}  # their contents count, not their paths


def differences(record: Json, run: RunSpec, restored: Collection[str]) -> list[Problem]:
    """One problem for each difference that can change what is trained, as an error: with its fix
    the run repeats exactly. `restored` are settings whose files have their recorded content.

    What cannot be compared is advice.
    """
    found = [*_versions(record), *_code(record), *_hardware(record, run), *_world(record, run)]
    model = fingerprints.of_model(run["model_name_or_path"], run["model_revision"])
    now = {"data": fingerprints.of_data(run["dataset_name"]), "model": model}
    same = {name for name, what in _MATERIAL.items() if now[what] and now[what] == record.get(what)}
    found += [*_inputs(record, run, now), *_environment(record), *_settings(record, run, {*restored, *same})]
    return found


def _is_not(subject: str, then: object, here: object, fix: str) -> Problem:
    return Problem(subject, f"was {then}, is {here} here", fix)


def _versions(record: Json) -> Iterator[Problem]:
    here = surroundings.versions()
    for name, then in (record.get("versions") or {}).items():
        now = here.get(name)
        if then is None or name not in here or now == then:
            continue
        without_build = str(then).partition("+")[0]
        fix = f"Python {then}" if name == "python" else f"pip install {name}=={without_build}"
        yield _is_not(name, then, now or "not installed", fix)


def _code(record: Json) -> Iterator[Problem]:
    then, here = record.get("code") or {}, surroundings.code()
    if not then:
        yield Problem("code", f"of accelerate-recipes was {_NOT_RECORDED}, is {_describe(here)}", severity="advice")
    elif then.get("source") != here["source"]:
        commit = then.get("commit")
        fix = f"git checkout {commit}" if commit else f"pip install accelerate-recipes=={then.get('version')}"
        if then.get("changed"):
            fix += ", and the changes that were not committed then"
        yield _is_not("accelerate-recipes", _describe(then), _describe(here), fix)


def _describe(code: Json) -> str:
    commit = (
        f", commit {str(code['commit'])[:10]}{' with changes' * bool(code.get('changed'))}" if "commit" in code else ""
    )
    return f"{code.get('version')} (source {code.get('source')}{commit})"


def _hardware(record: Json, run: RunSpec) -> Iterator[Problem]:
    then, here = record.get("hardware") or {}, {**run.hardware.as_dict(), "cpu": surroundings.cpu()}
    gpus_then, gpus = (gpu_names(hardware) for hardware in (then, here))
    if gpus_then != gpus:
        yield _is_not("GPUs", gpus_then, gpus, "a machine with those GPUs")
    for name, what in (("cpu", "such a CPU"), ("cores", "as many cores: threads add up in another order")):
        if not run.hardware.gpus and name in then and then[name] != here[name]:
            yield _is_not(name, then[name], here[name], f"a machine with {what}")


def gpu_names(hardware: Json) -> str:
    """A machine's GPUs by name: `2 x NVIDIA H100`, or `none`."""
    names = [str(gpu["name"]) for gpu in hardware.get("gpus") or ()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _world(record: Json, run: RunSpec) -> Iterator[Problem]:
    then = record.get("world_size") or 1
    if then != run.world_size:
        yield _is_not("num_processes", then, run.world_size, f"--num_processes {then}")
    if record.get("engine") not in (None, run.engine.title, run.engine_title):
        yield _is_not("engine", record["engine"], run.engine_title, "leave --accelerate_config and --deepspeed out")
    nodes = then // (record.get("local_world_size") or then)
    if nodes > 1:
        yield _is_not(
            "nodes", nodes, 1, f"recipes submit slurm --nodes {nodes} ... -- --config with this {recorded.NAME}"
        )


def _inputs(record: Json, run: RunSpec, now: dict[str, str | None]) -> Iterator[Problem]:
    for name, what in _MATERIAL.items():
        if not run[name] and record["settings"].get(name, {}).get("value"):
            continue  # it is missing here, which is a problem of the record itself, or left out by the user
        subject = (title(run[name]) if what == "data" else run[name]) or (
            "Python's standard library" if what == "data" else "the model"
        )
        if fingerprints.differ(record.get(what), now[what]):
            fix = f"the {what} as it was, or --{name} with its path"
            if what == "data" and not run[name]:
                fix = f"Python {(record.get('versions') or {}).get('python')}: the demonstration trains on its source"
            yield Problem(name, f"{subject} has other contents than then ({record[what]}, here {now[what]})", fix)
        elif run[name] and (record.get(what) is None or now[what] is None):
            then = f" ({record[what]})" if record.get(what) else ""
            yield Problem(
                name, f"whether {subject} is as it was{then} cannot be told before it is loaded", severity="advice"
            )


def _environment(record: Json) -> Iterator[Problem]:
    if "environment" not in record:
        return
    then, here = record["environment"] or {}, surroundings.environment()
    for name in sorted({*then, *here}):
        if then.get(name) == here.get(name) or name.startswith(_SEEN_OTHERWISE):
            continue
        fix = f"export {name}={quote(then[name])}" if name in then else f"unset {name}"
        now = f"{here.get(name, 'not set')} ({surroundings.why_it_matters(name)})"
        yield Problem(name, f"was {then.get(name, 'not set')}, is {now} here", fix)


def _settings(record: Json, run: RunSpec, same: Collection[str]) -> Iterator[Problem]:
    at_its_place, skipped = recorded.at_a_place(record), {*NO_DIFFERENCE, *same}
    if record.get("world_size") not in (None, run.world_size):
        skipped |= {"per_device_train_batch_size", "gradient_accumulation_steps"}  # they follow from it
    for name, entry in record["settings"].items():
        if name in skipped or name not in run or entry["value"] == HIDDEN:
            continue
        setting, here = run.setting(name), recorded.plain(run[name])
        typed = setting.source == COMMAND_LINE
        if here == entry["value"] or (name in at_its_place and not typed):
            continue
        fix = f"leave --{name} out" if typed else f"--{name} {quote(value_text(entry['value']))}"
        if not recorded.is_legal(name, entry["value"]):
            if not typed and not recorded.is_derived(entry["source"]):
                continue  # it is given again, and refused for that
            fix = "the libraries' versions of then: these do not take it"
        why = f" ({setting.reason})" if setting.reason and not typed else ""
        yield _is_not(name, value_text(entry["value"]), f"{value_text(here)}{why}", fix)
