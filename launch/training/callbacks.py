"""Callbacks: stop on request or when the loss is NaN, print progress, and time the steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm
from transformers import TrainerCallback, TrainerState

from launch.host.signals import Preempted, StopRequest
from launch.terminal import print_problems
from launch.training.failure import NotANumber
from recipes.rules.training import warmup_within
from recipes.run import RunSpec
from recipes.run.metrics import IN_SHORT
from recipes.scaling.timings import WARM_UP_STEPS, of_median

if TYPE_CHECKING:
    from rich.console import Console
    from torch.distributed import ProcessGroup

_STRETCHES = 8  # parts of a run whose mean step times are compared
_MICRO_STEP = "micro-step"
_SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss", *(f"eval_{metric}" for metric in IN_SHORT))


class StopOnNotANumber(TrainerCallback):
    """Stops the run when a logged loss is NaN or infinite.

    A logged loss is already on the host, so the check does not wait for the GPU.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NotANumber(f"the loss is {loss} at step {state.global_step}")


class StoppedInEvaluation(Preempted):
    """A stop request ended an evaluation. `RecipeTrainer.evaluate` saves the evaluated step."""


class StopWhenRequested(TrainerCallback):
    """Stops all ranks together once any rank gets a stop signal: all complete the step and save.

    An evaluation ends after its current batch, because the other batches may take longer than the
    time that is left. The resumed run repeats the evaluation. The ranks agree over gloo, so that no
    GPU waits. `finish_saving` waits until the checkpoint that was just written is complete.
    """

    def __init__(self, request: StopRequest, finish_saving: Callable[[], None]) -> None:
        self.request, self.finish_saving = request, finish_saving
        self.group: ProcessGroup | None = None
        self.agreed = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.group = torch.distributed.new_group(backend="gloo") if args.world_size > 1 else None
        self.request.step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self.agreed = self._any_rank_was_asked()
        control.should_save |= self.agreed
        self.request.step = state.global_step

    on_evaluate = on_step_end  # a signal at the end of an evaluation does not wait for another step

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
        asked = torch.tensor(self.request.signal is not None, dtype=torch.int32)
        if self.group is not None:
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(asked)


class Progress(TrainerCallback):
    """Prints one line for each log of Trainer, also of an evaluation. Makes Trainer log the last
    step, so that the final loss is known even if the recipe logs rarely.
    """

    began: float | None = None  # None in an evaluation without training

    def __init__(self, run: RunSpec, out: Console) -> None:
        self.run, self.out = run, out

    def on_train_begin(self, args, state, control, **kwargs):
        if self.run["max_steps"] <= 0:  # the number of steps was not known to `check`
            print_problems(map(self.run.with_source, warmup_within(self.run, state.max_steps)), self.out)
        self.first, self.began = state.global_step, time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step >= state.max_steps

    def on_log(self, args, state, control, logs=None, **kwargs):
        parts = [f"{name} {float(logs[name]):.4g}" for name in _SHOWN if name in (logs or {})]
        if parts:
            parts = [f"step {state.global_step}/{state.max_steps}", f"epoch {state.epoch or 0:.3g}", *parts]
            if self.began is not None:
                elapsed, done = time.monotonic() - self.began, max(1, state.global_step - self.first)
                left = elapsed / done * (state.max_steps - state.global_step)
                parts.append(f"{tqdm.format_interval(elapsed)}, {tqdm.format_interval(left)} left")
            self.out.print("  ".join(parts), highlight=False)


# --- The time of a step ---------------------------------------------------------------------------


class StepTiming(TrainerCallback):
    """Times the steps after the warm-up and, with `parts`, the parts of a step for `--measure`.

    RecipeTrainer calls `mark` at the end of each part. On a GPU, a mark is an event in the CUDA
    stream. The event is read after the GPU has passed it, so that no step waits for a measurement.
    On a CPU, a mark is a reading of the clock. `on` is True while parts are timed.
    """

    def __init__(self, cuda: bool, parts: bool = False) -> None:
        self.durations: list[float] = []  # seconds of each step that neither saves, evaluates nor ends an epoch
        self.steps_trained = 0
        self._started: float | None = None  # start of the current step; None after a save, an evaluation or an epoch

        self.on = parts
        self.seconds: Counter[str] = Counter()  # part -> sum of its seconds over the timed steps
        self.sent: tuple[int, int, int] | None = None  # counts of one step: gradient exchanges, collectives, bytes
        # Micro-batches and number of items of the first timed step; the last step may be shorter.
        self.first_batches: tuple[list[dict[str, torch.Tensor]], torch.Tensor | int | None] = ([], None)
        self._cuda = cuda
        self._marks: deque[tuple[str, Any]] = deque()
        self._profiler: profile | None = None

    # --- The length of a step --------------------------------------------------------------------

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self._started is not None and self.steps_trained > WARM_UP_STEPS:
            self.durations.append(now - self._started)
        self._started = now
        self.steps_trained += 1

    def on_save(self, args, state, control, **kwargs):
        self._started = None

    on_evaluate = on_epoch_end = on_save

    @property
    def step_time(self) -> float | None:
        """The mean seconds per step; None if no step was timed.

        The time of a single step means little, because the GPU runs behind the host.
        """
        return fmean(self.durations) if self.durations else None

    @property
    def step_time_off(self) -> float | None:
        """The uncertainty of `step_time` in seconds, from the steps' scatter; None if unknown."""
        size = max(1, len(self.durations) // _STRETCHES)
        starts = range(0, len(self.durations) - size + 1, size)
        means = [fmean(self.durations[start : start + size]) for start in starts]
        return of_median(means) if len(means) > 1 else None

    # --- The parts of a step ---------------------------------------------------------------------

    def mark(self, part: str) -> None:
        """Assign the time since the last mark to `part`."""
        if not self.on:
            return
        now: Any = time.perf_counter()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((part, now))

    def begin_step(self) -> None:
        """Profile the last warm-up step, and time the parts of every step after the warm-up."""
        if self.on and self.steps_trained == WARM_UP_STEPS - 1 and not self._profiler:
            self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profiler.start()
        if self.on and self.steps_trained == WARM_UP_STEPS:
            self._fold(wait=True)
            self.seconds.clear()
            self._marks.clear()
            self.mark("start")

    def have_read(self, batches: list[dict[str, torch.Tensor]], items: torch.Tensor | int | None) -> None:
        if self.on and self.steps_trained == WARM_UP_STEPS:
            self.first_batches = (batches, items)

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        self.mark("other")
        with record_function(_MICRO_STEP) if self._profiler else contextlib.nullcontext():
            yield
        self.mark("backward")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.mark("optimizer")

    @contextlib.contextmanager
    def end_of_step(self, state: TrainerState, control: Any) -> Iterator[None]:
        """Time the whole block as the last part of the step. In the block, `mark` does nothing."""
        if self._profiler:
            self._profiler.stop()
            self.sent, self._profiler = _counted(self._profiler), None
        self.mark("other")
        part, was_on, self.on = _due(state, control), self.on, False
        yield
        self.on = was_on
        self.mark(part)
        self._fold()

    def on_train_end(self, args, state, control, **kwargs):
        """Add the last seconds to the parts, and ignore later marks."""
        self._fold(wait=True)
        self.on = False

    def _fold(self, wait: bool = False) -> None:
        """Sum the seconds of parts that the GPU has finished. With `wait`, wait for all parts."""
        if wait and self._cuda:
            torch.cuda.synchronize()
        while len(self._marks) > 1 and (not self._cuda or self._marks[1][1].query()):
            (_, start), (part, end) = self._marks.popleft(), self._marks[0]
            self.seconds[part] += start.elapsed_time(end) / 1000 if self._cuda else end - start


def _due(state: TrainerState, control: Any) -> str:
    """Return the name under which to time the work after a step. Reports omit "end"."""
    if state.global_step >= state.max_steps:
        return "end"
    if control.should_save or control.should_evaluate:
        return "saving"
    return "logging" if control.should_log else "other"


def _counted(profiler: profile) -> tuple[int, int, int]:
    """Return three counts from the profiled step of this process: micro-batches that reduced
    gradients, collectives, and the bytes that these collectives carried.

    A reduce inside a micro-batch carries gradients. Gathers and broadcasts carry parameters,
    buffers and counts.
    """
    events = list(profiler.profiler.kineto_results.events())
    sent = [event for event in events if event.name().startswith(("gloo:", "nccl:"))]
    reduced = [event.start_ns() for event in sent if "reduce" in event.name()]
    passes = [(event.start_ns(), event.end_ns()) for event in events if event.name() == _MICRO_STEP]
    exchanging = [any(start <= at <= end for at in reduced) for start, end in passes]
    return sum(exchanging), len(sent), sum(map(_bytes, sent))


def _bytes(event: Any) -> int:
    width = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long": 8, "long int": 8, "int": 4}
    sizes = zip(event.shapes(), event.dtypes(), strict=False)
    return sum(math.prod(shape) * width.get(kind, 1) for shape, kind in sizes)
