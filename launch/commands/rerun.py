"""`recipes rerun`: a run that was recorded, once more: its settings, engine, processes, files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from itertools import count as count_from
from pathlib import Path

from launch.commands.differences import differences
from launch.flags import Commands, count, spellings
from launch.jobs.local import Local
from launch.jobs.submit import submit
from launch.output.record import read
from launch.output.restore import restore
from launch.terminal import console, print_problems
from recipes.errors import UserError, mistake
from recipes.run import Json, Settings, here, recorded, resolve, with_flags
from recipes.run.command_line import parse

_DESCRIPTION = """\
Train a recorded run again, into another folder. What differs here (versions, GPUs or CPU, data, model, code,
environment variables) is listed before the start. Files that have changed since, such as a recipe of your own, are
restored from the record: a recipe in Python is code, so rerun only records that you trust.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "rerun",
        allow_abbrev=False,
        usage="recipes rerun FOLDER|run.json [--exact] [--dry_run] [--num_processes N] [--accelerate_config FILE] "
        "[any train.py flags]",
        description=_DESCRIPTION,
    )
    parser.add_argument("folder", metavar="FOLDER|run.json", help="an output folder, or its run.json")
    parser.add_argument("--exact", action="store_true", help="refuse to start if anything differs that matters")
    parser.add_argument(*spellings("dry_run"), action="store_true", help="print what would run, run nothing")
    parser.add_argument(*spellings("num_processes"), type=count, help="processes in all [as many as then]")
    parser.add_argument(*spellings("accelerate_config"), metavar="FILE", help="another engine [the recorded one]")
    parser.set_defaults(run=rerun)


def rerun(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Returns the run's exit code. Raises `UserError`, with --exact for anything that differs."""
    record, file = recorded.read(options.folder, "RUN"), recorded.file_of(options.folder).resolve()
    typed = {name: setting.value for name, setting in parse(argv, []).items()}
    if "config" in typed:
        raise mistake("config", f"is {file} here", "only the flags that change something")
    output_dir = _output_dir(record, file, typed)
    processes = options.num_processes or record.get("world_size") or 1
    restored = restore(record, output_dir, processes)
    files = {name: path for name, path in restored.flags.items() if name not in typed}
    recipe = typed.get("recipe") or files.get("recipe")  # a job has a place of its own for it
    flags = {"config": file, **_commit(record, typed), **files, "output_dir": output_dir, "recipe": None}
    words = with_flags(argv, flags)
    yaml = options.accelerate_config or restored.accelerate_config
    run = resolve(["--recipe", recipe, *words] if recipe else words, here(processes, accelerate_config=yaml))

    found = differences(record, run, files)
    matters = [problem for problem in found if problem.severity == "error"]
    if options.exact and matters:
        raise UserError(*run.problems, *matters)
    listed = [*restored.notes, *(replace(problem, severity="advice") for problem in found)]
    out = console(stderr=True)
    out.print(f"{_title(record, file)}: {'what differs here' if listed else 'nothing differs here'}", highlight=False)
    print_problems(listed, out)
    return submit(
        Local(),
        words,
        recipe=recipe,
        accelerate_config=yaml,
        processes_per_node=processes,
        dry_run=options.dry_run,
    )


def _title(record: Json, file: Path) -> str:
    return f"again {file.parent} ({record['status']}, {record.get('started', 'unknown when')})"


def _output_dir(record: Json, file: Path, typed: Settings) -> str:
    """Where the run writes. Raises `UserError` for the folder of the recorded run itself."""
    then = Path(str(record["settings"].get("output_dir", {}).get("value") or file.parent.name))
    output_dir = str(typed.get("output_dir") or _unfinished(Path("outputs", f"{then.name or 'run'}-rerun")))
    if Path(output_dir).resolve() in (file.parent, Path(record.get("folder") or ".", then).resolve()):
        what = f"{output_dir} is the folder of the recorded run"
        raise mistake("output_dir", what, "another one; the command of that run, given again, continues it")
    return output_dir


def _unfinished(folder: Path) -> Path:
    """The folder, or the next with a number that holds no finished run. Others are continued."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count_from(2))
    return next(path for path in chain([folder], numbered) if read(path).get("status") != "finished")


def _commit(record: Json, typed: Settings) -> Json:
    """The flag for the commit of a model on the Hub, so that a branch may have moved on."""
    model = str(record.get("model"))
    if not model.startswith("commit ") or {"model_revision", "model_name_or_path"} & set(typed):
        return {}
    return {"model_revision": model.removeprefix("commit ")}
