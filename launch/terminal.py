"""Where a person reads: the console of one rank, tables, and problems, one line each."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes.errors import Problem

_WIDTH = 110


def console(is_main: bool = True, stderr: bool = False) -> Console:
    """Where rank 0 prints. Output to a file or a pipe is not wrapped at 80 columns."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, quiet=not is_main, width=None if stream.isatty() else _WIDTH, soft_wrap=not stream.isatty()
    )


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """Names and what there is to say of them. Names are to be copied: they are never cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    longest = max((len(row[0]) for row in rows), default=0)
    for heading in headings:
        table.add_column(heading, min_width=0 if table.columns else longest)
    for row in rows:
        table.add_row(*row)
    console().print(table, highlight=False, markup=False)


def print_problems(problems: Iterable[Problem], out: Console) -> None:
    """One line a problem: what, where from, and the fix."""
    for problem in problems:
        colour = "red" if problem.severity == "error" else "yellow"
        out.print(f"[{colour}]{problem.severity}[/{colour}]  {escape(str(problem))}", highlight=False)
