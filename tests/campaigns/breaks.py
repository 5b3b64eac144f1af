"""Break the product on purpose, one line at a time, and see which breaks no test notices.

    python -m tests.campaigns.breaks --seed S --count N [--slow]

N places of recipes/ and launch/, evenly by room: a condition is negated, a `raise`, `continue` or
`return` dropped, a comparison or a number changed. The tests of the mirroring folder run in a
worktree of HEAD, without a break and with each break, with --slow also the slow tests. The same
seed draws the same breaks.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.running import ROOT

_COMPARISONS = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


@dataclass(frozen=True)
class Break:
    """The characters `start` to `end` of a line of a file, and what stands there instead."""

    file: Path
    line: int
    start: int
    end: int
    instead: str

    def apply(self, root: Path) -> str:
        """Break the file. Returns the line as it was and as it is."""
        lines = (root / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        before = lines[self.line - 1].encode()
        after = before[: self.start] + self.instead.encode() + before[self.end :]
        lines[self.line - 1] = after.decode()
        (root / self.file).write_text("".join(lines), encoding="utf-8")
        return f"{self.file}:{self.line}: {before.decode().strip()}  ->  {after.decode().strip()}"


def breaks_of(file: Path, source: str) -> Iterator[Break]:
    """Every break of a file that changes one line."""
    for node in ast.walk(ast.parse(source)):
        for part, instead in _changed(node):
            if part.lineno == part.end_lineno:
                yield Break(file, part.lineno, part.col_offset, part.end_col_offset or 0, instead)


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """A part of the node, and what stands in its place."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Raise | ast.Continue | ast.Return):
        yield node, "pass"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _COMPARISONS[type(node.ops[0])]
        yield node, f"{ast.unparse(node.left)} {other} {ast.unparse(node.comparators[0])}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, str(not node.value if isinstance(node.value, bool) else node.value + 1)


def draw(random: Random, root: Path, count: int) -> list[Break]:
    """So many breaks, of one room after another."""
    rooms: dict[Path, list[Break]] = {}
    for top in ("recipes", "launch"):
        for path in sorted((root / top).rglob("*.py")):
            file = path.relative_to(root)
            rooms.setdefault(file.parent, []).extend(breaks_of(file, path.read_text(encoding="utf-8")))
    names = random.sample([room for room in sorted(rooms) if rooms[room]], len([room for room in rooms if rooms[room]]))
    return [random.choice(rooms[names[number % len(names)]]) for number in range(count)]


def failing_test(folder: Path, worktree: Path, slow: bool) -> str:
    """The first test of a folder that fails; empty if all pass."""
    tests = sorted(str(file) for file in (worktree / "tests" / folder).glob("test_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(worktree), "CI": "true"}
    for tier in ("not slow", "slow") if slow else ("not slow",):
        done = subprocess.run([*command, tier, *tests], cwd=worktree, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 5):  # 5: there are no tests
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return found[1] if found else "pytest itself"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.breaks")
    parser.add_argument("--seed", default="nov27", help="any word; the same word draws the same breaks [nov27]")
    parser.add_argument("--count", type=int, default=60, help="how many breaks [60]")
    parser.add_argument("--slow", action="store_true", help="ask the slow tests too")
    options, unnoticed, unbroken = parser.parse_args(), [], set[Path]()
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        worktree = Path(folder, "worktree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(worktree), "HEAD"], check=True, capture_output=True)
        try:
            for one in draw(Random(options.seed), worktree, options.count):
                room, whole = one.file.parent, (worktree / one.file).read_text(encoding="utf-8")
                if room not in unbroken and (test := failing_test(room, worktree, options.slow)):
                    sys.exit(f"{test} fails without a break")
                unbroken.add(room)
                line = one.apply(worktree)
                test = failing_test(room, worktree, options.slow)
                (worktree / one.file).write_text(whole, encoding="utf-8")
                unnoticed += [] if test else [line]
                print(f"{test or 'UNNOTICED'}: {line}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(worktree)], check=True)
    print(f"{options.count} breaks, {len(unnoticed)} unnoticed (seed {options.seed})", *unnoticed, sep="\n    ")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
