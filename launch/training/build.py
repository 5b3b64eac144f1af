"""From a run to Hugging Face's objects: the Hub, TrainingArguments and the Trainer."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import EarlyStoppingCallback, TrainingArguments

from launch.data.load import Data
from launch.host.files import end_workers_that_cannot_send
from launch.host.signals import StopRequest
from launch.host.world import World
from launch.output.other_world import AnyWorld
from launch.terminal import print_note
from launch.training.callbacks import Progress, StopOnNotANumber, StopWhenRequested
from launch.training.objective import MeanOverExamples, Metrics
from launch.training.trainer import RecipeTrainer
from recipes.errors import mistake, one_line
from recipes.factories import arguments_for
from recipes.rules.training import pushed_to
from recipes.run import Json, RunSpec, Settings


def require_hub(run: Settings) -> None:
    """Ask the Hub before the start for the repository that Trainer will push to after hours.

    Raises `UserError` with the Hub's own message.
    """
    if not run["push_to_hub"]:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    api = HfApi(token=run["hub_token"])
    try:
        name = api.create_repo(pushed_to(run), private=run["hub_private_repo"], exist_ok=True).repo_id
        api.auth_check(name, write=True)
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        fix = "`hf auth login` with a token that may write there, or a --hub_model_id of your own; or leave it out"
        raise mistake("push_to_hub", one_line(error), f"{fix}, and `hf upload` the folder afterwards") from None


def build_arguments(run: RunSpec) -> TrainingArguments:
    """The TrainingArguments of a run, in the process group that it has joined.

    Raises `UserError` with their own message.
    """
    return arguments_for(run, TrainingArguments, {"disable_tqdm": True, "do_train": True})


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
    """The Trainer of a run, with all that it needs from outside.

    `identity` is the run's, for the manifests of its checkpoints. Once `stop` is requested on any
    rank, all save and leave.
    """
    end_workers_that_cannot_send()
    if args.hub_token is not None:  # Trainer would write it into training_args.bin; the model is loaded by now
        os.environ["HF_TOKEN"], args.hub_token = args.hub_token, None
    kind = data.problem_type  # None for a language model
    any_world = None
    if run.engine.kind == "deepspeed":
        any_world = AnyWorld(Path(run["output_dir"]), world, run.data_parallel_size, partial(print_note, out=out))
    trainer = RecipeTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator_for(model.config._attn_implementation),
        processing_class=tokenizer,
        compute_metrics=Metrics(kind) if kind else None,
        compute_loss_func=MeanOverExamples(kind, args.label_smoothing_factor) if kind else None,
        callbacks=[StopOnNotANumber(), Progress(run, out)],
        run=run,
        any_world=any_world,
        engine=run.engine.title,
        identity=identity,
    )
    if run["early_stopping_patience"]:
        trainer.add_callback(EarlyStoppingCallback(run["early_stopping_patience"]))
    if stop is not None:
        trainer.add_callback(StopWhenRequested(stop, world, trainer.finish_saving))
    return trainer
