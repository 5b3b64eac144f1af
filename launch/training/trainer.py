"""A Trainer that wastes no synchronisation, and the callbacks that watch it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from launch.host.memory import ran_out
from launch.host.signals import Preempted, StopRequest
from launch.host.world import World
from launch.training.batches import IGNORED
from recipes.errors import mistake
from recipes.scaling.timings import WARM_UP_STEPS


class RecipeTrainer(Trainer):
    """Trainer, less its per-micro-batch flop counting, plus a token count that never waits for the GPU.

    The last batch of an epoch and of an evaluation counts each example once, on any number of processes: accelerate
    fills it up with examples it has already dealt out.
    """

    tokens_seen: torch.Tensor | int = 0
    meter: Meter
    _evaluated: _Evaluated | None = None

    def train(self, resume_from_checkpoint=None, **kwargs):
        """As Trainer's. Raises `UserError` where a whole checkpoint does not fit what is to be trained."""
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            loading = resume_from_checkpoint is not None and not self.meter.steps_trained
            if not loading or ran_out(error) or isinstance(error, torch.distributed.DistError):
                raise
            raise mistake(
                "output_dir",
                f"{resume_from_checkpoint} does not fit this model: {_in_one_line(error)}",
                "another --output_dir, or --fresh to move that run aside",
            ) from None

    def _issue_warnings_after_load(self, load_result) -> None:
        # Trainer warns, and goes on with whatever values these weights have.
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        lost = sorted(name for name in missing & set(weights) if id(weights[name]) not in loaded)  # not the tied ones
        if lost:
            raise ValueError(f"it lacks {len(lost)} weights of it, {lost[0]} among them")
        super()._issue_warnings_after_load(load_result)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: it walks every parameter each micro-batch. MFU comes from the token count instead."""
        return 0

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.tokens_seen = self.tokens_seen + sum(_tokens(batch) for batch in samples)
        return samples, items

    def _get_num_items_in_batch(self, batch_samples, device):
        if batch_samples and self.accelerator.gradient_state.end_of_dataloader:
            self._forget_repeated_examples(batch_samples[-1])
        items = super()._get_num_items_in_batch(batch_samples, device)
        if self._evaluated is not None:
            self._evaluated.items = items
        return items

    def _forget_repeated_examples(self, batch: dict[str, Any]) -> None:
        """Mask the labels of what fills up this process's share of the last batch; its rank's share comes in order."""
        left = self.accelerator.gradient_state.remainder  # examples in the last round of micro-batches, -1 or 0: all
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if left <= 0 or not counted or "labels" not in batch:
            return
        number = _example_numbers(batch)
        size = self.args.train_batch_size if self.model.training else self.args.eval_batch_size
        own = min(max(left - self.args.process_index * size, 0), size)
        batch["labels"] = batch["labels"].masked_fill(number >= own, IGNORED)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._evaluated is not None and loss is not None and self._evaluated.items is not None:
            self._evaluated.add(loss)
        return loss, logits, labels

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """As Trainer's, whose loss is a mean over batches; here it is one over all tokens, or over all examples."""
        self._evaluated = _Evaluated()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        evaluated, self._evaluated = self._evaluated, None
        if evaluated.weight:
            mean = self.accelerator.reduce(evaluated.total.to(self.args.device), "mean") / evaluated.weight
            output.metrics[f"{metric_key_prefix}_loss"] = mean.item()
        return output

    def _run_epoch(self, *args, **kwargs):
        # Resumed from its last step, Trainer would take one more: it looks at these only after a step.
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)


@dataclass
class _Evaluated:
    """Losses of an evaluation: `total` of (mean loss of a batch x its items), `weight` all items, of all processes."""

    total: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    weight: int = 0
    items: Any = None

    def add(self, loss: torch.Tensor) -> None:
        self.total = self.total + (loss.double() * self.items).cpu()
        self.weight += int(self.items)


