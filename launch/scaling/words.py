"""The sentences and tables of a scaling report, for the terminal, the text and the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.scaling.run import TIMINGS
from launch.terminal import plural
from recipes.scaling.advice import Advice, Applied, advise, applied
from recipes.scaling.causes import CAUSES
from recipes.scaling.laws import Law
from recipes.scaling.pairing import paired
from recipes.scaling.row import PARTS, Timing
from recipes.scaling.sizes import Size, Spread, Verdict
from recipes.scaling.verdicts import Series, analyse

_FAR = 10  # times the measured sizes: a limit further away would be a guess


@dataclass(frozen=True)
class Findings:
    """The analysis of timings, and the command that asked for it.

    `measured_in` is the folder of `recipes scale run` that the timings come from, where advice can
    be tried. None if they come from elsewhere.
    """

    rows: Sequence[Timing]
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
        named = dict.fromkeys(row.setup.hardware for row in self.rows if row.setup.hardware)
        return "; ".join(named) or "not stated in the timings"


def find(rows: Sequence[Timing], command: str = "", files: Sequence[str] = ()) -> Findings:
    """The analysis of `rows`, which were read from `files`."""
    folders = [Path(file).parent for file in files if Path(file).name == TIMINGS]
    by_jobs = any(not row.scaling for row in rows)
    measured_in = folders[0] if len(files) == len(folders) == 1 and not by_jobs else None
    rows = paired(rows)
    return Findings(rows, analyse(rows), applied(rows), command, measured_in)


@dataclass(frozen=True)
class Table:
    """`rows` of text; `headings` name each column with its unit."""

    caption: str
    headings: list[str]
    rows: list[list[str]]

    def numeric(self, column: int) -> bool:
        return all(row[column] == "" or row[column][0].isdigit() for row in self.rows)


# --- Sentences -----------------------------------------------------------------------------------


def serial_words(series: Series) -> str:
    """The law that the speedups follow and what follows from it, or why there is none."""
    smallest, largest = series.sizes[0].num_processes, series.sizes[-1].num_processes
    if series.scaling == "weak":
        return "No serial fraction: Amdahl's law describes a fixed amount of work, not weak scaling."
    law = series.law
    if law is None:
        return "No serial fraction: Amdahl's law describes a fixed amount of work, and these sizes differ in samples."
    if law.kind == "unknown":
        return f"No serial fraction: Amdahl's law needs at least three world sizes, and there are {len(series.sizes)}."
    if law.kind == "turns":
        return _turn_words(series, law)
    if law.serial is None:
        first, last = (f"{share:.1%}" for share in (law.karp_flatt[0], law.karp_flatt[-1]))
        grows = "overhead grows with the processes" if law.kind == "growing overhead" else "it is not level"
        return (
            "No serial fraction: Amdahl's law does not describe these sizes. The fraction of Karp and Flatt goes from "
            f"{first} at {series.sizes[1].num_processes} to {last} at {largest} processes: {grows}."
        )
    if law.serial == 0:
        return f"No serial fraction is visible in {len(series.sizes)} world sizes (Amdahl's law)."
    words = f"Serial fraction {law.serial:.1%} (Amdahl's law, {len(series.sizes)} world sizes)"
    if 1 / law.serial > _FAR * largest / smallest:
        return f"{words}: too small for a limit to follow from sizes up to {largest}."
    return (
        f"{words}: that part of the time on {plural(smallest, 'process')} does not shrink, so no number of processes "
        f"can be more than {1 / law.serial:.3g} times as fast."
    )


def _turn_words(series: Series, law: Law) -> str:
    best = next(size for size in series.sizes if size.num_processes == law.best)
    text = "No serial fraction: Amdahl's law does not describe these sizes, since more processes are slower. "
    text += f"Of the measured sizes {law.best} is the best, {best.speedup.median:.2f} times as fast as "
    text += f"{series.sizes[0].num_processes}"
    if law.peak is None:
        return f"{text}."
    return f"{text}; the universal scalability law, fitted, is highest at {law.peak:.3g} processes."


def also(verdict: Verdict) -> list[str]:
    """The causes besides the main one that are worth naming."""
    return [f"Also {CAUSES[cause.key]}: {cause.evidence}." for cause in verdict.named[1:]]


def suggestions(series: Series) -> list[tuple[Size, Advice]]:
    """The advice at each world size, the best first."""
    return [(size, advice) for size in series.sizes for advice in advise(size, series)]


def gain_words(advice: Advice) -> str:
    different = "" if advice.same_training else "; a different training"
    return f"{advice.gain:.2f} times the throughput (predicted{different})"


def commands(found: Findings, series: Series, size: Size, advice: Advice) -> list[str]:
    """The flags of an advice, and the command that tries them where it was measured.

    Empty if there are none.
    """
    processes = ["--num_processes", str(advice.num_processes)] if advice.num_processes != size.num_processes else []
    flags = " ".join([*processes, *filter(None, [advice.shown_flags])])
    if not flags or found.measured_in is None:
        return [flags] if flags else []
    words = ["recipes", "scale", "run", "--apply", advice.key, "--num_processes", str(size.num_processes)]
    words += ["--recipe", series.recipe, "--scaling", series.scaling, "--name", series.name]
    return [flags, shlex.join([*words, "--output", str(found.measured_in)])]


def summary(found: Findings) -> str:
    """For the terminal: the verdicts and the best advice at each world size."""
    lines = []
    for series in found.series:
        lines += [series.title, *(f"  {verdict.words}" for verdict in series.verdicts), f"  {serial_words(series)}"]
        best = {size.num_processes: (size, advice) for size, advice in reversed(suggestions(series))}
        for world, (size, advice) in sorted(best.items()):
            lines.append(f"  advice at {world}: {advice.title}: {gain_words(advice)}")
            lines += [f"    {words}" for words in commands(found, series, size, advice)]
        lines.append("")
    for tried in found.applied:
        lines += [f"tried at {tried.num_processes}: {tried.title}:", f"  {tried.words}"]
    return "\n".join(lines).rstrip()


def timed(series: Series) -> str:
    """What `epoch_time` covers: "epoch", "20 steps", "1000 samples"; "stretch" if sizes differ."""
    found = {size.typical.timed or "epoch" for size in series.sizes}
    return found.pop() if len(found) == 1 else "stretch"


# --- Tables --------------------------------------------------------------------------------------


def results(series: Series) -> Table:
    """A row for each world size; empty columns are left out."""
    columns: dict[str, Callable[[Size, Verdict], str]] = {
        "processes": lambda size, _: str(size.num_processes),
        "repeats": lambda size, _: str(size.repeats),
        f"{timed(series)} (s)": lambda size, _: number(size.epoch_time.median),
        "quartiles (s)": lambda size, _: _quartiles(size),
        "samples/s": lambda size, _: number(size.samples_per_second.median if size.samples_per_second else None),
        "tokens/s": lambda size, _: number(size.tokens_per_second),
        "speedup": lambda size, _: f"{size.speedup.median:.2f}",
        "efficiency": lambda size, _: f"{size.efficiency.median:.1%}",
        "band": lambda _, verdict: verdict.band or "reference",
        "main cause": lambda _, verdict: CAUSES[verdict.cause] if verdict.cause else "",
        "accuracy": lambda size, _: number(size.accuracy),
    }
    pairs = list(zip(series.sizes, series.verdicts, strict=True))
    return _filled(series.title, {name: [cell(*pair) for pair in pairs] for name, cell in columns.items()})


def step_parts(series: Series) -> Table | None:
    """The parts of a step, in milliseconds; None if they were not measured."""
    sizes = [size for size in series.sizes if size.typical.parts.known()]
    if not sizes:
        return None
    columns = {"processes": [str(size.num_processes) for size in sizes]}
    columns["step"] = [_milliseconds(size.typical.step_time) for size in sizes]
    columns["p50"] = [_milliseconds(size.typical.step_p50) for size in sizes]
    columns["p99"] = [_milliseconds(size.typical.step_p99) for size in sizes]
    for part in PARTS:
        columns[part.replace("_", " ")] = [_milliseconds(size.typical.parts.known().get(part)) for size in sizes]
    columns["longest data wait"] = [_longest_wait(size.typical) for size in sizes]
    return _filled(f"{series.title}: parts of an optimizer step, ms", columns)


def _longest_wait(row: Timing) -> str:
    """Of the process that waits most for data, with its rank if it is the same in every repeat."""
    if row.num_processes == 1 or not row.data_wait_max:
        return ""
    rank = row.slowest.data_rank if row.slowest else None
    return _milliseconds(row.data_wait_max) + ("" if rank is None else f" (rank {rank})")


def losses(series: Series) -> Table | None:
    """The time that a step loses to each cause, in milliseconds; None if no losses are known."""
    verdicts = [verdict for verdict in series.verdicts if verdict.causes or verdict.bound]
    if not verdicts:
        return None
    columns = {"processes": [str(verdict.num_processes) for verdict in verdicts]}
    for key, title in CAUSES.items():
        of_key = [{cause.key: cause.seconds for cause in verdict.causes}.get(key) for verdict in verdicts]
        columns[title] = [_milliseconds(seconds) for seconds in of_key]
    bounds = [verdict.bound.seconds if verdict.bound else None for verdict in verdicts]
    columns["at most communication, contention, stragglers"] = [_milliseconds(seconds) for seconds in bounds]
    columns["lost in total"] = [_milliseconds(verdict.lost) for verdict in verdicts]
    columns["unexplained"] = [_milliseconds(verdict.unexplained) for verdict in verdicts]
    return _filled(f"{series.title}: time lost in an optimizer step, ms", columns)


def tried(found: Findings) -> Table | None:
    """Predicted and measured throughput for advice that was tried; None if none was."""
    if not found.applied:
        return None
    headings = ["change", "processes", "predicted throughput (times)", "measured (times, quartiles)", "prediction"]
    rows = [
        [one.title, str(one.num_processes), f"{one.predicted:.2f}", _with_quartiles(one.measured, ".2f"), one.judged]
        for one in found.applied
    ]
    return Table("Advice that was tried: throughput after over throughput before", headings, rows)


def _filled(caption: str, columns: dict[str, list[str]]) -> Table:
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    return Table(caption, list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def _quartiles(size: Size) -> str:
    if size.repeats == 1:
        return ""
    return f"{number(size.epoch_time.low)} to {number(size.epoch_time.high)}"


def _with_quartiles(spread: Spread, form: str) -> str:
    if spread.low == spread.high:
        return f"{spread.median:{form}}"
    return f"{spread.median:{form}} ({spread.low:{form}} to {spread.high:{form}})"


def number(value: float | None) -> str:
    """Four significant digits, or all digits before the point; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".removesuffix(".")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{round(1000 * seconds, 3):.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
