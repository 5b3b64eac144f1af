"""Breaks are drawn again by their seed, and a broken file is another program, not a broken text."""

from __future__ import annotations

import ast
from pathlib import Path
from random import Random

from tests.campaigns.breaks import breaks_of, draw
from tests.support.running import ROOT

SOURCE = """\
def f(x):
    if x > 3:
        raise ValueError("größer")
    return x if x == 1 else True
"""


def test_each_break_is_another_program(tmp_path):
    found = []
    for one in breaks_of(Path("f.py"), SOURCE):
        (tmp_path / "f.py").write_text(SOURCE, encoding="utf-8")
        one.apply(tmp_path)
        found.append(ast.unparse(ast.parse((tmp_path / "f.py").read_text(encoding="utf-8"))))
    assert len(found) == len(set(found)) == 9 and ast.unparse(ast.parse(SOURCE)) not in found


def test_the_same_seed_draws_the_same_breaks_of_every_room():
    first, again = (draw(Random("seed"), ROOT, 40) for _ in range(2))
    assert first == again
    assert {Path("launch/output"), Path("recipes/rules")} <= {one.file.parent for one in first}
