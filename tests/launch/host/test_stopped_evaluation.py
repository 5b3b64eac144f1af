"""Told to stop during an evaluation, however long it takes: it is cut short, its step is saved, and
the run that goes on evaluates that step after all.
"""

import os
import signal
from pathlib import Path

import pytest

from launch.host.signals import EXIT_CODE
from launch.output.checkpoints import newest_valid
from tests.support.running import eval_losses, fork, launch_quickly, losses, read_record, train_here
from tests.support.slow_model import write_model_with
from tests.support.stopping import TWO_RANKS, Run
from tests.support.waiting import PATIENCE

STEPS = (
    "--max_steps 8 --logging_steps 1 --learning_rate 1e-3 --global_batch_size 4 "
    "--dataset_train_split train[:90%] --dataset_test_split train[90%:] --per_device_eval_batch_size 1"
).split()
EVERY_FOURTH = "--eval_strategy steps --eval_steps 4".split()
AT_THE_END = "--eval_strategy steps --eval_steps 1000".split()
BEST = "--load_best_model_at_end --metric_for_best_model loss --greater_is_better true".split()  # the first is
SECONDS = 3  # a batch of an evaluation; there are 26


@pytest.fixture
def slow(tiny_model, texts, tmp_path):
    """Flags of a training whose evaluations are slow as long as `model.slow` is there."""
    (tmp_path / "model.slow").touch()
    pause = f"if not self.training and os.path.exists('{tmp_path}/model.slow'): time.sleep({SECONDS})"
    model = write_model_with(pause, tmp_path / "model", tiny_model)
    return [*model, "--dataset_name", str(texts), "--max_length", "64", *STEPS]


@pytest.fixture
def quick(slow, texts, tmp_path):
    """Trains the same to its end in this process, and quickly."""
    return lambda output, *flags: train_here(tmp_path / "model", texts, output, "--trust_remote_code", *STEPS, *flags)


class Forked(Run):
    """One rank without a launcher, in a process that need not import everything: for what comes
    after that.
    """

    def start(self, argv: list[str]) -> None:
        self.process = fork(dict(os.environ), argv, self.log.fileno())

    def __exit__(self, *exception):
        self.process.kill()

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def ranks(self) -> list[int]:
        return [self.process.pid]

    def end(self) -> str:
        self.process.join(PATIENCE)
        return self.output_so_far()


def stopped(start: type[Run], flags: list[str], output: Path, step: int) -> Run:
    """A run that was told to stop while it evaluated after a step, which is saved."""
    with start(flags, output) as run:
        run.wait_for_output(f"step {step}/")
        os.kill(run.ranks()[-1], signal.SIGTERM)
        run.printed = run.end()
    (output.parent / "model.slow").unlink()
    newest, damaged = newest_valid(output)
    assert newest is not None and newest.step == step and not damaged
    assert read_record(output)["status"] == "preempted"
    assert "eval_loss" not in (newest.path / "trainer_state.json").read_text()
    return run


@pytest.mark.parametrize(
    ("flags", "step"),
    [([*EVERY_FOURTH, *BEST], 4), pytest.param(AT_THE_END, 8, marks=pytest.mark.slow)],
    ids=["in the training", "after the training"],
)
def test_a_sigterm_cuts_an_evaluation_short_and_the_resumed_run_evaluates_that_step(flags, step, slow, quick, tmp_path):
    run = stopped(Forked, [*slow, *flags], tmp_path / "out", step)
    assert run.process.exitcode == EXIT_CODE and f"told to stop by SIGTERM at step {step}" in run.printed
    whole, again = (quick(tmp_path / name, *flags) for name in ("whole", "out"))
    assert (again.code, again.record["status"]) == (0, "finished")
    assert again.record["eval_loss"] == whole.record["eval_loss"]
    if step == 4:
        assert losses(again) == losses(whole)
        assert eval_losses(again) == eval_losses(whole) != []
        assert again.record["model_step"] == whole.record["model_step"] == 4


@pytest.mark.slow
def test_two_ranks_stopped_in_an_evaluation_resume_with_the_same_losses_and_evaluations(slow, tmp_path):
    stopped(TWO_RANKS, [*slow, *EVERY_FOURTH], tmp_path / "out", 4)
    whole, again = (launch_quickly(*slow, *EVERY_FOURTH, output=tmp_path / name) for name in ("whole", "out"))
    assert again.code == 0, again.output
    assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
    assert dict(eval_losses(again)) == pytest.approx(dict(eval_losses(whole)), rel=1e-6)
