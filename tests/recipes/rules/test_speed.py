"""Rules about speed, and what happens without them."""

from __future__ import annotations

import pytest
from transformers import CTRLConfig, CTRLLMHeadModel

from recipes import legal
from tests.support.real_failures import arguments, assert_fires, launched, train
from tests.support.runs import Run, yaml

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "yaml_compiles_what_the_arguments_do_not": (
        Run(yaml=yaml("MULTI_GPU", "dynamo_config:", "  dynamo_backend: inductor")),
        Run("--torch_compile", yaml=yaml("MULTI_GPU", "dynamo_config:", "  dynamo_backend: inductor")),
    ),
    "compile_backend_is_known": (
        Run("--torch_compile_backend foo"),
        Run("--torch_compile_backend aot_eager"),
    ),
    "compile_backend_is_installed": (
        Run("--torch_compile_backend tvm", missing=("tvm",)),
        Run("--torch_compile_backend tvm"),
    ),
    "compile_mode_is_known": (
        Run("--torch_compile_mode fastest"),
        Run("--torch_compile_mode max-autotune-no-cudagraphs"),
    ),
    "compiling_has_a_backend": (
        Run("--torch_compile --torch_compile_backend no"),
        Run("--torch_compile --torch_compile_backend eager"),
    ),
    "compile_settings_compile": (
        Run("--torch_compile false --torch_compile_mode default"),
        Run("--torch_compile --torch_compile_mode default"),
    ),
    "compiling_needs_one_shape": (Run("--torch_compile --packing false"), Run("--torch_compile --packing")),
    "the_model_can_checkpoint": (
        Run("--gradient_checkpointing --model_name_or_path model", files={"model/config.json": {"model_type": "ctrl"}}),
        Run("--gradient_checkpointing --model_name_or_path model", files={"model/config.json": {"model_type": "gpt2"}}),
    ),
    "syncing_each_batch_is_slow": (
        Run('--accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":true}}'),
        Run('--accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":false}}'),
    ),
    "counting_tokens_costs_a_sync": (
        Run("--include_num_input_tokens_seen all"),
        Run("--include_num_input_tokens_seen no"),
    ),
    "logging_costs_a_sync": (Run("--logging_steps 1"), Run("--logging_steps 2")),
    "shared_memory_is_fast": (
        Run(environment={"NCCL_SHM_DISABLE": "1"}),
        Run(environment={"NCCL_SHM_DISABLE": "0"}),
    ),
}

DYNAMO = ("dynamo_config:", "  dynamo_backend: inductor")

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("compile_backend_is_known", Run("--torch_compile_backend ofi"), "torch_compile_backend"),
    (
        "compile_backend_is_known",
        Run("--torch_compile", yaml=yaml("NO", "dynamo_config:", "  dynamo_backend: NVPRIMS_NVFUSER")),
        "dynamo_backend",
    ),
    ("compile_mode_is_known", Run("--torch_compile", environment={"ACCELERATE_DYNAMO_MODE": "x"}), "dynamo_mode"),
    ("compile_mode_is_known", Run("--torch_compile_backend eager --torch_compile_mode default"), "torch_compile_mode"),
    ("compile_mode_is_known", Run("--torch_compile", yaml=yaml("NO", *DYNAMO, "  dynamo_mode: x")), "dynamo_mode"),
    ("compiling_needs_one_shape", Run("--torch_compile_mode default --packing false"), "torch_compile"),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    (rule, Run("--torch_compile", yaml=yaml("NO", *DYNAMO, "  dynamo_mode: max-autotune-no-cudagraphs")))
    for rule in ("compile_mode_is_known", "nested_yaml_values_are_legal")
]


def test_a_compile_backend_compiles_what_torch_compile_switched_off(tmp_path):
    settings = dict(torch_compile=False, torch_compile_backend="eager")
    assert arguments(tmp_path, **settings).torch_compile
    assert_fires("compile_settings_compile", settings)


def test_dynamo_in_the_yaml_compiles_behind_the_arguments(write_yaml, tmp_path, monkeypatch):
    file = write_yaml("'NO'", "dynamo_config:", "  dynamo_backend: eager", processes=1)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launched(file)["ACCELERATE_DYNAMO_BACKEND"])
    trainer = train(tmp_path)
    assert not trainer.args.torch_compile
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "EAGER"
    assert_fires("yaml_compiles_what_the_arguments_do_not", {}, config=file)


def test_a_deepspeed_launch_exports_no_dynamo(write_yaml):
    file = write_yaml(
        "DEEPSPEED", "dynamo_config:", "  dynamo_backend: inductor", "deepspeed_config:", "  zero_stage: 2"
    )
    assert not [name for name in launched(file) if "DYNAMO" in name]
    assert_fires("yaml_compiles_what_the_arguments_do_not", {}, config=file)


@pytest.mark.parametrize("backend", ["ofi", "nvprims_nvfuser", "onnxrt", "tensorrt"])
def test_torch_has_no_such_backend_any_more(backend, tmp_path):
    import torch

    with pytest.raises(torch._dynamo.exc.InvalidBackend, match=backend):
        train(tmp_path, torch_compile_backend=backend)
    assert_fires("compile_backend_is_known", {"torch_compile_backend": backend})


def test_some_models_cannot_checkpoint(tmp_path):
    model = CTRLLMHeadModel(CTRLConfig(vocab_size=300, n_embd=8, n_head=2, n_layer=1, dff=8))
    with pytest.raises(ValueError, match="does not support activation checkpointing"):
        train(tmp_path, model=model, gradient_checkpointing=True)


def test_torch_has_no_such_mode(tmp_path):
    with pytest.raises(RuntimeError, match="Unrecognized mode=fastest"):
        train(tmp_path, torch_compile_mode="fastest")
    assert_fires("compile_mode_is_known", {"torch_compile_mode": "fastest"})


def test_other_backends_ignore_the_mode(tmp_path):
    settings = {"torch_compile_backend": "aot_eager", "torch_compile_mode": "fastest"}
    train(tmp_path, **settings)
    assert_fires("compile_mode_is_known", settings)


def test_the_backend_no_compiles_nothing(tmp_path):
    settings = {"torch_compile": True, "torch_compile_backend": "no"}
    trainer = train(tmp_path, **settings)
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "NO"
    assert_fires("compiling_has_a_backend", settings)


def test_what_is_read_from_the_source_is_what_torch_has():
    import torch

    assert legal.compile_modes() == tuple(torch._inductor.list_mode_options())
    named = {name.lower() for name in legal.accelerate_choices()["DynamoBackend"]}
    assert legal.compile_backends() & named == set(torch._dynamo.list_backends(None)) & named
