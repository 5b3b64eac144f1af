"""`--measure`: where the time of a training's steps goes, from marks between their parts that wait for nothing.

On a GPU a mark is an event in its stream, read once the GPU has passed it: the parts are what the GPU spends or waits,
as it happens, and the host never stops for them. Elsewhere it is a reading of the clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState

from launch.training.trainer import RecipeTrainer
from recipes.scaling.timings import WARM_UP_STEPS

_MICRO_STEP = "micro-step"


class Timeline:
    """Seconds in each part of a step. `mark(part)`: what went by since the last mark was that part."""

    def __init__(self, cuda: bool) -> None:
        self.seconds: Counter[str] = Counter()
        self.on = True
        self._cuda = cuda
        self._marks: deque[tuple[str, Any]] = deque()

    def mark(self, part: str) -> None:
        if not self.on:
            return
        now: Any = time.perf_counter()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((part, now))

    @contextlib.contextmanager
    def only(self, part: str) -> Iterator[None]:
        """All of a block is one part, whatever is marked in it."""
        was_on, self.on = self.on, False
        yield
        self.on = was_on
        self.mark(part)

    def fold(self, wait: bool = False) -> None:
        """Add up what the GPU has passed, so that marks do not pile up; with `wait`, all of it."""
        if wait and self._cuda:
            torch.cuda.synchronize()
        while len(self._marks) > 1 and (not self._cuda or self._marks[1][1].query()):
            (_, start), (part, end) = self._marks.popleft(), self._marks[0]
            self.seconds[part] += start.elapsed_time(end) / 1000 if self._cuda else end - start

    def restart(self) -> None:
        """Forget everything so far; the next part begins now."""
        self.fold(wait=True)
        self.seconds.clear()
        self._marks.clear()
        self.mark("start")


@dataclass(frozen=True)
class Exchanges:
    """What one optimizer step of one process sent, counted: `syncs` are backward passes that exchanged gradients."""

    syncs: int
    collectives: int
    bytes: int


class MeasuredTrainer(RecipeTrainer):
    """A RecipeTrainer that marks the parts of its steps, once warm, and counts what the last cold one sends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeline = Timeline(self.args.device.type == "cuda")
        self.exchanges: Exchanges | None = None
        self.first_batches: tuple[list[Any], Any] = ([], None)  # of the first measured step; an epoch's last is short
        self._profiler: profile | None = None
        self._steps_begun = 0
        self.add_callback(_AfterOptimizer(self.timeline))

    @property
    def steps_measured(self) -> int:
        return max(0, self._steps_begun - WARM_UP_STEPS)

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        self.timeline.fold(wait=True)
        self.timeline.on = False
        return output

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._steps_begun == WARM_UP_STEPS:
            self.timeline.restart()
        if self._steps_begun == WARM_UP_STEPS - 1 and not self._profiler:
            self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profiler.start()
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._steps_begun += bool(batches[0])
        if self.steps_measured == 1:
            self.first_batches = batches
        return batches

    def _get_num_items_in_batch(self, batch_samples, device):
        self.timeline.mark("data_wait")  # from here on the processes add up their items
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, *args, **kwargs):
        self.timeline.mark("other")
        with record_function(_MICRO_STEP) if self._profiler else contextlib.nullcontext():
            loss = super().training_step(*args, **kwargs)
        self.timeline.mark("backward")
        return loss

    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        self.timeline.mark("forward")
        return loss

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if self._profiler:
            self._profiler.stop()
            self.exchanges, self._profiler = _counted(self._profiler), None
        self.timeline.mark("other")
        with self.timeline.only(self._due()):
            super()._maybe_log_save_evaluate(*args, **kwargs)
        self.timeline.fold()

    def _due(self) -> str:
        """What follows a step. Every run logs and saves at its end: that is no part of a step, unless it is due."""
        state, control = self.state, self.control
        last = state.global_step >= state.max_steps
        if control.should_save or control.should_evaluate:
            return (
                "saving"
                if not last or _divides(state.save_steps, state) or _divides(state.eval_steps, state)
                else "end"
            )
        if control.should_log:
            return "logging" if not last or _divides(state.logging_steps, state) else "end"
        return "other"


def _divides(every: int | None, state: TrainerState) -> bool:
    return bool(every) and state.global_step % every == 0


class _AfterOptimizer(TrainerCallback):
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.timeline.mark("optimizer")


def _counted(profiler: profile) -> Exchanges:
    """Collectives that the process group itself recorded, and the backward passes in which gradients were among them.

    Gradients are reduced; what is gathered or broadcast beside them are parameters, buffers and counts.
    """
    events = list(profiler.profiler.kineto_results.events())
    sent = [event for event in events if event.name().startswith(("gloo:", "nccl:"))]
    reduced = [event.start_ns() for event in sent if "reduce" in event.name()]
    passes = [(event.start_ns(), event.end_ns()) for event in events if event.name() == _MICRO_STEP]
    exchanging = [any(start <= at <= end for at in reduced) for start, end in passes]
    return Exchanges(sum(exchanging), len(sent), sum(map(_bytes, sent)))


def _bytes(event: Any) -> int:
    width = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long": 8, "long int": 8, "int": 4}
    sizes = zip(event.shapes(), event.dtypes(), strict=False)
    return sum(math.prod(shape) * width.get(kind, 1) for shape, kind in sizes)
