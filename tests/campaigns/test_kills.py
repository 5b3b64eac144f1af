"""The same seed kills in the same places, a moment comes where it was drawn, no run is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

import pytest

import launch.training.trainer  # noqa: F401 - what is forked below need not import it
from tests.campaigns.kills.draw import draw_chains, from_json
from tests.campaigns.legality.start import forked
from tests.campaigns.moment import HIT, VARIABLE, Moment, watched
from tests.support.campaigns import campaign

EVENTS = {"start": 9, "training": 5, "step 1": 4, "step 2": 4, "evaluation": 6, "save": 40, "rotation": 20, "end": 9}
COUNTS = {"single": [EVENTS], "ddp": [EVENTS, {"start": 2, "step 1": 4, "save": 9, "end": 1}]}


def test_the_same_seed_draws_the_same_kills():
    first, again = (draw_chains(Random("seed"), COUNTS, 200) for _ in range(2))
    assert first == again == [from_json(chain.as_json()) for chain in first]
    moments = [moment for chain in first for moment in chain.moments]
    assert len(moments) == 200
    assert {moment.phase for moment in moments} == {*EVENTS, "loading"}
    assert any(moment.alone for moment in moments) and any(moment.rank for moment in moments)


def written(folder: Path, moment: Moment) -> tuple[int, list[str]]:
    """How a process ends that writes the files a, b and c, and which of them are there then."""

    def write() -> None:
        os.setsid()
        os.chdir(folder)
        with watched("out"):
            for name in "abc":
                Path("out", name).write_text(name)

    (folder / "out").mkdir()
    pid = forked(write, {**os.environ, VARIABLE: moment.as_json()})
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sorted(file.name for file in folder.glob("out/*"))


def test_a_moment_comes_before_the_file_of_its_number_is_opened(tmp_path):
    assert written(tmp_path, Moment("start", 3)) == (-signal.SIGKILL, ["a"])  # the first is the start itself
    assert (tmp_path / HIT).exists()


def test_the_moment_of_another_rank_does_not_come(tmp_path):
    assert written(tmp_path, Moment("start", 3, rank=1)) == (0, ["a", "b", "c"])
    assert not (tmp_path / HIT).exists()


@pytest.mark.slow
def test_no_kill_loses_a_run():
    engines = ["single", "ddp", "lora-best"]
    assert "0 lost" in campaign("kills", "--seed", "slow tier", "--count", "12", "--engine", *engines)
