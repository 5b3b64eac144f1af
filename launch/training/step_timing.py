"""`--measure`: where the time of a training's steps goes, from marks between the parts of a step.

On a GPU a mark is an event in its stream, read once the GPU has passed it: the parts are what the
GPU computes or waits for, and the host never stops to measure them. Elsewhere a mark is a reading
of the clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState

from launch.training.trainer import RecipeTrainer
from recipes.scaling.timings import PARTS, WARM_UP_STEPS

_MICRO_STEP = "micro-step"


class StepTimer:
    """Seconds in each part of a step. `mark(part)`: the time since the last mark was that part."""

    def __init__(self, cuda: bool) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps: list[float] = []  # seconds of each
        self.on = True
        self._cuda = cuda
        self._marks: deque[tuple[str, Any, bool]] = deque()
        self._step: Counter[str] = Counter()

    def mark(self, part: str, ends_step: bool = False) -> None:
        if not self.on:
            return
        now: Any = time.perf_counter()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((part, now, ends_step))

    @contextlib.contextmanager
    def last(self, part: str) -> Iterator[None]:
        """The whole block is one part, whatever is marked inside, and the last of a step."""
        was_on, self.on = self.on, False
        yield
        self.on = was_on
        self.mark(part, ends_step=True)

    def fold(self, wait: bool = False) -> None:
        """Add up the parts that the GPU has finished; with `wait`, all parts."""
        if wait and self._cuda:
            torch.cuda.synchronize()
        while len(self._marks) > 1 and (not self._cuda or self._marks[1][1].query()):
            (_, start, _), (part, end, ends_step) = self._marks.popleft(), self._marks[0]
            took = start.elapsed_time(end) / 1000 if self._cuda else end - start
            self.seconds[part] += took
            self._step[part] += took
            # Trainer asks once more at the end of an epoch: nothing was computed since the step.
            if ends_step and self._step["forward"]:
                self.steps.append(sum(self._step[part] for part in PARTS))
                self._step.clear()

    def restart(self) -> None:
        """Forget everything so far; the next part begins now."""
        self.fold(wait=True)
        self.seconds.clear()
        self.steps.clear()
        self._step.clear()
        self._marks.clear()
        self.mark("start")


@dataclass(frozen=True)
class Sent:
    """What one process sent in one optimizer step, counted."""

    syncs: int  # backward passes that exchanged gradients
    collectives: int
    bytes: int


class TimedTrainer(RecipeTrainer):
    """A RecipeTrainer that times its steps after a warm-up, whose last step is counted."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.timer = StepTimer(self.args.device.type == "cuda")
        self.sent: Sent | None = None
        # The micro-batches of the first timed step, and their items: an epoch's last step is short.
        self.first_batches: tuple[list[dict[str, torch.Tensor]], torch.Tensor | int | None] = ([], None)
        self._load_before = read_load()
        self.load = (self._load_before, self._load_before)  # at the first timed step, and after the last
        self._profiler: profile | None = None
        self._steps_begun = 0
        self.add_callback(_AfterOptimizer(self.timer))

    @property
    def timed_steps(self) -> int:
        return max(0, self._steps_begun - WARM_UP_STEPS)

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        self.timer.fold(wait=True)
        self.timer.on = False
        self.load = (self._load_before, read_load())
        return output

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._steps_begun == WARM_UP_STEPS:
            self._load_before = read_load()
            self.timer.restart()
        if self._steps_begun == WARM_UP_STEPS - 1 and not self._profiler:
            self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profiler.start()
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._steps_begun += bool(batches[0])
        if self.timed_steps == 1:
            self.first_batches = batches
        return batches

    def _get_num_items_in_batch(self, batch_samples, device):
        self.timer.mark("data_wait")  # from here on the processes add up their items
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, *args, **kwargs):
        self.timer.mark("other")
        with record_function(_MICRO_STEP) if self._profiler else contextlib.nullcontext():
            loss = super().training_step(*args, **kwargs)
        self.timer.mark("backward")
        return loss

    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        self.timer.mark("forward")
        return loss

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if self._profiler:
            self._profiler.stop()
            self.sent, self._profiler = _counted(self._profiler), None
        self.timer.mark("other")
        with self.timer.last(self._due()):
            super()._maybe_log_save_evaluate(*args, **kwargs)
        self.timer.fold()

    def _due(self) -> str:
        """Which part follows a step.

        What every run logs and saves at its end is part of a step only if it is due.
        """
        state, control = self.state, self.control
        last = state.global_step >= state.max_steps
        if control.should_save or control.should_evaluate:
            return "saving" if not last or _is_due(state, state.save_steps, state.eval_steps) else "end"
        if control.should_log:
            return "logging" if not last or _is_due(state, state.logging_steps) else "end"
        return "other"


def _is_due(state: TrainerState, *every: int | None) -> bool:
    """Whether this step is one of those that come every so many steps."""
    return any(steps and state.global_step % steps == 0 for steps in every)


class _AfterOptimizer(TrainerCallback):
    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.timer.mark("optimizer")


def _counted(profiler: profile) -> Sent:
    """The collectives of a step as the process group recorded them.

    A reduce inside a backward pass exchanges gradients; what is gathered or broadcast are
    parameters, buffers and counts.
    """
    events = list(profiler.profiler.kineto_results.events())
    sent = [event for event in events if event.name().startswith(("gloo:", "nccl:"))]
    reduced = [event.start_ns() for event in sent if "reduce" in event.name()]
    passes = [(event.start_ns(), event.end_ns()) for event in events if event.name() == _MICRO_STEP]
    exchanging = [any(start <= at <= end for at in reduced) for start, end in passes]
    return Sent(sum(exchanging), len(sent), sum(map(_bytes, sent)))


def _bytes(event: Any) -> int:
    width = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long": 8, "long int": 8, "int": 4}
    sizes = zip(event.shapes(), event.dtypes(), strict=False)
    return sum(math.prod(shape) * width.get(kind, 1) for shape, kind in sizes)


# --- What else keeps the machine busy ------------------------------------------------------------

_IDLE = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is counted as user time too


@dataclass(frozen=True)
class Load:
    """CPU seconds until a time: of all programs, and of this process with its children."""

    at: float
    all: float
    own: float


def read_load() -> Load:
    """The load until now. A container reads its host's."""
    times = psutil.cpu_times()._asdict()
    everyones = sum(seconds for name, seconds in times.items() if name not in _IDLE)
    return Load(time.monotonic(), everyones, _own_cpu_seconds())


def _own_cpu_seconds() -> float:
    """Of this process, of children that have ended and of those that run."""
    process = psutil.Process()
    own = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            own += sum(child.cpu_times()[:4])
    return own


def busy_cores(before: Load, after: Load) -> tuple[float, float]:
    """Cores that all programs, and that this one, kept busy between two readings."""
    took = max(after.at - before.at, 1e-9)
    return (after.all - before.all) / took, (after.own - before.own) / took
