"""A Trainer that trains as the recipe promises: the same training on any hardware and after any
resume, with complete checkpoints, and without waiting for the GPU between logs.
"""

import os
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import DDPCommunicationHookType, FullyShardedDataParallelPlugin, gather_object
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from launch.data.load import Data
from launch.data.streams import Stream
from launch.host.files import end_workers_that_cannot_send
from launch.host.memory import ran_out
from launch.host.signals import StopRequest
from launch.host.world import launched
from launch.output.checkpoints import inspect
from launch.output.other_world import AnyWorld
from launch.output.saving import CommittingTrainer
from launch.terminal import console, print_note
from launch.training.batches import Places, examples_in_last_round, set_epoch, tokens_of
from launch.training.callbacks import Progress, StepTiming, StopOnNotANumber, StoppedInEvaluation, StopWhenRequested
from launch.training.failure import NotANumber, only_noted
from launch.training.model import parameter_count
from launch.training.objective import countable, filler, mean_loss, metrics_of
from recipes.errors import Failure, mistake, one_line
from recipes.rules.training import pushed_to
from recipes.run import Json, RunSpec, Settings

# Errors that a checkpoint of another model, or a damaged one, may raise while it is loaded.
_MISFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# GaLore and APOLLO keep objects of these classes in their state. torch.load must allow the classes.
_PROJECTORS = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
    ("apollo_torch.svd_projector", "GaLoreProjector"),
)


