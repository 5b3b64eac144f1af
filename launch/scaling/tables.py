"""The tables of a scaling report for other programs: a CSV with every number, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
import unicodedata

from launch.scaling.words import Findings, number
from recipes.scaling.causes import CAUSES
from recipes.scaling.row import PARTS, to_columns
from recipes.scaling.verdicts import Series, Size, Spread, Verdict

# --- comprehensive_summary.csv -------------------------------------------------------------------


def summary_csv(found: Findings) -> str:
    """A row for each series and size, with the names and units of the timings."""
    rows = [_flat(series, *pair) for series in found.series for pair in zip(series.sizes, series.verdicts, strict=True)]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _flat(series: Series, size: Size, verdict: Verdict) -> dict[str, object]:
    seconds = {cause.key: cause.seconds for cause in verdict.causes}
    typical = to_columns(size.typical)
    names = ("samples", "global_batch", "micro_batch", "accumulation", "step_time", *PARTS, "loss", "peak_memory")
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
        **{name: typical[name] for name in names},
        **{f"lost_to_{key}": seconds.get(key) for key in CAUSES},
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
    headings = ["Processes", "Epoch (s)", *["Samples/s"] * samples, "Speedup", r"Efficiency (\%)"]
    headings += ["Accuracy"] * accuracy
    lines = [
        f"% Written by: {' '.join(found.command.split())}",
        r"% Include with \input{summary_table.tex}, refer to with \ref{tab:scaling}. Needs no package.",
        r"\begin{table}[htbp]",
        r"\centering",
        r"\caption{Scaling with the number of processes: the median time of an epoch, with quartiles in brackets where",
        r"it is repeated. Speedup and efficiency are relative to the smallest number of processes in each series.}",
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
