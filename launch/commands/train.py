"""`recipes prepare`, `fit`, `train`, `submit`, `status` and `logs`: one training, here or as a job.

The code that submits jobs is in `launch.jobs`.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import NoReturn

from launch.flags import Commands, add_fields, given
from launch.host.signals import StopRequest, block_until_listening
from launch.host.world import prepare_environment, require_launcher
from launch.jobs.job import checked_job, launch_words
from launch.jobs.local import Local
from launch.jobs.submit import TARGETS, from_site, newest, refuse_while_in_use, rows, site_defaults, site_file, submit
from launch.terminal import console, duration, memory_size, plural, print_progress, print_table
from launch.training import banner
from recipes.errors import UserError, mistake
from recipes.quiet import quiet_libraries
from recipes.rules.check import require_legal
from recipes.run import resolve, with_flags
from recipes.run.engine import from_yaml
from recipes.run.files import find_yaml, shipped

_RECIPE = "--recipe NAME  a name from `recipes list`, or a file of your own [the recipe in --config, or standard]\n"
_YAML = "--accelerate_config FILE|NAME  Accelerate YAML in place of the recipe's own\n"
_HERE = "--num_processes N  processes on this machine [num_processes of your own Accelerate YAML, or one per GPU]\n"
_SUBMIT = f"""
{_RECIPE}{_YAML}--nodes N      number of nodes [1]
--processes_per_node N  processes on each node [one per GPU; for azureml 1]
--dry_run      print the job instead of sending it
--output FILE  with --dry_run: write the job to FILE, and for azureml its code beside FILE
--preflight    run `recipes doctor` on every node first; a failed check ends the job
"""
_SHOW = "--show N  print N examples, decoded, with the learned tokens between « and »"
_FOLDER = "[FOLDER]  output folder of a run, or a folder of runs; {} [outputs]\n"


def add_parser(commands: Commands) -> None:
    data = "Tokenize a run's data into a cache, and print the cache's folder. train.py with the same flags and HF_HOME "
    data += "then starts at once. If `prepare` is killed, repeat it. You can remove the folder when no run needs it."
    commands.add_parser("prepare", description=data).takes(prepare, _SHOW)
    description = "Check the run, then train here in this terminal: `accelerate launch` with the recipe's YAML."
    parser = commands.add_parser("train", description=description)
    parser.takes(train, _RECIPE + _HERE + _YAML)
    own_help = parser.format_help
    parser.format_help = lambda: f"{own_help()}\n{banner.settings_help()}"  # type: ignore[method-assign]
    commands.add_parser("fit").takes(fit, _RECIPE + _HERE + _YAML)
    targets = commands.add_parser("submit").add_subparsers(dest="target", required=True, metavar="|".join(TARGETS))
    for name, target in TARGETS.items():
        epilog = f"Defaults of --{fields(target)[0].name} and of all flags listed after it can be set under "
        epilog += f"`{name}:` in {site_file()}; the command line overrides these defaults."
        usage = f"recipes submit {name} [flags] -- [train.py flags]"
        parser = targets.add_parser(name, usage=usage, help=target.HELP, description=target.HELP, epilog=epilog)
        parser.takes(submit_run, _SUBMIT, nodes=1)
        add_fields(parser, target)
    commands.add_parser("status").takes(show_status, _FOLDER.format("all are listed, newest first"), folder="outputs")
    parser = commands.add_parser("logs")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run has ended")
    parser.takes(show_logs, _FOLDER.format("the newest submitted run is shown"), folder="outputs")


def prepare(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Tokenize a run's data, and print its folders with numbers of rows and tokens; with --show
    also examples as the training sees them. Raises `UserError` if the run or its data is unusable.
    """
    StopRequest().listen()
    run = resolve(argv)
    require_legal(run)
    if not run["dataset_name"]:
        raise mistake("dataset_name", "is not given, so there is nothing to prepare", "--dataset_name FILE_OR_ID")
    if run["dataset_streaming"]:
        what = "there is nothing to prepare: a stream is tokenized during the training"
        raise mistake("dataset_streaming", what, "leave --dataset_streaming out of this command and of the training")
    quiet_libraries(run["verbose"])
    prepare_environment(run)
    from launch.data.load import load_data, shown_examples
    from launch.data.tokens import lengths_of, of_parts
    from launch.training.model import known_classes, load_tokenizer, with_model

    began, tokenizer = time.monotonic(), load_tokenizer(run)
    run, _ = with_model(run, tokenizer)  # a classifier's examples are cut to the longest input of its model
    for _, found in of_parts(run, tokenizer):
        folder = found.folder
        assert folder is not None
        splits = [split for split in (found.train, found.eval) if split is not None]
        tokens = sum(int(lengths_of(split).sum()) for split in splits)
        size = sum(file.stat().st_size for file in folder.rglob("*.arrow"))
        rows = plural(sum(map(len, splits)), "row")
        print(f"{rows}, {tokens:,} tokens in {duration(time.monotonic() - began)}")
        print(f"{folder} ({memory_size(size)})")
    if options.show:
        data = load_data(run, tokenizer, known_classes(run, tokenizer))
        print(*shown_examples(data, tokenizer, options.show), sep="\n\n")
    return 0


def train(options: argparse.Namespace, rest: Sequence[str]) -> NoReturn:
    """Replace this process by the launcher of the run, which exits with train.py's exit code.
    Raises `UserError` with every problem of the run.
    """
    require_launcher()
    yaml = options.accelerate_config
    place = Local().place(options.num_processes or in_own_yaml(yaml), accelerate_config=yaml)
    job = checked_job(options.recipe, rest, place, starts_here=True)
    refuse_while_in_use(job.folder)
    world = plural(job.run.world_size, "process")
    print_progress(f"starting {world}, {job.run.recipe.name} on {job.run.engine_title}", console())
    block_until_listening()  # signals wait until the launcher can handle them
    os.execv(sys.executable, [*launch_words(job), *job.command])


def fit(options: argparse.Namespace, rest: Sequence[str]) -> NoReturn:
    train(options, with_flags(rest, {"fit_only": True}))


def submit_run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    target = TARGETS[options.target]
    written = given(target, options)
    defaults = {name: value for name, value in site_defaults(options.target).items() if name not in written}
    names = ("recipe", "accelerate_config", "nodes", "processes_per_node", "preflight", "dry_run", "output")
    asked = {name: getattr(options, name) for name in names}
    try:
        return submit(target(**defaults, **written), rest, comment=from_site(defaults), **asked)
    except UserError as error:
        source = str(site_file())
        problems = [replace(one, source=source) if one.subject in defaults else one for one in error.problems]
        raise UserError(*problems) from None


def in_own_yaml(name: str | None) -> int | None:
    """Return `num_processes` of the user's own YAML, or None. A missing file raises `UserError`."""
    if name is None:
        return None
    file = find_yaml(name)
    return None if file.parent == shipped(file.name).parent else from_yaml(file).num_processes


def show_status(options: argparse.Namespace, rest: Sequence[str]) -> int:
    print_table(["folder", "where", "state", "last line"], rows(Path(options.folder)))
    return 0


def show_logs(options: argparse.Namespace, rest: Sequence[str]) -> int:
    folder, submission = newest(Path(options.folder))
    try:
        TARGETS[submission.target].print_log(submission, folder, options.follow)
    except KeyboardInterrupt:
        print(f"\nthe run continues: see `recipes status {quote(str(folder))}`")
    return 0
