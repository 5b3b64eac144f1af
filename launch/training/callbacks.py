"""Callbacks: stop early or when told to, log the last step, time the steps, show progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from launch.host.signals import Preempted, StopRequest
from launch.host.world import World
from launch.terminal import print_problems
from launch.training.failure import NotANumber
from recipes.rules.training import warmup_within
from recipes.run import RunSpec
from recipes.run.metrics import IN_SHORT
from recipes.scaling.noise import of_median
from recipes.scaling.timings import WARM_UP_STEPS

_STRETCHES = 8  # of a run, whose step times are compared

if TYPE_CHECKING:
    from rich import progress
    from torch.distributed import ProcessGroup


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping that stays stopped when the run is resumed from where it stopped."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


class WarmUpAdvice(TrainerCallback):
    """Says that the warm-up is longer than the run: with the data, the steps are known."""

    def __init__(self, run: RunSpec, console) -> None:
        self.run, self.console = run, console

    def on_train_begin(self, args, state, control, **kwargs):
        if self.run["max_steps"] <= 0:  # else `check` has said it
            print_problems(warmup_within(self.run, state.max_steps), self.console)


class StopOnNotANumber(TrainerCallback):
    """Stops when a logged loss is NaN or infinite.

    A logged loss is on the host already, so the check is free.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NotANumber(f"the loss is {loss} at step {state.global_step}")


class StoppedInEvaluation(Preempted):
    """All ranks were told to stop after the same batch of an evaluation.

    `RecipeTrainer.evaluate` saves the step that was being evaluated.
    """


class StopWhenRequested(TrainerCallback):
    """Once any rank was told to stop, all ranks complete the step, save and leave together.

    An evaluation is cut short after its current batch: it may take longer than the time that is
    left. The run that resumes repeats it.

    The ranks ask each other over gloo, so that no GPU waits for the answer.

    `finish_saving` waits until the checkpoint that was just written is complete.
    """

    def __init__(self, request: StopRequest, world: World, finish_saving: Callable[[], None] = lambda: None) -> None:
        self.request = request
        self.world = world
        self.finish_saving = finish_saving
        self.group: ProcessGroup | None = None
        self.agreed = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.group = torch.distributed.new_group(backend="gloo") if self.world.size > 1 else None
        self.request.step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self.agreed = self._any_rank_was_asked()
        control.should_save |= self.agreed
        self.request.step = state.global_step

    on_evaluate = on_step_end  # a signal at the end of the evaluation does not wait for another step

    def on_prediction_step(self, args, state, control, **kwargs):
        self.agreed = self.agreed or self._any_rank_was_asked()
        if self.agreed:
            raise StoppedInEvaluation(self._message(state))

    def on_save(self, args, state, control, **kwargs):
        if not self.agreed:
            return
        self.finish_saving()
        if self.group is not None:
            # If one rank left early, its launcher would end the others.
            torch.distributed.barrier(group=self.group)
        raise Preempted(self._message(state))

    def _message(self, state) -> str:
        return f"told to stop by {self.request.signal or 'another rank'} at step {state.global_step}"

    def _any_rank_was_asked(self) -> bool:
        asked = torch.tensor(self.request.stop_requested, dtype=torch.int32)
        if self.group is not None:
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(asked)


class LogLastStep(TrainerCallback):
    """Logs at the last step too, so that the final loss is known even if a recipe logs rarely."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True


class Meter(TrainerCallback):
    """Step time in seconds, over the steps after the warm-up that neither save nor evaluate."""

    WARM_UP_STEPS = WARM_UP_STEPS

    def __init__(self) -> None:
        self.durations: list[float] = []
        self._started: float | None = None
        self._interrupted = False
        self.steps_trained = 0

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self._started is not None and not self._interrupted and self.steps_trained > self.WARM_UP_STEPS:
            self.durations.append(now - self._started)
        self._started, self._interrupted = now, False
        self.steps_trained += 1

    def on_save(self, args, state, control, **kwargs):
        self._interrupted = True

    def on_evaluate(self, args, state, control, **kwargs):
        self._interrupted = True

    def on_epoch_end(self, args, state, control, **kwargs):
        self._interrupted = True

    @property
    def step_time(self) -> float | None:
        """Mean seconds per step.

        Single steps mean little: a GPU works behind the host. None if there were too few.
        """
        return sum(self.durations) / len(self.durations) if self.durations else None

    @property
    def step_time_off(self) -> float | None:
        """Seconds by which that mean may be off: stretches of the run differ by as much."""
        size = max(1, len(self.durations) // _STRETCHES)
        starts = range(0, len(self.durations) - size + 1, size)
        means = [sum(self.durations[start : start + size]) / size for start in starts]
        return of_median(means) if len(means) > 1 else None


class Progress(TrainerCallback):
    """A progress bar on a terminal; one line per log elsewhere."""

    task: progress.TaskID  # of the bar, once there is one

    def __init__(self, console) -> None:
        self.console = console
        self.bar: progress.Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console)
        self.bar.start()
        self.task = self.bar.add_task("starting", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        parts = [
            f"{name} {_short(logs[name])}"
            for name in ("loss", "learning_rate", "eval_loss", *(f"eval_{metric}" for metric in IN_SHORT))
            if name in logs
        ]
        if not parts:
            return
        if self.bar and "loss" in logs:
            self.bar.update(self.task, description="  ".join(parts))
        else:
            self.console.print(f"step {state.global_step}/{state.max_steps}  " + "  ".join(parts), highlight=False)

    def on_train_end(self, args, state, control, **kwargs):
        self.stop()

    def stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


def _short(value: float) -> str:
    return f"{float(value):.4g}"
