"""The scaling report as one HTML page that holds all it shows: it asks no one for anything, and runs nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from launch.scaling.plots import Picture
from launch.scaling.words import (
    Findings,
    Table,
    also,
    commands,
    gain_words,
    losses,
    results,
    serial_words,
    step_parts,
    suggestions,
    tried,
)
from recipes.scaling.advice import Advice
from recipes.scaling.verdicts import Series, Size

_STYLE = """
:root { color-scheme: light dark; --line: #ccc; --soft: #f3f3f3; }
@media (prefers-color-scheme: dark) { :root { --line: #555; --soft: #222; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
figure { margin: 1.5rem 0; break-inside: avoid; }
img { max-width: 100%; height: auto; background: white; }
figcaption, footer { font-size: 0.9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1.5rem 0; font-size: 0.9rem; break-inside: avoid; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.3rem; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { background: var(--soft); vertical-align: bottom; }
code { overflow-wrap: anywhere; background: var(--soft); padding: 0.1rem 0.3rem; }
@media print { body { max-width: none; margin: 0; font-size: 11pt; } .wide { overflow: visible; } }
"""


def page(found: Findings, pictures: Sequence[Picture], notes: Sequence[str] = ()) -> str:
    """The verdicts first, the pictures next, the tables after. Everything that a file or a user named is escaped."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    tables = [table for series in found.series for table in (results(series), step_parts(series), losses(series))]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(found.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(found.title)}</h1>\n<p>Hardware: {escape(found.hardware)}</p>",
            "<h2>Verdicts</h2>",
            *(_verdicts(found, series) for series in found.series),
            _table(tried(found)),
            "<h2>Pictures</h2>" if pictures else "",
            *map(_figure, pictures),
            *(f"<p>{escape(note)}</p>" for note in notes),
            "<h2>Tables</h2>",
            *map(_table, tables),
            f"</main>\n<footer>Written by <code>{escape(found.command)}</code></footer>\n</body>\n</html>\n",
        ]
    )


def _verdicts(found: Findings, series: Series) -> str:
    said = [" ".join([verdict.words, *also(verdict)]) for verdict in series.verdicts]
    parts = [f"<h3>{escape(series.title)}</h3>", _list(map(escape, said)), f"<p>{escape(serial_words(series))}</p>"]
    advice = [_advice(size, one, commands(found, series, size, one)) for size, one in suggestions(series)]
    return "\n".join([*parts, *(["<h4>Advice</h4>", _list(advice)] if advice else [])])


def _advice(size: Size, advice: Advice, words: Iterable[str]) -> str:
    why = f"{escape(gain_words(advice))}: {escape(advice.why)}."
    told = f"At {size.num_processes}: <strong>{escape(advice.title)}</strong>: {why}"
    return told + "".join(f"<br><code>{escape(line)}</code>" for line in words)


def _list(items: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    image = f'<img alt="{escape(picture.alt)}" src="data:image/png;base64,{data}">'
    return f"<figure>\n{image}\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"


def _table(table: Table | None) -> str:
    if table is None:
        return ""
    aligned = [' class="number"' if table.numeric(place) else "" for place in range(len(table.headings))]
    heads = "".join(
        f'<th scope="col"{look}>{escape(cell)}</th>' for cell, look in zip(table.headings, aligned, strict=True)
    )
    rows = [_row(row, aligned) for row in table.rows]
    body = f"<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>"
    return f'<div class="wide">\n<table>\n<caption>{escape(table.caption)}</caption>\n{body}\n</table>\n</div>'


def _row(cells: Sequence[str], aligned: Sequence[str]) -> str:
    first, *others = [f"{look}>{escape(cell)}" for cell, look in zip(cells, aligned, strict=True)]
    return f'<tr><th scope="row"{first}</th>' + "".join(f"<td{cell}</td>" for cell in others) + "</tr>"
