"""`recipes scale report`: pictures, tables, a text file and an HTML page from existing timings.

The terminal shows only sentences. The text file and the page show the same sentences, and tables.
"""

from __future__ import annotations

import argparse
import base64
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from launch.flags import Commands
from launch.host.files import write_whole, writing
from launch.scaling import plots
from launch.scaling.plots import NO_PICTURES, Picture
from launch.scaling.run import TIMINGS
from recipes.errors import mistake, plural
from recipes.rules.facts import installed
from recipes.run import with_flags
from recipes.scaling import sentences, timings
from recipes.scaling.advice import Advice, Applied, advise, applied
from recipes.scaling.analyse import Series, Size, Spread, analyse, hardware_of
from recipes.scaling.causes import CAUSES
from recipes.scaling.timings import PARTS, Timing

if TYPE_CHECKING:
    from pandas import DataFrame

_WIDTH = 110  # characters in a line of the text
_STEM = 40  # characters: even at 4 bytes each, a file name stays below the 255 bytes of most file systems


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        prog="recipes scale report",
        help="pictures, tables and verdicts from existing timings",
        description="Pictures, tables and verdicts from timings of your own or of `recipes scale run`.",
        usage="recipes scale report FILE... [--output FOLDER] [--format {svg,pdf} ...]",
    )
    columns = "num_processes; epoch_time (s), samples_per_second or tokens_per_second; "
    columns += "optional: name, recipe, scaling, epoch, samples, accuracy, ..."
    parser.add_argument("files", nargs="+", metavar="FILE", help=f".csv or .jsonl, one row per epoch: {columns}")
    output = Path("outputs/scale/report")
    parser.add_argument("--output", type=Path, default=output, metavar="FOLDER", help=f"[{output}]")
    formats = "also draw each picture in this format, beside the .png"
    parser.add_argument("--format", nargs="+", choices=("svg", "pdf"), default=[], metavar="svg|pdf", help=formats)
    parser.takes(show_report, "")


