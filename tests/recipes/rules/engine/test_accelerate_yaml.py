"""Rules about the Accelerate YAML, and what its launcher does without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.errors import UserError
from recipes.rules.check import check
from recipes.rules.engine.accelerate_yaml import nested_yaml_values_are_legal
from recipes.run import resolve
from tests.support.real_failures import arguments, assert_fires, launched, run_launch_command
from tests.support.runs import LOCAL, TWO_GPUS, Run, deepspeed, fsdp, yaml

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "yaml_keys_are_known": (
        Run(yaml=yaml("MULTI_GPU", "static_graph: true")),
        Run(yaml=yaml("MULTI_GPU", "same_network: true")),
    ),
    "nested_yaml_keys_are_known": (Run(yaml=deepspeed("zero_stge: 3")), Run(yaml=deepspeed("zero_stage: 3"))),
    "sections_hold_settings": (
        Run(yaml=yaml("DEEPSPEED", "deepspeed_config: ds.json")),
        Run(yaml=yaml("DEEPSPEED", "deepspeed_config:")),
    ),
    "sections_fit_the_type": (
        Run(yaml=yaml("MULTI_GPU", "fsdp_config:", "  fsdp_version: 2")),
        Run(yaml=yaml("FSDP", "fsdp_config:", "  fsdp_version: 2")),
    ),
    "compute_environment_is_known": (
        Run(yaml="compute_environment: LOCAL\ndistributed_type: 'NO'\n"),
        Run(yaml="compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n"),
    ),
    "distributed_type_is_known": (Run(yaml=yaml("multi_gpu")), Run(yaml=yaml("MULTI_GPU"))),
    "mixed_precision_is_known": (
        Run(yaml=yaml("MULTI_GPU", "mixed_precision: no")),
        Run(yaml=yaml("MULTI_GPU", "mixed_precision: 'no'")),
    ),
    "top_level_values_have_the_right_type": (
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: 0")),
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: all")),
    ),
    "num_processes_is_given": (
        Run(yaml=yaml("MULTI_GPU", processes=None), world=None),
        Run(yaml=yaml("MULTI_GPU", processes=None)),
    ),
    "gpu_ids_name_enough_gpus": (
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: '0'"), hardware=TWO_GPUS),
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: '0,1'"), hardware=TWO_GPUS),
    ),
    "machines_share_the_processes": (
        Run(yaml=yaml("MULTI_GPU", "num_machines: 3"), world=4),
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2"), world=4),
    ),
    "machines_find_each_other": (
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2"), world=2),
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2", "main_process_ip: h", "main_process_port: 29500"), world=2),
    ),
    "ports_exist": (
        Run(yaml=yaml("MULTI_GPU", "main_process_port: 70000")),
        Run(yaml=yaml("MULTI_GPU", "main_process_port: 0")),
    ),
    "nested_yaml_values_are_legal": (Run(yaml=deepspeed("zero_stage: 5")), Run(yaml=deepspeed("zero_stage: '3'"))),
    "variables_hold_legal_values": (
        Run(environment={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "9"}),
        Run(environment={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
    ),
    "nvme_paths_reach_the_workers": (
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: nvme", "offload_param_nvme_path: /nvme")),
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: cpu")),
    ),
    "parameters_are_offloaded_by_stage_three": (
        Run(yaml=deepspeed("zero_stage: 2", "offload_param_device: cpu")),
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: cpu")),
    ),
    "yaml_agrees_with_the_batch": (
        Run(yaml=deepspeed("gradient_accumulation_steps: 3")),
        Run(yaml=deepspeed("gradient_accumulation_steps: 4")),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("nested_yaml_keys_are_known", Run(yaml=fsdp("fsdp_verion: 2")), "fsdp_verion"),
    ("nested_yaml_keys_are_known", Run(yaml=yaml("FSDP", "parallelism_config:", "  tp_size: 2")), "tp_size"),
    ("distributed_type_is_known", Run(yaml=yaml("NO")), "distributed_type"),
    ("num_processes_is_given", Run(yaml=yaml("MULTI_GPU", "num_processes:", processes=None), world=None), "num_proc"),
    ("num_processes_is_given", Run(yaml=yaml("'NO'", processes=-1), world=None), "num_processes"),
    ("num_processes_is_given", Run(yaml=yaml("MULTI_GPU", processes=0), world=None), "num_processes"),
    ("distributed_type_is_known", Run(yaml=f"{LOCAL}num_processes: 1\n"), "distributed_type"),
    ("machines_share_the_processes", Run(yaml=yaml("MULTI_GPU", "machine_rank: 1")), "machine_rank"),
    ("machines_share_the_processes", Run(yaml=yaml("MULTI_GPU", "num_machines:")), "num_machines"),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("nested_yaml_keys_are_known", Run(yaml=fsdp("fsdp_version: 2", "fsdp_ignored_modules: lm_head"))),
    ("sections_hold_settings", Run(yaml=yaml("MULTI_GPU", "deepspeed_config: ds.json"))),  # which nothing reads
    ("nested_yaml_values_are_legal", Run(yaml=deepspeed("zero3_init_flag: 'true'", "gradient_clipping: auto"))),
    ("nested_yaml_values_are_legal", Run(yaml=fsdp("fsdp_version: '2'", "fsdp_offload_params: 'false'"))),
    ("nested_yaml_values_are_legal", Run(yaml=yaml("MULTI_GPU", "fsdp_config:", "  fsdp_version: 3"))),  # unread
    ("nested_yaml_values_are_legal", Run(yaml=yaml("MULTI_GPU", "deepspeed_config:", "  zero_stage: 5"))),
    ("mixed_precision_is_known", Run(yaml=yaml("MULTI_GPU", "mixed_precision: BF16"))),
    ("num_processes_is_given", Run(yaml=yaml("'NO'", processes=None), world=None)),
    ("num_processes_is_given", Run(yaml=yaml("MULTI_GPU", processes=0), world=2)),
    ("num_processes_is_given", Run("--recipe memory", yaml=yaml("MULTI_GPU", processes=0), world=2)),
    ("top_level_values_have_the_right_type", Run(yaml=yaml("'NO'", processes="'2'"), world=1)),
    ("gpu_ids_name_enough_gpus", Run(world=4, yaml=yaml("MULTI_GPU", "gpu_ids: '0,1'"))),  # on a CPU
]


REFUSED_BY_THE_LAUNCHER = [
    ("mixed_precision_is_known", "MULTI_GPU", ["mixed_precision: no"], AttributeError, "'bool' object"),
    ("mixed_precision_is_known", "MULTI_GPU", ["mixed_precision: bfloat16"], ValueError, "Unknown mixed_precision"),
    ("yaml_keys_are_known", "MULTI_GPU", ["static_graph: true"], ValueError, "unknown keys"),
    ("distributed_type_is_known", "multi_gpu", [], ValueError, "not a valid DistributedType"),
    ("top_level_values_have_the_right_type", "MULTI_GPU", ["gpu_ids: 0"], AttributeError, "'int' object"),
    ("top_level_values_have_the_right_type", "MULTI_GPU", ["num_machines: '1'"], TypeError, "not supported between"),
    ("gpu_ids_name_enough_gpus", "MULTI_GPU", ["gpu_ids: '0'"], ValueError, "Less than two GPU ids"),
    (
        "efficient_loading_needs_synchronisation",
        "FSDP",
        ["fsdp_config:", "  fsdp_sync_module_states: false"],
        ValueError,
        "fsdp_sync_module_states",
    ),
    (
        "nested_yaml_values_are_legal",
        "MULTI_GPU",
        ["dynamo_config:", "  dynamo_backend: inductr"],
        ValueError,
        "Unknown dynamo backend",
    ),
    ("ports_exist", "MULTI_GPU", ["main_process_port: 99999"], OverflowError, "port must be 0-65535"),
]


@pytest.mark.parametrize(("rule", "type_", "lines", "error", "message"), REFUSED_BY_THE_LAUNCHER)
def test_the_launcher_raises(rule, type_, lines, error, message, write_yaml):
    file = write_yaml(type_, *lines)
    with pytest.raises(error, match=message):
        launched(file)
    assert_fires(rule, {}, config=file)


def test_another_compute_environment_is_read_as_sagemakers(write_yaml):
    file = write_yaml("MULTI_GPU", environment="local_machine")
    with pytest.raises(ValueError, match=r"unknown keys \(\['num_processes'"):
        launched(file)
    assert_fires("compute_environment_is_known", {}, config=file)


SECTIONS_OF_ANOTHER_TYPE = [
    ["fsdp_config:", "  fsdp_version: 2"],
    ["deepspeed_config:", "  zero_stage: 3"],
    ["megatron_lm_config:", "  megatron_lm_tp_degree: 2"],
]


@pytest.mark.parametrize("section", SECTIONS_OF_ANOTHER_TYPE, ids=lambda lines: lines[0])
def test_a_section_of_another_type_changes_nothing(section, write_yaml):
    plain = launched(write_yaml("MULTI_GPU"))
    file = write_yaml("MULTI_GPU", *section)
    assert launched(file) == plain
    assert_fires("sections_fit_the_type", {}, config=file)


@pytest.mark.parametrize("line", ["fsdp_min_num_params: many", "fsdp_sharding_strategy: ZERO2"])
def test_a_wrong_value_that_fsdp2_does_not_read_is_only_advice(line, tmp_path, monkeypatch):
    run = Run(yaml=fsdp("fsdp_version: 2", line), hardware=TWO_GPUS).resolve(tmp_path, monkeypatch)
    found = [problem.severity for problem in nested_yaml_values_are_legal(run)]
    assert found == ["advice"]


def test_one_machine_needs_no_multinode_launcher(tmp_path, monkeypatch):
    for machines, severity in (("", "advice"), ("num_machines: 2\n", "error")):
        file = deepspeed("deepspeed_multinode_launcher: srun") + machines
        found = nested_yaml_values_are_legal(Run(yaml=file).resolve(tmp_path, monkeypatch))
        assert [problem.severity for problem in found] == [severity]


def test_a_section_that_is_a_file_name_breaks_the_launcher(write_yaml):
    file = write_yaml("DEEPSPEED", "deepspeed_config: ds.json")
    with pytest.raises(AttributeError, match="keys"):
        run_launch_command(file)
    assert_fires("sections_hold_settings", {}, config=file)


@pytest.mark.parametrize("type_", ["MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"])
def test_the_launcher_wants_num_processes(type_, write_yaml):
    file = write_yaml(type_, processes=None)
    with pytest.raises(ValueError, match="manually pass in `--num_processes`"):
        launched(file)
    launched(file, "--num_processes", "2")
    assert_fires("num_processes_is_given", {}, config=file, world=None)


def test_one_process_needs_no_count(write_yaml):
    file = write_yaml("'NO'", processes=None)
    launched(file)
    assert not check(resolve([], accelerate_config=str(file), environment={}))


@pytest.mark.parametrize("content", ["", "# later", "\n\n"])
def test_an_empty_file_breaks_the_launcher(content, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'get'"):
        launched(file, "--num_processes", "2")
    with pytest.raises(UserError, match="is empty"):
        resolve([], world_size=2, accelerate_config=str(file), environment={})


def test_a_misspelt_zero_stage_trains_with_stage_two(write_yaml, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stge: 3")
    environment = launched(file)
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in environment
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", raising=False)
    assert DeepSpeedPlugin().zero_stage == 2
    assert_fires("nested_yaml_keys_are_known", {}, config=file)


def test_a_misspelt_fsdp_version_trains_with_fsdp1(write_yaml):
    file = write_yaml("FSDP", "fsdp_config:", "  fsdp_verion: 2")
    assert launched(file)["FSDP_VERSION"] == "1"
    assert_fires("nested_yaml_keys_are_known", {}, config=file)
    assert_fires("fsdp_version_two_is_chosen", {}, config=file)


def test_an_nvme_path_never_reaches_the_processes(write_yaml):
    path = "  offload_optimizer_nvme_path: /local_nvme"
    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 3", "  offload_optimizer_device: nvme", path)
    environment = launched(file)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "nvme"
    assert "/local_nvme" not in environment.values()
    assert_fires("nvme_paths_reach_the_workers", {}, config=file)


def torchrun_arguments(file: Path):
    """What `accelerate launch --config_file FILE` would start torchrun with."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    prepare_multi_gpu_env(args)
    return args


