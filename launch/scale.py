"""`recipes scale`: how a training scales over processes, and why not better."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from recipes import timings


def add_parser(commands: Any, count: Any) -> None:
    group = commands.add_parser("scale", help="how a training scales, and why not better", allow_abbrev=False)
    parts = group.add_subparsers(dest="part", required=True, metavar="run|report")
    reporting = parts.add_parser(
        "report",
        help="pictures, tables and verdicts from timings that are there",
        allow_abbrev=False,
        usage="recipes scale report FILE... [--output FOLDER] [--json]",
    )
    columns = "num_processes and epoch_time, and as far as they are known name, epoch, samples, accuracy, recipe, ..."
    reporting.add_argument("files", nargs="+", metavar="FILE", help=f".csv or .jsonl with a row an epoch: {columns}")
    reporting.add_argument("--output", type=Path, default=Path("outputs/scale/report"), help="[outputs/scale/report]")
    reporting.add_argument("--json", action="store_true", help="print all numbers too")
    reporting.set_defaults(run=show_report)


def show_report(options: argparse.Namespace, rest: list[str]) -> int:
    from launch import plots, scale_report, scale_words

    rows = timings.read(options.files)
    command = shlex.join(["recipes", "scale", "report", *options.files, "--output", str(options.output)])
    written = scale_report.report(rows, options.output, command)
    if not plots.installed():
        print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    if options.json:
        print(json.dumps({**scale_report.as_json(rows), "written": [str(file) for file in written]}, indent=2))
        return 0
    print(scale_words.summary(scale_words.find(rows, command)))
    print("\nwritten:", *written, sep="\n  ")
    return 0
