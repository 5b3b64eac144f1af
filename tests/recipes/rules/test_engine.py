"""Rules about engines, and what really happens to the runs that they report."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from accelerate.commands import launch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from recipes.rules.check import check, problems_by_rule
from recipes.run import here, resolve
from recipes.run.files import shipped
from tests.support.parallel import printed, ranks, zero
from tests.support.real_failures import arguments, assert_fires, launched, losses, tiny_llama, train
from tests.support.runs import (
    CLASSIFY,
    DS,
    MODEL,
    TWO_GPUS,
    Run,
    deepspeed,
    ds_json,
    fsdp,
    groups,
    model,
    resolved,
    yaml,
)

TWO = ds_json(tensor_parallel={"autotp_size": 2})
SCATTERS = '--accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":true}}'
OFFLOADED = '--fsdp true --fsdp_config {"cpu_offload":true}'
CHECKPOINTED = "fsdp_activation_checkpointing: true"
REENTRANT_FLAGS = '--gradient_checkpointing --gradient_checkpointing_kwargs {"use_reentrant":true}'
STATIC_FLAGS = "--ddp_static_graph true --gradient_accumulation_steps 2"
BY_LAYER = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
ADDRESS = ("main_process_ip: h", "main_process_port: 29500")
NO_STAGE = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}


def version_2(*lines: str) -> str:
    return fsdp("fsdp_version: 2", *lines)


def on_gpus(argv: str = "", **run) -> Run:
    """On a CPU the same run is plain DDP, and no rule about FSDP fires."""
    return Run(argv, **{"hardware": TWO_GPUS, **run})


# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "several_processes_on_a_cpu_need_use_cpu": (Run("--use_cpu false", world=2), Run("--use_cpu true", world=2)),
    "a_launch_starts_processes": (
        Run(yaml=yaml("MULTI_GPU").replace("num_processes: 1", "num_processes: 0"), world=None),
        Run(yaml=yaml("MULTI_GPU"), world=None)),
    "single_engine_starts_one_process": (Run(yaml=yaml("'NO'"), world=2), Run(yaml=yaml("MULTI_GPU"), world=2)),
    "each_process_has_a_gpu": (on_gpus(world=4), on_gpus(world=4, yaml=yaml("MULTI_GPU", "num_machines: 2"))),
    "machines_share_the_processes": (
        Run(yaml=yaml("MULTI_GPU", "num_machines: 3", *ADDRESS), world=4),
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2", *ADDRESS), world=4)),
    "recipe_has_its_own_engine": (
        on_gpus("--recipe memory", yaml="sharded.yaml"), Run("--recipe memory", yaml="memory_zero3.yaml")),
    "one_engine_is_asked_for": (
        Run("--recipe memory --fsdp full_shard", yaml="memory.yaml"), Run("--recipe memory", yaml="memory.yaml")),
    "fsdp_needs_ranks_with_gpus": (Run(yaml="sharded.yaml"), on_gpus(yaml="sharded.yaml")),
    "static_graph_needs_accumulation_one": (
        Run(STATIC_FLAGS, world=2), Run("--ddp_static_graph true --gradient_accumulation_steps 1", world=2)),
    "reentrant_checkpointing_needs_find_unused_off": (
        Run(f"--ddp_find_unused_parameters true {REENTRANT_FLAGS}"),
        Run("--ddp_find_unused_parameters true --gradient_checkpointing")),
    "ddp_settings_need_ddp": (
        Run("--recipe memory --ddp_bucket_cap_mb 50", yaml="memory.yaml"),
        Run("--ddp_bucket_cap_mb 50", yaml="standard.yaml")),
    "bf16_compression_needs_nccl": (Run("--ddp_comm_hook bf16", world=2), Run("--ddp_comm_hook fp16", world=2)),
    "backends_have_their_processes": (Run("--recipe baseline --ddp_backend gloo"), Run("--ddp_backend gloo", world=2)),
    "backends_have_their_hardware": (Run("--ddp_backend nccl", world=2), on_gpus("--ddp_backend nccl", world=2)),
    "wandb_uploads_whole_models": (
        Run(f"{DS} --report_to wandb", environment={"WANDB_LOG_MODEL": "end"}), Run(f"{DS} --report_to wandb")),
    "nccl_timeout_is_an_argument": (Run(environment={"NCCL_TIMEOUT": "60"}), Run(environment={"NCCL_DEBUG": "INFO"})),
    "yaml_keys_are_known": (Run(yaml=deepspeed("zero_stge: 3")), Run(yaml=deepspeed("zero_stage: 3"))),
    "sections_are_read": (
        Run(yaml=yaml("MULTI_GPU", "fsdp_config:", "  fsdp_version: 2")),
        Run(yaml=yaml("FSDP", "fsdp_config:", "  fsdp_version: 2"))),
    "no_is_quoted": (
        Run(yaml=yaml("MULTI_GPU", "mixed_precision: no")), Run(yaml=yaml("MULTI_GPU", "mixed_precision: 'no'"))),
    "offload_happens": (
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: nvme", "offload_param_nvme_path: /nvme")),
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: cpu"))),
    "deepspeed_json_keys_are_known": (
        Run(DS, files=ds_json(gradient_cliping=1.0)), Run(DS, files=ds_json(gradient_clipping=1.0))),
    "sixteen_bits_are_trained_by_a_stage": (
        Run(f"{DS} --bf16", files=ds_json(**NO_STAGE)), Run(DS, files=ds_json(zero_optimization={"stage": 0}))),
    "tensor_parallelism_fits_the_run": (Run(f"{DS} --use_peft", files=TWO, world=2), Run(DS, files=TWO, world=2)),
    "sequences_and_models_are_not_divided": (
        Run(yaml=groups("DEEPSPEED", sp=2), world=2), Run(yaml=groups("DEEPSPEED", sp=1), world=2)),
    "fsdp2_is_chosen": (
        on_gpus(yaml=fsdp("fsdp_offload_params: true")), on_gpus(yaml=fsdp("version: 2"))),
    "fsdp2_shards_layer_by_layer": (
        on_gpus(yaml=version_2("fsdp_auto_wrap_policy: NO_WRAP")), on_gpus(yaml="sharded.yaml")),
    "fsdp2_scatters_every_micro_batch": (
        on_gpus("--gradient_accumulation_steps 2", world=2, yaml="sharded.yaml"),
        on_gpus(f"--gradient_accumulation_steps 2 {SCATTERS}", world=2, yaml="sharded.yaml")),
    "fsdp2_shards_are_known_to_the_optimizer": (
        on_gpus("--recipe sharded --optim adamw_bnb_8bit", yaml="sharded.yaml"),
        on_gpus("--recipe sharded --optim adamw_torch_fused", yaml="sharded.yaml")),
    "offloaded_gradients_are_clipped_over_gloo": (
        on_gpus(OFFLOADED, world=2), on_gpus(f"{OFFLOADED} --max_grad_norm 0", world=2)),
    "fsdp_recomputes_once_and_the_same": (
        on_gpus("--gradient_checkpointing", yaml=version_2(CHECKPOINTED)),
        on_gpus("--gradient_checkpointing", yaml=version_2("fsdp_activation_checkpointing: false"))),
}  # fmt: skip

# rule, another run in which it fires, a part of the subject or of the Fix
ALSO_FIRES = [
    ("each_process_has_a_gpu", on_gpus("--recipe baseline"), "num_processes"),
    ("recipe_has_its_own_engine", Run("--recipe sharded", yaml="standard.yaml"), "recipe"),
    ("one_engine_is_asked_for", on_gpus(DS, yaml="sharded.yaml", files=ds_json()), "deepspeed"),
    ("one_engine_is_asked_for", Run(DS, yaml=deepspeed("deepspeed_config_file: other.json"),
                                    files={**ds_json(), "other.json": zero(2)}), "deepspeed"),
    ("fsdp_needs_ranks_with_gpus", Run("--fsdp full_shard", yaml="standard.yaml", world=2), "fsdp"),
    ("fsdp_needs_ranks_with_gpus", Run("--recipe baseline --fsdp full_shard"), "fsdp"),
    ("yaml_keys_are_known", Run(yaml=yaml("MULTI_GPU", "static_graph: true")), "static_graph"),
    ("yaml_keys_are_known", Run(yaml=yaml("FSDP", "parallelism_config:", "  tp_size: 2")), "tp_size"),
    ("no_is_quoted", Run(yaml=yaml("NO")), "distributed_type: 'NO'"),
    ("sixteen_bits_are_trained_by_a_stage", Run("--bf16", yaml=deepspeed("zero_stage: 0")), "zero_stage"),
    ("tensor_parallelism_fits_the_run",
     Run(f"{DS} {CLASSIFY} --eval_strategy epoch", files=TWO, world=2), "eval_strategy"),
    ("tensor_parallelism_fits_the_run",
     Run(f"{DS} --average_tokens_across_devices false", files=TWO, world=2), "average_tokens_across_devices"),
    ("tensor_parallelism_fits_the_run",
     Run(f'{DS} --accelerator_config {{"dispatch_batches":true}}', files=TWO, world=2), "accelerator_config"),
    ("tensor_parallelism_fits_the_run",
     Run(f"{DS} {MODEL}", files=TWO | model(model_type="gpt2"), world=2), "autotp_size"),
    ("tensor_parallelism_fits_the_run", Run(DS, files=ds_json(tensor_parallel={"autotp_size": 0})), "autotp_size"),
    ("sequences_and_models_are_not_divided", Run(yaml=groups("MULTI_GPU", tp=2), world=2), "tp_size"),
    ("fsdp2_shards_are_known_to_the_optimizer", on_gpus("--fsdp true --optim lion_8bit", world=2), "optim"),
    ("fsdp2_is_chosen", on_gpus('--fsdp true --fsdp_config {"version":3}', world=2), "fsdp_config"),
    ("fsdp2_shards_are_known_to_the_optimizer", on_gpus("--optim adagrad", yaml="sharded.yaml"), "optim"),
    ("fsdp_recomputes_once_and_the_same",
     on_gpus("--use_peft --model_name_or_path m", yaml=version_2(CHECKPOINTED)), "activation_checkpointing"),
]  # fmt: skip

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("recipe_has_its_own_engine", on_gpus("--recipe sharded", yaml="sharded.yaml")),
    ("one_engine_is_asked_for", Run(DS, yaml=deepspeed("deepspeed_config_file: ds.json"), files=ds_json())),
    ("fsdp_needs_ranks_with_gpus", on_gpus("--fsdp full_shard", yaml="standard.yaml", world=2)),
    # one process; accumulation that reduces in every micro-step; an engine that has no graph
    ("static_graph_needs_accumulation_one", Run(STATIC_FLAGS)),
    ("static_graph_needs_accumulation_one", Run(f"{STATIC_FLAGS} {SCATTERS}", world=2)),
    ("static_graph_needs_accumulation_one", Run("--ddp_static_graph true", world=2, yaml="memory.yaml")),
    ("reentrant_checkpointing_needs_find_unused_off",  # a static graph knows which parameters it uses
     Run(f"--ddp_find_unused_parameters true --ddp_static_graph true {REENTRANT_FLAGS}")),
    ("yaml_keys_are_known", Run(yaml=version_2("fsdp_ignored_modules: lm_head"))),
    ("sections_are_read", Run(yaml=yaml("DEEPSPEED", "deepspeed_config:"))),
    ("fsdp2_is_chosen", on_gpus("--recipe baseline --fsdp full_shard")),  # one process
    ("fsdp2_shards_are_known_to_the_optimizer", on_gpus("--optim adafactor", yaml=fsdp("fsdp_version: 1"))),
    ("offloaded_gradients_are_clipped_over_gloo", on_gpus(world=2, yaml=version_2("fsdp_offload_params: true"))),
]  # fmt: skip


# --- Processes and DDP ----------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["'NO'", "MULTI_CPU"])
def test_accelerate_launch_starts_one_process_for_distributed_type_no_and_multi_cpu(type_, write_yaml, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "simple_launcher", started.append)
    file = write_yaml(type_)
    launch.launch_command(launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    assert [args.num_processes for args in started] == [2]  # one command, though two were asked for
    assert_fires("single_engine_starts_one_process", {}, world=2, config=file)


def test_a_rank_of_torchrun_may_start_the_engine_of_its_recipe():
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    run = resolve(["--recipe", "memory"], here(1, environment=ranks, launched=True))
    assert run.engine.kind == "deepspeed" and not [one for one in check(run) if one.severity == "error"]


@pytest.mark.slow
def test_two_ranks_on_a_cpu_without_use_cpu_train_two_separate_models(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert [one["trained"][0] for one in ranks(tmp_path, 2, settings={"use_cpu": False})] == [1, 1]
    assert_fires("several_processes_on_a_cpu_need_use_cpu", {"use_cpu": False}, world=2)


@pytest.mark.slow
def test_a_static_graph_fails_in_the_second_backward_of_a_step(tmp_path):
    settings = {"ddp_static_graph": True, "gradient_accumulation_steps": 2, "use_cpu": True}
    assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in printed(tmp_path, 2, settings=settings)
    assert_fires("static_graph_needs_accumulation_one", settings, world=2)


@pytest.mark.slow
def test_fsdp_on_a_cpu_is_plain_ddp(tmp_path):
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    reports = ranks(tmp_path, 2, settings={}, variables=variables)
    assert [one["trained"] for one in reports] == [[2, "MULTI_CPU", "DistributedDataParallel"]] * 2
    assert_fires("fsdp_needs_ranks_with_gpus", {}, world=2, config=shipped("sharded.yaml"))


def test_ddp_settings_do_not_wrap_the_model_in_one_process(tmp_path):
    trainer = train(tmp_path, ddp_bucket_cap_mb=1)
    assert type(trainer.model_wrapped) is type(trainer.model)
    assert_fires("ddp_settings_need_ddp", {"recipe": "baseline", "ddp_bucket_cap_mb": 1})


@pytest.fixture
def gpu_rank(monkeypatch):
    """The only rank of a world, that accelerate believes to have a GPU. All else is real, with gloo
    and on the CPU.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", **address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_variable_nccl_timeout_does_not_change_the_timeout_of_the_process_group(gpu_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_TIMEOUT", "7")
    arguments(tmp_path, use_cpu=False, ddp_timeout=77)
    world = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert world.options._timeout == timedelta(seconds=77)
    assert_fires("nccl_timeout_is_an_argument", {}, environment={"NCCL_TIMEOUT": "7"})


