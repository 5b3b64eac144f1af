"""All that a training's folder held and had flushed, moment by moment, and what a crash leaves.

`traced` runs train.py through this file as a script, which notes both before each file there is
opened, renamed or removed, and around each flush.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import runpy
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
Names = dict[int, dict[str, int]]  # of each folder by its inode: the inodes of its names


@dataclass(frozen=True)
class Moment:
    """Of folders `there` has the names that programs see, and `flushed` those that are on the disk
    for sure; `copies` are those that were made of files when they were flushed.
    """

    event: str
    root: int
    there: Names
    flushed: Names
    copies: dict[int, Path]

    def crash(self, folder: Path, chance: random.Random | None = None) -> None:
        """Write into `folder` what a crash leaves now: what was flushed and, where `chance` says
        so, names that were not. Of files it leaves nothing that was not flushed, or zeros.
        """
        self._write(self.root, folder, chance)

    def _write(self, inode: int, path: Path, chance: random.Random | None) -> None:
        if inode in self.flushed:  # a folder
            path.mkdir()
            names = self.there.get(inode, {}) if chance and chance.random() < 0.5 else self.flushed[inode]
            for name, child in names.items():
                self._write(child, path / name, chance)
        elif inode in self.copies:
            os.link(self.copies[inode], path)
        else:
            path.write_bytes(bytes(chance.choice((0, 5000)) if chance else 0))


def traced(script: Path, flags: list[str], output: Path, folder: Path) -> list[Moment]:
    """Train into `output`. Returns its moments that differ, in order."""
    folder.mkdir()
    command = [sys.executable, __file__, str(folder), str(output), str(script), *flags, "--output_dir", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    moments = [Moment(*one) for one in pickle.loads((folder / "moments").read_bytes())]
    return [one for one, before in zip(moments, [None, *moments], strict=False) if _differ(one, before)]


def _differ(one: Moment, before: Moment | None) -> bool:
    return before is None or (one.there, one.flushed, one.copies) != (before.there, before.flushed, before.copies)


class Notes:
    """Notes the moments of one process. What is seen is held open, so that no inode comes again."""

    def __init__(self, output: Path, folder: Path) -> None:
        output.mkdir()
        self.output, self.folder, self.flush = output, folder, os.fsync
        self.moments: list[tuple] = []
        self.flushed: Names = {}
        self.copies: dict[int, Path] = {}
        self.held: set[int] = set()
        self.numbers, self.lock, self.here = itertools.count(), threading.Lock(), threading.local()

    def audit(self, event: str, arguments: tuple) -> None:
        if event not in _EVENTS or not isinstance(arguments[0], str | os.PathLike) or getattr(self.here, "busy", False):
            return
        path = str(arguments[0])
        if path.startswith(str(self.output)) or "/" not in path:  # rmtree names files without their folder
            self.note(f"{event} {path}")

    def fsync(self, handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        self.note(f"flush {path}")
        inode, copy = os.fstat(handle).st_ino, self.folder / str(next(self.numbers))
        self.here.busy = True
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        names = self._names(path) if is_folder else shutil.copyfile(path, copy)
        self.here.busy = False
        self.flush(handle)
        with self.lock:  # several threads flush at a time
            if is_folder:
                self.flushed = {**self.flushed, inode: names}
            else:
                self.copies = {**self.copies, inode: copy}
        self.note(f"flushed {path}")

    def note(self, event: str) -> None:
        with self.lock:
            self.here.busy = True
            there = {Path(path).stat().st_ino: self._names(Path(path)) for path, _, _ in os.walk(self.output)}
            self.here.busy = False
            self.flushed = {**{inode: {} for inode in there}, **self.flushed}
            self.moments.append((event, self.output.stat().st_ino, there, self.flushed, self.copies))

    def _names(self, folder: Path) -> dict[str, int]:
        found = {}
        for entry in os.scandir(folder):
            if entry.inode() not in self.held:
                os.open(entry.path, os.O_PATH)
                self.held.add(entry.inode())
            found[entry.name] = entry.inode()
        return found


if __name__ == "__main__":
    folder, output, *sys.argv = map(str, sys.argv[1:])
    notes = Notes(Path(output), Path(folder))
    os.fsync = notes.fsync
    sys.addaudithook(notes.audit)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        notes.note("the end")
        Path(folder, "moments").write_bytes(pickle.dumps(notes.moments))
