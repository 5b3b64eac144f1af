"""Results of the cases: one JSON file for each machine, and the tables made from it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.doctor.machine import driver
from launch.host.files import write_whole
from launch.output.record import code, cpu, versions
from recipes.run import hardware
from tests.gpu.cases import Case

OK, OUT_OF_MEMORY, NOT_RUN = "ok", "out of memory", "not run: budget"

# One table for each group of cases: heading, name of the figure and format of each column.
COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    "doctor": [("checks", "checks", ""), ("not ok", "wrong", ""), ("matrix product", "matrices", ""),
               ("CUDA context", "CUDA context", ""), ("PCIe", "PCIe", ""), ("CPU Adam", "CPU Adam", "")],
    "speed": [("tokens/s", "tokens_per_second", ",.0f"), ("MFU", "mfu", ".1%"), ("step ms", "step_ms", ",.1f"),
              ("peak GiB", "peak_gib", ".2f"), ("start s", "start_s", ".1f"), ("parts of a step, ms", "parts", "")],
    "memory": [("planned GiB", "planned_gib", ".4g"), ("allocated GiB", "allocated_gib", ".4g"),
               ("reserved GiB", "reserved_gib", ".4g"), ("difference", "difference", "+.1%"),
               ("holds with the margin", "holds", ""), ("note", "not_planned", "")],
    "fit": [("micro-batch", "micro_batch", ""), ("accumulation", "accumulation", ""),
            ("peak GiB", "peak_gib", ".2f"), ("planned GiB", "planned_gib", ".2f"), ("tried", "tried", "")],
}  # fmt: skip


class Results:
    """FOLDER/HARDWARE.json and .md: the machine, the newest call and a row for each case.

    Each is written again with every row, so that nothing is lost when a lease ends.
    """

    def __init__(self, folder: Path, command: str, time: str, cases: Sequence[Case], rehearse: bool) -> None:
        found = "CPU rehearsal" if rehearse else str(hardware.read())
        self.file = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', found)}.json"
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        machine = {"hardware": found, "cpu": cpu(), "driver": driver()[0], "versions": versions(), "code": code()}
        self.content = {**machine, "command": command, "time": time, "rows": before.get("rows", {})}
        self.cases = cases

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return self.content["rows"]

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        write_whole(self.file, json.dumps(self.content, indent=1).encode())
        self.file.with_suffix(".md").write_text(self.tables())

    def tables(self) -> str:
        """Markdown: the machine and the command, then a table for each group of cases."""
        known = [f"{name} {version}" for name, version in self.content["versions"].items() if version]
        parts = [
            f"{', '.join([self.content['hardware'], *known])}\n\n`{self.content['command']}`, {self.content['time']}"
        ]
        for group, columns in COLUMNS.items():
            heads = [group, *(heading for heading, _, _ in columns), "status", "seconds"]
            rows = [self._cells(case, columns) for case in self.cases if case.group == group]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows]))
        return "\n\n".join(parts) + "\n"

    def _cells(self, case: Case, columns: Sequence[tuple[str, str, str]]) -> list[str]:
        row = self.rows.get(case.name, {"status": NOT_RUN})
        figures = [row.get("figures", {}).get(name) for _, name, _ in columns]
        shown = ["" if value is None else format(value, kind[2]) for value, kind in zip(figures, columns, strict=True)]
        return [case.name, *shown, row["status"].replace("|", "/"), format(row.get("seconds", 0), ".0f")]
