"""`recipes scale report`: pictures, tables, a text and a page from timings that exist already."""

from __future__ import annotations

import argparse
import base64
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import plots
from launch.flags import Commands
from launch.host.files import write_whole
from launch.scaling import plots as scale_plots
from launch.scaling.plots import Picture
from launch.scaling.words import Findings, find, results, sections, tables, text
from recipes.errors import mistake
from recipes.scaling import sentences, timings
from recipes.scaling.analyse import Series, Size
from recipes.scaling.causes import CAUSES
from recipes.scaling.timings import OF_ONE_PROCESS, PARTS

_NO_PICTURES = "No pictures: matplotlib is not installed (pip install matplotlib)."
_STEM = 40  # characters: in any script, a file name stays below the 255 bytes that most file systems allow


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        prog="recipes scale report",
        help="pictures, tables and verdicts from existing timings",
        description="Pictures, tables and verdicts from timings of your own or of `recipes scale run`.",
        usage="recipes scale report FILE... [--output FOLDER] [--format svg pdf]",
    )
    columns = "num_processes and epoch_time (s) or samples_per_second or tokens_per_second, "
    columns += "and if known name, recipe, scaling, epoch, samples, accuracy, ..."
    parser.add_argument("files", nargs="+", metavar="FILE", help=f".csv or .jsonl, one row per epoch: {columns}")
    output = Path("outputs/scale/report")
    parser.add_argument("--output", type=Path, default=output, metavar="FOLDER", help=f"[{output}]")
    formats = "also draw each picture in this format, beside the .png"
    parser.add_argument("--format", nargs="+", choices=("svg", "pdf"), default=[], metavar="svg|pdf", help=formats)
    parser.set_defaults(run=show_report)


def show_report(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise mistake(rest[0], "is not a flag of scale report", "--output FOLDER or --format")
    command = shlex.join(["recipes", "scale", "report", *options.files, "--output", str(options.output)])
    found = find(timings.read(options.files), command, options.files)
    written = report(found, options.output, options.format)
    if not plots.installed():
        print(_NO_PICTURES, file=sys.stderr)
    print(text(found))
    print("\nwritten:", *written, sep="\n  ")
    return 0


def report(found: Findings, folder: Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write the whole report and return its files; without matplotlib, all but the pictures.

    Pictures are PNG, and in each of `formats` too. Raises `UserError` if the folder cannot be
    written.
    """
    drawn: dict[str, Picture] = {}
    note = "" if plots.installed() else _NO_PICTURES
    for name, stem in file_stems(found.names).items() if plots.installed() else ():
        of_name = [series for series in found.series if series.name == name]
        drawn |= {f"{stem}_{picture.kind}": picture for picture in scale_plots.pictures(name, of_name, formats)}
    texts = {
        "comprehensive_summary.csv": summary_csv(found),
        "summary_table.tex": summary_tex(found),
        "performance_report.txt": _text(found, note),
        "report.html": _page(found, list(drawn.values()), note),
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


def file_stems(names: Sequence[str]) -> dict[str, str]:
    """The beginning of each training's file names: letters, digits, `-`, `.` and `_`.

    No two differ only in case.
    """
    stems: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", name).strip("._")[:_STEM] or "training"
        stem, count = plain, 1
        while stem.casefold() in {taken.casefold() for taken in stems.values()}:
            count += 1
            stem = f"{plain}-{count}"
        stems[name] = stem
    return stems


# --- For reading ---------------------------------------------------------------------------------


def _text(found: Findings, note: str) -> str:
    shown = [f"{table.caption}\n{table.cells.to_string(index=False)}" for table in tables(found)]
    return "\n\n".join(filter(None, [text(found), note, *shown, f"written by: {found.command}"])) + "\n"


def _page(found: Findings, pictures: Sequence[Picture], note: str) -> str:
    """One HTML page that sends no request and runs no script.

    Everything that a file or a user named is escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    look = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    look.filters["base64"] = lambda data: base64.b64encode(data).decode()
    known = {"sections": sections(found), "tables": tables(found)}
    return look.get_template("page.html").render(found=found, pictures=pictures, note=note, **known)


# --- For other programs --------------------------------------------------------------------------


def summary_csv(found: Findings) -> str:
    """A row for each series and size, with the names and units of the timings."""
    from pandas import DataFrame

    rows = [_flat(series, size) for series in found.series for size in series.sizes]
    return DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")  # object: counts stay whole


def _flat(series: Series, size: Size) -> dict[str, object]:
    spreads: dict[str, object] = {}
    for name in ("epoch_time", "samples_per_second", "speedup", "efficiency"):
        spread = getattr(size, name)
        for suffix, field in (("", "median"), ("_low_quartile", "low"), ("_high_quartile", "high")):
            spreads[name + suffix] = getattr(spread, field) if spread else None
    losses, typical = size.losses, vars(size.typical)
    names = ["samples", "global_batch", "micro_batch", "accumulation", "step_time", *PARTS]
    names += ["loss", "peak_memory", *OF_ONE_PROCESS, "engine", "hardware"]
    return {
        **{name: getattr(series, name) for name in ("name", "recipe", "scaling")},
        "num_processes": size.num_processes,
        "repeats": size.repeats,
        "timed": typical["timed"] or "epoch",
        **spreads,
        "tokens_per_second": size.tokens_per_second,
        "band": size.band,
        "cause": size.cause,
        "undecided": losses.undecided,
        "slower_than": size.slower_than,
        "accuracy": size.accuracy,
        "serial_fraction": series.serial_fraction,
        "best_size": series.best.num_processes,
        **{name: typical[name] for name in names},
        **dict.fromkeys((f"lost_to_{key}" for key in CAUSES), None),
        **{f"lost_to_{cause.key}": cause.seconds for cause in losses.causes},
        "lost": losses.lost,
        "unexplained": losses.unexplained,
        "verdict": sentences.verdict(size, series),
    }


def summary_tex(found: Findings) -> str:
    r"""A table for a paper for each series. It needs no package, so its rules are \hline."""
    lines = [
        f"% Written by: {' '.join(found.command.split())}",
        r"% Include with \input{summary_table.tex}, refer to with \ref{tab:scaling}, \ref{tab:scaling-2}, ...",
    ]
    for number, series in enumerate(found.series, 1):
        cells = results(series).cells.drop(columns=["repeats", "tokens/s", "main cause"], errors="ignore")
        style = cells.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
        style.set_table_styles([{"selector": f"{rule}rule", "props": ":hline;"} for rule in ("top", "mid", "bottom")])
        title = re.sub(r"([&%$#_{}])", r"\\\1", re.sub(r"[\\^~]", " ", series.title))
        lines.append(
            style.to_latex(
                column_format="r" * len(cells.columns),
                position="htbp",
                position_float="centering",
                caption=f"{title}: the median time, with quartiles in brackets where it is repeated. Speedup and "
                "efficiency are relative to the smallest number of processes.",
                label=f"tab:scaling-{number}" if number > 1 else "tab:scaling",
            ).replace(r"\centering", r"\centering\footnotesize\setlength{\tabcolsep}{3pt}")
        )
    return "\n".join(lines)