def show_report(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise mistake(rest[0], "is not a flag of scale report", "use --output FOLDER or --format svg")
    command = shlex.join(["recipes", "scale", "report", *options.files, "--output", str(options.output)])
    found = find(timings.read(options.files), command, options.files)
    written = report(found, options.output, options.format)
    if not installed("matplotlib"):
        print(NO_PICTURES, file=sys.stderr)
    print(text(found))
    print("\nwritten:", *written, sep="\n  ")
    return 0


def report(found: Findings, folder: Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write the whole report and return its files; without matplotlib there are no pictures.

    Pictures are PNG, and also in `formats`. Raises `UserError` if the folder cannot be written.
    """
    drawn: dict[str, Picture] = {}
    note = "" if installed("matplotlib") else NO_PICTURES
    for name, stem in file_stems(found.names).items() if installed("matplotlib") else ():
        of_name = [series for series in found.series if series.name == name]
        drawn |= {f"{stem}_{picture.kind}": picture for picture in plots.pictures(name, of_name, formats)}
    texts = {
        "comprehensive_summary.csv": summary_csv(found),
        "summary_table.tex": summary_tex(found),
        "performance_report.txt": _text(found, note),
        "report.html": _page(found, list(drawn.values()), note),
    }
    content = {f"{stem}.{one}": data for stem, picture in drawn.items() for one, data in picture.files.items()}
    # The texts name folders, and the name of a folder may not be UTF-8.
    content |= {name: written.encode(errors="backslashreplace") for name, written in texts.items()}
    with writing(folder, "output"):
        for name, data in content.items():
            write_whole(folder / name, data)
    return [folder / name for name in content]


def file_stems(names: Sequence[str]) -> dict[str, str]:
    """Map each training to the prefix of its files' names: letters, digits, `-`, `.` and `_`. If
    prefixes are equal, or differ only in case, each gets a number.
    """
    plain = [re.sub(r"[^\w.-]+", "_", name).strip("._")[:_STEM] or "training" for name in names]
    folded = [stem.casefold() for stem in plain]
    several = [folded.count(stem) > 1 for stem in folded]
    return {names[at]: f"{stem}-{at + 1}" if several[at] else stem for at, stem in enumerate(plain)}


@dataclass(frozen=True)
class Findings:
    """The analysis of timings, and the command that writes the report."""

    series: list[Series]
    applied: list[Applied]
    command: str
    measured_in: Path | None  # the folder in which `scale run` measured all timings and can try the advice

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(one.name for one in self.series))

    @property
    def title(self) -> str:
        return f"Scaling of {', '.join(self.names)}" if self.names else "Advice that was tried"

    @property
    def hardware(self) -> str:
        return hardware_of(self.series) or "not stated in the timings"


def find(rows: Sequence[Timing], command: str = "", files: Sequence[str] = ()) -> Findings:
    """Analyse `rows`, which come from `files`."""
    here = len(files) == 1 and Path(files[0]).name == TIMINGS and all(row.scaling for row in rows)
    return Findings(analyse(rows), applied(rows), command, Path(files[0]).parent if here else None)


# --- Sentences -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """The text about one series: its sentences, and each piece of advice with its commands."""

    title: str
    sentences: list[str]
    advice: list[tuple[str, list[str]]]


def sections(found: Findings) -> list[Section]:
    """Return a section for each series, then one for the advice that was tried."""
    every = []
    for series in found.series:
        suggested = [(size, advice) for size in series.sizes for advice in advise(size, series)]
        advice = [(_advice_words(*one), commands(found, series, *one)) for one in suggested]
        every.append(Section(series.title, sentences.of(series), advice))
    if found.applied:
        tried = [f"{plural(one.num_processes, 'process')}: {one.title}: {one.words}." for one in found.applied]
        every.append(Section("Advice that was tried: throughput with the advice over throughput without it", tried, []))
    return every


def _advice_words(size: Size, advice: Advice) -> str:
    different = "" if advice.same_training else "; a different training"
    gain = f"{advice.gain:.2f} times the throughput (predicted{different})"
    return f"Advice for {plural(size.num_processes, 'process')}: {advice.title}: {gain}: {advice.why}."


def commands(found: Findings, series: Series, size: Size, advice: Advice) -> list[str]:
    """Return the flags that the advice changes, and the `scale run --apply` command to try them.

    The command is included only if all timings come from one file of `scale run`. If the advice
    changes no flag, the list is empty.
    """
    flags = shlex.join(with_flags([], advice.flags))
    if not flags or found.measured_in is None:
        return [flags] if flags else []
    words = ["recipes", "scale", "run", "--apply", advice.key, "--num_processes", str(size.num_processes)]
    words += ["--recipe", series.recipe, "--scaling", series.scaling, "--name", series.name]
    return [flags, shlex.join([*words, "--output", str(found.measured_in)])]


def text(found: Findings) -> str:
    """Return the sections as plain text, for the terminal and performance_report.txt."""
    lines = [found.title, "", f"hardware: {found.hardware}"]
    for section in sections(found):
        lines += ["", section.title, "=" * len(section.title), *map(_wrapped, section.sentences)]
        for words, flags in section.advice:
            lines += [_wrapped(words), *(f"    {line}" for line in flags)]
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    return fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# --- Tables --------------------------------------------------------------------------------------


def tables(found: Findings) -> dict[str, DataFrame]:
    """Map captions to non-empty tables. Cells are text; units are in the headings or captions."""
    every: dict[str, DataFrame] = {}
    for series in found.series:
        every |= {
            series.title: results(series),
            f"{series.title}: parts of an optimizer step, ms": _step_parts(series),
            f"{series.title}: time lost in an optimizer step, ms": _lost_times(series),
        }
    return {caption: cells for caption, cells in every.items() if len(cells.columns) > 1}


def results(series: Series) -> DataFrame:
    """Return the table of times, speeds and efficiency: a row per world size, no empty columns."""
    sizes = series.sizes
    timed = sizes[0].typical.timed or "epoch"  # what epoch_time covers
    rates = [size.samples_per_second.median if size.samples_per_second else None for size in sizes]
    columns = {
        "repeats": [str(size.repeats) for size in sizes],
        f"{timed} (s)": [_with_quartiles(size.epoch_time) for size in sizes],
        "samples/s": [*map(_number, rates)],
        "tokens/s": [_number(size.tokens_per_second) for size in sizes],
        "speedup": [f"{size.speedup.median:.2f}" for size in sizes],
        "efficiency": [f"{size.efficiency.median:.1%}" for size in sizes],
        "band": [size.band or "reference" for size in sizes],
        "main cause": [CAUSES.get(key := size.cause or size.losses.undecided, key) for size in sizes],
        "accuracy": [_number(size.accuracy) for size in sizes],
    }
    return _table(series, columns)


def _step_parts(series: Series) -> DataFrame:
    """Return a table of the measured parts of a step, in milliseconds."""
    names = ("step_time", *PARTS, "data_wait_max")
    seconds = {name.replace("_", " "): [getattr(size.typical, name) for size in series.sizes] for name in names}
    return _table(series, {name: [*map(_milliseconds, column)] for name, column in seconds.items()})


def _lost_times(series: Series) -> DataFrame:
    """Return a table of the time that a step loses to each known cause, in milliseconds."""
    every = [size.losses for size in series.sizes]
    of_causes = [{cause.key: cause.seconds for cause in one.causes} for one in every]
    seconds = {title: [of_size.get(key) for of_size in of_causes] for key, title in CAUSES.items()}
    seconds |= {"lost in total": [one.lost for one in every], "unexplained": [one.unexplained for one in every]}
    return _table(series, {name: [*map(_milliseconds, column)] for name, column in seconds.items()})


def _table(series: Series, columns: dict[str, list[str]]) -> DataFrame:
    from pandas import DataFrame

    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return DataFrame({"processes": [str(size.num_processes) for size in series.sizes], **filled})


def _with_quartiles(spread: Spread) -> str:
    quartiles = "" if spread.low == spread.high else f" [{_number(spread.low)}, {_number(spread.high)}]"
    return _number(spread.median) + quartiles


def _number(value: float | None) -> str:
    """Format with four significant digits, from 1000 on without decimals; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".removesuffix(".")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{round(1000 * seconds, 3):.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


# --- The text and the page -----------------------------------------------------------------------


def _text(found: Findings, note: str) -> str:
    shown = [f"{caption}\n{cells.to_string(index=False)}" for caption, cells in tables(found).items()]
    return "\n\n".join(filter(None, [text(found), note, *shown, f"written by: {found.command}"])) + "\n"


def _page(found: Findings, pictures: Sequence[Picture], note: str) -> str:
    """Return one HTML page that sends no request and runs no script.

    All names that come from files or users are escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    look = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    look.filters["base64"] = lambda data: base64.b64encode(data).decode()
    known = {"sections": sections(found), "tables": tables(found)}
    return look.get_template("page.html").render(found=found, pictures=pictures, note=note, **known)


# --- For other programs --------------------------------------------------------------------------


def summary_csv(found: Findings) -> str:
    """Return a CSV: a row for each world size of each series, a column for each known value."""
    from pandas import DataFrame

    rows = [_flat(series, size) for series in found.series for size in series.sizes]
    cells = DataFrame(rows, dtype=object)  # with dtype object, counts stay whole numbers
    return cells.replace("", None).dropna(axis="columns", how="all").to_csv(index=False, lineterminator="\n")


def _flat(series: Series, size: Size) -> dict[str, object]:
    """Return the typical timing and the analysis of a world size as one dict, a row of the CSV."""
    found: dict[str, object] = vars(size.typical) | {"timed": size.typical.timed or "epoch"}
    found["serial_fraction"] = series.serial_fraction
    for name in ("repeats", "tokens_per_second", "band", "cause", "slower_than", "accuracy"):
        found[name] = getattr(size, name)
    for name in ("epoch_time", "samples_per_second", "speedup", "efficiency"):
        if spread := getattr(size, name):
            found |= {name: spread.median, f"{name}_low_quartile": spread.low, f"{name}_high_quartile": spread.high}
    losses = size.losses
    found |= {f"lost_to_{cause.key}": cause.seconds for cause in losses.causes}
    found |= {"lost": losses.lost, "unexplained": losses.unexplained, "undecided": losses.undecided}
    return found | {"best_size": series.best.num_processes, "verdict": sentences.verdict(size, series)}


def summary_tex(found: Findings) -> str:
    r"""Return a LaTeX table for each series. The rules are \hline, which needs no package."""
    lines = [r"% Include \input{summary_table.tex}; its tables are \ref{tab:scaling}, \ref{tab:scaling-2}, ..."]
    for number, series in enumerate(found.series, 1):
        cells = results(series).drop(columns=["repeats", "tokens/s", "main cause"], errors="ignore")
        style = cells.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
        style.set_table_styles([{"selector": f"{rule}rule", "props": ":hline;"} for rule in ("top", "mid", "bottom")])
        title = re.sub(r"([&%$#_{}])", r"\\\1", re.sub(r"[\\^~]", " ", series.title))
        caption = f"{title}: the median time, with quartiles in brackets if there are repeats. Speedup and efficiency "
        caption += "are relative to the smallest number of processes."
        label = f"tab:scaling-{number}" if number > 1 else "tab:scaling"
        place = {"column_format": "r" * len(cells.columns), "position": "htbp", "position_float": "centering"}
        table = style.to_latex(caption=caption, label=label, **place)
        lines.append(table.replace(r"\centering", r"\centering\footnotesize\setlength{\tabcolsep}{3pt}"))
    return "\n".join(lines)
