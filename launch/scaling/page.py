"""The scaling report as one HTML page that sends no request and runs no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from launch.scaling import words
from launch.scaling.plots import Picture


def page(found: words.Findings, pictures: Sequence[Picture], notes: Sequence[str] = ()) -> str:
    """The verdicts first, the pictures next, the tables after.

    Everything that a file or a user named is escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    tables = [make(series) for series in found.series for make in (words.results, words.step_parts, words.losses)]
    return environment.get_template("page.html").render(
        found=found,
        pictures=pictures,
        notes=notes,
        tried=words.tried(found),
        tables=[table for table in tables if table],
        also=words.also,
        commands=words.commands,
        gain_words=words.gain_words,
        serial_words=words.serial_words,
        suggestions=words.suggestions,
    )
