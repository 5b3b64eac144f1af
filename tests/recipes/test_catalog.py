"""The recipes: what each one sets, on which hardware, and why."""

from dataclasses import replace

import pytest

from recipes.catalog import RECIPES
from recipes.run.engine import from_yaml
from recipes.run.files import shipped
from recipes.run.hardware import Hardware
from tests.support import runs
from tests.support.runs import machine, resolved

CPU = Hardware(cores=2)
T4, H100, EIGHT_H100 = machine(runs.T4, liger=False), machine(runs.H100, liger=False), machine(runs.H100, 8)
FUSED_BY_COMPILE = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")


def run_of(recipe, hardware=CPU, world=1, trained_by="nobody", **settings):
    return resolved("", world, {"recipe": recipe, **settings}, hardware=hardware, trained_by=trained_by)


EVERY_30 = dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=30)
VALUES = [
    # bf16 where it is native, fp16 on older cards, fp32 on a CPU; a choice turns the other off
    ("standard", CPU, {}, dict(bf16=False, fp16=False)),
    ("standard", T4, {}, dict(bf16=False, fp16=True)),
    ("standard", H100, {}, dict(bf16=True, fp16=False)),
    ("standard", H100, dict(bf16=False), dict(bf16=False, fp16=False)),
    ("baseline", H100, {}, dict(bf16=False, fp16=False, tf32=None)),
    ("fast", H100, dict(use_cpu=True), dict(bf16=False, torch_compile=False, tf32=None)),
    ("memory", CPU, {}, dict(bf16=True)),
    ("memory", CPU, dict(fp16=True), dict(bf16=False)),
    # DDP plans a static graph only without accumulation
    ("fast", EIGHT_H100, dict(world=1), dict(ddp_static_graph=False)),
    ("fast", EIGHT_H100, dict(world=2), dict(ddp_static_graph=True)),
    # compiled where all batches have one shape
    ("fast", CPU, {}, dict(torch_compile=False)),
    ("fast", H100, {}, dict(torch_compile=True)),
    ("fast", H100, dict(packing=False), dict(torch_compile=False)),
    # equal layers are compiled once
    ("fast", H100, {}, dict(use_regional_compilation=True)),
    ("fast", CPU, {}, dict(use_regional_compilation=False)),
    # flex attention for compiled packs on one GPU, as it was measured
    ("fast", H100, {}, dict(attn_implementation="flex_attention")),
    ("fast", H100, dict(packing=False), dict(attn_implementation=None)),
    ("fast", EIGHT_H100, dict(world=2), dict(attn_implementation=None)),
    ("fast", H100, dict(gradient_checkpointing=True), dict(attn_implementation=None)),
    # Liger's loss alone beside torch.compile, which fuses the rest
    ("fast", EIGHT_H100, {}, dict(liger_kernel_config=dict.fromkeys(FUSED_BY_COMPILE, False))),
    ("fast", EIGHT_H100, dict(torch_compile=False), dict(liger_kernel_config=None)),
    # Liger where it is installed, but not with smoothed labels: an evaluation would fail
    ("fast", H100, {}, dict(use_liger_kernel=False)),
    ("fast", EIGHT_H100, {}, dict(use_liger_kernel=True)),
    ("fast", EIGHT_H100, dict(label_smoothing_factor=0.1), dict(use_liger_kernel=False)),
    ("fast", EIGHT_H100, dict(trained_by="script"), dict(torch_compile=True, use_liger_kernel=False)),
    # frozen weights in 16 bits, where nothing asks for one type of all
    ("standard", H100, {}, dict(dtype="float32")),
    ("standard", H100, dict(use_peft=True), dict(dtype="bfloat16")),
    ("standard", H100, dict(use_peft=True, dtype="float32"), dict(dtype="float32")),
    ("standard", T4, dict(use_peft=True), dict(dtype="float32")),
    ("memory", H100, dict(use_peft=True), dict(dtype="float32")),
    # segments grow on a card, unless its graphs or the user say otherwise
    ("standard", CPU, {}, dict(expandable_segments=False)),
    ("standard", H100, {}, dict(expandable_segments=True)),
    ("fast", H100, dict(torch_compile_mode="reduce-overhead"), dict(expandable_segments=False)),
    # for the best model, a run saves where it evaluates, unless the user says when
    ("standard", CPU, EVERY_30, dict(save_strategy="steps", save_steps=30)),
    ("standard", CPU, EVERY_30 | dict(save_steps=60), dict(save_strategy="steps", save_steps=60)),
    ("standard", CPU, EVERY_30 | dict(save_strategy="best"), dict(save_strategy="best", save_steps=500)),
    ("standard", CPU, EVERY_30 | dict(eval_strategy="epoch"), dict(save_strategy="epoch", save_steps=500)),
    # workers leave each process its cores, and only they prefetch
    ("fast", CPU, {}, dict(dataloader_num_workers=0, dataloader_prefetch_factor=None)),
    ("fast", H100, {}, dict(dataloader_num_workers=4, dataloader_prefetch_factor=4)),
    ("fast", replace(EIGHT_H100, cores=16), dict(world=8), dict(dataloader_num_workers=2)),
]


@pytest.mark.parametrize(("recipe", "hardware", "settings", "expected"), VALUES)
def test_recipe_values_follow_the_hardware_and_the_other_settings(recipe, hardware, settings, expected):
    run = run_of(recipe, hardware, **settings)
    assert {name: run[name] for name in expected} == expected


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", [CPU, T4, EIGHT_H100], ids=["cpu", "t4", "8xh100"])
def test_every_value_that_a_recipe_chooses_has_a_reason(recipe, hardware):
    run = run_of(recipe, hardware)
    assert not [name for name, setting in run.chosen().items() if not setting.reason and name not in run.given]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_keeps_two_checkpoints_hides_no_nan_and_its_accelerate_yaml_has_num_processes_1(recipe):
    assert run_of(recipe)["save_total_limit"] == 2 and not run_of(recipe)["logging_nan_inf_filter"]
    assert from_yaml(shipped(RECIPES[recipe]().engine)).num_processes == 1
