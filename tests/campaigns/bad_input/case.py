"""A case: a command line, and the files that differ from those of the valid world."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join


@dataclass(frozen=True)
class Case:
    """`argv[0]` is a command of `recipes`, or train.py. `files` holds path -> content, where
    None is a missing file. `to_the_end` trains to the end, for what is only read there. A case
    that `only_reads` leaves the world's folders as they are, so that they need not be copied.
    """

    kind: str
    argv: list[str]
    files: dict[str, bytes | None] = field(default_factory=dict)
    to_the_end: bool = False
    only_reads: bool = False

    def __str__(self) -> str:
        command = join(word.encode("utf-8", "backslashreplace").decode() for word in self.argv)
        lines = [f"[{self.kind}] {command[:600]}"]
        for name, content in self.files.items():
            size = "missing" if content is None else f"{len(content)} bytes"
            lines.append(f"    {name!r}, {size}: {content[:300] if content else ''!r}")
        return "\n".join(lines)


def write(case: Case, world: Path, folder: Path) -> None:
    """The valid world in a new folder, with the case's own files in place of its."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for item in world.iterdir():
        if item.is_dir() and item.name != "data" and not case.only_reads:
            shutil.copytree(item, folder / item.name, symlinks=True)
        else:
            (folder / item.name).symlink_to(item)
    for name, content in case.files.items():
        target = folder / name
        _own_folder(target.parent, folder)
        if content is None:
            target.unlink()
        else:
            target.unlink(missing_ok=True)
            target.write_bytes(content)


def _own_folder(folder: Path, top: Path) -> None:
    """The folder as one that this case may write to: large ones are links to the world's."""
    if folder == top:
        return
    _own_folder(folder.parent, top)
    if not folder.is_symlink():
        folder.mkdir(exist_ok=True)
        return
    original = folder.resolve()
    folder.unlink()
    folder.mkdir()
    for item in original.iterdir():
        (folder / item.name).symlink_to(item)
