"""Rules about the DeepSpeed JSON, and what DeepSpeed does without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.real_failures import ZERO_2, arguments, assert_fires, launched, report_of_deepspeed, train
from tests.support.runs import DS, Run, deepspeed, ds_json

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "deepspeed_is_configured_once": (
        Run(yaml=deepspeed("deepspeed_config_file: ds.json", "zero_stage: 2"), files=ds_json()),
        Run(yaml=deepspeed("deepspeed_config_file: ds.json"), files=ds_json()),
    ),
    "the_model_has_the_experts_to_keep_whole": (
        Run(yaml=deepspeed("deepspeed_moe_layer_cls_names: MixtralExperts")),
        Run(yaml=deepspeed("deepspeed_moe_layer_cls_names: LlamaMLP")),
    ),
    "deepspeed_file_can_be_read": (
        Run(yaml=deepspeed("deepspeed_config_file: ds.json")),
        Run(yaml=deepspeed("deepspeed_config_file: ds.json"), files=ds_json()),
    ),
    "deepspeed_json_sections_are_objects": (
        Run(DS, files=ds_json(zero_optimization=2)),
        Run(DS, files=ds_json(zero_optimization={"stage": 2})),
    ),
    "deepspeed_json_names_the_batch": (
        Run(DS, files={"ds.json": ZERO_2}),
        Run(DS, files=ds_json()),
    ),
    "deepspeed_json_keys_are_known": (
        Run(DS, files=ds_json(gradient_cliping=1.0)),
        Run(DS, files=ds_json(gradient_clipping=1.0)),
    ),
    "deepspeed_json_agrees_with_arguments": (
        Run(DS, files=ds_json(gradient_accumulation_steps=2)),
        Run(DS, files=ds_json(gradient_accumulation_steps="auto")),
    ),
    "deepspeed_json_has_one_precision": (
        Run(DS, files=ds_json(fp16={"enabled": True}, bf16={"enabled": True})),
        Run(f"{DS} --bf16", files=ds_json(fp16={"enabled": False}, bf16={"enabled": True})),
    ),
    "deepspeed_json_names_classes": (
        Run(DS, files=ds_json(scheduler={"type": "WarmupLr", "params": {}})),
        Run(DS, files=ds_json(scheduler={"type": "WarmupLR", "params": {}}, optimizer={"type": "AdamW"})),
    ),
    "zero_stages_exist": (
        Run(DS, files={"ds.json": {"zero_optimization": {"stage": 4}}}),
        Run(DS, files={"ds.json": {"zero_optimization": {"stage": 3}}}),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    (
        "deepspeed_is_configured_once",  # as a launcher hands it on
        Run(DS, files=ds_json(), environment={"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,mixed_precision"}),
        "deepspeed_config",
    ),
    ("deepspeed_json_sections_are_objects", Run(DS, files=ds_json(optimizer="AdamW")), "optimizer"),
    ("deepspeed_json_sections_are_objects", Run(DS, files=ds_json(tensor_parallel=2)), "tensor_parallel"),
    ("deepspeed_json_names_the_batch", Run(DS, files=ds_json(train_batch_size="auto")), "gradient_accumulation_steps"),
    (
        "deepspeed_json_names_the_batch",  # accelerate takes 1 for it
        Run(yaml=deepspeed("deepspeed_config_file: ds.json"), files={"ds.json": ZERO_2}),
        "gradient_accumulation_steps",
    ),
    ("deepspeed_json_keys_are_known", Run(DS, files={"ds.json": {"zero_optimization": {"stge": 2}}}), "stge"),
]


@pytest.mark.parametrize(
    "content",
    [
        dict(train_micro_batch_size_per_gpu=3),
        dict(gradient_accumulation_steps=3),
        dict(train_batch_size=99),
        dict(gradient_clipping=0.3),
        dict(bf16={"enabled": True}),
        dict(optimizer={"params": {"lr": 0.3}}),
    ],
    ids=lambda content: next(iter(content)),
)
def test_a_deepspeed_json_that_contradicts_the_arguments_is_refused(content, tmp_path):
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = {"zero_optimization": {"stage": 2}, **content}
    real = HfTrainerDeepSpeedConfig(config)
    args = arguments(tmp_path)
    real.trainer_config_process(args)
    with pytest.raises(ValueError, match="mismatch TrainingArguments"):
        real.trainer_config_finalize(args, None, 10)
    assert_fires("deepspeed_json_agrees_with_arguments", {"recipe": "baseline", "deepspeed": config})


def test_deepspeed_is_configured_in_the_yaml_or_in_the_json(write_yaml, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    json_file = tmp_path / "ds.json"
    file = write_yaml("DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {json_file}", "  zero_stage: 2")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", launched(file)["ACCELERATE_CONFIG_DS_FIELDS"])
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config=str(json_file))
    assert_fires("deepspeed_is_configured_once", {}, config=file)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ValueError, "Expected a string path to an existing deepspeed config"),
        ("{bad", ValueError, "Expecting property name"),
        ("[1]", AttributeError, "'list' object"),
        ("{}", ValueError, "Please specify the ZeRO optimization config"),
    ],
)
def test_a_deepspeed_json_that_cannot_be_used_fails_in_the_workers(content, error, message, write_yaml, tmp_path):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    json_file = tmp_path / "ds.json"
    if content is not None:
        json_file.write_text(content, encoding="utf-8")
    file = write_yaml("DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {json_file}")
    launched(file)
    with pytest.raises(error, match=message):
        DeepSpeedPlugin(hf_ds_config=str(json_file))
    assert_fires("deepspeed_file_can_be_read", {}, config=file)


def test_a_section_that_is_not_an_object_fails_in_the_constructor(tmp_path):
    pytest.importorskip("deepspeed")
    with pytest.raises(AttributeError, match="has no attribute 'get'"):
        arguments(tmp_path, deepspeed={"zero_optimization": 2})
    assert_fires("deepspeed_json_sections_are_objects", {"deepspeed": {"zero_optimization": 2}})


def test_a_json_without_a_batch_is_refused_by_deepspeed():
    deepspeed = pytest.importorskip("deepspeed")
    with pytest.raises(AssertionError, match="Either train_batch_size or"):
        deepspeed.DeepSpeedConfig(dict(ZERO_2))
    assert_fires("deepspeed_json_names_the_batch", {"deepspeed": ZERO_2})


def test_two_precisions_in_the_json_are_refused_by_deepspeed():
    deepspeed = pytest.importorskip("deepspeed")
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(AssertionError, match="cannot be simultaneously enabled"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, **both})
    assert_fires("deepspeed_json_has_one_precision", {"deepspeed": {**ZERO_2, **both}})


def test_a_zero_stage_that_does_not_exist_is_refused_by_deepspeed():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    with pytest.raises(ValueError, match="Input should be 0, 1, 2"):
        zero.DeepSpeedZeroConfig(stage=4)
    assert_fires("zero_stages_exist", {"deepspeed": {"zero_optimization": {"stage": 4}}})


def test_a_typo_inside_zero_optimization_is_refused_by_deepspeed():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    with pytest.raises(ValueError, match="stge"):
        zero.DeepSpeedZeroConfig(stge=2)
    assert_fires("deepspeed_json_keys_are_known", {"deepspeed": {"zero_optimization": {"stge": 2}}})


AUTO = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"], "auto")


def zero(stage: int, *, sections: dict | None = None, **zero_optimization) -> dict:
    return {**AUTO, "zero_optimization": {"stage": stage, **zero_optimization}, **(sections or {})}


def saved(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "checkpoint-2").iterdir())


def in_shards(trainer) -> int:
    return sum(hasattr(weight, "ds_tensor") for weight in trainer.model.parameters())


def zero_report(folder: Path) -> dict:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 1}}
    chosen = zero(2, sections={"optimizer": optimizer, "scheduler": scheduler})
    engine = train(folder / "chosen", deepspeed=chosen, optim="sgd", lr_scheduler_type="cosine").model_wrapped
    offload, saves = {"offload_param": {"device": "cpu"}}, dict(save_strategy="steps", save_steps=2)
    zero2 = train(folder / "zero2", deepspeed=zero(2, **offload))
    zero3 = train(folder / "zero3", deepspeed=zero(3, **offload), **saves)
    train(folder / "whole", deepspeed=zero(3, stage3_gather_16bit_weights_on_model_save=True), **saves)
    return {
        "optimizer": type(engine.optimizer.optimizer).__name__,
        "scheduler": type(engine.lr_scheduler).__name__,
        "in shards": {"zero2": in_shards(zero2), "zero3": in_shards(zero3)},
        "saved": saved(folder / "zero3"),
        "saved whole": saved(folder / "whole"),
    }


@pytest.fixture(scope="module")
def zero_trained(tmp_path_factory) -> dict:
    pytest.importorskip("deepspeed")
    return report_of_deepspeed(zero_report, tmp_path_factory.mktemp("zero"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "trained", "settings"),
    [("optimizer", "AdamW", {"optim": "sgd"}), ("scheduler", "WarmupLR", {"lr_scheduler_type": "cosine"})],
)
def test_the_deepspeed_json_replaces_what_the_arguments_choose(section, trained, settings, zero_trained):
    assert zero_trained[section] == trained
    config = zero(2, sections={section: {"type": trained, "params": {}}})
    assert_fires("deepspeed_json_chooses_the_optimizer", {"deepspeed": config, **settings})


@pytest.mark.slow
def test_zero3_saves_no_weights_unless_it_is_told_to_gather_them(zero_trained):
    assert "model.safetensors" in zero_trained["saved whole"]
    assert "model.safetensors" not in zero_trained["saved"]
    assert_fires("zero3_saves_whole_weights", {"deepspeed": zero(3)})


@pytest.mark.slow
def test_zero2_leaves_parameters_alone_that_it_was_told_to_offload(zero_trained, write_yaml):
    in_shards = zero_trained["in shards"]
    assert in_shards["zero3"] and not in_shards["zero2"]
    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 2", "  offload_param_device: cpu")
    assert_fires("parameters_are_offloaded_by_stage_three", {}, config=file)
