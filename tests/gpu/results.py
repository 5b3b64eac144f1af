"""Results of the cases: one line of JSON each, and the tables made from these lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.cases import Case
from tests.gpu.machine import in_words

OK, OUT_OF_MEMORY, LATE, NOT_RUN = "ok", "out of memory", "over its deadline", "not run: budget"

Row = dict[str, Any]

# One table for each group of cases: heading, name of the figure and format of each column.
COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    "doctor": [("checks", "checks", ""), ("warnings", "warnings", ""), ("failed", "failed", ""),
               ("matrix product", "matrices", ""), ("CUDA context", "context", ""), ("PCIe", "pcie", ""),
               ("CPU Adam", "adam", "")],
    "speed": [("tokens/s", "tokens_per_second", ",.0f"), ("MFU", "mfu", ".1%"), ("step ms", "step_ms", ",.1f"),
              ("compile s", "compile_s", ".1f"), ("allocated GiB", "allocated_gib", ".2f"),
              ("reserved GiB", "reserved_gib", ".2f")],
    "memory": [("planned GiB", "planned_gib", ".4g"), ("allocated GiB", "allocated_gib", ".4g"),
               ("reserved GiB", "reserved_gib", ".4g"), ("difference", "difference", "+.1%"),
               ("holds with the margin", "holds", "")],
    "parts of a step": [("step ms", "step_time_ms", ",.1f"), ("data wait", "data_wait_ms", ",.1f"),
                        ("forward", "forward_ms", ",.1f"), ("backward", "backward_ms", ",.1f"),
                        ("communication", "communication_ms", ",.1f"), ("optimizer", "optimizer_ms", ",.1f"),
                        ("logging", "logging_ms", ",.1f"), ("saving", "saving_ms", ",.1f"),
                        ("other", "other_ms", ",.1f"), ("overhead of a pass", "pass_overhead_ms", ",.1f"),
                        ("peak GiB", "peak_gib", ".2f")],
    "fit": [("micro-batch", "micro_batch", ""), ("accumulation", "accumulation", ""),
            ("peak GiB", "peak_gib", ".2f"), ("planned GiB", "planned_gib", ".2f"),
            ("tried", "tried", "")],
}  # fmt: skip


class Results:
    """results.jsonl and results.md of a folder.

    `last` is the newest row of each case by its name. `call` says when, where and by which command
    the newest of them was measured.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "results.jsonl"
        self.last: dict[str, Row] = {}
        self.call: Row = {}
        self._newest_call: Row = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            row = json.loads(line)
        except ValueError:  # the call was killed while it wrote this line
            return
        if "case" in row:
            self.last[row["case"]], self.call = row, self._newest_call
        else:
            self._newest_call = row

    def add(self, row: Row) -> None:
        """Append a row: of a case, or about the call that measures the next ones."""
        line = json.dumps(row)
        before = self.file.read_text() if self.file.exists() else ""
        cut_off = before != "" and not before.endswith("\n")
        with self.file.open("a") as stream:
            stream.write("\n" * cut_off + line + "\n")
        self._take(line)

    def write_tables(self, cases: Sequence[Case]) -> str:
        """Write results.md, and return its text."""
        text = tables(cases, self.last, self.call)
        (self.folder / "results.md").write_text(text)
        return text


def tables(cases: Sequence[Case], rows: dict[str, Row], call: Row) -> str:
    """Markdown: the machine and the command, then a table for each group of cases."""
    parts = [f"{in_words(call['machine'])}\n\n`{call['command']}`, {call['time']}"] if call else []
    for group in dict.fromkeys(case.group for case in cases):
        found = [rows.get(case.name, {"case": case.name, "status": "not run"}) for case in cases if case.group == group]
        parts.append(_table(group, found))
    return "\n\n".join(parts) + "\n"


def _table(group: str, rows: Sequence[Row]) -> str:
    noted = any(row.get("figures", {}).get("note") for row in rows)
    columns = COLUMNS[group] + [("note", "note", "")] * noted
    heads = [group, *(heading for heading, _, _ in columns), "status", "seconds"]
    lines = [heads, ["---"] * len(heads), *(_cells(row, columns) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    figures = row.get("figures", {})
    shown = [_shown(figures.get(name), kind) for _, name, kind in columns]
    seconds = f"{row['seconds']:.0f}" if row.get("seconds") is not None else ""
    again = f" (attempt {row['attempt']})" if row.get("attempt", 1) > 1 else ""
    return [row["case"], *shown, row["status"].replace("|", "/") + again, seconds]


def _shown(value: Any, kind: str) -> str:
    return "" if value is None else format(value, kind)
