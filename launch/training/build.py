"""From a run to Hugging Face's objects: TrainingArguments and the Trainer."""

from __future__ import annotations

import time
from functools import partial

import torch
import transformers.trainer
from torch.distributed import DistError
from transformers import TrainingArguments

from launch.data.load import Data
from launch.host.heartbeat import limit_waits
from launch.host.secrets import Unpickled
from launch.host.storage import end_workers_that_cannot_send
from launch.training.callbacks import (
    EarlyStopping,
    LogLastStep,
    Meter,
    Progress,
    StopOnNotANumber,
    WarmUpAdvice,
    only_our_progress,
)
from launch.training.objective import MeanOverExamples, Metrics
from launch.training.step_timing import TimedTrainer
from launch.training.trainer import RecipeTrainer, apply_ddp_settings, apply_fsdp_settings
from recipes.errors import Failure, UserError
from recipes.factories import arguments_for
from recipes.rules.check import refused_by_library
from recipes.run import RunSpec


def build_arguments(run: RunSpec) -> TrainingArguments:
    """The TrainingArguments of a run, which join the process group.

    Raises `UserError` with their own message, and `Failure` if a rank does not join.
    """
    limit_waits(run["ddp_timeout"])
    try:
        args = arguments_for(run, TrainingArguments, {"disable_tqdm": True, "do_train": True})
    except (TypeError, ValueError) as error:
        raise UserError(refused_by_library(run, error)) from None
    except DistError as error:
        what = f"the ranks of the run were not all there within {run['ddp_timeout']} s (ddp_timeout)"
        raise Failure(f"{what}: {' '.join(str(error).split())[:200]}") from None
    if run.engine.kind == "deepspeed" and run.world_size > 1:
        _tell_deepspeed()
    if args.hub_token is not None:
        args.hub_token = Unpickled(args.hub_token)
    return args


def _tell_deepspeed() -> None:
    """Hand the process group to DeepSpeed. On a CPU accelerate does not, if --deepspeed is beside a
    launch of plain DDP, and ZeRO-3 would divide the weights of the model among one process.
    """
    from deepspeed import comm

    if not comm.is_initialized():
        comm.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)


class _SteadyClock:
    """Python's `time` for Trainer, which takes durations from a clock that may be set meanwhile."""

    time = staticmethod(time.monotonic)


def build_trainer(run: RunSpec, args: TrainingArguments, model, tokenizer, data: Data, console) -> RecipeTrainer:
    """The Trainer of a run with our callbacks.

    With `--measure` it also marks the parts of its steps.
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
        callbacks=[StopOnNotANumber(), LogLastStep(), WarmUpAdvice(run, console)],
    )
    if kind:
        # These models accept **kwargs and ignore the count in them.
        trainer.model_accepts_loss_kwargs = False
    elif trainer.label_smoother:
        # Trainer shifts labels for names of classes that it knows. FSDP2 renames them, remote code
        # has its own: such a model would learn to repeat each token.
        trainer.label_smoother = partial(trainer.label_smoother, shift_labels=True)
    trainer.engine = run.engine.title
    trainer.padding_free = run["padding_free"]
    trainer.meter = Meter()
    trainer.add_callback(trainer.meter)
    if not (run.explicit("disable_tqdm") and run["disable_tqdm"]):
        trainer.add_callback(Progress(console))
    if run["early_stopping_patience"]:
        trainer.add_callback(EarlyStopping(run["early_stopping_patience"]))
    only_our_progress(trainer)
    apply_ddp_settings(trainer, run)
    apply_fsdp_settings(trainer)
    return trainer
