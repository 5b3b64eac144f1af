"""A machine that crashes at any moment of a training leaves a folder that resumes."""

import random
import shutil
import sys

import pytest

from launch.output import manifest, record
from launch.output.checkpoints import newest_valid
from tests.support.running import SCRIPT, losses, model_flags, train_here
from tests.support.traced import traced

EIGHT_STEPS = "--max_steps 8 --save_steps 2 --learning_rate 1e-3 --logging_steps 1".split()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_every_crash_leaves_the_last_complete_checkpoint(tiny_model, texts, tmp_path):
    """Whatever was not flushed is lost, or is there in part: each moment of the training is judged
    in both ways. Of all that are judged alike, one is trained to its end.
    """
    output = tmp_path / "run"
    moments = traced(SCRIPT, [*model_flags(tiny_model, texts), *EIGHT_STEPS], output, tmp_path / "trace")
    complete, found = 0, {}
    for number, moment in enumerate(moments):
        for chance in (None, random.Random(number)):
            left = tmp_path / "left"
            moment.crash(left, chance)
            newest, damaged = newest_valid(left)
            step = newest.step if newest else 0
            assert newest is None or manifest.is_committed(newest.path)
            assert step >= complete, f"before {moment.event} step {complete} was lost"
            if chance is None:
                complete = step
            judged = (step, record.read(left).get("status"), *((path.step, path.faults) for path in damaged))
            if judged in found:
                shutil.rmtree(left)
            else:
                found[judged] = copied(left, tmp_path / f"state-{len(found)}")
    assert {step for step, *_ in found} == {0, 2, 4, 6, 8}
    whole = train_here(tiny_model, texts, tmp_path / "whole", *EIGHT_STEPS)
    for judged, folder in found.items():
        resumed = train_here(tiny_model, texts, folder, *EIGHT_STEPS)
        assert (resumed.code, resumed.record["status"]) == (0, "finished"), f"{judged}: {resumed.output}"
        assert losses(resumed) == losses(whole), judged


def copied(folder, to):
    """The folder moved: its files are links to what was flushed, which nothing may change."""
    shutil.copytree(folder, to)
    shutil.rmtree(folder)
    return to
