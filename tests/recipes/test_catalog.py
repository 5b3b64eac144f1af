"""The recipes: what each one sets, on which hardware, and why."""

import subprocess
import sys

import pytest

from recipes.catalog import RECIPES
from recipes.run import resolve
from recipes.run.engine import from_yaml, shipped
from recipes.run.hardware import Gpu, Hardware

CPU = Hardware(cores=2)
T4 = Hardware((Gpu("Tesla T4", (7, 5), 16 * 2**30),), cores=8)
H100 = Hardware((Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30),), cores=32)
EIGHT_H100 = Hardware(H100.gpus * 8, cores=64, liger=True)


def run_of(recipe, hardware=CPU, world=1, **settings):
    return resolve(
        settings={"recipe": recipe, **settings}, hardware=hardware, world_size=world, environment={}, demonstrate=False
    )


@pytest.mark.parametrize(
    ("recipe", "logging", "kept", "engine"),
    [
        ("baseline", 1, 2, "single.yaml"),
        ("standard", 5, 2, "standard.yaml"),
        ("fast", 10, 2, "fast.yaml"),
        ("sharded", 5, 2, "sharded.yaml"),
        ("memory", 10, 2, "memory.yaml"),
        ("memory_zero3", 10, 2, "memory_zero3.yaml"),
    ],
)
def test_each_recipe_keeps_its_promise(recipe, logging, kept, engine):
    run = run_of(recipe)
    assert (run["logging_steps"], run["save_total_limit"], run.recipe.engine) == (logging, kept, engine)


@pytest.mark.parametrize(
    ("hardware", "precision"),
    [(CPU, (False, False)), (T4, (False, True)), (H100, (True, False))],
    ids=["cpu", "t4", "h100"],
)
def test_standard_computes_in_what_the_hardware_has(hardware, precision):
    run = run_of("standard", hardware)
    assert (run["bf16"], run["fp16"]) == precision


def test_baseline_is_fp32_on_any_hardware():
    run = run_of("baseline", H100)
    assert (run["bf16"], run["fp16"], run["tf32"]) == (False, False, None)


def test_memory_is_bf16_also_on_a_cpu():
    assert run_of("memory", CPU)["bf16"] is True


def test_the_static_graph_is_planned_only_without_accumulation():
    assert run_of("fast", H100, world=1)["ddp_static_graph"] is False
    assert run_of("fast", EIGHT_H100, world=2)["ddp_static_graph"] is True


def test_fast_compiles_on_cuda_only_when_batches_have_one_shape():
    assert run_of("fast", H100)["torch_compile"] is True
    assert run_of("fast", H100, packing=False)["torch_compile"] is False
    assert run_of("fast", CPU)["torch_compile"] is False


def test_fast_does_not_pack_classification():
    assert run_of("fast", H100, task="sequence_classification")["packing"] is False


def test_liger_is_used_where_it_is_installed_and_runs():
    assert run_of("fast", EIGHT_H100)["use_liger_kernel"] is True
    assert run_of("fast", H100)["use_liger_kernel"] is False


def test_fast_leaves_liger_out_where_labels_are_smoothed():
    """Its fused loss is not used with them, and an evaluation would fail."""
    assert run_of("fast", EIGHT_H100, label_smoothing_factor=0.1)["use_liger_kernel"] is False


def test_prefetch_is_set_only_with_workers():
    assert run_of("fast", CPU)["dataloader_prefetch_factor"] is None
    assert run_of("fast", H100)["dataloader_prefetch_factor"] == 4


def test_workers_leave_each_process_its_cores():
    assert run_of("standard", Hardware(H100.gpus * 8, cores=16), world=8)["dataloader_num_workers"] == 2


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", [CPU, T4, EIGHT_H100], ids=["cpu", "t4", "8xh100"])
def test_every_chosen_value_has_a_reason(recipe, hardware):
    run = run_of(recipe, hardware)
    assert not [name for name, setting in run.chosen().items() if not setting.reason and name not in run.given]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_engine_is_a_shipped_yaml(recipe):
    assert from_yaml(shipped(RECIPES[recipe]().engine)).num_processes == 1


def test_a_variant_changes_only_what_it_names():
    base, variant = RECIPES["memory"](), RECIPES["memory_zero3"]()
    assert variant.settings == base.settings


def test_sharded_leaves_out_what_only_ddp_reads():
    assert not [name for name in RECIPES["sharded"]().settings if name.startswith("ddp_")]


def test_importing_the_recipes_imports_neither_torch_nor_transformers():
    unused = ("torch", "transformers", "recipes.factories", "recipes.planner", "recipes.scaling")
    code = f"import recipes, recipes.rules.check, sys; print([m for m in {unused} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_explicit_choice_turns_off_what_the_recipe_would_choose_against_it():
    assert run_of("memory", CPU, fp16=True)["bf16"] is False
    assert run_of("fast", H100, padding_free=True)["packing"] is False


def test_bf16_switched_off_is_fp32_where_bf16_is_native():
    run = run_of("standard", H100, bf16=False)
    assert (run["bf16"], run["fp16"]) == (False, False)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L40", 181e12),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
    ],
)
def test_a_peak_is_claimed_only_for_a_whole_card_with_bf16_that_is_listed(name, peak):
    assert Hardware((Gpu(name, (8, 0), 2**30),)).peak_flops == peak