# --- The Accelerate YAML --------------------------------------------------------------------------

SECTIONS_OF_ANOTHER_TYPE = [
    ["fsdp_config:", "  fsdp_version: 2"],
    ["deepspeed_config:", "  zero_stage: 3"],
    ["megatron_lm_config:", "  megatron_lm_tp_degree: 2"],
]


@pytest.mark.parametrize("section", SECTIONS_OF_ANOTHER_TYPE, ids=lambda lines: lines[0])
def test_accelerate_launch_ignores_a_yaml_section_of_another_distributed_type(section, write_yaml):
    plain = launched(write_yaml("MULTI_GPU"))
    file = write_yaml("MULTI_GPU", *section)
    assert launched(file) == plain
    assert_fires("sections_are_read", {}, config=file)


def test_accelerate_uses_zero_stage_2_if_zero_stage_is_misspelt_and_a_rule_refuses_the_yaml(write_yaml, monkeypatch):
    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stge: 3")
    environment = launched(file)
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in environment
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", raising=False)
    assert DeepSpeedPlugin().zero_stage == 2
    assert_fires("yaml_keys_are_known", {}, config=file)


def test_accelerate_uses_fsdp1_if_fsdp_version_is_misspelt_and_a_rule_refuses_the_yaml(write_yaml):
    file = write_yaml("FSDP", "fsdp_config:", "  fsdp_verion: 2")
    assert launched(file)["FSDP_VERSION"] == "1"
    assert_fires("yaml_keys_are_known", {}, config=file)
    assert_fires("fsdp2_is_chosen", {}, config=file)


