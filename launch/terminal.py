"""Output for people: the console of one rank, tables, problems, and numbers with their units.

`rich` and `recipes.legal` are imported only where needed: quick commands print only numbers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from recipes.errors import Problem
from recipes.errors import plural as plural

if TYPE_CHECKING:
    from rich.console import Console

    from recipes.run import Settings

_WIDTH = 120


# --- Numbers -------------------------------------------------------------------------------------


def memory_size(size_bytes: float) -> str:
    """Format bytes of memory or disk in powers of two: `512.0 MiB`, `1.50 GiB`."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def duration(seconds: float) -> str:
    """Format seconds with about three digits, as no timing is more exact: `12.3 ms`, `125 s`."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000, "ms")
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def value_text(value: object) -> str:
    """Format a setting's value as a user types it: text without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def schedule(run: Settings) -> str:
    """Return the settings of the learning-rate schedule, the run's length and max_length."""
    from recipes import legal

    warmup = run["warmup_steps"] * (run["lr_scheduler_type"] not in legal.names("schedules_without_warmup"))
    warm_up = f"warm-up of {warmup:.0%}" if 0 < warmup < 1 else f"warm-up of {plural(int(warmup), 'step')}"
    steps = run["max_steps"]
    length = f"max_steps {steps}" if steps > 0 else f"num_train_epochs {run['num_train_epochs']:g}"
    rate = f"learning_rate {run['learning_rate']:g}, {run['lr_scheduler_type']}"
    return f"{rate}, {warm_up if warmup else 'no warm-up'}, {length}, max_length {run['max_length']}"


# --- Printing ------------------------------------------------------------------------------------


def finish_printing() -> None:
    """Flush stdout. If no reader is left, drop the output: else Python would exit with 120."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(is_main: bool = True, stderr: bool = False) -> Console:
    """Return a console that prints only if `is_main` is true. Output to a file or a pipe is not
    wrapped at 80 columns, and a `:b:` in a file's name does not become an emoji.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wraps = stream.isatty()
    width = None if wraps else _WIDTH
    return Console(file=stream, quiet=not is_main, width=width, soft_wrap=not wraps, emoji=False)


def print_table(headings: list[str], rows: list[list[str]], stderr: bool = False, whole: bool = False) -> None:
    """Print a table. The first column holds names to copy, and is never cut.

    Other cells may be cut to fit the terminal. With `whole`, or if the output goes to a file or a
    pipe, every cell stays whole, and a line may be wider than the terminal.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    longest = max((len(row[0]) for row in rows), default=0)
    for heading in headings:
        table.add_column(heading, min_width=0 if table.columns else longest)
    for row in rows:
        table.add_row(*row)
    out = console(stderr=stderr)
    if whole or not out.file.isatty():  # print(width=...) would be limited to the console's own width
        out.width = max(out.width, out.measure(table, options=out.options.update(max_width=10_000)).maximum)
    out.print(table, highlight=False, markup=False)


def print_problems(problems: Iterable[Problem], out: Console) -> None:
    """Print one line per problem: what is wrong, where the value came from, and the fix."""
    for problem in problems:
        _print_labelled(problem.severity, "red" if problem.severity == "error" else "yellow", str(problem), out)


def print_progress(text: str, out: Console) -> None:
    """Print the current work of a command, so that the command is not silent for many seconds."""
    out.print(f"{text} ...", style="dim", highlight=False, markup=False)


def print_note(text: str, out: Console) -> None:
    """Print a line, labelled `note`, that the user should read."""
    _print_labelled("note", "yellow", text, out)


def _print_labelled(label: str, colour: str, text: str, out: Console) -> None:
    from rich.text import Text

    out.print(Text.assemble((label, colour), f"  {text}"), highlight=False)
