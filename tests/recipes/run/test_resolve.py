"""Resolving: precedence, the engine, the machine, and nothing lost on the way."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import legal
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run.engine import from_yaml, launch_environment
from recipes.run.files import shipped
from recipes.run.hardware import Hardware
from tests.support.real_failures import launched
from tests.support.runs import CPU, H100, TWO_GPUS, machine, resolved


def test_the_command_line_wins_over_the_config_file_and_the_config_file_over_the_recipe(config):
    path = config("recipe: fast\nlogging_steps: 7\nlearning_rate: 1e-4\n")
    run = resolved(["--config", path, "--learning_rate", "2e-4"])
    assert (run["learning_rate"], run["logging_steps"], run["save_total_limit"]) == (2e-4, 7, 2)


@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    rate=st.floats(1e-6, 1.0),
    steps=st.integers(1, 10_000),
    world=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_values_of_the_command_line_reach_the_training_arguments(recipe, rate, steps, world):
    run = resolved(["--recipe", recipe, "--learning_rate", repr(rate), "--max_steps", str(steps)], world_size=world)
    arguments = run.training_arguments()
    assert not run.problems
    assert (arguments["learning_rate"], arguments["max_steps"]) == (rate, steps)
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * world == 16


@pytest.mark.parametrize("value", ["none", "0", "-1", "true", "", "{}", "[]", "nan", "1e400", "/nonexistent", "a b"])
def test_no_odd_value_of_any_setting_crashes_the_check(value):
    for name in legal.settings():
        with contextlib.suppress(UserError):
            check(resolved([f"--{name}", value]))


# --- The engine that trains -----------------------------------------------------------------------

TP, OFFLOADED = "DeepSpeed ZeRO-1, tensor parallel 2", "FSDP2, optimizer and parameter offload"
RANK = {"RANK": "0", "WORLD_SIZE": "2"}
FSDP = {**RANK, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "false"}
IN_FSDP = {"launched": True, "environment": FSDP}
OFFLOADS = {"launched": True, "environment": {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}}
ENGINES = {
    "a recipe on GPUs": ("--recipe sharded", TWO_GPUS, {}, "FSDP2"),
    "a recipe on a CPU, where FSDP is plain DDP": ("--recipe sharded", CPU, {}, "DDP"),
    "--deepspeed": ("--deepspeed ds.json", CPU, {}, TP),
    "--deepspeed beside FSDP": ("--deepspeed ds.json", CPU, {"accelerate_config": "sharded"}, TP),
    "--fsdp": ('--fsdp true --fsdp_config {"cpu_offload":true}', TWO_GPUS, {}, OFFLOADED),
    "--fsdp in words": (["--fsdp", "full_shard offload"], TWO_GPUS, {}, OFFLOADED),
    "--fsdp on a CPU": ("--fsdp true", CPU, {}, "DDP"),
    "a memory recipe under a DDP YAML": ("--recipe memory", CPU, {"accelerate_config": "ddp.yaml"}, "DeepSpeed ZeRO-2"),
    "sharded in one launched process": ("--recipe sharded", machine(H100), {"launched": True}, "FSDP2"),
    "sharded under torchrun": ("--recipe sharded", TWO_GPUS, {"launched": True, "environment": RANK}, "FSDP2"),
    "an FSDP launch on a CPU": ("--recipe sharded", CPU, IN_FSDP, "DDP"),
    "standard in an FSDP launch": ("", TWO_GPUS, IN_FSDP, "FSDP1"),
    "memory under torchrun": ("--recipe memory", CPU, {"launched": True, "environment": RANK}, "DeepSpeed ZeRO-2"),
    "--fsdp in an FSDP launch": ("--fsdp true", TWO_GPUS, IN_FSDP, "FSDP2"),
    "--fsdp in an FSDP launch that offloads": ("--fsdp true", TWO_GPUS, OFFLOADS, OFFLOADED),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    content = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precison: 'no'\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("argv", "hardware", "place", "title"), ENGINES.values(), ids=ENGINES)
def test_the_engine_depends_on_recipe_flags_yaml_launcher_variables_and_hardware(argv, hardware, place, title, folder):
    assert resolved(argv, 2, hardware=hardware, **place).engine_title.startswith(title)


def test_the_accelerate_yaml_is_still_read_and_checked_if_the_recipe_has_another_engine(folder):
    run = resolved("--recipe memory", hardware=Hardware(cores=2), accelerate_config="ddp.yaml")
    assert (run.outer_engine.source, run.world_size) == ("ddp.yaml", 2)
    assert [problem.subject for problem in check(run)] == ["mixed_precison"]


def test_launch_variables_computed_from_an_fsdp_yaml_are_those_of_accelerate_launch(tmp_path):
    file, section = tmp_path / "fsdp.yaml", "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: Block"
    file.write_text(shipped("sharded.yaml").read_text().replace("fsdp_config:", section))
    ours, theirs = launch_environment(from_yaml(file)), launched(file)
    assert {name: value.lower() for name, value in ours.items()} == {name: theirs[name].lower() for name in ours}
