"""The tables of a scaling report for other programs: a CSV with every number, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Callable

from launch.scaling.words import Findings, number, serial_words, timed
from recipes.scaling.causes import CAUSES
from recipes.scaling.row import PARTS, to_columns
from recipes.scaling.sizes import NEGATIVE, UNCLEAR, Size, Spread, Verdict
from recipes.scaling.verdicts import Series

# --- comprehensive_summary.csv -------------------------------------------------------------------


def summary_csv(found: Findings) -> str:
    """A row for each series and size, with the names and units of the timings."""
    rows = [_flat(series, *pair) for series in found.series for pair in zip(series.sizes, series.verdicts, strict=True)]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _harmless(value: object) -> object:
    """Text that a spreadsheet would run as a formula, as text: behind an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _flat(series: Series, size: Size, verdict: Verdict) -> dict[str, object]:
    seconds = {cause.key: cause.seconds for cause in verdict.causes}
    typical = to_columns(size.typical)
    names = ["samples", "global_batch", "micro_batch", "accumulation", "step_time", "step_p50", "step_p99", *PARTS]
    names += ["loss", "peak_memory", "other_load", "slowest_rank", "slowest_host", "slowest_device", "data_wait_rank"]
    return {
        "name": series.name,
        "recipe": series.recipe,
        "scaling": series.scaling,
        "num_processes": size.num_processes,
        "repeats": size.repeats,
        "timed": typical["timed"] or "epoch",
        **_spread("epoch_time", size.epoch_time),
        **_spread("samples_per_second", size.samples_per_second),
        "tokens_per_second": size.tokens_per_second,
        **_spread("speedup", size.speedup),
        **_spread("efficiency", size.efficiency),
        "band": verdict.band,
        "cause": verdict.cause,
        "undecided": verdict.undecided,
        "slower_than": verdict.slower_than,
        "accuracy": size.accuracy,
        "serial_fraction": series.serial_fraction,
        "law": series.law.kind if series.law else None,
        "best_size": series.law.best if series.law else None,
        **{name: typical[name] for name in names},
        **{f"lost_to_{key}": seconds.get(key) for key in CAUSES},
        "bound_on_communication": verdict.bound.seconds if verdict.bound else None,
        "lost": verdict.lost,
        "unexplained": verdict.unexplained,
        "engine": typical["engine"],
        "hardware": typical["hardware"],
        "verdict": verdict.words,
    }


def _spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    numbers = (spread.median, spread.low, spread.high) if spread else (None, None, None)
    return dict(zip((name, f"{name}_low_quartile", f"{name}_high_quartile"), numbers, strict=True))


# --- summary_table.tex ---------------------------------------------------------------------------

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
# Combining marks as LaTeX accents, which every font encoding has.
_ACCENTS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u030c": "v", "\u0327": "c"}


def tex_escaped(name: str) -> str:
    """Text for LaTeX's own fonts; a character that they lack becomes its number, [U+6A21]."""
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
    """A table for a paper: the series below each other, each under its title."""
    accuracy = any(size.accuracy is not None for series in found.series for size in series.sizes)
    samples = any(size.samples_per_second for series in found.series for size in series.sizes)
    stretches = {timed(series) for series in found.series}
    stretch = tex_escaped(stretches.pop().capitalize()) if len(stretches) == 1 else "Time"
    headings = ["Processes", f"{stretch} (s)", *["Samples/s"] * samples, "Speedup", r"Efficiency (\%)"]
    headings += ["Accuracy"] * accuracy
    lines = [
        f"% Written by: {' '.join(found.command.split())}",
        r"% Include with \input{summary_table.tex}, refer to with \ref{tab:scaling}. Needs no package.",
        r"\begin{table}[htbp]",
        r"\centering",
        r"\caption{Scaling with the number of processes: the median time, with quartiles in brackets where",
        r"it is repeated. Speedup and efficiency are relative to the smallest number of processes in each series.",
        *_marks_explained(found),
        r"}",
        r"\label{tab:scaling}",
        r"\small\setlength{\tabcolsep}{4pt}",
        rf"\begin{{tabular}}{{{'r' * len(headings)}}}",
        r"\hline",
        " & ".join(headings) + r" \\",
    ]
    for series in found.series:
        title = rf"\multicolumn{{{len(headings)}}}{{p{{0.7\linewidth}}}}{{{tex_escaped(series.title)}}}"
        lines += [r"\hline", title + r" \\"]
        lines += [
            " & ".join(_tex_cells(size, verdict, samples, accuracy)) + r" \\"
            for size, verdict in zip(series.sizes, series.verdicts, strict=True)
        ]
        sentences = [*(verdict.words for verdict in series.verdicts), serial_words(series)]
        lines += [f"% {' '.join(sentence.split())}" for sentence in sentences]
    return "\n".join([*lines, r"\hline", r"\end{tabular}", r"\end{table}", ""])


# What the text says of a size in words, in LaTeX as a mark behind its efficiency.
_MARKS: dict[str, tuple[Callable[[Verdict], bool], str]] = {
    r"\dag": (lambda verdict: verdict.band == NEGATIVE, "slower than a smaller number of processes"),
    r"\ddag": (lambda verdict: verdict.undecided == "noise", "repeats differ by more than the effect"),
    r"\S": (lambda verdict: verdict.band == UNCLEAR, "perhaps not weak scaling: the samples are unknown"),
}


def _marks(verdict: Verdict) -> str:
    return "".join(mark for mark, (holds, _) in _MARKS.items() if holds(verdict))


def _marks_explained(found: Findings) -> list[str]:
    every = [verdict for series in found.series for verdict in series.verdicts]
    return [f"{mark}{{}}: {words}." for mark, (holds, words) in _MARKS.items() if any(map(holds, every))]


def _tex_cells(size: Size, verdict: Verdict, samples: bool, accuracy: bool) -> list[str]:
    epoch = size.epoch_time
    quartiles = f" [{number(epoch.low)}, {number(epoch.high)}]" if size.repeats > 1 else ""
    cells = [str(size.num_processes), number(epoch.median) + quartiles]
    if samples:
        cells.append(number(size.samples_per_second.median if size.samples_per_second else None))
    cells += [f"{size.speedup.median:.2f}", f"{size.efficiency.median:.1%}".removesuffix("%") + _marks(verdict)]
    return [*cells, number(size.accuracy)] if accuracy else cells
