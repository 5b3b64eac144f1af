"""Rules about training that are functions, and what happens without them."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
from transformers import Trainer

from recipes.run.hardware import Gpu
from tests.support import runs
from tests.support.real_failures import BY_NAME, arguments, assert_fires, launched, train
from tests.support.runs import A100, BEST, CLASSIFY, DS, EVAL, H100, SGD, Run, ds_json, machine, resolved, yaml

V100 = Gpu("Tesla V100-SXM2-16GB", (7, 0), 16 << 30)
MISSPELT = '--gradient_checkpointing --gradient_checkpointing_kwargs {"use_rentrant":false}'
DYNAMO = ("dynamo_config:", "  dynamo_backend: inductor")
FP8 = yaml("'NO'", "mixed_precision: fp8")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "nested_settings_are_known": (Run(MISSPELT), Run(MISSPELT.replace("rentrant", "reentrant"))),
    "nested_files_can_be_read": (Run(DS), Run(DS, files=ds_json())),
    "reports_have_their_packages": (Run("--report_to wandb", missing=("wandb",)), Run("--report_to wandb")),
    "fit_chooses_the_micro_batch": (Run("--fit --gradient_accumulation_steps 2"), Run("--fit --global_batch_size 8")),
    "yaml_compiles_what_the_arguments_do_not": (
        Run(yaml=yaml("MULTI_GPU", *DYNAMO)), Run("--torch_compile", yaml=yaml("MULTI_GPU", *DYNAMO))),
    "yaml_precision_agrees_with_arguments": (
        Run("--bf16 false", yaml=yaml("MULTI_GPU", "mixed_precision: bf16")),
        Run("--bf16 true", yaml=yaml("MULTI_GPU", "mixed_precision: bf16"))),
    "fp8_needs_sm89": (
        Run("--bf16 false --fp16 false", yaml=FP8, hardware=machine(A100)),
        Run("--bf16 false --fp16 false", yaml=FP8, hardware=machine(H100))),
    "torch_has_kernels_for_the_card": (Run(hardware=machine(V100)), Run(hardware=machine(A100))),
    "offload_needs_adamw": (
        Run(f"--recipe memory {SGD}", yaml="memory.yaml"),
        Run("--recipe memory --optim adamw_torch_fused", yaml="memory.yaml")),
    "optim_args_are_known": (Run(f"{SGD} --optim_args momentun=0.9"), Run(f"{SGD} --optim_args momentum=0.9")),
    "warmup_ends_before_the_run": (Run("--warmup_steps 10 --max_steps 10"), Run("--warmup_steps 9 --max_steps 10")),
    "every_evaluation_is_saved": (
        Run(f"{BEST} {EVAL} --eval_steps 5 --save_steps 10"), Run(f"{BEST} {EVAL} --eval_steps 5")),
    "best_metric_is_reported": (
        Run(f"{EVAL} {BEST} --metric_for_best_model f1"), Run(f"{EVAL} {BEST} --metric_for_best_model eval_loss")),
    "best_is_the_better_value": (
        Run(f"{EVAL} {BEST} --metric_for_best_model loss --greater_is_better true"),
        Run(f"{EVAL} {BEST} --metric_for_best_model loss --greater_is_better false")),
    "resume_starts_from_something": (
        Run("--resume_from_checkpoint outputs/checkpoint-7"), Run("--resume_from_checkpoint true")),
    "sharded_checkpoints_hold_the_optimizer": (
        Run("--save_only_model", yaml=runs.fsdp("fsdp_state_dict_type: SHARDED_STATE_DICT"), hardware=runs.TWO_GPUS),
        Run("--save_only_model", yaml=runs.fsdp("fsdp_state_dict_type: FULL_STATE_DICT"), hardware=runs.TWO_GPUS)),
    "norms_and_biases_do_not_decay": (
        Run(f"{DS} --weight_decay 0.1", files=ds_json(optimizer={"type": "AdamW"})),
        Run(f"{DS} --weight_decay 0.1", files=ds_json())),
    "zero3_saves_whole_weights": (
        Run(yaml=runs.deepspeed("zero_stage: 3")),
        Run(yaml=runs.deepspeed("zero_stage: 3", "zero3_save_16bit_model: true"))),
}  # fmt: skip

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("nested_settings_are_known", Run('--accelerator_config {"even_batch":true}'), "accelerator_config"),
    ("best_metric_is_reported",
     Run(f"{CLASSIFY} --prediction_loss_only {EVAL} --metric_for_best_model accuracy"), "loss"),
    ("yaml_precision_agrees_with_arguments", Run("--bf16", yaml=FP8), "mixed_precision"),
    ("yaml_compiles_what_the_arguments_do_not", Run(yaml=runs.deepspeed() + "\n".join(DYNAMO)), "dynamo_config"),
    ("zero3_saves_whole_weights",  # in a JSON without a section for ZeRO, too
     Run(DS, files={"ds.json": {"tensor_parallel": {"autotp_size": 2}}}, world=2), "stage3_gather_16bit_weights"),
]  # fmt: skip

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("nested_settings_are_known", Run('--fsdp_config {"verion":2}')),  # fsdp_config_is_read speaks of it
    ("yaml_precision_agrees_with_arguments", Run("--bf16 false", yaml=FP8)),
    ("offload_needs_adamw", Run(f"{DS} {SGD}", files=ds_json(zero_force_ds_cpu_optimizer=False))),
    ("offload_needs_adamw", Run(f"--recipe memory {SGD}", yaml=runs.deepspeed("zero_stage: 2"))),
    ("warmup_ends_before_the_run", Run("--max_steps 2")),  # the demonstration's own warm-up
    ("best_metric_is_reported", Run(f"{CLASSIFY} {EVAL} {BEST} --metric_for_best_model r2")),  # the data will tell
    ("best_is_the_better_value", Run(f"{EVAL} --greater_is_better true")),  # nothing reads it
]


# --- What really happens --------------------------------------------------------------------------


def test_mixed_precision_in_the_accelerate_yaml_trains_in_bf16_without_the_bf16_flag(write_yaml, tmp_path, monkeypatch):
    file = write_yaml("'NO'", "mixed_precision: bf16", processes=1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched(file)["ACCELERATE_MIXED_PRECISION"])
    trainer = train(tmp_path)
    assert (trainer.args.bf16, trainer.accelerator.mixed_precision) == (False, "bf16")
    assert_fires("yaml_precision_agrees_with_arguments", {"bf16": False}, config=file)


def test_the_bf16_flag_wins_over_mixed_precision_in_the_accelerate_yaml(tmp_path, write_yaml, monkeypatch):
    file = write_yaml("MULTI_GPU", "mixed_precision: fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert arguments(tmp_path, bf16=True).mixed_precision == "bf16"
    run = resolved("--bf16", accelerate_config=str(file))
    (problem,) = BY_NAME["yaml_precision_agrees_with_arguments"](run)
    assert problem.severity == "advice" and "--bf16 wins" in problem.what


def test_a_dynamo_backend_in_the_yaml_compiles_even_if_torch_compile_is_not_set(write_yaml, tmp_path, monkeypatch):
    file = write_yaml("'NO'", "dynamo_config:", "  dynamo_backend: eager", processes=1)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launched(file)["ACCELERATE_DYNAMO_BACKEND"])
    trainer = train(tmp_path)
    assert not trainer.args.torch_compile
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "EAGER"
    assert "from the YAML" in assert_fires("yaml_compiles_what_the_arguments_do_not", {}, config=file).fix


def test_accelerate_replaces_fp8_by_fp16_on_a_gpu_without_fp8(write_yaml, monkeypatch):
    """Only which card and which packages there are is a stand-in."""
    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setenv("PATH", "")  # no nvidia-smi, which accelerate asks first
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert Accelerator(cpu=True).mixed_precision == "fp16"
    file = write_yaml("'NO'", "mixed_precision: fp8", processes=1)
    assert_fires("fp8_needs_sm89", {"bf16": False, "fp16": False}, config=file, gpu=(8, 0))


@pytest.mark.parametrize(
    ("torch", "severity"),
    [
        ("2.13.0", "error"),
        ("2.13.0+cu130", "error"),
        ("2.13.0+cu126", None),
        ("2.13.0+cpu", "advice"),
    ],
)
def test_recent_torch_on_a_v100_has_to_be_built_for_cuda_12_6(torch, severity, monkeypatch):
    monkeypatch.setattr("recipes.legal.version", lambda package: torch)
    found = BY_NAME["torch_has_kernels_for_the_card"](resolved(hardware=machine(V100)))
    assert [problem.severity for problem in found] == ([severity] if severity else [])


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["sgd", "adamw_bnb_8bit"])
def test_optimizer_offload_silently_replaces_the_optimizer_by_deepspeed_cpu_adam(optim):
    weight = [torch.nn.Parameter(torch.ones(1))]
    if optim == "sgd":
        chosen = torch.optim.SGD(weight, lr=0.1)
    else:
        chosen = pytest.importorskip("bitsandbytes").optim.AdamW(weight, lr=0.1, optim_bits=8)
    assert type(map_pytorch_optim_to_deepspeed(chosen)).__name__ == "DeepSpeedCPUAdam"
    assert_fires("offload_needs_adamw", {"recipe": "memory", "optim": optim})


@pytest.mark.parametrize(
    ("optim", "unread"),
    [
        ("sgd", {"optim_args": "momentun=0.9"}),
        ("lion_8bit", {"optim_args": "beta1=0.1"}),
        ("adafactor", {"adam_beta1": 0.5}),
    ],
)
def test_an_optimizer_drops_the_settings_that_its_code_does_not_read(optim, unread, tmp_path):
    made = [Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim=optim, **more)) for more in ({}, unread)]
    assert made[0] == made[1]


def test_a_warmup_longer_than_max_steps_never_reaches_the_learning_rate(tmp_path):
    settings = dict(max_steps=2, warmup_steps=10, logging_steps=1)
    history = train(tmp_path, **settings).state.log_history
    assert [entry["learning_rate"] for entry in history if "learning_rate" in entry] == [0, 5e-6]
    assert_fires("warmup_ends_before_the_run", settings)
