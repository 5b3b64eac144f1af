"""From a run to Hugging Face's objects: the arguments and the Trainer, and nothing that the run does not say."""

from __future__ import annotations

from functools import partial

from transformers import TrainingArguments

from launch.training.data import Data, compute_accuracy
from launch.training.step_timing import TimedTrainer
from launch.training.trainer import (
    EarlyStopping,
    LogLastStep,
    Meter,
    Progress,
    RecipeTrainer,
    StopOnNotANumber,
    apply_ddp_settings,
    mean_over_examples,
    only_our_progress,
)
from recipes.errors import mistake
from recipes.factories import arguments_for
from recipes.run import RunSpec


def build_arguments(run: RunSpec) -> TrainingArguments:
    """The real TrainingArguments; their own complaints become one line. Joins the world as a side effect."""
    try:
        return arguments_for(run, TrainingArguments, {"disable_tqdm": True, "do_train": True})
    except (TypeError, ValueError) as error:
        raise mistake("TrainingArguments", str(error).splitlines()[0], "the setting it names") from None


def build_trainer(run: RunSpec, args: TrainingArguments, model, tokenizer, data: Data, console) -> RecipeTrainer:
    classifies = run["task"] == "sequence_classification"
    trainer = (TimedTrainer if run["measure"] else RecipeTrainer)(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator,
        processing_class=tokenizer,
        compute_metrics=compute_accuracy if classifies else None,
        compute_loss_func=partial(mean_over_examples, label_smoothing=args.label_smoothing_factor)
        if classifies
        else None,
        callbacks=[StopOnNotANumber(), LogLastStep()],
    )
    if classifies:
        trainer.model_accepts_loss_kwargs = False  # these models take **kwargs, and hand them to nobody who counts
    trainer.meter = Meter()
    trainer.add_callback(trainer.meter)
    if not (run.explicit("disable_tqdm") and run["disable_tqdm"]):
        trainer.add_callback(Progress(console))
    if run["early_stopping_patience"]:
        trainer.add_callback(EarlyStopping(run["early_stopping_patience"]))
    only_our_progress(trainer)
    apply_ddp_settings(trainer, run)
    return trainer
