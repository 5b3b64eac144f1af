"""What really happens under DeepSpeed, on a CPU, to runs that rules of several subjects report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.real_failures import arguments, assert_fires, report_of_deepspeed, tiny_llama, train

pytestmark = pytest.mark.slow

AUTO = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"], "auto")
ENABLED = {"enabled": "auto"}
MIN_LR = {"lr_scheduler_kwargs": {"min_lr": 1e-6}}
EVAL = {"eval_strategy": "steps", "eval_steps": 1}
TORCH_ADAM = {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}}

# What trains: sections of the DeepSpeed JSON beside the stage, and arguments.
RUNS: dict[str, tuple[dict, dict]] = {
    "polynomial": ({}, {"lr_scheduler_type": "polynomial"}),
    "polynomial of the JSON's optimizer": ({"optimizer": TORCH_ADAM}, {"lr_scheduler_type": "polynomial"}),
    "cosine with min_lr": ({}, {"lr_scheduler_type": "cosine_with_min_lr", **MIN_LR}),
    "cosine and warm-up with min_lr": ({}, {"lr_scheduler_type": "cosine_warmup_with_min_lr", **MIN_LR}),
    "fp16": ({"fp16": ENABLED}, {"fp16": True}),
    "evaluates in bf16 alone": ({}, {"bf16_full_eval": True, **EVAL}),
    "evaluates and trains in bf16": ({"bf16": ENABLED}, {"bf16_full_eval": True, **EVAL}),
}


def report(folder: Path) -> dict[str, str]:
    """How each of RUNS has ended, and a LoRA classifier in two precisions."""
    ends = {}
    for name, (sections, settings) in RUNS.items():
        for stage in (2, 3):
            config = {**AUTO, "zero_optimization": {"stage": stage}, **sections}
            ends[f"{name}, stage {stage}"] = end_of(folder, deepspeed=config, **settings)
    for stage, bf16 in ((2, True), (3, False), (3, True)):
        config = {**AUTO, "zero_optimization": {"stage": stage}, "bf16": ENABLED}
        ends[f"LoRA classifier, stage {stage}, bf16 {bf16}"] = end_of(
            folder, classifies=True, deepspeed=config, bf16=bf16
        )
    return ends


def end_of(folder: Path, classifies: bool = False, **settings) -> str:
    """The error, or the type that the weights were trained in."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations import unset_hf_deepspeed_config

    try:
        if classifies:
            return str(train_classifier(folder, **settings))
        trainer = train(folder, evaluates="eval_strategy" in settings, **settings)
        return str(trainer.model_wrapped.get_data_types()[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        unset_hf_deepspeed_config()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def train_classifier(folder: Path, **settings):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, Trainer

    tiny_llama(pad_token_id=0).save_pretrained(folder / "model")
    args = arguments(folder, **settings)  # before the model, so that ZeRO-3 shards it
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    adapters = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
    rows = [{"input_ids": [1, 2, 3], "labels": 0}] * 16
    trainer = Trainer(get_peft_model(model, adapters), args, train_dataset=rows)
    trainer.train()
    return trainer.model_wrapped.get_data_types()[0]


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, str]:
    pytest.importorskip("deepspeed")
    return report_of_deepspeed(report, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("rule", "name", "message"),
    [
        ("the_schedule_works_under_deepspeed", "polynomial", "has no attribute 'defaults'"),
        ("the_schedule_works_under_deepspeed", "cosine with min_lr", "has no attribute 'defaults'"),
        (
            "the_schedule_works_under_deepspeed",
            "cosine and warm-up with min_lr",
            "has no attribute 'defaults'",
        ),
    ],
)
def test_it_fails(rule, name, message, stage, ends):
    assert message in ends[f"{name}, stage {stage}"]
    sections, settings = RUNS[name]
    assert_fires(rule, {"deepspeed": {"zero_optimization": {"stage": stage}, **sections}, **settings})


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_of_the_json_takes_any_schedule(stage, ends):
    assert ends[f"polynomial of the JSON's optimizer, stage {stage}"] == "torch.float32"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_type_of_evaluations_becomes_the_type_of_the_training(stage, ends):
    assert ends[f"evaluates in bf16 alone, stage {stage}"] == "torch.float32"
    assert ends[f"evaluates and trains in bf16, stage {stage}"] == "torch.bfloat16"
    config = {"zero_optimization": {"stage": stage}, "bf16": ENABLED}
    assert_fires("deepspeed_evaluates_as_it_trains", {"deepspeed": config, "bf16_full_eval": True})


def test_fp16_is_not_for_every_cpu(ends):
    import torch

    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU has fp16")
    assert "Type fp16 is not supported" in ends["fp16, stage 2"]
    assert_fires("fp16_under_deepspeed_needs_hardware", {"deepspeed": {"zero_optimization": {}}, "fp16": True})


def test_zero3_joins_trained_weights_of_one_type(ends):
    assert ends["LoRA classifier, stage 2, bf16 True"] == "torch.bfloat16"
    assert ends["LoRA classifier, stage 3, bf16 False"] == "torch.float32"
    assert ends["LoRA classifier, stage 3, bf16 True"].startswith("AssertionError")
    classifier = {"task": "sequence_classification", "use_peft": True, "bf16": True}
    config = {"zero_optimization": {"stage": 3}, "bf16": ENABLED}
    assert_fires("classifier_adapters_have_one_type", {"deepspeed": config, **classifier})