class RecipeTrainer(CommittingTrainer):
    """Trainer with complete checkpoints, without FLOP counting in every micro-batch, and with a
    token count that never waits for the GPU. A stream resumes at the place in its checkpoint.

    accelerate fills up the last batch of an epoch or evaluation with examples that were already
    used (accelerate#2316). RecipeTrainer counts each example once, on any number of processes.

    `run` holds the settings that TrainingArguments lacks.
    """

    label_smoother: Any
    tokens_seen: torch.Tensor | int = 0
    loaded_step: int | None = None  # the step of the best model if it was loaded at the end
    _evaluated: list[float] | None = None  # in an evaluation: the sum of item losses, and the number of items
    _items: Any = None  # the number of items in the last step or evaluation batch
    _owed: bool = False  # True if a stop cut short the evaluation of the checkpoint
    _last_round: int = -1  # examples_in_last_round of the current epoch
    _places: Places | None = None  # for a stream only

    def __init__(self, *args, run: RunSpec, **kwargs) -> None:
        settings = kwargs["args"]
        if settings.use_liger_kernel and settings.torch_compile:
            _keep_loss_out_of_compiled_code()
        if settings.torch_compile and run["use_regional_compilation"]:
            torch._dynamo.config.optimize_ddp = False  # else layers are cut at DDP's buckets, and keep more activations
        try:
            super().__init__(*args, run=run, **kwargs)
        except ValueError as error:
            if "purely quantized" not in str(error):
                raise
            fix = "add --use_peft, or name a model that is not quantised"
            raise mistake("model_name_or_path", one_line(error), fix) from None
        self.any_world = AnyWorld(Path(self.args.output_dir), launched(), run.batch.data_parallel)
        self.timing = StepTiming(self.args.device.type == "cuda", parts=bool(run["measure"]))
        self.add_callback(self.timing)
        self.remove_callback(PrinterCallback)  # Trainer adds it when its own progress bar is off
        if self.compute_loss_func is not None:
            self.model_accepts_loss_kwargs = False  # classifiers accept **kwargs but ignore the item count
        elif self.label_smoother is not None:
            # Trainer shifts labels only for class names that it knows (transformers#27161). Under
            # FSDP2 and in remote code the names differ, so a model would learn to repeat tokens.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        self.evaluations: dict[int, dict[str, float]] = {}  # step -> metrics, of this process
        self.num_parameters = parameter_count(self.model)  # before an engine shards them
        apply_ddp_settings(self, run)
        if self.accelerator.is_fsdp2:
            _mend_fsdp2(self.accelerator.state.fsdp_plugin, self.model)

    # --- Training --------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, **kwargs):
        self._checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        try:
            with patch("transformers.trainer.deepspeed_load_checkpoint", self.any_world.load):
                return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            in_reporter = any(frame.filename.endswith("integrations/integration_utils.py") for frame in frames)
            if in_reporter and not self.timing.steps_trained:
                fix = "log in, correct the environment variables of the service, or leave --report_to out"
                raise mistake("report_to", f"the reporter cannot start: {one_line(error).rstrip('.')}", fix) from None
            if "No target modules found" in str(error):
                fix = "use all-linear, parts of layers' names (q_proj v_proj), or a pattern of whole names (.*q_proj)"
                raise mistake("optim_target_modules", one_line(error), fix) from None
            if resume_from_checkpoint is None or self.timing.steps_trained or not isinstance(error, _MISFIT):
                raise
            if isinstance(error, (torch.distributed.DistError, Failure)) or ran_out(error):
                raise
            what = f"{resume_from_checkpoint} does not fit this model: {one_line(error)}"
            fix = "use another --output_dir, or --fresh; or rename a damaged checkpoint, to resume from an older one"
            raise mistake("output_dir", what, fix) from None

    def _finalize_training(self, *args, **kwargs):
        # An unreachable service must not stop the save that follows (pytorch-lightning#6641).
        for callback in self.callback_handler.callbacks:
            if type(callback).__module__.startswith("transformers.integrations"):
                for event in ("on_log", "on_evaluate", "on_train_end"):
                    setattr(callback, event, only_noted(launched())(getattr(callback, event)))
        return super()._finalize_training(*args, **kwargs)

    def _run_epoch(self, *args, **kwargs):
        # Trainer checks these conditions only after a step, so a run that resumes at its last step
        # would take one more step.
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return None
        # If a resume continues an epoch, accelerate's loader does not know how many examples are
        # left for the last batch, and does not set the epoch of every sampler.
        self._last_round = examples_in_last_round(kwargs["train_dataloader"])
        set_epoch(kwargs["train_dataloader"], kwargs["epoch"])
        group = self.args.process_index // self.get_tp_size()
        # Seed each rank's own dropout masks (transformers#31412) only here, because accelerate has
        # taken its seed for shuffling by now. A checkpoint's random state is loaded later.
        if group and not self.timing.steps_trained:
            torch.manual_seed(self.args.seed + group)
        return super()._run_epoch(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        with self.timing.micro_step():
            return super().training_step(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.timing.mark("forward")
        return loss

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if self._places is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps  # Trainer counts epochs from the resume
        with self.timing.end_of_step(self.state, self.control):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, torch.Tensor]) -> int:
        """Return 0, because counting would visit every parameter in each micro-batch."""
        return 0

    def require_finite_weights(self) -> None:
        """Raise `NotANumber` if a trained weight is NaN or infinite after the last update, which no
        loss shows. All ranks call this, because under FSDP each rank sees only its own shards.
        """
        trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        broken = gather_object([name for name, weight in trained if not bool(torch.isfinite(weight).all())])
        if broken:
            raise NotANumber(f"weights are NaN or infinite after step {self.state.global_step} ({broken[0]})")

    # --- Examples --------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, Stream):
            return super().get_train_dataloader()
        args, sharing = self.args, self.get_tp_size()
        places = Places(args.world_size // sharing, max(1, args.dataloader_num_workers), self.train_dataset.shards)
        if self._checkpoint is not None and not args.ignore_data_skip:
            places = places.found_in(Path(self._checkpoint), args.process_index, args.world_size)
        self._places, args.ignore_data_skip = places, True  # the stream itself begins at the place of the resume
        return places.loader(self.train_dataset, self.data_collator, args.process_index // sharing, args)

    def get_eval_dataloader(self, *args, **kwargs) -> DataLoader:
        """Return a loader of all held-out examples: `dataloader_drop_last` applies to training."""
        with patch.object(self.args, "dataloader_drop_last", False):
            return super().get_eval_dataloader(*args, **kwargs)

    def _get_train_sampler(self, *args, **kwargs):
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            # Trainer groups only the examples of one process in a step, and shuffles with random
            # numbers that a resume in the second epoch cannot repeat.
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler.batch_size, sampler.generator = self.get_total_train_batch_size(self.args), torch.Generator()
            sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(seed + epoch)
        return sampler

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        self.timing.begin_step()
        batches = epoch_iterator if self._places is None else map(self._places.advance, epoch_iterator)
        samples, items = super().get_batch_samples(batches, num_batches, device)
        self.timing.have_read(samples, items)
        self.tokens_seen = self.tokens_seen + sum(tokens_of(batch) for batch in samples)
        return samples, items

    def _get_num_items_in_batch(self, batch_samples, device):
        self.timing.mark("data_wait")  # after this, the processes add up their items
        if batch_samples and self.accelerator.gradient_state.end_of_dataloader:
            self._forget_repeated_examples(batch_samples[-1])
        items = super()._get_num_items_in_batch([countable(batch) for batch in batch_samples], device)
        if torch.is_tensor(items) and self.accelerator.is_fsdp2 and self.accelerator.parallelism_config is None:
            items = items.long()  # FSDP2 rounds float inputs of the model: in bf16, 654 items are 656
        self._items = items
        return items

    def _forget_repeated_examples(self, batch: dict[str, torch.Tensor]) -> None:
        """Mask the labels of examples that only fill up this process's share of the last batch."""
        # `model.training` cannot tell: it stays False from an evaluation until the next step.
        trains = self._evaluated is None
        left = self._last_round if trains else self.accelerator.gradient_state.remainder
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if left <= 0 or not counted or "labels" not in batch:
            return
        size = self.args.train_batch_size if trains else self.args.eval_batch_size
        group = self.args.process_index // self.get_tp_size()  # processes of one group have the same examples
        own = min(max(left - group * size, 0), size)
        batch["labels"] = batch["labels"].clone()
        batch["labels"][own:] = filler(batch["labels"])

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        if "labels" in prepared:  # under DeepSpeed, Trainer rounds floats to 16 bits: label 1001 to 1000
            prepared["labels"] = inputs["labels"].to(self.args.device)
        return prepared

    # --- Evaluations -----------------------------------------------------------------------------

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """Evaluate as Trainer does, but average the loss over all tokens (or examples), not over
        batches (transformers#39241).
        """
        self._evaluated = [0.0, 0.0]
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums, self._evaluated = torch.tensor(self._evaluated, dtype=torch.float64, device=self.args.device), None
        if self._items is not None:
            # `_items` counts all ranks with `average_tokens_across_devices`, else only this rank.
            total, items = self.accelerator.reduce(sums, "mean").tolist()
            if items:
                output.metrics[f"{metric_key_prefix}_loss"] = total / items
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._evaluated is not None and loss is not None and self._items:  # 0: examples that only fill up a batch
            items = int(self._items)
            self._evaluated = [self._evaluated[0] + loss.double().item() * items, self._evaluated[1] + items]
        # BART and T5 also return hidden states, which Trainer would keep until the evaluation ends.
        return loss, logits[0] if isinstance(logits, tuple) else logits, labels

    def evaluate(self, *args, **kwargs):
        """Evaluate as Trainer does. If asked to stop, save this step, and raise `Preempted`."""
        try:
            metrics = super().evaluate(*args, **kwargs)
        except StoppedInEvaluation:
            step = self.state.global_step
            if step and step == self.model_step and not str(self._checkpoint).endswith(f"checkpoint-{step}"):
                self._save_checkpoint(self.model_wrapped, None)
                self.callback_handler.on_save(self.args, self.state, self.control)  # waits for all ranks, then raises
            raise
        self.evaluations[self.state.global_step] = metrics
        return metrics

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        """Evaluate as Trainer does. If the earlier run was stopped during its last evaluation,
        this run's first evaluation repeats that evaluation, and updates best model and scheduler.
        """
        owed, self._owed = self._owed, False
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler and not owed)
        if owed and self._determine_best_metric(metrics, trial):
            self.state.best_model_checkpoint = self._checkpoint
        return metrics

    def final_metrics(self) -> dict[str, float]:
        """Return the current model's metrics, evaluated if needed; empty without held-out data."""
        if self.eval_dataset is None:
            return {}
        return self.evaluations.get(self.model_step) or self.evaluate()

    # --- Checkpoints and the model at the end ----------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Trainer does, but gather the final model, even if checkpoints are sharded."""
        if _internal_call and output_dir is not None and self._places is not None:
            self._places.save(Path(output_dir), self.args.process_index)
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()  # a schedule-free optimizer trains other weights than those to keep
        if self.deepspeed is not None and not _internal_call:
            self.deepspeed._config.zero_config.gather_16bit_weights_on_model_save = True
        if _internal_call or not self.accelerator.is_fsdp2:
            super().save_model(output_dir, _internal_call)
            return
        # Rank 0 receives the whole model. Adapters are saved without frozen weights.
        adapts = hasattr(self.model, "peft_config")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapts)
        state = get_model_state_dict(self.model, options=options)
        if self.args.should_save:  # else, before transformers 5.23, the other ranks would write an empty file
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(self, *args, **kwargs):
        """Push the model that `save_model` has written. Raises `Failure` if the Hub refuses it."""
        try:
            return super().push_to_hub(*args, **kwargs)
        except (HTTPError, OSError) as error:
            what = f"the model is in {self.args.output_dir}, but not on the Hub: {one_line(error)}"
            raise Failure(f"{what} Give the same command again, or run `hf upload`.") from None

    def _issue_warnings_after_load(self, load_result) -> None:
        # Raise: Trainer would only warn, and continue with random values in the missing weights.
        weights = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        missing, tied = set(load_result.missing_keys), set(getattr(self.model, "all_tied_weights_keys", ()))
        if lost := sorted(missing & weights - tied):
            raise ValueError(f"the checkpoint lacks {len(lost)} weights of the model, such as {lost[0]}")
        load_result.missing_keys[:] = missing - weights  # Trainer would warn of tied weights
        super()._issue_warnings_after_load(load_result)

    def _load_callback_state(self) -> None:
        # If should_evaluate is still set, the checkpoint was saved before its evaluation ended.
        control = self.state.stateful_callbacks.get("TrainerControl", {})
        self._owed = control.get("args", {}).get("should_evaluate", False)
        self.args.eval_on_start = self._owed  # one more evaluation would count for early stopping
        if self._checkpoint and self.state.best_global_step and self.state.best_model_checkpoint is None:
            best = Path(self._checkpoint).with_name(f"checkpoint-{self.state.best_global_step}")
            if best.is_dir():  # the output folder has moved: a cloud mounts it elsewhere at every start
                self.state.best_model_checkpoint = str(best)
        if stopping := self.state.stateful_callbacks.get("EarlyStoppingCallback"):  # else a new patience had no effect
            stopping["args"]["early_stopping_patience"] = self.run["early_stopping_patience"]
        super()._load_callback_state()
        for callback in [*self.callback_handler.callbacks, self.control]:  # Trainer's save expects an entry for each
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        known = [getattr(sys.modules[module], name) for module, name in _PROJECTORS if module in sys.modules]
        with torch.serialization.safe_globals(known):  # torch.load refuses other classes
            super()._load_optimizer_and_scheduler(checkpoint)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if checkpoint is not None and isinstance(schedule, LambdaLR):  # a longer schedule has another rate at this step
            pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            schedule._last_lr = [base * factor(schedule.last_epoch) for base, factor in pairs]
            for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = rate

    def _load_best_model(self) -> None:
        best, world = Path(self.state.best_model_checkpoint), launched()
        if damage := world.decide(lambda: inspect(best, self.identity).faults):  # Trainer would only warn
            print_note(f"the best model, {best.name}, is not loaded: {', '.join(damage)}", console(world.is_main))
            return
        self.any_world.prepare(best)
        super()._load_best_model()
        self.loaded_step = int(best.name.rpartition("-")[2])

    @property
    def model_step(self) -> int:
        """The step of the weights: the best step if its model was loaded, else the last step."""
        return self.state.global_step if self.loaded_step is None else self.loaded_step


