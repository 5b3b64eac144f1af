"""The report as sentences and tables, in one order for the terminal, the text and the page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from launch.scaling.run import TIMINGS
from recipes.scaling import sentences
from recipes.scaling.advice import Advice, Applied, advise, applied
from recipes.scaling.analyse import Series, Size, Spread, analyse, hardware_of
from recipes.scaling.causes import CAUSES
from recipes.scaling.timings import PARTS, Timing

if TYPE_CHECKING:
    from pandas import DataFrame

_WIDTH = 110  # of the text's lines


@dataclass(frozen=True)
class Findings:
    """The analysis of timings, and the command that asked for it.

    `measured_in` is the folder of `recipes scale run` that the timings come from, where advice can
    be tried. None if they come from elsewhere.
    """

    series: list[Series]
    applied: list[Applied]
    command: str
    measured_in: Path | None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(one.name for one in self.series))

    @property
    def title(self) -> str:
        return f"Scaling of {', '.join(self.names) or 'advice that was tried'}"

    @property
    def hardware(self) -> str:
        return hardware_of(self.series) or "not stated in the timings"


def find(rows: Sequence[Timing], command: str = "", files: Sequence[str] = ()) -> Findings:
    """The analysis of `rows`, which were read from `files`."""
    here = len(files) == 1 and Path(files[0]).name == TIMINGS and all(row.scaling for row in rows)
    return Findings(analyse(rows), applied(rows), command, Path(files[0]).parent if here else None)


# --- Sentences -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """The words about one series: sentences, and each advice with its commands."""

    title: str
    sentences: list[str]
    advice: list[tuple[str, list[str]]]


def sections(found: Findings) -> list[Section]:
    """Those of the series, then what was tried."""
    every = []
    for series in found.series:
        suggested = [(size, advice) for size in series.sizes for advice in advise(size, series)]
        advice = [(_advice_words(*one), commands(found, series, *one)) for one in suggested]
        every.append(Section(series.title, sentences.of(series), advice))
    if found.applied:
        tried = [f"At {one.num_processes}: {one.title}: {one.words}." for one in found.applied]
        every.append(Section("Advice that was tried: throughput after over throughput before", tried, []))
    return every


def _advice_words(size: Size, advice: Advice) -> str:
    different = "" if advice.same_training else "; a different training"
    gain = f"{advice.gain:.2f} times the throughput (predicted{different})"
    return f"Advice at {size.num_processes}: {advice.title}: {gain}: {advice.why}."


def commands(found: Findings, series: Series, size: Size, advice: Advice) -> list[str]:
    """The flags of an advice, and the command that tries them where it was measured.

    Empty if there are none.
    """
    processes = [f"--num_processes {advice.num_processes}"] if advice.num_processes != size.num_processes else []
    flags = " ".join(filter(None, [*processes, advice.shown_flags]))
    if not flags or found.measured_in is None:
        return [flags] if flags else []
    words = ["recipes", "scale", "run", "--apply", advice.key, "--num_processes", str(size.num_processes)]
    words += ["--recipe", series.recipe, "--scaling", series.scaling, "--name", series.name]
    return [flags, shlex.join([*words, "--output", str(found.measured_in)])]


def text(found: Findings) -> str:
    """The sections as plain text, for the terminal and the beginning of the text file."""
    lines = [found.title, "", f"hardware: {found.hardware}"]
    for section in sections(found):
        lines += ["", section.title, "=" * len(section.title), *map(_wrapped, section.sentences)]
        for words, flags in section.advice:
            lines += [_wrapped(words), *(f"    {line}" for line in flags)]
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    return fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# --- Tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """`cells` are text; their headings name each column with its unit."""

    caption: str
    cells: DataFrame


def tables(found: Findings) -> list[Table]:
    every = [make(series) for series in found.series for make in (results, step_parts, losses)]
    return [table for table in every if len(table.cells.columns) > 1]


def results(series: Series) -> Table:
    """A row for each world size; empty columns are left out."""
    sizes = series.sizes
    stretches = {size.typical.timed or "epoch" for size in sizes}  # what epoch_time covers
    timed = stretches.pop() if len(stretches) == 1 else "stretch"
    rates = [size.samples_per_second.median if size.samples_per_second else None for size in sizes]
    columns = {
        "repeats": [str(size.repeats) for size in sizes],
        f"{timed} (s)": [_with_quartiles(size.epoch_time) for size in sizes],
        "samples/s": [*map(_number, rates)],
        "tokens/s": [_number(size.tokens_per_second) for size in sizes],
        "speedup": [f"{size.speedup.median:.2f}" for size in sizes],
        "efficiency": [f"{size.efficiency.median:.1%}" for size in sizes],
        "band": [size.band or "reference" for size in sizes],
        "main cause": [CAUSES[size.cause] if size.cause else size.losses.undecided for size in sizes],
        "accuracy": [_number(size.accuracy) for size in sizes],
    }
    return _table(series.title, series, columns)


def step_parts(series: Series) -> Table:
    """The parts of a step, in milliseconds, where they were measured."""
    names = ("step_time", *PARTS, "data_wait_max")
    columns = {name.replace("_", " "): [getattr(size.typical, name) for size in series.sizes] for name in names}
    return _in_milliseconds(f"{series.title}: parts of an optimizer step, ms", series, columns)


def losses(series: Series) -> Table:
    """The time that a step loses to each cause, in milliseconds, where it is known."""
    every = [size.losses for size in series.sizes]
    seconds = [{cause.key: cause.seconds for cause in one.causes} for one in every]
    columns = {title: [of_size.get(key) for of_size in seconds] for key, title in CAUSES.items()}
    columns |= {"lost in total": [one.lost for one in every], "unexplained": [one.unexplained for one in every]}
    return _in_milliseconds(f"{series.title}: time lost in an optimizer step, ms", series, columns)


def _in_milliseconds(caption: str, series: Series, columns: dict[str, list[float | None]]) -> Table:
    return _table(caption, series, {name: [*map(_milliseconds, seconds)] for name, seconds in columns.items()})


def _table(caption: str, series: Series, columns: dict[str, list[str]]) -> Table:
    from pandas import DataFrame

    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return Table(caption, DataFrame({"processes": [str(size.num_processes) for size in series.sizes], **filled}))


def _with_quartiles(spread: Spread) -> str:
    quartiles = "" if spread.low == spread.high else f" [{_number(spread.low)}, {_number(spread.high)}]"
    return _number(spread.median) + quartiles


def _number(value: float | None) -> str:
    """Four significant digits, or all digits before the point; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".removesuffix(".")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{round(1000 * seconds, 3):.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
