"""RecipeTrainer: what reaches DDP, what is counted, and that it does not wait for the device."""

import types

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType
from transformers import TrainerState

from launch.host.world import World
from launch.terminal import console
from launch.training.callbacks import Meter, StopOnNotANumber, WarmUpAdvice
from launch.training.failure import NotANumber
from launch.training.trainer import RecipeTrainer, apply_ddp_settings
from recipes import standard
from recipes.errors import UserError
from recipes.run import here, resolve
from tests.support.running import model_flags, train_here


@pytest.fixture
def trainer(tmp_path):
    args = standard(str(tmp_path), max_steps=1, disable_tqdm=True)
    return RecipeTrainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[{"x": 0}])


def built(flags, model, tokenized_from) -> RecipeTrainer:
    from launch.data.load import load_data
    from launch.training.build import build_arguments, build_trainer
    from launch.training.model import load_model, load_tokenizer

    run = resolve([*model_flags(model, tokenized_from), *flags], here(environment={}))
    tokenizer = load_tokenizer(run)
    data = load_data(run, tokenizer)
    model = load_model(run, tokenizer, data)
    return build_trainer(run, World(), build_arguments(run), model, tokenizer, data, None)


def test_a_run_hands_its_settings_to_the_trainer_it_builds(tiny_model, texts, tmp_path):
    flags = ["--recipe", "fast", "--ddp_comm_hook", "fp16", "--output_dir", str(tmp_path)]
    handler = built(flags, tiny_model, texts).accelerator.ddp_handler
    assert (handler.gradient_as_bucket_view, handler.comm_hook) == (True, DDPCommunicationHookType.FP16)


def test_label_smoothing_asks_for_the_next_token_whatever_the_models_class_is_called(tiny_model, texts, tmp_path):
    """FSDP2 calls it FSDPLlamaForCausalLM, which Trainer takes for no language model."""
    flags = ["--label_smoothing_factor", "0.1", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    trainer = built(flags, tiny_model, texts)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch)).item()
    trainer.model.__class__ = type("FSDPModel", (type(trainer.model),), {})
    assert trainer.compute_loss(trainer.model, dict(batch)).item() == loss


def test_what_training_arguments_refuse_is_a_mistake_in_a_setting():
    from launch.training.build import build_arguments

    with pytest.raises(UserError, match=r"warmup_steps: .*\(command line\)\. Fix: another value, or leave it out"):
        build_arguments(resolve(["--warmup_steps", "-1"], here(environment={})))


def test_what_trainer_itself_set_on_the_handler_stays(trainer):
    apply_ddp_settings(trainer, {"gradient_as_bucket_view": True, "ddp_comm_hook": "no"})
    assert trainer.accelerator.ddp_handler.find_unused_parameters is False


def test_padding_is_not_counted_as_tokens(trainer):
    batch = {"input_ids": torch.ones(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])}
    trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert int(trainer.tokens_seen) == 4


def test_packed_rows_count_whole(trainer):
    trainer.get_batch_samples(iter([{"input_ids": torch.ones(2, 4)}]), 1, torch.device("cpu"))
    assert int(trainer.tokens_seen) == 8


def test_flops_are_not_counted_in_every_micro_batch(trainer):
    assert trainer.floating_point_ops({"input_ids": torch.ones(2, 4)}) == 0


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_logged_loss_that_is_not_a_number_stops(loss):
    with pytest.raises(NotANumber, match="step 7"):
        StopOnNotANumber().on_log(None, types.SimpleNamespace(global_step=7), None, logs={"loss": loss})


def test_a_warm_up_beyond_the_epochs_is_told_once_their_steps_are_known(capsys):
    def advised(*flags, steps=7):
        run = resolve(["--num_train_epochs", "1", *flags], here(environment={}))
        WarmUpAdvice(run, console()).on_train_begin(None, TrainerState(max_steps=steps), None)
        return capsys.readouterr().out

    assert "1000 steps of warm-up do not end before the run, which has 7" in advised("--warmup_steps", "1000")
    assert advised("--warmup_steps", "3") == advised("--warmup_steps", "1000", steps=2000) == ""
    assert advised("--warmup_steps", "1000", "--max_steps", "7") == ""  # `check` has said it


def test_the_meter_leaves_out_warm_up_and_steps_that_save():
    meter = Meter()
    for step in range(10):
        meter.on_step_begin(None, None, None)
        if step == 6:
            meter.on_save(None, None, None)
    assert meter.steps_trained == 10
    assert len(meter.durations) == 10 - 1 - Meter.WARM_UP_STEPS - 1


def test_without_enough_steps_there_is_no_step_time():
    assert Meter().step_time is None


def test_tokens_per_second_come_from_the_tokens_that_were_trained(tiny_model, texts, tmp_path):
    full = ("--packing", "--packing_strategy", "wrapped", "--max_steps", "8")
    record = train_here(tiny_model, texts, tmp_path, *full).record
    assert record["tokens_per_second"] == pytest.approx(record["samples_per_second"] * 64)