def test_accelerate_launch_passes_no_nvme_path_of_a_yaml_to_its_processes(write_yaml):
    path = "  offload_optimizer_nvme_path: /local_nvme"
    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 3", "  offload_optimizer_device: nvme", path)
    environment = launched(file)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "nvme"
    assert "/local_nvme" not in environment.values()
    assert_fires("offload_happens", {}, config=file)


def torchrun_arguments(file: Path):
    """What `accelerate launch --config_file FILE` would start torchrun with."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    prepare_multi_gpu_env(args)
    return args


def test_accelerate_starts_only_two_of_three_processes_on_two_machines_and_a_rule_refuses_it(write_yaml):
    address = ["main_process_ip: 127.0.0.1", "main_process_port: 29876"]
    file = write_yaml("MULTI_GPU", "num_machines: 2", *address, processes=3)
    args = torchrun_arguments(file)
    assert (args.nnodes, args.nproc_per_node) == ("2", "1")
    assert_fires("machines_share_the_processes", {"global_batch_size": 12}, world=3, config=file)


def test_two_machines_without_main_process_ip_rendezvous_at_a_host_named_none(write_yaml):
    file = write_yaml("MULTI_GPU", "num_machines: 2", "machine_rank: 1")
    assert torchrun_arguments(file).rdzv_endpoint == "None:29500"
    assert_fires("machines_share_the_processes", {}, world=2, config=file)


# --- The DeepSpeed JSON ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_zero3_saves_no_weights_without_stage3_gather_16bit_weights_on_model_save(whole, tmp_path):
    config = zero(3, stage3_gather_16bit_weights_on_model_save=whole)
    ranks(tmp_path, 1, settings={"deepspeed": config, "save_strategy": "steps", "save_steps": 2})
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists() == whole
    assert_fires("zero3_saves_whole_weights", {"deepspeed": zero(3)})


@pytest.mark.slow
def test_zero2_keeps_whole_parameters_despite_offload_param(tmp_path, write_yaml):
    offloaded = [{"deepspeed": zero(stage, offload_param={"device": "cpu"})} for stage in (2, 3)]
    (two,), (three,) = (ranks(tmp_path / str(n), 1, settings=own) for n, own in enumerate(offloaded))
    assert three["in shards"] and not two["in shards"]
    file = write_yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 2", "  offload_param_device: cpu")
    assert_fires("offload_happens", {}, config=file)


# --- FSDP -----------------------------------------------------------------------------------------


@pytest.fixture
def train_launched(gpu_rank, write_yaml, monkeypatch, tmp_path):
    """Trains in the environment that `accelerate launch` makes of an FSDP2 YAML."""

    def start(*lines: str, **settings):
        file = write_yaml("FSDP", "fsdp_config:", *(f"  {line}" for line in ("fsdp_version: 2", *lines)), processes=1)
        for name, value in launched(file).items():
            if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP":
                monkeypatch.setenv(name, value)
        return file, lambda **more: train(tmp_path, use_cpu=False, **settings, **more)

    return start


def test_the_fsdp_argument_trains_with_fsdp2_and_full_state_dict_whatever_the_launch_sets(train_launched, monkeypatch):
    settings = {"save_only_model": True, "fsdp": True}
    file, start = train_launched(BY_LAYER, "fsdp_state_dict_type: SHARDED_STATE_DICT", **settings)
    monkeypatch.setenv("FSDP_VERSION", "1")
    plugin = start().accelerator.state.fsdp_plugin
    assert (plugin.fsdp_version, plugin.state_dict_type.name) == (2, "FULL_STATE_DICT")
    run = resolved(settings=settings, accelerate_config=str(file), hardware=TWO_GPUS)
    assert "sharded_checkpoints_hold_the_optimizer" not in dict(problems_by_rule(run))


def test_activation_checkpointing_fails_without_an_auto_wrap_policy(train_launched):
    file, start = train_launched(CHECKPOINTED)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        start()
    assert assert_fires("fsdp2_shards_layer_by_layer", {}, gpu=(8, 0), config=file).severity == "error"


def recomputed(train_launched, *lines, **settings):
    _, start = train_launched(BY_LAYER, *lines, **settings)
    model = tiny_llama(attention_dropout=0.5, attn_implementation="eager")
    return losses(start(model=model, logging_steps=1, max_steps=4, learning_rate=1e-2))


def test_gradient_checkpointing_repeats_dropout_but_fsdp_activation_checkpointing_does_not(train_launched):
    plain = recomputed(train_launched)
    assert recomputed(train_launched, gradient_checkpointing=True) == plain
    assert recomputed(train_launched, CHECKPOINTED) != plain
