"""From a run to Hugging Face's objects: TrainingArguments and the Trainer."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import transformers.trainer
from rich.console import Console
from transformers import TrainingArguments

from launch.data.load import Data
from launch.host.files import end_workers_that_cannot_send
from launch.host.secrets import Unpickled
from launch.host.signals import StopRequest
from launch.host.world import World
from launch.output.other_world import AnyWorld
from launch.terminal import print_note
from launch.training.callbacks import (
    EarlyStopping,
    LogLastStep,
    Progress,
    StopOnNotANumber,
    StopWhenRequested,
    WarmUpAdvice,
)
from launch.training.objective import MeanOverExamples, Metrics
from launch.training.step_timing import TimedTrainer
from launch.training.trainer import RecipeTrainer, apply_ddp_settings, apply_fsdp_settings
from recipes.factories import arguments_for
from recipes.run import Json, RunSpec


def build_arguments(run: RunSpec) -> TrainingArguments:
    """The TrainingArguments of a run, in the process group that it has joined.

    Raises `UserError` with their own message.
    """
    args = arguments_for(run, TrainingArguments, {"disable_tqdm": True, "do_train": True})
    if args.hub_token is not None:
        args.hub_token = Unpickled(args.hub_token)
    return args


class _SteadyClock:
    """Python's `time` for Trainer, which takes durations from a clock that may be set meanwhile."""

    time = staticmethod(time.monotonic)


def build_trainer(
    run: RunSpec,
    world: World,
    args: TrainingArguments,
    model,
    tokenizer,
    data: Data,
    out: Console,
    identity: Json | None = None,
    stop: StopRequest | None = None,
) -> RecipeTrainer:
    """The Trainer of a run, with all that it needs from outside. With `--measure` it also marks the
    parts of its steps.

    `identity` is the run's, for the manifests of its checkpoints. Once `stop` is requested on any
    rank, all save and leave.
    """
    end_workers_that_cannot_send()
    for module in (transformers.trainer, transformers.trainer_utils):
        module.time = _SteadyClock  # type: ignore[attr-defined]
    kind = data.problem_type  # None for a language model
    trainer = (TimedTrainer if run["measure"] else RecipeTrainer)(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator_for(model.config._attn_implementation),
        processing_class=tokenizer,
        compute_metrics=Metrics(kind, data.labels or ()) if kind else None,
        compute_loss_func=MeanOverExamples(kind, args.label_smoothing_factor) if kind else None,
        callbacks=[StopOnNotANumber(), LogLastStep(), WarmUpAdvice(run, out)],
        padding_free=run["padding_free"],
        any_world=_any_world(run, world, out),
        engine=run.engine.title,
        identity=identity,
    )
    if not (run.explicit("disable_tqdm") and run["disable_tqdm"]):
        trainer.add_callback(Progress(out))
    if run["early_stopping_patience"]:
        trainer.add_callback(EarlyStopping(run["early_stopping_patience"]))
    if stop is not None:
        trainer.add_callback(StopWhenRequested(stop, world, trainer.finish_saving))
    apply_ddp_settings(trainer, run)
    apply_fsdp_settings(trainer)
    return trainer


def _any_world(run: RunSpec, world: World, out: Console) -> AnyWorld | None:
    if run.engine.kind != "deepspeed":
        return None
    return AnyWorld(Path(run["output_dir"]), world, run.data_parallel_size, partial(print_note, out=out))
