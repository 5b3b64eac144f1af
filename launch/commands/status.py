"""`recipes status` and `recipes logs`: how submitted runs are doing, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from launch.flags import Commands
from launch.jobs.submit import TARGETS, newest, rows
from launch.terminal import print_table


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("status", allow_abbrev=False)
    several = "output folder of a run, or of several"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="outputs", help=f"{several} [outputs]")
    parser.set_defaults(run=show_status)
    logs = commands.add_parser("logs", allow_abbrev=False)
    logs.add_argument("folder", metavar="FOLDER", nargs="?", default="outputs", help=f"{several}: the newest [outputs]")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    logs.set_defaults(run=show_logs)


def show_status(options: argparse.Namespace, rest: Sequence[str]) -> int:
    print_table(["folder", "where", "state", "last line"], rows(Path(options.folder)))
    return 0


def show_logs(options: argparse.Namespace, rest: Sequence[str]) -> int:
    folder, submission = newest(Path(options.folder))
    try:
        TARGETS[submission.target].print_log(submission, folder, options.follow)
    except KeyboardInterrupt:
        print(f"\nthe run goes on: recipes status {quote(str(folder))}")
    return 0
