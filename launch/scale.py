"""`recipes scale`: `run` measures a training at several world sizes, `report` says what the timings say."""

from __future__ import annotations

from typing import Any

from launch.scaling import report as scale_report
from launch.scaling import run as scale_run


def add_parser(commands: Any, count: Any) -> None:
    parser = commands.add_parser("scale", help="measure how a training scales, and report why", allow_abbrev=False)
    targets = parser.add_subparsers(dest="target", required=True, metavar="run|report")
    scale_run.add_parser(targets, count)
    scale_report.add_parser(targets)
