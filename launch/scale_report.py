"""`recipes scale report`: pictures, tables for papers, a text and a page, from timings that are already there."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from launch import plots, scale_page, scale_plots
from launch.files import write_whole
from launch.scale_plots import NEEDS, Picture
from launch.scale_words import (
    Findings,
    Table,
    also,
    command_of,
    find,
    gain_words,
    losses,
    number,
    results,
    serial_words,
    step_parts,
    suggestions,
    tried,
)
from recipes.errors import mistake
from recipes.scaling import CAUSES, Series, Size, Spread, Verdict
from recipes.timings import PARTS, Timing

_WIDTH = 110  # of the text's lines
_STEM = 40  # letters: with the longest ending below the 255 bytes of most file systems in any script


def report(rows: Sequence[Timing], folder: Path, command: str) -> list[Path]:
    """Write the whole report and return its files; without matplotlib all but the pictures.

    `command` is what the user typed, and stands in the report. Raises `UserError` where the folder cannot be written.
    """
    found = find(rows, command)
    drawn = _pictures(found) if plots.installed() else {}
    notes = _not_drawn(found)
    content = {name: picture.png for name, picture in drawn.items()}
    content |= {
        "comprehensive_summary.csv": summary_csv(found).encode(),
        "summary_table.tex": summary_tex(found).encode(),
        "performance_report.txt": text(found, notes).encode(),
        "report.html": scale_page.page(found, list(drawn.values()), notes).encode(),
    }
    try:
        for name, data in content.items():
            write_whole(folder / name, data)
    except OSError as error:
        raise mistake("output", f"{folder} cannot be written: {error.strerror}", "a folder that can") from None
    return [folder / name for name in content]


def as_json(rows: Sequence[Timing]) -> dict[str, Any]:
    """All of the report as numbers: seconds, samples, bytes and ratios."""
    found = find(rows, "")
    return {
        "series": [
            {
                **asdict(series),
                "advice": [
                    {"at": size.num_processes, **asdict(advice), "command": command_of(advice)}
                    for size, advice in suggestions(series)
                ],
            }
            for series in found.series
        ],
        "applied": [asdict(one) for one in found.applied],
    }


# --- Pictures --------------------------------------------------------------------------------------------------------


def _pictures(found: Findings) -> dict[str, Picture]:
    drawn = {}
    for name, stem in file_stems(found.names).items():
        of_name = [series for series in found.series if series.name == name]
        for picture in scale_plots.pictures(name, of_name, found.rows):
            drawn[f"{stem}_{picture.kind}.png"] = picture
    return drawn


def _not_drawn(found: Findings) -> list[str]:
    if not plots.installed():
        return ["No pictures: they are drawn with matplotlib, which is not installed (pip install matplotlib)."]
    notes = []
    for name in found.names:
        of_name = [series for series in found.series if series.name == name]
        lacking = {kind: needs for kind, needs in NEEDS.items() if not scale_plots.has_numbers(kind, of_name)}
        notes += [f"{name}: no picture of {kind.replace('_', ' ')}: needs {needs}." for kind, needs in lacking.items()]
    return notes


def file_stems(names: Sequence[str]) -> dict[str, str]:
    """How the files of each training begin: letters, digits, `-`, `.` and `_`, and no two alike in any case."""
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


# --- comprehensive_summary.csv ---------------------------------------------------------------------------------------


def summary_csv(found: Findings) -> str:
    """One row for each series and size, under the names and in the units of the timings."""
    rows = [_flat(series, *pair) for series in found.series for pair in zip(series.sizes, series.verdicts, strict=True)]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _flat(series: Series, size: Size, verdict: Verdict) -> dict[str, Any]:
    seconds = {cause.key: cause.seconds for cause in verdict.causes}
    typical = {name: getattr(size.typical, name) for name in ("samples", "global_batch", "micro_batch", "accumulation")}
    measured = {name: getattr(size.typical, name) for name in ("step_time", *PARTS, "loss", "peak_memory")}
    return {
        "name": series.name,
        "recipe": series.recipe,
        "scaling": series.scaling,
        "num_processes": size.num_processes,
        "repeats": size.repeats,
        **_spread("epoch_time", size.epoch_time),
        **_spread("samples_per_second", size.samples_per_second),
        "tokens_per_second": size.tokens_per_second,
        **_spread("speedup", size.speedup),
        **_spread("efficiency", size.efficiency),
        "band": verdict.band,
        "cause": verdict.cause,
        "accuracy": size.accuracy,
        "serial_fraction": series.serial_fraction,
        **typical,
        **measured,
        **{f"lost_to_{key}": seconds.get(key) for key in CAUSES},
        "lost": verdict.lost,
        "unexplained": verdict.unexplained,
        "engine": size.typical.engine,
        "hardware": size.typical.hardware,
        "verdict": verdict.words,
    }


def _spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    numbers = (spread.median, spread.low, spread.high) if spread else (None, None, None)
    return dict(zip((name, f"{name}_low_quartile", f"{name}_high_quartile"), numbers, strict=True))


# --- summary_table.tex -----------------------------------------------------------------------------------------------

_TEX = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
# Combining marks as LaTeX's accents, which every font encoding has.
_ACCENTS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u030c": "v", "\u0327": "c"}


def tex_escaped(name: str) -> str:
    """Text as LaTeX prints it with its own fonts alone; a letter that they lack as its number in Unicode."""
    escaped = ""
    for letter in unicodedata.normalize("NFC", name):
        base, *marks = list(unicodedata.normalize("NFD", letter))
        if letter.isspace():
            escaped += " "
        elif letter.isascii():
            escaped += _TEX.get(letter, letter) if letter.isprintable() else ""
        elif base.isascii() and len(marks) == 1 and marks[0] in _ACCENTS:
            escaped += f"\\{_ACCENTS[marks[0]]}{{{base}}}"
        else:
            escaped += f"[U+{ord(letter):04X}]"
    return escaped


def summary_tex(found: Findings) -> str:
    """A table for a paper: the series one below the other, each under its title."""
    accuracy = any(size.accuracy is not None for series in found.series for size in series.sizes)
    samples = any(size.samples_per_second for series in found.series for size in series.sizes)
    headings = ["Processes", "Epoch (s)", *["Samples/s"] * samples, "Speedup", r"Efficiency (\%)"]
    headings += ["Accuracy"] * accuracy
    lines = [
        f"% Written by: {' '.join(found.command.split())}",
        r"% Include it with \input{summary_table.tex}, refer to it with \ref{tab:scaling}. It needs no package.",
        r"\begin{table}[htbp]",
        r"\centering",
        r"\caption{Scaling of training over processes: medians of the timed epochs, with quartiles in brackets where",
        r"there are several. Speedup and efficiency are relative to the smallest number of processes of each series.}",
        r"\label{tab:scaling}",
        r"\small\setlength{\tabcolsep}{4pt}",
        rf"\begin{{tabular}}{{{'r' * len(headings)}}}",
        r"\hline",
        " & ".join(headings) + r" \\",
    ]
    for series in found.series:
        title = rf"\multicolumn{{{len(headings)}}}{{p{{0.7\linewidth}}}}{{{tex_escaped(series.title)}}}"
        lines += [r"\hline", title + r" \\"]
        lines += [" & ".join(_tex_cells(size, samples, accuracy)) + r" \\" for size in series.sizes]
    return "\n".join([*lines, r"\hline", r"\end{tabular}", r"\end{table}", ""])


def _tex_cells(size: Size, samples: bool, accuracy: bool) -> list[str]:
    epoch = size.epoch_time
    quartiles = f" [{number(epoch.low)}, {number(epoch.high)}]" if size.repeats > 1 else ""
    cells = [str(size.num_processes), number(epoch.median) + quartiles]
    if samples:
        cells.append(number(size.samples_per_second.median if size.samples_per_second else None))
    cells += [f"{size.speedup.median:.2f}", f"{size.efficiency.median:.1%}".removesuffix("%")]
    return [*cells, number(size.accuracy)] if accuracy else cells


# --- performance_report.txt ------------------------------------------------------------------------------------------


def text(found: Findings, notes: Sequence[str] = ()) -> str:
    """The report for those who read nothing else."""
    lines = [found.title, "", f"hardware: {found.hardware}", f"written by: {found.command}"]
    for series in found.series:
        lines += ["", "", series.title, "=" * len(series.title), ""]
        for verdict in series.verdicts:
            lines += [_wrapped(line) for line in (verdict.words, *also(verdict))]
        lines += [_wrapped(serial_words(series)), ""]
        lines += _advice_lines(series)
        for table in (results(series), step_parts(series), losses(series)):
            lines += [*aligned(table), ""] if table else []
    table = tried(found)
    lines += ["", *aligned(table), ""] if table else []
    return "\n".join([*lines, *notes]).rstrip() + "\n"


def _advice_lines(series: Series) -> list[str]:
    lines = []
    for size, advice in suggestions(series):
        lines.append(_wrapped(f"Try at {size.num_processes}: {advice.title}: {gain_words(advice)}. {advice.why}"))
        lines += [f"  {command_of(advice)}", ""]
    return lines


def _wrapped(line: str) -> str:
    return fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def aligned(table: Table) -> list[str]:
    """A table in letters of one width, numbers to the right."""
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