def test_three_processes_on_two_machines_start_one_each(write_yaml):
    address = ["main_process_ip: 127.0.0.1", "main_process_port: 29876"]
    file = write_yaml("MULTI_GPU", "num_machines: 2", *address, processes=3)
    args = torchrun_arguments(file)
    assert (args.nnodes, args.nproc_per_node) == ("2", "1")
    assert_fires("machines_share_the_processes", {"global_batch_size": 12}, world=3, config=file)


def test_machines_without_an_address_look_for_one_named_none(write_yaml):
    file = write_yaml("MULTI_GPU", "num_machines: 2", "machine_rank: 1")
    assert torchrun_arguments(file).rdzv_endpoint == "None:29500"
    assert_fires("machines_find_each_other", {}, world=2, config=file)


@pytest.mark.parametrize("line", ["gradient_accumulation_steps: 3", "gradient_clipping: 0.5"])
def test_a_yaml_that_contradicts_the_batch_fails_in_the_workers(line, write_yaml, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 2", f"  {line}")
    for name, value in launched(file).items():
        monkeypatch.setenv(name, value)
    args = arguments(tmp_path)
    real = HfTrainerDeepSpeedConfig(DeepSpeedPlugin().hf_ds_config.config)
    real.trainer_config_process(args)
    with pytest.raises(ValueError, match="mismatch TrainingArguments"):
        real.trainer_config_finalize(args, None, 10)
    assert_fires("yaml_agrees_with_the_batch", {}, config=file)
