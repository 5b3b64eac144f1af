"""`recipes rerun`: repeat a recorded run with its settings, engine and number of processes."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from launch.commands.compare import ABSENT, Row, differences, print_settings
from launch.flags import Commands
from launch.jobs.local import Local
from launch.jobs.submit import submit
from launch.output.record import MATERIAL, by_accelerate, several, started
from launch.terminal import console, plural, print_note
from recipes.errors import Problem, UserError, mistake
from recipes.mixture import title
from recipes.run import COMMAND_LINE, HIDDEN, Json, RunSpec, Settings, here, recorded, resolve, with_flags
from recipes.run.command_line import parse
from recipes.run.files import existing_path, shipped

_DESCRIPTION = """\
Train a recorded run again, into another folder. Differences on this machine (versions, GPUs or CPU, data, model, code,
files such as a recipe of your own, environment variables) are listed before the start. The field `files` of the
recorded run.json holds the old contents of these files.
"""


_FLAGS = """
FOLDER                    an output folder, or its run.json
--exact                   refuse to start if a difference can change the training, or if a resume changed the run
--dry_run                 print the script instead of running it
--num_processes N         processes in all [as many as recorded]
--accelerate_config FILE  Accelerate YAML of another engine [the recorded YAML]
"""


def add_parser(commands: Commands) -> None:
    commands.add_parser("rerun", description=_DESCRIPTION).takes(rerun, _FLAGS)


def rerun(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Repeat a run. --exact raises `UserError` if anything differs or a resume changed the run."""
    record, file = recorded.read(options.folder, "RUN"), recorded.file_of(options.folder).resolve()
    typed = {name: setting.value for name, setting in parse(argv, []).items()}
    if "config" in typed:
        raise mistake("config", f"cannot be given: a rerun reads {file}", "leave out --config")
    output_dir = _output_dir(record, file, typed)
    processes = options.num_processes or record.get("world_size") or 1
    words = with_flags(argv, {"config": file, **_commit(record, typed), "output_dir": output_dir})
    yaml = options.accelerate_config or _yaml(record, processes)
    run = resolve(words, here(processes, accelerate_config=yaml))

    here_now = recorded.plain(started(run, yaml=yaml))
    if record.get("engine") != run.engine.title:
        here_now["engine"] = run.engine_title
    rows = [row for row in differences([record, here_now]) if _matters(row, record, run)]
    out, then = console(stderr=True), f"{record['status']}, {record.get('started', 'unknown when')}"
    title_line = f"rerun of {file.parent} ({then}): {'the following' if rows else 'nothing'} differs here"
    out.print(title_line, highlight=False, markup=False)
    if rows:
        print_settings(["then", "here"], rows, stderr=True)
    if left_out := " ".join(_left_out(record)):
        print_note(f"launcher flags that are not repeated: {left_out}; set them in a YAML for --accelerate_config", out)
    for name, what in MATERIAL.items():
        if run[name] and None in (record.get(what), here_now[what]):
            print_note(f"{title(run[name])} may have changed: its contents could not be compared", out)
    refusals = [f"{plural(len(rows), 'difference')} from the recorded run"] if rows else []
    if resumed := several(record):
        print_note(f"{resumed}, so an uninterrupted rerun is not equal bit for bit", out)
        refusals.append(resumed)
    if options.exact and refusals:
        undo = "undo the differences that are listed above, or " if rows else ""
        fix = f"{undo}leave out --exact if the rerun need not be equal bit for bit"
        raise UserError(*run.problems, *(Problem("exact", what, fix) for what in refusals))
    return submit(Local(), words, accelerate_config=yaml, processes_per_node=processes, dry_run=options.dry_run)


def _output_dir(record: Json, file: Path, typed: Settings) -> str:
    """Return the rerun's output folder. Raises `UserError` if it is the recorded run's folder."""
    then = Path(str(record["settings"].get("output_dir", {}).get("value") or file.parent.name))
    output_dir = str(typed.get("output_dir") or Path("outputs", f"{then.name or 'run'}-rerun"))
    if Path(output_dir).resolve() in (file.parent, Path(record.get("folder") or ".", then).resolve()):
        what = f"{output_dir} is the folder of the recorded run"
        raise mistake("output_dir", what, "choose another folder; to continue the recorded run, repeat its command")
    return output_dir


def _commit(record: Json, typed: Settings) -> Json:
    """Return a Hub model's recorded commit as a flag, unless the user gives a model or revision."""
    model = str(record.get("model"))
    if not model.startswith("commit ") or {"model_revision", "model_name_or_path"} & set(typed):
        return {}
    return {"model_revision": model.removeprefix("commit ")}


# --- Files of the recorded run --------------------------------------------------------------------

# The launcher's flags that rerun sets itself.
_PLACEMENT = ("config_file num_processes num_machines machine_rank main_process_ip main_process_port multi_gpu").split()


def _yaml(record: Json, processes: int) -> str:
    """Return the recorded Accelerate YAML's path or, without one, the path of a shipped YAML."""
    path = record.get("accelerate_config") or str(shipped("standard.yaml" if processes > 1 else "single.yaml"))
    if not existing_path(path) and shipped(Path(path).name).is_file():  # a shipped YAML of another environment
        return str(shipped(Path(path).name))
    return path


def _left_out(record: Json) -> list[str]:
    """Return the flags of the run's `accelerate launch` that rerun does not repeat."""
    launcher = record.get("launcher") or []
    words = [word for word in launcher if word.startswith("--") and by_accelerate(launcher)]
    return [word for word in words if word[2:].partition("=")[0].replace("-", "_") not in _PLACEMENT]


# --- Differences ----------------------------------------------------------------------------------

# Variables that are ignored, because model, data and GPUs themselves are compared.
_SEEN_OTHERWISE = ("HF_", "TRANSFORMERS_", "CUDA_VISIBLE_DEVICES")


def _matters(row: Row, record: Json, run: RunSpec) -> bool:
    """True if the difference can change the training. False if another difference causes this one,
    or if the recorded or the installed version of a library lacks the setting.
    """
    name, then = row.name, row.values[0]
    if row.part == "contents":  # missing data or a missing model is reported elsewhere
        flag = next(flag for flag, what in MATERIAL.items() if what == name)
        return bool(run[flag] or not record["settings"].get(flag, {}).get("value"))
    if row.part == "environment":
        return not name.startswith(_SEEN_OTHERWISE)
    if row.part == "machine":
        return name == "gpus" or (name in ("cpu", "cores") and not run.hardware.gpus)
    if not row.is_setting:
        return name != "peak_memory_of" and (row.part != "versions" or then is not None)
    if then == HIDDEN or ABSENT in row.entries:
        return False
    if name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        return record.get("world_size") in (None, run.world_size)
    if run.setting(name).source == COMMAND_LINE:
        return True
    given_again = not recorded.is_derived(row.entries[0]["source"])  # if true, the rerun refuses an illegal value
    return name not in recorded.at_a_place(record) and (recorded.is_legal(name, then) or not given_again)
