"""How far the tokenizing is: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch.terminal import console, duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_SECONDS = 10
_QUICK_SECONDS = 1  # nobody waits for what is quicker, so nothing is said
_REFRESH_SECONDS = 0.2
_POLL_SECONDS = 0.2


class Progress:
    """What was tokenized since it was entered. `files` are read one after the other."""

    def __init__(self, name: str, files: list[str]) -> None:
        self.name = name
        self.rows = self.tokens = 0
        self._files = _Files(files)
        self._out = console()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        self._due = self._started + _QUICK_SECONDS
        if self._out.is_terminal:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            # Its own thread would be forked with the processes that tokenize.
            self._bar = Progress(*columns, console=self._out, transient=True, auto_refresh=False)
            self._bar.start()
            self._bar.add_task(f"tokenizing {self.name}", total=None)
        return self

    def add(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        now = time.monotonic()
        if now < self._due:
            return
        share = self._files.share_read()
        if self._bar:
            self._due = now + _REFRESH_SECONDS
            total = None if share is None else 1.0
            self._bar.update(self._bar.task_ids[0], description=self._text(), completed=share or 0, total=total)
            self._bar.refresh()
        else:
            self._due = now + _SECONDS
            part = "" if share is None else f", {share:.0%} of the files"
            self._out.print(f"{self._text()}{part}", highlight=False, markup=False)

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()
        seconds = time.monotonic() - self._started
        if seconds > _QUICK_SECONDS and error == (None, None, None):
            self._out.print(f"{self._text()}, in {duration(seconds)}", highlight=False, markup=False)

    def _text(self) -> str:
        speed = self.tokens / (time.monotonic() - self._started)
        counts = f"{self.rows:,} examples, {self.tokens / 1e6:,.1f} M tokens"
        return f"tokenizing {self.name}: {counts}, {speed:,.0f} tokens/s"


class _Files:
    """How much of some files this process has read, by its place in the one that it has open."""

    def __init__(self, files: list[str]) -> None:
        local = [file for file in files if os.path.isfile(file)]  # noqa: PTH113, an address is not a file
        sizes = [Path(file).stat().st_size for file in local]
        self._before = {os.path.realpath(file): sum(sizes[:number]) for number, file in enumerate(local)}
        self._total = sum(sizes) if len(local) == len(files) else 0
        self._read = 0

    def share_read(self) -> float | None:
        """None if unknown, as of data from the Hub. Linux only."""
        if not self._total or not os.path.isdir("/proc/self/fd"):  # noqa: PTH112
            return None
        for handle in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                before = self._before.get(str(handle.readlink()))
                if before is not None:
                    place = Path("/proc/self/fdinfo", handle.name).read_text().split()[1]
                    self._read = max(self._read, before + int(place))
        return min(1.0, self._read / self._total)


class Wait:
    """For another process that tokenizes. Who waits long is told what for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due = time.monotonic() + _QUICK_SECONDS

    def go_on(self) -> None:
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > self._due:
            self._due = float("inf")
            text = f"waiting for another process that reads the data: {self._folder}"
            console(os.environ.get("LOCAL_RANK", "0") == "0").print(text, highlight=False, markup=False)