def _keep_loss_out_of_compiled_code() -> None:
    """Have torch.compile leave Liger's loss uncompiled. torch 2.11 cannot trace the loss of
    liger-kernel 0.8.5: `unsupported operand type(s) for *: 'torch.dtype' and 'FakeTensor'`.
    """
    from liger_kernel.transformers import functional

    name = "liger_fused_linear_cross_entropy"
    setattr(functional, name, torch.compiler.disable(getattr(functional, name)))


def apply_ddp_settings(trainer: Trainer, run: Settings) -> None:
    """Pass to DDP the settings that TrainingArguments lacks: `gradient_as_bucket_view` (bool) and
    `ddp_comm_hook` ("no", "fp16" or "bf16"). Call this before `train()` wraps the model.
    """
    if handler := trainer.accelerator.ddp_handler:
        handler.gradient_as_bucket_view = run["gradient_as_bucket_view"]
        handler.comm_hook = DDPCommunicationHookType(run["ddp_comm_hook"])


def _mend_fsdp2(plugin: FullyShardedDataParallelPlugin, model: PreTrainedModel) -> None:
    """Work around accelerate 1.15, which rounds all outputs of the model to 16 bits, even the loss.
    accelerate also shards the input embeddings, and fails if they lie in a sharded module (BERT).
    """
    if policy := plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)
    if plugin.transformer_cls_names_to_wrap is None:
        embeddings = model.get_input_embeddings()
        beside = {type(module).__name__ for module in model.modules() if embeddings not in set(module.modules())}
        plugin.transformer_cls_names_to_wrap = sorted(beside & set(model._no_split_modules or ()))


