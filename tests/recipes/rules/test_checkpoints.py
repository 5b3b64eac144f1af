"""Rules about checkpoints, and what happens without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.rules.checkpoints import _as_repository, a_push_has_a_login
from tests.support.real_failures import TOKENS, arguments, assert_fires, losses, tiny_llama, train
from tests.support.runs import BEST, DS, EVAL, TWO_GPUS, Run, deepspeed, fsdp, resolved

pytestmark = pytest.mark.usefixtures("fresh_state")

PUSH = "--push_to_hub"

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "output_has_a_folder": (Run("--output_dir none"), Run("--output_dir some")),
    "a_push_names_a_repository": (
        Run(f"{PUSH} --hub_model_id my/own/model"),
        Run(f"{PUSH} --hub_model_id my/own-model"),
    ),
    "a_push_has_a_login": (
        Run(PUSH, environment={"HF_TOKEN": "hf_mine", "HF_HUB_OFFLINE": "1"}),
        Run(PUSH, environment={"HF_TOKEN": "hf_mine"}),
    ),
    "resume_starts_from_something": (
        Run("--resume_from_checkpoint outputs/checkpoint-7"),
        Run("--resume_from_checkpoint true"),
    ),
    "a_resume_skips_what_was_trained": (Run("--ignore_data_skip"), Run("")),
    "persistent_workers_change_a_resume": (
        Run("--dataloader_persistent_workers --dataloader_num_workers 1"),
        Run("--dataloader_num_workers 1"),
    ),
    "an_unseeded_sampler_changes_a_resume": (
        Run('--accelerator_config {"use_seedable_sampler":false}'),
        Run('--accelerator_config {"use_seedable_sampler":false} --train_sampling_strategy sequential'),
    ),
    "weights_alone_cannot_find_the_best": (
        Run(f"--save_only_model {BEST} {EVAL}", yaml="memory.yaml"),
        Run(f"--save_only_model {BEST} {EVAL}", yaml="standard.yaml"),
    ),
    "sharded_checkpoints_hold_the_optimizer": (
        Run("--save_only_model", yaml=fsdp("fsdp_state_dict_type: SHARDED_STATE_DICT"), hardware=TWO_GPUS),
        Run("--save_only_model", yaml=fsdp("fsdp_state_dict_type: FULL_STATE_DICT"), hardware=TWO_GPUS),
    ),
    "weights_alone_do_not_resume": (Run("--save_only_model"), Run("--save_only_model false")),
    "signal_checkpoints_may_be_incomplete": (Run("--enable_jit_checkpoint"), Run("--enable_jit_checkpoint false")),
    "zero3_saves_whole_weights": (
        Run(yaml=deepspeed("zero_stage: 3")),
        Run(yaml=deepspeed("zero_stage: 3", "zero3_save_16bit_model: true")),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    (
        "zero3_saves_whole_weights",  # in a JSON without a section for ZeRO, too
        Run(DS, files={"ds.json": {"tensor_parallel": {"autotp_size": 2}}}, world=2),
        "stage3_gather_16bit_weights_on_model_save",
    ),
    ("resume_starts_from_something", Run("--fresh --resume_from_checkpoint ."), "resume_from_checkpoint"),
]


def test_resuming_from_nothing_fails_after_everything_was_loaded(tmp_path):
    with pytest.raises(Exception, match="checkpoint"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-9"))
    assert_fires("resume_starts_from_something", {"resume_from_checkpoint": str(tmp_path / "checkpoint-9")})


def test_weights_alone_leave_no_optimizer_to_resume(tmp_path):
    train(tmp_path, save_only_model=True, save_strategy="steps", save_steps=2)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert_fires("weights_alone_do_not_resume", {"save_only_model": True})


EXACT = dict(logging_steps=1, max_steps=3, save_strategy="steps", save_steps=1)


def train_with_dropout(folder: Path, **settings) -> list[float]:
    """The losses of a run that a resume repeats exactly if the random state is the same."""
    return losses(train(folder, model=tiny_llama(attention_dropout=0.5), **{**EXACT, **settings}))


def test_persistent_workers_change_what_follows_a_resume(tmp_path):
    same = {}
    for persistent in (False, True):
        settings = dict(dataloader_num_workers=1, dataloader_persistent_workers=persistent)
        whole = train_with_dropout(tmp_path / f"{persistent}", **settings)
        checkpoint = str(tmp_path / f"{persistent}" / "checkpoint-2")  # the end of an epoch
        same[persistent] = train_with_dropout(tmp_path / "resumed", resume=checkpoint, **settings) == whole
    assert same == {False: True, True: False}
    assert_fires("persistent_workers_change_a_resume", settings)


def test_a_checkpoint_on_a_signal_is_from_the_middle_of_a_step(tmp_path):
    """Its random state is from after the forward pass, its weights are from before the update."""
    from transformers import Trainer, TrainerCallback

    class Signal(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            manager.is_checkpoint_requested = state.global_step == 1  # as the handler of SIGTERM does

    steps = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4)
    whole = train_with_dropout(tmp_path / "whole", **steps)
    on_signals = {**EXACT, **steps, "save_strategy": "no", "enable_jit_checkpoint": True}
    args = arguments(tmp_path / "stopped", **on_signals)
    trainer = Trainer(tiny_llama(attention_dropout=0.5), args, train_dataset=[TOKENS] * 16, callbacks=[Signal()])
    manager = next(each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))
    trainer.train()
    same = {}
    for run in ("whole", "stopped"):
        checkpoint = str(tmp_path / run / "checkpoint-1")
        same[run] = train_with_dropout(tmp_path / "resumed", resume=checkpoint, **steps) == whole
    assert same == {"whole": True, "stopped": False}
    assert_fires("signal_checkpoints_may_be_incomplete", {"enable_jit_checkpoint": True})


def test_nobody_is_logged_in(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    (found,) = a_push_has_a_login(resolved(PUSH))
    assert found.severity == "error" and "hf auth login" in found.fix
    assert not list(a_push_has_a_login(resolved("--push_to_hub --hub_token mine")))
    (elsewhere,) = a_push_has_a_login(resolved(PUSH, elsewhere=frozenset()))
    assert elsewhere.severity == "advice"  # who is logged in there, nobody knows here


def test_a_name_that_the_hub_does_not_take_fails_when_the_trainer_is_built(tmp_path):
    from huggingface_hub.errors import HFValidationError
    from transformers import Trainer

    settings = {"push_to_hub": True, "hub_model_id": "my own model", "hub_token": "mine"}
    with pytest.raises(HFValidationError):
        Trainer(tiny_llama(), arguments(tmp_path, **settings))
    assert_fires("a_push_names_a_repository", settings)


@given(st.text(min_size=1, max_size=120))
def test_the_name_in_the_fix_is_one_that_the_hub_takes(name):
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(_as_repository(name))
