"""Resolving: precedence, the engine, the machine, and nothing lost on the way."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import legal
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run import resolve
from recipes.run.engine import from_yaml, launch_environment, shipped
from recipes.run.hardware import Gpu, Hardware
from tests.support.real_failures import launched
from tests.support.runs import TWO_GPUS, resolved


def test_the_command_line_wins_over_the_file_and_the_file_over_the_recipe(config):
    path = config("recipe: fast\nlogging_steps: 7\nlearning_rate: 1e-4\n")
    run = resolved(["--config", path, "--learning_rate", "2e-4"])
    assert (run["learning_rate"], run["logging_steps"], run["save_total_limit"]) == (2e-4, 7, 2)


@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    rate=st.floats(1e-6, 1.0),
    steps=st.integers(1, 10_000),
    world=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_what_is_typed_is_what_trains(recipe, rate, steps, world):
    run = resolved(["--recipe", recipe, "--learning_rate", repr(rate), "--max_steps", str(steps)], world_size=world)
    arguments = run.training_arguments()
    assert not run.problems
    assert (arguments["learning_rate"], arguments["max_steps"]) == (rate, steps)
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * world == 16


def test_gpus_that_are_not_to_be_used_decide_nothing():
    h100 = Hardware((Gpu("NVIDIA H100", (9, 0), 80 * 2**30),), cores=16)
    run = resolve(["--recipe", "fast", "--use_cpu"], hardware=h100, environment={})
    assert (run["bf16"], run["torch_compile"], run["tf32"]) == (False, False, None)


def test_trainers_own_deepspeed_argument_names_the_engine(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert resolved(["--deepspeed", str(file)]).engine.title == "DeepSpeed ZeRO-3"


def test_trainers_own_fsdp_argument_names_the_engine_on_gpus():
    h100 = Hardware((Gpu("NVIDIA H100", (9, 0), 80 * 2**30),) * 2, cores=16)
    flags = ["--fsdp", "true", "--fsdp_config", '{"cpu_offload": true}']
    for words in (flags, ["--fsdp", "full_shard offload"]):
        run = resolve(words, hardware=h100, world_size=2, environment={})
        assert run.engine.title == "FSDP2, optimizer and parameter offload"
    assert resolve(flags, hardware=Hardware(), world_size=2, environment={}).engine.title == "DDP"


@pytest.mark.parametrize(("offload", "title"), [("false", "FSDP2"), ("true", "FSDP2, optimizer and parameter offload")])
def test_trainers_own_fsdp_argument_wins_over_the_version_of_the_launch(offload, title):
    launch = {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
    environment = {**launch, "FSDP_OFFLOAD_PARAMS": offload}
    run = resolve(["--fsdp", "true"], hardware=TWO_GPUS, world_size=2, environment=environment, launched=True)
    assert run.engine.title == title


@pytest.mark.parametrize(
    ("recipe", "gpus", "environment", "kind"),
    [
        ("sharded", 1, {}, "fsdp"),
        ("sharded", 2, {"RANK": "0", "WORLD_SIZE": "2"}, "fsdp"),
        ("sharded", 0, {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "ddp"),
        ("standard", 2, {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "fsdp"),
        ("memory", 0, {"RANK": "0", "WORLD_SIZE": "2"}, "deepspeed"),
    ],
)
def test_a_launched_recipe_trains_on_the_engine_that_it_says(recipe, gpus, environment, kind):
    hardware = Hardware((Gpu("NVIDIA H100", (9, 0), 80 * 2**30),) * gpus, cores=16)
    run = resolve(["--recipe", recipe], hardware=hardware, environment=environment, launched=True)
    assert run.engine.kind == kind


def test_a_recipe_that_starts_fsdp_itself_sets_what_the_launcher_would():
    file = shipped("sharded.yaml")
    ours, theirs = launch_environment(from_yaml(file)), launched(file)
    assert {name: value.lower() for name, value in ours.items()} == {name: theirs[name].lower() for name in ours}


def test_epochs_that_were_asked_for_win_over_the_demonstrations_steps():
    run = resolve(["--num_train_epochs", "3"], hardware=Hardware(), environment={})
    assert (run["num_train_epochs"], run["max_steps"]) == (3, -1)


@pytest.mark.parametrize("value", ["none", "0", "-1", "true", "", "{}", "[]", "nan", "1e400", "/nonexistent", "a b"])
def test_no_value_of_any_setting_breaks_the_check(value):
    for name in legal.settings():
        with contextlib.suppress(UserError):
            check(resolved([f"--{name}", value]))


@pytest.mark.parametrize(("type_", "world"), [("MULTI_GPU", 2), ("'NO'", 1)])
def test_a_count_of_processes_as_text_counts_where_the_launcher_reads_it(type_, world, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"distributed_type: {type_}\nnum_processes: '2'\n", encoding="utf-8")
    assert resolved(accelerate_config=str(file)).world_size == world


def test_a_memory_recipe_starts_its_own_engine_under_a_ddp_yaml(tmp_path):
    file = tmp_path / "ddp.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precison: 'no'\n")
    run = resolve(["--recipe", "memory"], hardware=Hardware(cores=2), accelerate_config=str(file), environment={})
    assert (run.engine.kind, run.world_size) == ("deepspeed", 2)
    assert [problem.subject for problem in check(run)] == ["mixed_precison"]  # the launcher still reads the file


@pytest.mark.parametrize("file", ["standard.yaml", "sharded.yaml", "memory_zero3.yaml"])
def test_deepspeed_trains_under_any_yaml_if_a_json_is_named(file, tmp_path):
    json_file = tmp_path / "ds.json"
    json_file.write_text('{"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}')
    run = resolved(["--deepspeed", str(json_file)], world_size=4, accelerate_config=str(shipped(file)))
    assert run.engine_title == "DeepSpeed ZeRO-1, tensor parallel 2"
    assert (run.engine.source, run.launcher.source) == (str(json_file), str(shipped(file)))


@pytest.mark.parametrize(("file", "refused"), [("standard.yaml", []), ("memory.yaml", ["deepspeed_config"])])
def test_a_deepspeed_json_is_refused_beside_a_yaml_with_deepspeed_settings(file, refused, tmp_path):
    """accelerate refuses it: `the following accelerate config variables will be ignored`"""
    json_file = tmp_path / "ds.json"
    json_file.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    words = ["--recipe", "memory", "--deepspeed", str(json_file)]
    assert [problem.subject for problem in check(resolved(words, accelerate_config=str(shipped(file))))] == refused


def test_fsdp_is_plain_ddp_on_a_cpu_and_fsdp_where_a_job_has_gpus():
    assert resolved("--recipe sharded", world_size=2).engine_title == "DDP"
    gpus = resolve(["--recipe", "sharded"], world_size=2, hardware=TWO_GPUS, environment={})
    assert gpus.engine_title == "FSDP2"