# --- From a run to its Trainer --------------------------------------------------------------------


def require_hub(run: Settings) -> None:
    """With --push_to_hub, create the run's repository if it is missing, and check, before hours of
    training, that the Hub accepts a push. Raises `UserError` with the Hub's own message.
    """
    if not run["push_to_hub"]:
        return
    api = HfApi(token=run["hub_token"])
    try:
        name = api.create_repo(pushed_to(run), private=run["hub_private_repo"], exist_ok=True).repo_id
        api.auth_check(name, write=True)
    except (HTTPError, OSError) as error:
        fix = "run `hf auth login` with a write token, or set --hub_model_id to your repository"
        fix += "; or leave out --push_to_hub, and run `hf upload` after the training"
        raise mistake("push_to_hub", one_line(error), fix) from None


def build_trainer(
    run: RunSpec,
    args: TrainingArguments,
    model,
    tokenizer,
    data: Data,
    out: Console,
    identity: Json | None = None,
    stop: StopRequest | None = None,
) -> RecipeTrainer:
    """Create the Trainer of a run, with its data, metrics and callbacks.

    `identity` describes the run in the manifests of its checkpoints. Once `stop` is requested on
    any rank, all ranks save and leave. Raises `UserError` if no example is left to train on.
    """
    end_workers_that_cannot_send()
    fewest = run.batch.micro * run.batch.data_parallel if run["dataloader_drop_last"] else 0
    if not isinstance(data.train, Stream) and len(data.train) < fewest:  # type: ignore[arg-type]
        what = f"drops every example: one micro-batch per process takes {fewest} examples; the data has fewer"
        raise mistake("dataloader_drop_last", what, "leave it out, or use a smaller --global_batch_size")
    if args.hub_token is not None:  # else Trainer writes it into training_args.bin; the model is loaded already
        os.environ["HF_TOKEN"], args.hub_token = args.hub_token, None
    kind = data.problem_type  # None for a language model
    loss = partial(mean_loss, problem_type=kind, label_smoothing=args.label_smoothing_factor) if kind else None
    trainer = RecipeTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator_for(model.config._attn_implementation),
        processing_class=tokenizer,
        compute_metrics=partial(metrics_of, kind) if kind else None,
        compute_loss_func=loss,
        callbacks=[StopOnNotANumber(), Progress(run, out)],
        run=run,
        identity=identity,
    )
    if run["early_stopping_patience"]:
        trainer.add_callback(EarlyStoppingCallback(run["early_stopping_patience"]))
    if stop is not None:
        trainer.add_callback(StopWhenRequested(stop, trainer.finish_saving))
    return trainer
