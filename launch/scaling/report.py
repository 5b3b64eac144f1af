"""`recipes scale report`: pictures, tables, a text and a page from timings that exist already."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill

from launch import plots
from launch.flags import Commands, whole
from launch.host.files import write_whole
from launch.scaling import page as scale_page
from launch.scaling import plots as scale_plots
from launch.scaling.plots import NEEDS, Picture
from launch.scaling.tables import summary_csv, summary_tex
from launch.scaling.words import (
    Findings,
    Table,
    also,
    commands,
    find,
    gain_words,
    losses,
    results,
    serial_words,
    step_parts,
    suggestions,
    summary,
    tried,
)
from recipes.errors import mistake
from recipes.run import Json
from recipes.scaling import timings
from recipes.scaling.row import to_columns
from recipes.scaling.verdicts import Series

_WIDTH = 110  # of the text's lines
_STEM = 40  # characters: in any script, a file name stays below the 255 bytes that most file systems allow


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        prog="recipes scale report",
        help="pictures, tables and verdicts from existing timings",
        description="Pictures, tables and verdicts from timings of your own or of `recipes scale run`.",
        allow_abbrev=False,
        usage="recipes scale report FILE... [--output FOLDER] [--warmup N] [--format svg pdf] [--json]",
    )
    columns = "num_processes and epoch_time (s) or samples_per_second or tokens_per_second, "
    columns += "and if known name, recipe, scaling, epoch, samples, accuracy, ..."
    parser.add_argument("files", nargs="+", metavar="FILE", help=f".csv or .jsonl, one row per epoch: {columns}")
    output = Path("outputs/scale/report")
    parser.add_argument("--output", type=Path, default=output, metavar="FOLDER", help=f"[{output}]")
    warm_up = "leave out the first N epochs (rows) of each training and size [0]"
    parser.add_argument("--warmup", type=whole, default=0, metavar="N", help=warm_up)
    formats = "also draw each picture in this format, beside the .png"
    parser.add_argument("--format", nargs="+", choices=("svg", "pdf"), default=[], metavar="svg|pdf", help=formats)
    parser.add_argument("--json", action="store_true", help="print all numbers, instead of the verdicts")
    parser.set_defaults(run=show_report)


def show_report(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise mistake(rest[0], "is not a flag of scale report", "--output FOLDER, --warmup N, --format or --json")
    words = ["recipes", "scale", "report", *options.files, "--output", str(options.output)]
    command = shlex.join(words + ["--warmup", str(options.warmup)] * bool(options.warmup))
    rows = timings.without_warm_up(timings.read(options.files), options.warmup)
    found = find(rows, command, options.files)
    written = report(found, options.output, options.format)
    if not plots.installed():
        print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    if options.json:
        print(json.dumps({**as_json(found), "written": [str(file) for file in written]}, indent=2))
        return 0
    print(summary(found))
    print("\nwritten:", *written, sep="\n  ")
    return 0


def report(found: Findings, folder: Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write the whole report and return its files; without matplotlib, all but the pictures.

    Pictures are PNG, and in each of `formats` too.

    Raises `UserError` if the folder cannot be written.
    """
    drawn = _pictures(found, formats) if plots.installed() else {}
    notes = _not_drawn(found)
    texts = {
        "comprehensive_summary.csv": summary_csv(found),
        "summary_table.tex": summary_tex(found),
        "performance_report.txt": text(found, notes),
        "report.html": scale_page.page(found, list(drawn.values()), notes),
    }
    content = {f"{stem}.{one}": data for stem, picture in drawn.items() for one, data in picture.files.items()}
    # The name of a folder need not be UTF-8.
    content |= {name: written.encode(errors="backslashreplace") for name, written in texts.items()}
    try:
        for name, data in content.items():
            write_whole(folder / name, data)
    except OSError as error:
        raise mistake("output", f"{folder} cannot be written: {error.strerror}", "choose a writable folder") from None
    return [folder / name for name in content]


def as_json(found: Findings) -> Json:
    """Every number of the report, in seconds, samples, bytes and ratios."""
    return {
        "series": [_series(found, series) for series in found.series],
        "applied": [{**asdict(one), "judged": one.judged} for one in found.applied],
    }


def _series(found: Findings, series: Series) -> Json:
    sizes = [{**asdict(size), "typical": to_columns(size.typical)} for size in series.sizes]
    whole = {**asdict(series), "sizes": sizes, "serial_fraction": series.serial_fraction}
    return {**whole, "law_in_words": serial_words(series), "advice": _advice(found, series)}


def _advice(found: Findings, series: Series) -> list[Json]:
    return [
        {"at": size.num_processes, **asdict(advice), "commands": commands(found, series, size, advice)}
        for size, advice in suggestions(series)
    ]


# --- Pictures ------------------------------------------------------------------------------------


def _pictures(found: Findings, formats: Sequence[str]) -> dict[str, Picture]:
    drawn = {}
    for name, stem in file_stems(found.names).items():
        of_name = [series for series in found.series if series.name == name]
        for picture in scale_plots.pictures(name, of_name, found.rows, formats):
            drawn[f"{stem}_{picture.kind}"] = picture
    return drawn


def _not_drawn(found: Findings) -> list[str]:
    if not plots.installed():
        return ["No pictures: matplotlib is not installed (pip install matplotlib)."]
    notes = []
    for name in found.names:
        of_name = [series for series in found.series if series.name == name]
        lacking = {
            kind: needs for kind, needs in NEEDS.items() if not scale_plots.has_numbers(kind, of_name, found.rows)
        }
        notes += [f"{name}: no picture of {kind.replace('_', ' ')}: needs {needs}." for kind, needs in lacking.items()]
    return notes


def file_stems(names: Sequence[str]) -> dict[str, str]:
    """How the files of each training begin: letters, digits, `-`, `.` and `_`.

    No two differ only in case.
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", name)).strip("._")[:_STEM] or "training"
        stem, count = plain, 1
        while stem.casefold() in taken:
            count += 1
            stem = f"{plain}-{count}"
        taken.add(stem.casefold())
        stems[name] = stem
    return stems


# --- performance_report.txt ----------------------------------------------------------------------


def text(found: Findings, notes: Sequence[str] = ()) -> str:
    """The report as plain text."""
    lines = [found.title, "", f"hardware: {found.hardware}", f"written by: {found.command}"]
    for series in found.series:
        lines += ["", "", series.title, "=" * len(series.title), ""]
        for verdict in series.verdicts:
            lines += [_wrapped(line) for line in (verdict.words, *also(verdict))]
        lines += [_wrapped(serial_words(series)), ""]
        lines += _advice_lines(found, series)
        for table in (results(series), step_parts(series), losses(series)):
            lines += [*aligned(table), ""] if table else []
    table = tried(found)
    lines += ["", *aligned(table), ""] if table else []
    return "\n".join([*lines, *notes]).rstrip() + "\n"


def _advice_lines(found: Findings, series: Series) -> list[str]:
    lines = []
    for size, advice in suggestions(series):
        lines.append(_wrapped(f"Advice at {size.num_processes}: {advice.title}: {gain_words(advice)}: {advice.why}."))
        lines += [f"  {words}" for words in commands(found, series, size, advice)]
        lines.append("")
    return lines


def _wrapped(line: str) -> str:
    return fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def aligned(table: Table) -> list[str]:
    """A table in a fixed-width font, with numbers to the right."""
    columns = list(zip(table.headings, *table.rows, strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    lines = [table.caption]
    for cells in (table.headings, *table.rows):
        padded = [
            cell.rjust(width) if table.numeric(place) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines
