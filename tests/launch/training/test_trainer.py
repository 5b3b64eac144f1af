"""RecipeTrainer: what reaches DDP, what is counted, and that it does not wait for the device."""

from functools import partial

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType
from safetensors.torch import save_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from launch.data.load import load_data
from launch.terminal import console
from launch.training.callbacks import Progress, StepTiming
from launch.training.model import load_model, load_tokenizer
from launch.training.objective import mean_loss
from launch.training.trainer import RecipeTrainer, build_trainer
from recipes import standard
from recipes.errors import UserError
from recipes.rules.probe import arguments_for
from recipes.run import here, resolve
from recipes.scaling.timings import WARM_UP_STEPS
from tests.support.running import model_flags, train_here


@pytest.fixture
def trainer(tmp_path):
    args = standard(str(tmp_path), max_steps=1, disable_tqdm=True)
    return RecipeTrainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[{"x": 0}], run=resolve())


def built(flags, model, tokenized_from) -> RecipeTrainer:
    run = resolve([*model_flags(model, tokenized_from), *flags], here(environment={}))
    tokenizer = load_tokenizer(run)
    data = load_data(run, tokenizer)
    args, model = arguments_for(run, TrainingArguments), load_model(run, tokenizer)
    return build_trainer(run, args, model, tokenizer, data, console(is_main=False))


def test_gradient_as_bucket_view_and_ddp_comm_hook_reach_ddp(tiny_model, texts, tmp_path):
    flags = ["--recipe", "fast", "--ddp_comm_hook", "fp16", "--output_dir", str(tmp_path)]
    handler = built(flags, tiny_model, texts).accelerator.ddp_handler
    assert (handler.gradient_as_bucket_view, handler.comm_hook) == (True, DDPCommunicationHookType.FP16)


def test_label_smoothing_shifts_the_labels_whatever_the_models_class_is_called(tiny_model, texts, tmp_path):
    """FSDP2 calls it FSDPLlamaForCausalLM, which Trainer takes for no language model."""
    flags = ["--label_smoothing_factor", "0.1", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    trainer = built(flags, tiny_model, texts)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch)).item()
    trainer.model.__class__ = type("FSDPModel", (type(trainer.model),), {})
    assert trainer.compute_loss(trainer.model, dict(batch)).item() == loss
    trainer.label_smoother = trainer.label_smoother.func
    assert trainer.compute_loss(trainer.model, dict(batch)).item() != loss  # else Trainer does it by now


@pytest.mark.parametrize(
    ("more", "tokens"), [({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])}, 4), ({}, 8)]
)
def test_tokens_seen_leaves_out_padding_by_the_attention_mask_and_counts_all_tokens_without_one(more, tokens, trainer):
    trainer.get_batch_samples(iter([{"input_ids": torch.ones(2, 4), **more}]), 1, torch.device("cpu"))
    assert int(trainer.tokens_seen) == tokens


def test_the_start_of_a_training_prints_advice_against_warmup_steps_beyond_the_total_steps(capsys):
    def advised(*flags, steps=70):
        run = resolve(["--num_train_epochs", "1", *flags], here(environment={}))
        Progress(run, console()).on_train_begin(None, TrainerState(max_steps=steps), None)
        return capsys.readouterr().out

    assert "the warm-up (1000 steps) is at least as long as the run (70 steps)" in advised("--warmup_steps", "1000")
    assert advised("--warmup_steps", "3") == advised("--warmup_steps", "1000", steps=2000) == ""
    assert advised("--warmup_steps", "1000", "--max_steps", "7") == ""  # `check` has said it


def test_the_step_time_leaves_out_warm_up_and_steps_that_save():
    timing = StepTiming(cuda=False)
    assert timing.step_time is None
    for step in range(10):
        timing.on_step_begin(None, None, None)
        if step == 6:
            timing.on_save(None, None, None)
    assert timing.steps_trained == 10
    assert len(timing.durations) == 10 - 1 - WARM_UP_STEPS - 1


def test_dataloader_drop_last_keeps_evaluation_data_and_refuses_to_drop_all_data(tiny_model, texts, tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--dataloader_drop_last", "--eval_strategy", "epoch"]
    held_out = ["--dataset_test_split", "train[20:33]", "--per_device_eval_batch_size", "4"]
    trainer = built([*flags, *held_out, "--dataset_train_split", "train[:20]"], tiny_model, texts)
    assert sum(len(batch["labels"]) for batch in trainer.get_eval_dataloader()) == 13
    with pytest.raises(UserError, match="drops every example"):
        built([*flags, *held_out, "--dataset_train_split", "train[:3]"], tiny_model, texts)


def test_an_evaluation_keeps_the_logits_and_no_other_output_of_the_model(trainer):
    trainer.label_names = ["labels"]
    trainer.model.forward = lambda x, labels: {"loss": x.sum(), "logits": x, "encoder_last_hidden_state": 0 * x}
    _, logits, _ = trainer.prediction_step(trainer.model, {"x": torch.ones(2, 2), "labels": torch.ones(2)}, False)
    assert torch.equal(logits, torch.ones(2, 2))


def test_a_resumed_run_continues_the_early_stopping_count_with_the_new_patience(trainer):
    trainer.run = resolve(settings={"early_stopping_patience": 50})
    trainer.add_callback(EarlyStoppingCallback(50))
    earlier = EarlyStoppingCallback(3)
    earlier.early_stopping_patience_counter = 2
    trainer.state.stateful_callbacks = {"EarlyStoppingCallback": earlier.state()}
    trainer._load_callback_state()
    (now,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback))
    assert (now.early_stopping_patience, now.early_stopping_patience_counter) == (50, 2)


def test_a_resume_does_not_repeat_the_evaluation_of_eval_on_start(trainer):
    trainer.args.eval_on_start = True
    trainer._load_callback_state()
    assert not trainer.args.eval_on_start


@pytest.mark.parametrize("event", ["on_train_end", "on_log"])
def test_a_reporter_that_fails_at_the_end_leaves_a_note_and_a_model_to_save(event, tiny_model, texts, tmp_path, capsys):
    """It is a service's callback, which fails in this event, not in a step."""

    def fail(self, args, state, control, logs=None, **_):
        if logs is None or "train_runtime" in logs:
            raise ValueError("503")

    trainer = built(["--output_dir", str(tmp_path), "--use_cpu", "true", "--max_steps", "1"], tiny_model, texts)
    methods = {"__module__": "transformers.integrations.own", event: fail}
    trainer.add_callback(type("Reporter", (TrainerCallback,), methods))
    assert trainer.train().global_step == 1 and "its report is incomplete: ValueError: 503" in capsys.readouterr().err


def test_galore_trains_the_named_modules_and_a_name_that_no_layer_has_is_a_mistake(tiny_model, texts, tmp_path):
    galore = "--max_steps 1 --optim galore_adamw --optim_target_modules".split()
    assert train_here(tiny_model, texts, tmp_path / "named", *galore, "q_proj", "k_proj").code == 0
    outcome = train_here(tiny_model, texts, tmp_path / "unknown", *galore, "query", "key")
    assert outcome.code == 2 and "optim_target_modules: No target modules found" in outcome.output


def test_a_reporter_that_cannot_start_is_reported_also_by_a_resume(real_checkpoint, tiny_model, texts, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "/dev/null/events")
    trainer = built(["--report_to", "tensorboard", "--max_steps", "6"], tiny_model, texts)
    with pytest.raises(UserError, match=r"report_to: the reporter cannot start: .*Not a directory"):
        trainer.train(resume_from_checkpoint=str(real_checkpoint))


# --- What Trainer alone does: if one of these fails, RecipeTrainer need not mend it any more ------


def test_the_eval_loss_is_a_mean_over_tokens_unlike_that_of_plain_trainer(tiny_model, texts, tmp_path):
    splits = ["--dataset_train_split", "train[:8]", "--dataset_test_split", "train[8:21]", "--eval_strategy", "epoch"]
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--per_device_eval_batch_size", "4", *splits]
    trainer = built(flags, tiny_model, texts)
    own = trainer.evaluate()["eval_loss"]
    loader = trainer.get_eval_dataloader()
    assert Trainer.evaluation_loop(trainer, loader, "").metrics["eval_loss"] != pytest.approx(own, rel=1e-5)
    losses = [(trainer.model(**batch).loss.item(), batch["labels"][:, 1:].ne(-100).sum().item()) for batch in loader]
    assert own == pytest.approx(sum(loss * items for loss, items in losses) / sum(items for _, items in losses))


def test_a_regression_label_of_minus_100_is_counted_unlike_in_plain_trainer(trainer):
    trainer.compute_loss_func = partial(mean_loss, problem_type="regression")
    batch = {"labels": torch.tensor([-100.0, 1.0])}
    assert Trainer._get_num_items_in_batch(trainer, [batch], torch.device("cpu")) == 1
    assert trainer._get_num_items_in_batch([batch], torch.device("cpu")) == 2


def test_a_checkpoint_that_lacks_weights_is_an_error_unlike_in_plain_trainer(trainer, tmp_path):
    trainer.model._keys_to_ignore_on_save = None
    save_file({"bias": torch.ones(2)}, tmp_path / "model.safetensors")
    Trainer(model=trainer.model, args=trainer.args)._load_from_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="lacks 1 weights of the model, such as weight"):
        trainer._load_from_checkpoint(str(tmp_path))