def mean_over_examples(outputs, labels, num_items_in_batch=None, label_smoothing: float = 0.0) -> torch.Tensor:
    """The loss of a classifier: each example of a global batch weighs the same, in whichever micro-batch it is."""
    losses = torch.nn.functional.cross_entropy(
        outputs["logits"].float(), labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return losses / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def _example_numbers(batch: Mapping[str, Any]) -> torch.Tensor:
    """Which example of a micro-batch each label belongs to: its row, or its place in a padding-free row."""
    labels = batch["labels"]
    if "position_ids" in batch and labels.dim() == 2 and len(labels) == 1:
        return (batch["position_ids"] == 0).cumsum(-1) - 1
    rows = torch.arange(len(labels), device=labels.device)
    return rows if labels.dim() == 1 else rows[:, None].expand_as(labels)


def _in_one_line(error: Exception) -> str:
    """The start of a library's message: its first line often only announces the second."""
    return " ".join(" ".join(str(error).splitlines()[:2]).split()) or type(error).__name__


def _tokens(batch: Mapping[str, Any]) -> torch.Tensor | int:
    """Tokens of one micro-batch without padding, left on the device where they are counted from a mask."""
    if batch.get("attention_mask") is not None:
        return batch["attention_mask"].sum()
    return batch["input_ids"].numel()


def apply_ddp_settings(trainer: Trainer, run: Mapping[str, Any]) -> None:
    """Hand DDP what is no field of TrainingArguments. Between `Trainer(...)` and `train()`: DDP wraps in `train()`.

    `run` has `gradient_as_bucket_view` (bool) and `ddp_comm_hook` ("no", "fp16" or "bf16").
    """
    from accelerate.utils import DDPCommunicationHookType

    handler = trainer.accelerator.ddp_handler
    if handler is None:
        return
    handler.gradient_as_bucket_view = run["gradient_as_bucket_view"]
    handler.comm_hook = DDPCommunicationHookType(run["ddp_comm_hook"])


class NotANumber(ArithmeticError):
    """The loss is NaN or infinite."""


class EarlyStopping(EarlyStoppingCallback):
    """Hugging Face's, which also stays stopped where a run resumes from the checkpoint it stopped at."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


class StopOnNotANumber(TrainerCallback):
    """Stops when a logged loss is NaN or infinite: the value is on the host then, so looking costs nothing."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NotANumber(f"the loss is {loss} at step {state.global_step}")


def require_finite(trainer: Trainer) -> None:
    """Raises `NotANumber` for trained weights that are none: the last steps may have failed after the last log."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise NotANumber(f"the weights are no numbers after step {trainer.state.global_step} ({name})")


class StopWhenTold(TrainerCallback):
    """Once any rank was told to stop, all ranks save at the same step and leave. A step with its evaluation is ended.

    The ranks ask each other over gloo, so that no GPU waits for the answer.
    """

    def __init__(self, request: StopRequest, world: World) -> None:
        self.request = request
        self.world = world
        self.group: Any = None
        self.agreed = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.group = torch.distributed.new_group(backend="gloo") if self.world.size > 1 else None

    def on_step_end(self, args, state, control, **kwargs):
        self.agreed = self._any_rank_was_told()
        control.should_save |= self.agreed

    on_evaluate = on_step_end  # a signal that came during the evaluation need not wait for another step

    def on_save(self, args, state, control, **kwargs):
        if not self.agreed:
            return
        if self.group is not None:
            torch.distributed.barrier(group=self.group)  # a rank that left would have its launcher end the others
        raise Preempted(f"told to stop by {self.request.signal or 'another rank'} at step {state.global_step}")

    def _any_rank_was_told(self) -> bool:
        told = torch.tensor(self.request.signal is not None, dtype=torch.int32)
        if self.group is not None:
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(told)


class LogLastStep(TrainerCallback):
    """Logs at the last step too, so that the final loss is known however seldom a recipe logs."""

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
        """Mean seconds per step: with a GPU that runs ahead of the host, single steps mean little. None if too few."""
        return sum(self.durations) / len(self.durations) if self.durations else None


class Progress(TrainerCallback):
    """One progress bar on a terminal, one line a log elsewhere."""

    def __init__(self, console) -> None:
        self.console = console
        self.bar: Any = None
        self.task: Any = None

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
        words = [
            f"{name} {_short(logs[name])}"
            for name in ("loss", "learning_rate", "eval_loss", "eval_accuracy")
            if name in logs
        ]
        if not words:
            return
        if self.bar and "loss" in logs:
            self.bar.update(self.task, description="  ".join(words))
        else:
            self.console.print(f"step {state.global_step}/{state.max_steps}  " + "  ".join(words), highlight=False)

    def on_train_end(self, args, state, control, **kwargs):
        self.stop()

    def stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


def _short(value: Any) -> str:
    return f"{float(value):.4g}"


def only_our_progress(trainer: Trainer) -> None:
    """Take out the printing callback that Trainer adds when its own progress bar is off."""
    trainer.remove_callback(PrinterCallback)
