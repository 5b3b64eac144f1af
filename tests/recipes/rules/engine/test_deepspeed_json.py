"""Rules about the DeepSpeed JSON, and what DeepSpeed does without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
    "deepspeed_json_names_what_trains": (
        Run(DS, files=ds_json(scheduler={"type": "WarmupLR", "params": {}})),
        Run(DS, files=ds_json(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}})),
    ),
    "deepspeed_sections_have_a_type": (
        Run(DS, files=ds_json(optimizer={"params": {}})),
        Run(DS, files=ds_json(optimizer={"type": "AdamW", "params": {"lr": "auto"}})),
    ),
    "deepspeed_schedulers_have_their_parameters": (
        Run(DS, files=ds_json(scheduler={"type": "WarmupCosineLR", "params": {}})),
        Run(DS, files=ds_json(scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}})),
    ),
    "deepspeed_schedulers_of_own_rates_replace_the_learning_rate": (
        Run(f"{DS} --learning_rate 3e-3", files=ds_json(scheduler={"type": "LRRangeTest", "params": {}})),
        Run(f"{DS} --learning_rate 3e-3", files=ds_json(scheduler={"type": "WarmupLR", "params": {}})),
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
    (
        "deepspeed_json_keys_are_known",
        Run(DS, files=ds_json(zero_optimization={"stage": 3, "offload_param": {"devise": "cpu"}})),
        "offload_param.devise",
    ),
    (
        "deepspeed_json_keys_are_known",
        Run(DS, files=ds_json(tensor_parallel={"tp_size": 2})),
        "tensor_parallel.tp_size",
    ),
    ("deepspeed_json_keys_are_known", Run(DS, files=ds_json(tensorboard={"path": "x"})), "tensorboard.path"),
    ("deepspeed_json_names_what_trains", Run(f"{DS} --max_grad_norm 0.5", files=ds_json()), "gradient_clipping"),
    ("deepspeed_json_names_what_trains", Run(f"{DS} --bf16", files=ds_json(bf16={})), "bf16.enabled"),
    (
        "deepspeed_json_names_what_trains",
        Run(f"{DS} --learning_rate 3e-3", files=ds_json(optimizer={"type": "AdamW"})),
        "optimizer.params.lr",
    ),
    (
        "deepspeed_json_names_what_trains",  # torch's own has another default than DeepSpeed's
        Run(DS, files=ds_json(optimizer={"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}})),
        "optimizer.params.weight_decay",
    ),
    (
        "deepspeed_json_names_what_trains",
        Run(DS, files=ds_json(scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}})),
        "scheduler.params.warmup_max_lr",
    ),
    ("deepspeed_sections_have_a_type", Run(DS, files=ds_json(scheduler={"params": {}})), "scheduler.type"),
    ("deepspeed_schedulers_have_their_parameters", Run(DS, files=ds_json(scheduler={"type": "StepLR"})), "params"),
    (
        "deepspeed_schedulers_have_their_parameters",
        Run(DS, files=ds_json(scheduler={"type": "WarmupLR", "params": {"warmup_steps": 5}})),
        "scheduler.params.warmup_steps",
    ),
    ("zero_stages_exist", Run(DS, files=ds_json(zero_optimization={"stage": "2"})), "zero_optimization.stage"),
]

ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}

# rule, another run in which the rule does not fire
LEGAL_AFTER_ALL = [
    ("deepspeed_json_names_what_trains", Run(f"{DS} --bf16", files=ds_json())),  # accelerate adds the section
    ("deepspeed_json_names_what_trains", Run(f"{DS} --learning_rate 3e-3", files=ds_json(optimizer=ADAMW))),
    (
        "deepspeed_json_names_what_trains",  # the schedule sets the rate
        Run(f"{DS} --learning_rate 3e-3", files=ds_json(optimizer={"type": "AdamW"}, scheduler=DECAY)),
    ),
    ("deepspeed_json_names_what_trains", Run(DS, files=ds_json(optimizer={"type": "SGD", "params": {"lr": "auto"}}))),
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


@pytest.mark.parametrize(("name", "trained"), [("WarmupLR", 3e-3), ("WarmupDecayLR", 1e-3)])
def test_a_schedule_whose_parameters_are_left_out_warms_up_to_and_as_long_as_deepspeed_likes(name, trained, tmp_path):
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    params = {"total_num_steps": "auto"} if name == "WarmupDecayLR" else {}
    content = {**ZERO_2, "scheduler": {"type": name, "params": params}}
    config = HfTrainerDeepSpeedConfig(json.loads(json.dumps(content)))
    args = arguments(tmp_path, learning_rate=3e-3)
    config.trainer_config_process(args)
    config.trainer_config_finalize(args, None, 2000)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    schedule = getattr(schedules, name)(optimizer, **config.config["scheduler"]["params"])
    rates = {steps: (schedule.step(steps), schedule.get_last_lr()[0])[1] for steps in (1, 999)}
    assert rates[1] < 0.2 * trained and rates[999] == pytest.approx(trained)
    assert_fires("deepspeed_json_names_what_trains", {"deepspeed": content, "learning_rate": 3e-3})


def test_a_schedule_without_what_it_needs_is_a_type_error():
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    with pytest.raises(TypeError, match="total_num_steps"):
        schedules.WarmupCosineLR(None)
    config = {**ZERO_2, "scheduler": {"type": "WarmupCosineLR", "params": {}}}
    assert_fires("deepspeed_schedulers_have_their_parameters", {"deepspeed": config})


@pytest.mark.parametrize("content", [{"tensor_parallel": {"tp_size": 2}}, {"fp16": {"enable": True}}])
def test_a_typo_inside_another_section_is_refused_by_deepspeed(content):
    deepspeed = pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, **content})
    assert_fires("deepspeed_json_keys_are_known", {"deepspeed": {**ZERO_2, **content}})


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
