"""What a training writes, in order, and what a crash at any moment leaves of it.

`traced` runs train.py under strace. Run as a script, this file is what strace runs: it trains, and
copies each file at the moment that it is flushed.
"""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

CALLS = "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,fsync"
_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")


@dataclass(frozen=True)
class Operation:
    """`kind` is create, mkdir, rename, remove or flush.

    `other` is the new name, or the copy that was made of a file when it was flushed.
    """

    kind: str
    path: Path
    other: Path | None = None


def traced(script: Path, flags: list[str], output: Path, folder: Path) -> list[Operation]:
    """Train into `output`. Returns what became of the names in it, and every flush."""
    (folder / "copies").mkdir(parents=True)
    command = ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-o", str(folder / "calls")]
    command += [sys.executable, __file__, str(folder / "copies"), str(script), *flags, "--output_dir", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(_operations((folder / "calls").read_text(), output, folder / "copies"))


def _operations(calls: str, output: Path, copies: Path):
    flushes = Counter[Path]()
    for call, words, result in _whole_calls(calls):
        if result < 0 or str(output) not in words:
            continue
        if call == "fsync":
            path = Path(words.partition("<")[2].rpartition(">")[0])
            flushes[path] += 1
            yield Operation("flush", path, copies / _copy_name(flushes[path], path))
            continue
        # Relative names follow the folder's descriptor: `4</folder>, "name"`.
        names = [Path(above or ".", name) for above, name in re.findall(r'(?:\d+<([^>]*)>, |)"([^"]*)"', words)]
        if call.startswith(("open", "creat")):
            if "O_CREAT" in words or call == "creat":
                yield Operation("create", names[0])
        elif call.startswith("mkdir"):
            yield Operation("mkdir", names[0])
        elif call.startswith("rename"):
            yield Operation("rename", names[0], names[1])
        elif call.startswith(("unlink", "rmdir")):
            yield Operation("remove", names[0])
        else:
            raise AssertionError(f"a crash's view of {call} is not known: {words}")


def _whole_calls(calls: str):
    """(call, arguments, result), with those in one piece that another thread has interrupted."""
    begun: dict[str, str] = {}
    for line in calls.splitlines():
        thread = line.split()[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"^\d+ +<\.\.\. \w+ resumed>(.*)", line):
            line = begun.pop(thread) + resumed.group(1)
        if found := _CALL.match(line):
            yield found.group(1), found.group(2), int(found.group(3))


@dataclass
class Node:
    """A file or folder: as programs see it, and as much of it as is on the disk."""

    is_folder: bool
    names: dict[str, Node] = field(default_factory=dict)
    flushed_names: dict[str, Node] = field(default_factory=dict)
    copy: Path | None = None


class Disk:
    """A folder on a disk that keeps, for sure, only what was flushed."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node(is_folder=True)

    def do(self, operation: Operation) -> None:
        path = operation.path
        if operation.kind == "flush":
            if path == self.root or path.is_relative_to(self.root):
                self._flush(self._find(path), operation.other)
            return
        if path == self.root:
            return
        above, name = self._find(path.parent), path.name
        if operation.kind == "create":
            above.names.setdefault(name, Node(is_folder=False))
        elif operation.kind == "mkdir":
            above.names[name] = Node(is_folder=True)
        elif operation.kind == "remove":
            del above.names[name]
        else:
            self._find(operation.other.parent).names[operation.other.name] = above.names.pop(name)

    def _find(self, path: Path) -> Node:
        node = self.top
        for name in path.relative_to(self.root).parts:
            node = node.names[name]
        return node

    def _flush(self, node: Node, copy: Path) -> None:
        if node.is_folder:
            node.flushed_names = dict(node.names)
        else:
            node.copy = copy

    def crash(self, folder: Path, chance: random.Random | None = None) -> None:
        """Write into `folder` what a crash leaves now: what was flushed and, where `chance` says
        so, names that were not. Of files it leaves nothing that was not flushed, or zeros.
        """
        self._write(self.top, folder, chance)

    def _write(self, node: Node, path: Path, chance: random.Random | None) -> None:
        if not node.is_folder:
            if node.copy is not None:
                os.link(node.copy, path)
            else:
                path.write_bytes(bytes(chance.choice((0, 5000)) if chance else 0))
            return
        path.mkdir()
        names = node.names if chance and chance.random() < 0.5 else node.flushed_names
        for name, child in names.items():
            self._write(child, path / name, chance)


def _copy_name(number: int, path: Path) -> str:
    return f"{number}{str(path).replace('/', '%')}"


def _train_and_copy(copies: Path, script: str) -> None:
    flush, times = os.fsync, Counter[Path]()

    def copy_and_flush(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        times[path] += 1
        if stat.S_ISREG(os.fstat(handle).st_mode):
            shutil.copyfile(path, copies / _copy_name(times[path], path))
        flush(handle)

    os.fsync = copy_and_flush
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    copies = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    _train_and_copy(copies, sys.argv[0])
